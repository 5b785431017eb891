"""Figures, read back from matplotlib's own objects.

- Every number of the data stands in the figure, at its place, on axes that name their unit.
- A figure can be read without colour: what is drawn differs by marker or dashes, and in brightness.
- Nothing is cut off, and no two labels lie on each other.
- PNG, SVG and JSON are written; the JSON draws the same figure again, to the same bytes.
- Nobody's matplotlib settings change the figure, and it changes nobody's.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_cells import result_of
from test_report import NOISY, PLAIN, WIDE, results

from st_gsinfonce.analysis import BatchProbe, FalseNegativeProbe, Geometry, NegativePair
from st_gsinfonce.cells import Arm, Cell
from st_gsinfonce.figure_data import (
    ArmHistory,
    ComparisonData,
    ComparisonPanel,
    ComparisonRow,
    Curve,
    EncoderCosines,
    FigureData,
    History,
    Point,
    ProbeData,
    SimilarityData,
    SweepData,
    TrainingData,
    figure_data_to_json,
    read_figure_data,
)
from st_gsinfonce.figure_files import (
    figure_from_json,
    figure_paths,
    require_room,
    save_figure,
)
from st_gsinfonce.figure_style import style
from st_gsinfonce.plots import draw
from st_gsinfonce.report import GridReport

matplotlib = pytest.importorskip("matplotlib")
mcolors = pytest.importorskip("matplotlib.colors")


def probe_data(threshold: float = 0.9) -> ProbeData:
    values = {64: (0.78, 0.84), 256: (0.86, 0.9), 1024: (0.95, 0.93), 4096: (0.97, 0.98)}
    points = tuple(
        BatchProbe(size, cosines, (0.2, 0.22), (NegativePair("It rains.", "Ça pleut.", 0.98, 2),))
        for size, cosines in values.items()
    )
    return ProbeData(
        FalseNegativeProbe(points, 4, 2, 0, 5000, 3, Geometry(384, 0.1, -3.5, 270.0)),
        threshold,
        "encoder, corpus",
    )


SWEEP = SweepData(
    curves=(
        Curve(
            "Avg.",
            (0.5, 3.0, 16.0),
            ((70.0, 71.0), (72.0, 71.5), (69.0, 68.0)),
            (70.0, 71.0),
            (Point(3.0, 1.38),),
        ),
        Curve(
            "STS-B dev", (0.5, 3.0, 16.0), ((80.0, 81.0), (81.0, 82.0), (79.0, 79.5)), (80.0, 80.5)
        ),
    ),
    xlabel="noise vectors M as a multiple of the batch",
    title="Number of noise vectors",
    log_x=True,
    paper_label="paper (BERT-base, a million sentences)",
)
MASS = SweepData(
    (Curve("Avg.", (5.5, 10.0, 16.0), ((70.0, 71.0), (72.0, 71.0), (68.0, 68.5)), (70.0, 71.0)),),
    "log mass b, nats",
    "Mass",
    scale=20.0,
)
COMPARISON = ComparisonData(
    "InfoNCE, dropout 0.1",
    (
        ComparisonPanel(
            "Avg.",
            (
                ComparisonRow(
                    "GS sampled, M = 3 x batch, dropout 0.1", (0.1, -0.2, 0.4), -0.2, 0.3, 0.5
                ),
                ComparisonRow("InfoNCE, dropout 0.2", (1.0, 1.2, 1.1), 1.0, 1.2, 0.0001),
                ComparisonRow("GS expected, b = 10, dropout 0.1", (0.3,), None, None, None),
            ),
        ),
        ComparisonPanel("STS-B dev", (ComparisonRow("GS sampled", (0.0, 0.5), 0.0, 0.5, 0.25),)),
    ),
)
TRAINING = TrainingData(
    tuple(
        ArmHistory(
            label,
            tuple(History(seed, (25, 50, 75), (2.0 + seed, 0.4, low)) for seed in (0, 1)),
            tuple(History(seed, (50, 75), (80.0 + seed, high)) for seed in (0, 1)),
        )
        for label, low, high in (
            ("InfoNCE", 0.05, 82.0),
            ("GS sampled, M = 3 x batch, b = 10, dropout 0.1", 0.1, 83.0),
        )
    )
)
GOLD = (0.0, 0.5, 1.0, 1.9, 2.2, 3.3, 4.0, 5.0)
SIMILARITY = SimilarityData(
    "STSBenchmark test",
    GOLD,
    (
        EncoderCosines("before", 61.234, (0.5, 0.6, 0.55, 0.7, 0.6, 0.7, 0.8, 0.9)),
        EncoderCosines("after", 80.0, tuple(gold / 5 for gold in GOLD)),
    ),
)
ALL: dict[str, FigureData] = {
    "probe": probe_data(),
    "ratio": SWEEP,
    "mass": MASS,
    "comparison": COMPARISON,
    "training": TRAINING,
    "similarity": SIMILARITY,
}


def axes_of(data: FigureData) -> list[Any]:
    return list(draw(data).axes)


def labelled(axis: Any, label: str) -> list[Any]:
    return [entry for entry in axis.get_lines() if entry.get_label() == label]


def legend_of(data: FigureData) -> list[str]:
    (legend,) = draw(data).legends
    return [text.get_text() for text in legend.get_texts()]


def ticks(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def numbers(values: Any) -> list[float]:
    return [float(value) for value in values]


def test_the_probe() -> None:
    data = probe_data()
    (axis,) = axes_of(data)
    assert axis.get_xscale() == "log" and axis.get_xlabel() == "batch size, sentences"
    assert axis.get_ylabel() == "cosine, mean of the 4 largest\nof a batch"
    assert axis.get_title(loc="left") == "encoder, corpus"
    assert ticks(axis.xaxis) == ["64", "256", "1024", "4096"]
    assert numbers(axis.get_xticks()) == [64, 256, 1024, 4096]
    (sentences,) = labelled(axis, "sentences ± 1 sd")
    (gaussian,) = labelled(axis, "Gaussian vectors of width 384 ± 1 sd")
    assert numbers(sentences.get_xdata()) == [64, 256, 1024, 4096]
    assert numbers(sentences.get_ydata()) == pytest.approx([0.81, 0.88, 0.94, 0.975])
    assert numbers(gaussian.get_ydata()) == pytest.approx([0.21] * 4)
    first = axis.collections[0].get_segments()[0]  # the bar at 64
    assert numbers(first[:, 1]) == pytest.approx([0.81 - 0.06 / 2**0.5, 0.81 + 0.06 / 2**0.5])
    (threshold,) = labelled(axis, "threshold 0.9")
    assert numbers(threshold.get_ydata()) == [0.9, 0.9]
    (mark,) = labelled(axis, "first above it: a batch of 1,024")
    assert numbers(mark.get_xydata()[0]) == pytest.approx([1024, 0.94])
    assert legend_of(data) == [
        line.get_label()
        for line in axis.get_lines()
        if line in (sentences, gaussian, threshold, mark)
    ]
    bottom, top = axis.get_ylim()
    assert bottom == 0 and top > 1


def test_a_threshold_that_is_not_passed_has_no_mark() -> None:
    assert legend_of(probe_data(0.99))[-1] == "threshold 0.99"
    (axis,) = axes_of(probe_data(0.5))
    assert labelled(axis, "first above it: a batch of 64")


def test_a_probe_of_one_draw_has_no_bars() -> None:
    data = probe_data()
    points = tuple(replace(p, values=p.values[:1]) for p in data.probe.points)
    alone = replace(data, probe=replace(data.probe, points=points, repeats=1))
    (axis,) = axes_of(alone)
    assert labelled(axis, "sentences") and not axis.collections


def test_a_sweep_shows_differences_to_no_noise() -> None:
    first, second = axes_of(SWEEP)
    assert first.get_title(loc="left") == "Avg.: 70.50 ± 0.71 without noise"
    assert second.get_title(loc="left") == "STS-B dev: 80.25 ± 0.35 without noise"
    assert {axis.get_ylabel() for axis in (first, second)} == {"difference, points"}
    assert second.get_xlabel() == SWEEP.xlabel and second.get_xscale() == "log"
    assert ticks(second.xaxis) == ["0.5", "3", "16"]
    (means,) = labelled(first, "mean ± 1 sd over seeds")
    assert numbers(means.get_xdata()) == [0.5, 3, 16]
    assert numbers(means.get_ydata()) == pytest.approx([0, 1.25, -2])
    (seeds,) = labelled(first, "one seed")
    assert numbers(seeds.get_xdata()) == [0.5, 0.5, 3, 3, 16, 16]
    assert numbers(seeds.get_ydata()) == pytest.approx([-0.5, 0.5, 1.5, 1.0, -1.5, -2.5])
    (zero,) = labelled(first, "no noise")
    assert numbers(zero.get_ydata()) == [0, 0]
    (band,) = first.patches
    # A polygon or a rectangle, as the version has it.
    heights = band.get_patch_transform().transform(band.get_path().vertices)[:, 1]
    assert (min(heights), max(heights)) == pytest.approx((-(0.5**0.5), 0.5**0.5))
    (paper,) = labelled(first, SWEEP.paper_label)
    assert numbers(paper.get_xydata()[0]) == [3, 1.38]
    assert not labelled(second, SWEEP.paper_label)
    assert set(legend_of(SWEEP)) == {
        "no noise",
        "no noise ± 1 sd over seeds",
        "one seed",
        "mean ± 1 sd over seeds",
        SWEEP.paper_label,
    }
    assert draw(SWEEP).get_suptitle() == SWEEP.title


def test_a_seed_far_from_the_mean_is_inside_the_axes() -> None:
    curve = Curve("Avg.", (1.0, 2.0), ((70.0,) * 9 + (80.0,), (70.0,) * 9 + (60.0,)), (70.0, 71.0))
    (axis,) = axes_of(SweepData((curve,), "x", "title"))
    bottom, top = axis.get_ylim()
    assert bottom < 60 - 70.5 and top > 80 - 70.5


def test_a_mass_is_also_a_cosine() -> None:
    figure = draw(MASS)
    figure.draw_without_rendering()
    (axis,) = figure.axes
    (top,) = axis.child_axes
    assert top.get_xlabel() == "cosine of one virtual negative, b / s"
    assert numbers(top.get_xlim()) == pytest.approx([limit / 20 for limit in axis.get_xlim()])
    assert axis.get_xscale() == "linear"


def test_a_sweep_of_one_seed() -> None:
    curve = Curve("Avg.", (1.0, 2.0), ((70.0,), (71.0,)), (69.0,))
    data = SweepData((curve,), "x", "title")
    (axis,) = axes_of(data)
    assert axis.get_title(loc="left") == "Avg.: 69.00 without noise"
    assert not axis.patches and not axis.collections
    assert legend_of(data) == ["no noise", "one seed"]


def test_a_comparison_shows_every_pair() -> None:
    first, second = axes_of(COMPARISON)
    assert (first.get_title(loc="left"), second.get_title(loc="left")) == ("Avg.", "STS-B dev")
    assert second.get_xlabel() == "paired difference to InfoNCE, dropout 0.1, points"
    assert ticks(first.yaxis) == [
        "GS sampled, M = 3 x batch,\ndropout 0.1",
        "InfoNCE, dropout 0.2",
        "GS expected, b = 10,\ndropout 0.1",
    ]
    (right,) = first.child_axes
    assert ticks(right.yaxis) == ["p = 0.500", "p < 0.001", "one seed"]
    places = numbers(first.get_yticks())
    assert places == [0, 1, 2] and first.get_ylim()[0] > first.get_ylim()[1]  # in reading order
    dots = labelled(first, "one seed")
    for place, row, dot in zip(places, COMPARISON.panels[0].rows, dots, strict=True):
        assert numbers(dot.get_xdata()) == list(row.differences)
        assert all(abs(y - place) < 0.3 for y in numbers(dot.get_ydata()))
        assert len(set(numbers(dot.get_ydata()))) == len(row.differences)  # none hides another
    means = labelled(first, "mean, 95% bootstrap interval")
    assert [numbers(mean.get_xydata()[0]) for mean in means] == [
        pytest.approx([0.1, 0]),
        pytest.approx([1.1, 1]),
    ]
    intervals = [numbers(x.get_xdata()) for x in first.get_lines() if x.get_linestyle() == "-"]
    assert [-0.2, 0.3] in intervals and [1.0, 1.2] in intervals
    zeros = [x for x in first.get_lines() if numbers(x.get_xdata()) == [0, 0]]
    assert len(zeros) == 1 and numbers(zeros[0].get_ydata()) == [0, 1]  # the whole height
    assert legend_of(COMPARISON) == ["one seed", "mean, 95% bootstrap interval"]


def test_a_comparison_is_made_of_a_report_s() -> None:
    report = GridReport(results())
    pairs = [(NOISY, "Avg."), (WIDE, "Avg."), (NOISY, "STS-B dev"), (WIDE, "STS-B dev")]
    comparisons = [report.compare(arm, PLAIN, metric) for arm, metric in pairs]
    data = ComparisonData.of(comparisons)
    assert data.baseline == PLAIN.label
    assert [panel.metric for panel in data.panels] == ["Avg.", "STS-B dev"]
    noisy, wide = data.panels[0].rows
    expected = comparisons[0].difference
    assert noisy == ComparisonRow(
        NOISY.label, (1.0, 2.0, 3.0), expected.low, expected.high, expected.p_value
    )
    assert wide == ComparisonRow(WIDE.label, (0.5,), None, None, None)
    with pytest.raises(ValueError, match="comparisons must have one baseline"):
        ComparisonData.of([*comparisons, report.compare(WIDE, NOISY, "Avg.")])
    with pytest.raises(ValueError, match="at least one"):
        ComparisonData.of([])


def test_training() -> None:
    loss, dev = axes_of(TRAINING)
    assert (loss.get_ylabel(), dev.get_ylabel()) == ("training loss, nats", "STS-B dev, points")
    assert dev.get_xlabel() == "optimizer step"
    assert loss.get_yscale() == "log" and dev.get_yscale() == "linear"
    assert loss.get_title(loc="left") == "mean of 2 seeds; thin: each seed"
    for arm in TRAINING.arms:
        (line,) = labelled(loss, arm.label)
        assert numbers(line.get_xdata()) == [25, 50, 75]
        assert numbers(line.get_ydata()) == pytest.approx([2.5, 0.4, arm.losses[0].values[-1]])
        (line,) = labelled(dev, arm.label)
        assert numbers(line.get_ydata())[0] == pytest.approx(80.5)
    thin = [line for line in loss.get_lines() if line.get_linewidth() < 1]
    assert [numbers(line.get_ydata()) for line in thin] == [
        list(run.values) for arm in TRAINING.arms for run in arm.losses
    ]
    assert legend_of(TRAINING) == [arm.label for arm in TRAINING.arms]


def test_a_loss_that_hardly_falls_is_drawn_on_a_plain_scale() -> None:
    run = History(0, (1, 2), (2.0, 0.21))
    data = TrainingData((ArmHistory("a", (run,), ()), ArmHistory("b", (run,), ())))
    (axis,) = axes_of(data)  # no dev, no panel
    assert axis.get_yscale() == "linear" and axis.get_title(loc="left") == ""
    assert axis.get_xlabel() == "optimizer step"


def test_the_mean_is_over_the_steps_that_all_runs_have() -> None:
    runs = (History(0, (1, 2, 3), (1.0, 2.0, 3.0)), History(1, (2, 3, 4), (4.0, 5.0, 6.0)))
    (axis,) = axes_of(TrainingData((ArmHistory("a", runs, ()),)))
    (line,) = labelled(axis, "a")
    assert line.get_xydata().tolist() == [[2, 3], [3, 4]]


def test_training_is_made_of_a_report_s() -> None:
    data = TrainingData.of(GridReport(results()))
    assert [arm.label for arm in data.arms] == [PLAIN.label, NOISY.label, WIDE.label]
    assert data.arms[0].losses == tuple(History(s, (25, 50), (0.1, 0.05)) for s in (0, 1, 2))
    assert data.arms[2].dev == (History(0, (125,), (79.5,)),)
    bare = replace(result_of(Cell(Arm(), 0, results()[0].cell.setting)), dev={}, losses={})
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(TrainingData.of(GridReport([bare])))


def test_similarities_by_gold_score() -> None:
    before, after = axes_of(SIMILARITY)
    assert before.get_title(loc="left") == "before\nSpearman 61.23"
    assert after.get_title(loc="left") == "after\nSpearman 80.00"
    assert before.get_xlabel() == after.get_xlabel() == "cosine similarity"
    assert before.get_ylabel() == "gold score, STSBenchmark test"
    assert ticks(before.yaxis) == [
        "0 to 1\nn = 2",
        "1 to 2\nn = 2",
        "2 to 3\nn = 1",
        "3 to 4\nn = 1",
        "4 to 5\nn = 2",  # 5 itself as well
    ]
    assert before.get_xlim() == after.get_xlim()
    medians = labelled(before, "median")
    assert [line.get_xdata()[0] for line in medians] == pytest.approx([0.55, 0.625, 0.6, 0.7, 0.85])
    assert [line.get_ydata()[0] for line in medians] == [0, 1, 2, 3, 4]
    shares = [patch for patch in before.patches if patch.get_fill()]
    heights = [float(sum(patch.get_data().values - patch.get_data().baseline)) for patch in shares]
    assert heights == pytest.approx(
        [0.9] * 5
    )  # a bin's shares add up to 1: the tallest is 0.9 high
    assert legend_of(SIMILARITY) == ["share of the pairs of a bin", "median"]


def test_a_bin_without_pairs_stays_empty() -> None:
    data = SimilarityData("task", (0.5, 4.5), (EncoderCosines("x", 100.0, (0.3, 0.3)),))
    (axis,) = axes_of(data)
    assert len(labelled(axis, "median")) == 2 and "2 to 3\nn = 0" in ticks(axis.yaxis)
    with pytest.raises(ValueError, match="data.encoders is empty"):
        draw(replace(data, encoders=()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Curve("Avg.", (1.0, 2.0), ((70.0,),), (69.0,)), "curve 'Avg.': scores must hold"),
        (lambda: Curve("Avg.", (1.0,), ((70.0,),), ()), "0 of the baseline"),
        (lambda: Curve("Avg.", (), (), (69.0,)), "curve 'Avg.'"),
        (lambda: replace(SWEEP, curves=(replace(SWEEP.curves[0], x=(0.0, 1.0, 2.0)),)), "log_x"),
        (lambda: replace(SIMILARITY, gold=(1.0,)), "encoder 'before' has 8 cosines for 1 gold"),
        (lambda: replace(SIMILARITY, edges=(1.0, 5.0)), "between 1 and 5"),
        (lambda: SimilarityData("t", (), ()), "at least one"),
    ],
)
def test_data_that_cannot_be_drawn_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def luminance(color: Any) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in mcolors.to_rgb(color)
    ]
    return float(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])


@pytest.mark.parametrize("name", ALL)
def test_figures_can_be_read_without_colour(name: str) -> None:
    for axis in axes_of(ALL[name]):
        looks = {
            line.get_label(): (line.get_marker(), line.get_linestyle(), line.get_markersize())
            for line in axis.get_lines()
            if not line.get_label().startswith("_")
        }
        assert len(set(looks.values())) == len(looks)
        assert all(
            luminance(line.get_color()) < 0.5
            for line in axis.get_lines()
            if line.get_label() in looks
        )


def test_many_arms_differ() -> None:
    run = History(0, (1, 2), (2.0, 1.0))
    arms = tuple(ArmHistory(f"arm {number}", (run,), ()) for number in range(40))
    (axis,) = axes_of(TrainingData(arms))
    lines = axis.get_lines()
    assert len({(x.get_color(), x.get_marker(), x.get_linestyle()) for x in lines}) == 40
    assert len({x.get_marker() for x in lines[:7]}) == 7
    for one, other in itertools.pairwise(lines):
        assert abs(luminance(one.get_color()) - luminance(other.get_color())) > 0.03


def texts(figure: Any) -> Iterator[Any]:
    """Yield what a reader sees: a tick outside of the axis has a label, too, which is not drawn."""
    from matplotlib.text import Text

    for legend in figure.legends:
        yield from legend.get_texts()
    yield from figure.texts
    for axes in figure.axes:
        for axis in (x for one in (axes, *axes.child_axes) for x in (one.xaxis, one.yaxis)):
            low, high = sorted(axis.get_view_interval())
            yield axis.label
            for tick in axis.get_major_ticks():
                if low <= tick.get_loc() <= high:
                    yield from (tick.label1, tick.label2)
        title = axes.get_title(loc="left")
        yield from [one for one in axes.findobj(Text) if one.get_text() == title]


@pytest.mark.parametrize("name", [*ALL, "many"])
def test_nothing_is_cut_off_and_no_label_lies_on_another(name: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    data = TrainingData(TRAINING.arms * 4) if name == "many" else ALL[name]
    figure = draw(data)
    canvas = FigureCanvasAgg(figure)
    with style():
        canvas.draw()
    shown = [text for text in texts(figure) if text.get_visible() and text.get_text().strip()]
    boxes = [
        (text.get_text(), text.get_window_extent(canvas.get_renderer()))
        for text in dict.fromkeys(shown)
    ]
    assert len(boxes) > 8
    for text, box in boxes:
        assert box.x0 > 0 and box.y0 > 0, text
        assert box.x1 < figure.bbox.x1 and box.y1 < figure.bbox.y1, text
    for (one, box), (other, second) in itertools.combinations(boxes, 2):
        wide = min(box.x1, second.x1) - max(box.x0, second.x0)
        high = min(box.y1, second.y1) - max(box.y0, second.y0)
        assert min(wide, high) < 1, (one, other)


@pytest.mark.parametrize("name", ALL)
def test_three_files_of_which_one_draws_the_figure_again(name: str, tmp_path: Path) -> None:
    data = ALL[name]
    paths = save_figure(draw(data), data, tmp_path / "new" / "figure", run={"date": "today"})
    assert paths["png"].read_bytes()[:4] == b"\x89PNG"
    svg = paths["svg"].read_text(encoding="utf-8")
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert "<dc:date>" not in svg and "<text" not in svg  # letters are outlines
    record = json.loads(paths["json"].read_text(encoding="utf-8"))
    assert record["run"] == {"date": "today"} and set(record) == {"figure", "data", "run"}
    assert read_figure_data(paths["json"]) == data
    with matplotlib.rc_context({"font.size": 3, "lines.linewidth": 9, "svg.hashsalt": "x"}):
        again = figure_from_json(paths["json"])
        others = save_figure(again, data, tmp_path / "again.svg")
        assert matplotlib.rcParams["font.size"] == 3
    assert set(others.values()) == {
        tmp_path / f"again.{ending}" for ending in ("png", "svg", "json")
    }
    for ending in ("png", "svg"):
        assert others[ending].read_bytes() == paths[ending].read_bytes(), ending
    assert [axis.get_title(loc="left") for axis in again.axes] == [
        axis.get_title(loc="left") for axis in draw(data).axes
    ]
    assert "matplotlib.pyplot" not in sys.modules  # no window, no global state


def test_a_failing_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "figure.json").write_text("old")

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk is full"):
        save_figure(draw(MASS), MASS, tmp_path / "figure")
    assert [path.name for path in tmp_path.iterdir()] == ["figure.json"]
    assert (tmp_path / "figure.json").read_text() == "old"


def test_the_json_may_lie_elsewhere(tmp_path: Path) -> None:
    save_figure(draw(MASS), MASS, tmp_path / "mass.png", json_path=tmp_path / "data.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.json", "mass.png", "mass.svg"]


def test_names_of_files(tmp_path: Path) -> None:
    assert figure_paths("runs/at-0.9")["png"] == Path("runs/at-0.9.png")
    for folder in ("", "runs/", ".png", ".", "..", "runs/.."):
        with pytest.raises(ValueError, match="needs a file's name"):
            figure_paths(folder)


def test_what_keeps_a_figure_from_being_saved_is_found_before(tmp_path: Path) -> None:
    require_room(tmp_path / "new" / "figure", "--output")
    (tmp_path / "figure.svg").touch()
    with pytest.raises(FileExistsError, match=r"--output: .*figure\.svg exists.*--overwrite"):
        require_room(tmp_path / "figure.png", "--output")
    require_room(tmp_path / "figure.png", "--output", overwrite=True)
    (tmp_path / "figure.json").mkdir()
    with pytest.raises(FileExistsError, match=r"figure\.json exists.*another path$"):
        require_room(tmp_path / "figure", "--output", overwrite=True)
    with pytest.raises(OSError, match=r"--output: .*figure\.svg/a\.png cannot be written"):
        require_room(tmp_path / "figure.svg" / "a", "--output")


def test_a_dollar_is_a_dollar(tmp_path: Path) -> None:
    data = replace(probe_data(), title="a_$5_$6.txt")
    figure = draw(data)
    save_figure(figure, data, tmp_path / "dollars")
    assert figure.axes[0].get_title(loc="left") == r"a_\$5_\$6.txt"


def test_a_single_batch_size_has_a_width(recwarn: pytest.WarningsRecorder) -> None:
    probe = probe_data().probe
    figure = draw(ProbeData(replace(probe, points=probe.points[:1]), 0.9, "one"))
    low, high = figure.axes[0].get_xlim()
    assert low < 64 < high and not recwarn.list


def altered(path: str, value: Any) -> str:
    record = json.loads(figure_data_to_json(SWEEP))
    place = record
    *steps, last = [int(step) if step.isdecimal() else step for step in path.split("/")]
    for step in steps:
        place = place[step]
    place[last] = value
    return json.dumps(record)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1"),
        ("[]", "must be one of probe, sweep"),
        ('{"figure": "pie", "data": {}}', "must be one of probe, sweep"),
        ('{"figure": "probe"}', "data must be an object, got None"),
        ('{"figure": "sweep", "data": {}}', "data lacks 'curves'"),
        (altered("data/curves/0/x", 3), r"data.curves\[0\].x must be a list, got 3"),
        (
            altered("data/curves/0/x/1", "3"),
            r"data.curves\[0\].x\[1\] must be float or int, got '3'",
        ),
        (altered("data/log_x", 1), "data.log_x must be bool, got 1"),
        (altered("data/scale", True), "data.scale must be float or null or int, got True"),
        (altered("data/curves/0/x", [1.0]), "curve 'Avg.': scores must hold"),
    ],
)
def test_other_json_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "figure.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"figure.json is not the JSON of a figure: .*{message}"):
        figure_from_json(path)


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    broken = replace(MASS, curves=(replace(MASS.curves[0], baseline=(math.nan,)),))
    with pytest.raises(ValueError, match="(?i)nan"):
        figure_data_to_json(broken)


@pytest.mark.parametrize("name", ALL)
def test_without_matplotlib(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'st_gsinfonce\[plot\]'"):
        draw(ALL[name])


def test_deviations_are_those_over_seeds() -> None:
    first, _ = axes_of(SWEEP)
    bars = [segment[:, 1] for segment in first.collections[0].get_segments()]
    for bar, scores in zip(bars, SWEEP.curves[0].scores, strict=True):
        assert (bar[1] - bar[0]) / 2 == pytest.approx(statistics.stdev(scores))
