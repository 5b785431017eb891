"""The script that compares losses, run as a user runs it.

- By default it compares InfoNCE, sampled and expected noise, each with dropout 0.1 and 0.2.
- It prints what it saves; started again it runs nothing and says the same.
- It compares noise with no noise at the same dropout, and sampling with its expectation.
- Two figures hold its paired differences and its trainings; without matplotlib the tables are there all the
  same.
- What is wrong ends with one line that says what.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import RunExample

from st_gsinfonce.cells import Arm
from st_gsinfonce.figure_data import ComparisonData, TrainingData, read_figure_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*has .* pairs:UserWarning"),  # a made-up STS set
    pytest.mark.filterwarnings("ignore:.*is superseded:UserWarning"),
]


@pytest.fixture
def run(run_example: RunExample) -> RunExample:
    return partial(run_example, "compare_losses.py")


@pytest.fixture
def flags(grid_flags: list[str]) -> list[str]:
    return [*grid_flags, "--eval-steps", "1"]


def test_the_default_grid(run: RunExample) -> None:
    module = run(name="module")
    options = module["CompareOptions"]()
    arms = list(map(Arm.parse, options.arms))
    assert arms == [
        Arm(noise, ratio, None, dropout)  # type: ignore[arg-type]
        for dropout in (0.1, 0.2)
        for noise, ratio in (("none", 0.0), ("sampled", 3.0), ("expected", 3.0))
    ]
    assert (options.model, options.corpus, options.sts_data) == ("embedded", "embedded", "none")
    pairs = set(module["pairs"](arms))
    plain, sampled, expected, plain2, sampled2, expected2 = arms
    assert pairs == {
        *((arm, plain) for arm in arms[1:]),
        (sampled2, plain2),
        (expected2, plain2),
        (sampled, expected),
        (sampled2, expected2),
    }


def test_equal_masses_are_compared(run: RunExample) -> None:
    module = run(name="module")
    texts = ("infonce", "expected:b=10", "sampled:b=10", "sampled:b=11", "sampled", "expected")
    arms = list(map(Arm.parse, texts))
    sampling = [p for p in module["pairs"](arms) if p[1].noise == "expected"]
    assert sampling == [(arms[2], arms[1]), (arms[4], arms[5])]


@pytest.mark.slow
def test_a_grid_is_run_compared_and_kept(
    run: RunExample, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow: trains a grid of four arms."""
    arms = ["infonce", "sampled", "expected:b=10", "infonce:dropout=0.3"]
    run(*flags, "--arms", *arms)
    printed = capsys.readouterr().out
    saved = (tmp_path / "out" / "compare_losses.md").read_text(encoding="utf-8")
    assert saved in printed + "\n" and "Saved as out/compare_losses.md and .json" in printed
    cells = sorted((tmp_path / "out" / "cells").iterdir())
    assert len(cells) == 8
    record = json.loads((tmp_path / "out" / "compare_losses.json").read_text(encoding="utf-8"))
    assert [arm["arm"] for arm in record["arms"]] == [str(Arm.parse(arm)) for arm in arms]
    assert "compare_losses.py --model" in record["run"]["command"]
    assert record["verdict"] in printed and record["verdict"].startswith("By Avg., not told apart")
    for arm in record["arms"]:
        scores = [cell["scores"]["Avg."] for cell in arm["cells"]]
        assert len(scores) == 2 and f"{sum(scores) / 2:.2f} ±" in printed
        for cell in arm["cells"]:
            stored = json.loads((tmp_path / "out" / "cells" / cell["file"]).read_text())
            assert stored["scores"] == cell["scores"] and stored["cell"]["seed"] == cell["seed"]
    metrics = {c["metric"] for c in record["comparisons"]}
    assert metrics == {"Avg.", "STS-B dev"}
    assert all(c["verdict"] in printed for c in record["comparisons"] if c["metric"] == "Avg.")
    stamps = [path.stat().st_mtime_ns for path in cells]
    check_figures(tmp_path / "out", record)
    assert "Figure: out/compare_losses-training.png, .svg and .json." in printed

    run(*flags, "--arms", *arms)
    again = capsys.readouterr().out
    assert again == printed
    assert [path.stat().st_mtime_ns for path in cells] == stamps


def check_figures(output: Path, record: dict[str, Any]) -> None:
    """Assert that the figures are there, and drawn from the numbers of the cells."""
    names = {path.name for path in output.glob("compare_losses-*")}
    kinds = ("differences", "training")
    assert names == {f"compare_losses-{k}.{e}" for k in kinds for e in ("png", "svg", "json")}
    differences = read_figure_data(output / "compare_losses-differences.json")
    assert isinstance(differences, ComparisonData)
    assert differences.baseline == record["arms"][0]["label"]
    drawn = {(panel.metric, row.label): row for panel in differences.panels for row in panel.rows}
    assert [panel.metric for panel in differences.panels] == ["Avg.", "STS-B dev"]
    labels = {arm["arm"]: arm["label"] for arm in record["arms"]}
    baseline = record["arms"][0]["arm"]
    against = [c for c in record["comparisons"] if c["baseline"] == baseline]
    assert len(drawn) == len(against) == 6  # three arms by two scores
    for c in against:
        row = drawn[c["metric"], labels[c["treated"]]]
        assert list(row.differences) == c["differences"] and row.p_value == c["p_value"]
    training = read_figure_data(output / "compare_losses-training.json")
    assert isinstance(training, TrainingData)
    assert [arm.label for arm in training.arms] == list(labels.values())
    for arm, drawn_arm in zip(record["arms"], training.arms, strict=True):
        cells = [json.loads((output / "cells" / cell["file"]).read_text()) for cell in arm["cells"]]
        for kind, histories in (("losses", drawn_arm.losses), ("dev", drawn_arm.dev)):
            stored = {cell["cell"]["seed"]: cell[kind] for cell in cells if cell[kind]}
            assert stored == {
                one.seed: {str(s): v for s, v in zip(one.steps, one.values, strict=True)}
                for one in histories
            }
    assert all(len(arm.dev) == 2 for arm in training.arms)


def test_without_matplotlib_the_tables_are_saved(
    run: RunExample,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(*flags, "--mini", "--arms", "infonce", "expected:b=10")
    assert "Without the figures: figures need matplotlib: pip install" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "cells",
        "compare_losses-mini.json",
        "compare_losses-mini.md",
    ]


def test_the_smoke_run(run: RunExample, flags: list[str], tmp_path: Path) -> None:
    run(*flags, "--mini", "--arms", "expected:cosine=0.5", "--seeds", "3-9", "--name", "smoke")
    names = sorted(path.name for path in (tmp_path / "out" / "cells").iterdir())
    assert len(names) == 2 and all(name.startswith("expected-b10-") for name in names)
    text = (tmp_path / "out" / "smoke-mini.md").read_text(encoding="utf-8")
    assert "There is one arm only" in text and "3 steps" in text


def test_a_report_is_not_replaced_by_one_without_its_runs(
    run: RunExample, flags: list[str], tmp_path: Path
) -> None:
    run(*flags, "--arms", "infonce", "sampled", "--mini")
    report = (tmp_path / "out" / "compare_losses-mini.json").read_bytes()
    for fewer in (["--arms", "infonce"], ["--arms", "infonce", "sampled", "--learning-rate", "1"]):
        with pytest.raises(
            SystemExit, match=r"compare_losses-mini\.json reports [24] runs that .* --name"
        ):
            run(*flags, *fewer, "--mini")
    assert len(list(tmp_path.glob("out/cells/*.json"))) == 4  # it said so before any training
    assert (tmp_path / "out" / "compare_losses-mini.json").read_bytes() == report


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--arms", "simcse"], "arm 'simcse': no kind"),
        (["--seeds", "x"], "--seeds must be like"),
        (["--devices", "cuda:7"], "--devices: 'cuda:7' is none of"),
        (["--precision", "fp8"], "precision must be"),
        (["--corpus", "absent.txt"], "absent.txt"),
        (["--sts-data", "absent"], "absent"),
        (["--sts-data", "none"], "nothing to score on"),
        (["--model", "no/such-model"], "no/such-model"),
        (["--pooling", "first"], "pooling must be"),
        (["--batch-size", "100"], "fewer than one batch"),
        (["--name", "../elsewhere"], "--name must be a file's name"),
        (["--arms", "infonce", "sampled:ratio=0.01"], "0.01 noise vectors per sentence"),
    ],
)
def test_what_is_wrong_ends_with_a_reason(
    run: RunExample, flags: list[str], extra: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run(*flags, *extra)
    assert not list(tmp_path.glob("out/*.md")) and not list(tmp_path.glob("out/cells/*.json"))
