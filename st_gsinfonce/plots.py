"""Figures, drawn from the records of ``figure_data``; matplotlib is imported by what draws.

Each function takes a record and returns matplotlib's figure; ``figure_files`` writes it with its record.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from st_gsinfonce.figure_data import (
    ComparisonData,
    Curve,
    FigureData,
    History,
    ProbeData,
    SimilarityData,
    SweepData,
    TrainingData,
)
from st_gsinfonce.figure_style import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    PALE,
    TEXT,
    add_legend,
    draw_means,
    line,
    new_panels,
    plain,
    ring,
    style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_probe(data: ProbeData) -> Figure:
    """Draw the mean cosine of a batch's nearest negatives by the size of the batch.

    Source: figure 1 of Wu et al., COLING 2022, https://arxiv.org/abs/2109.04321.

    Raises:
        ImportError: If matplotlib is not installed; names the extra. So do all functions that draw.
    """
    probe, threshold = data.probe, data.threshold
    sizes = [point.batch_size for point in probe.points]
    bars = " ± 1 sd" if probe.repeats > 1 else ""
    with style():
        figure, (axis,) = new_panels(4.2, 1)
        axis.set_xscale("log", base=2)
        for number, (label, mean, sd) in enumerate(
            (
                ("sentences", "mean", "sd"),
                (f"Gaussian vectors of width {probe.geometry.dim}", "gaussian_mean", "gaussian_sd"),
            )
        ):
            means, sds = ([getattr(point, name) for point in probe.points] for name in (mean, sd))
            draw_means(axis, sizes, means, sds if bars else None, label + bars, number)
        axis.axhline(
            threshold, color=BLUE, linestyle=":", label=f"threshold {threshold:g}", zorder=1
        )
        above = next((point for point in probe.points if point.mean > threshold), None)
        if above is not None:
            axis.plot(
                [above.batch_size],
                [above.mean],
                label=f"first above it: a batch of {above.batch_size:,}",
                **ring(BLUE, 14),
            )
        lowest = min(min(*point.values, *point.gaussian_values, 0.0) for point in probe.points)
        axis.set_ylim(1.05 * lowest, 1.05)
        axis.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)  # a single size has a width, too
        axis.set_xticks(sizes, labels=[str(size) for size in sizes])
        axis.set_xticks([], minor=True)
        axis.set_xlabel("batch size, sentences")
        axis.set_ylabel(f"cosine, mean of the {probe.top_k} largest\nof a batch")
        axis.set_title(plain(textwrap.fill(data.title, 72)))
        add_legend(figure, [axis])
    return figure


def plot_sweep(data: SweepData) -> Figure:
    """Draw scores along a swept setting as differences to the mean score without it.

    On the scale of differences published numbers, of another encoder and corpus, can stand beside ours.
    """
    with style():
        figure, axes = new_panels(2.3 * len(data.curves) + 1.2, len(data.curves), sharex=True)
        if data.log_x:
            axes[-1].set_xscale("log", base=2)
        for axis, curve in zip(axes, data.curves, strict=True):
            _draw_curve(axis, curve, data.paper_label)
        if data.log_x:
            points = sorted({x for curve in data.curves for x in curve.x})
            axes[-1].set_xticks(points, labels=[f"{x:g}" for x in points])
            axes[-1].set_xticks([], minor=True)
        if data.scale is not None:
            scale = data.scale

            def cosine(mass: Any) -> Any:
                return mass / scale

            def mass(cosine: Any) -> Any:
                return cosine * scale

            top = axes[0].secondary_xaxis("top", functions=(cosine, mass))
            top.set_xlabel("cosine of one virtual negative, b / s")
            axes[0].spines["top"].set_visible(True)
        axes[-1].set_xlabel(data.xlabel)
        figure.suptitle(plain(data.title), fontsize=TEXT)
        add_legend(figure, axes)
    return figure


def _draw_curve(axis: Axes, curve: Curve, paper_label: str) -> None:
    several, zero = max(map(len, curve.scores)) > 1, curve.zero
    described = f"{zero:.2f}"
    if len(curve.baseline) > 1:
        sd = statistics.stdev(curve.baseline)
        described += f" ± {sd:.2f}"
        axis.axhspan(-sd, sd, color=PALE, linewidth=0, label="no noise ± 1 sd over seeds", zorder=0)
    axis.axhline(0, color=GREY, linestyle="--", label="no noise", zorder=1)
    means = [statistics.fmean(scores) - zero for scores in curve.scores]
    if several:
        xs = [x for x, scores in zip(curve.x, curve.scores, strict=True) for _ in scores]
        ys = [score - zero for scores in curve.scores for score in scores]
        axis.plot(xs, ys, label="one seed", transform=_aside(axis), **ring(GREY, 4))
        # Points set aside are left out of the limits, but for this.
        axis.update_datalim(list(zip(xs, ys, strict=True)))
    draw_means(
        axis,
        curve.x,
        means,
        [_sd(scores) for scores in curve.scores] if several else None,
        "mean ± 1 sd over seeds" if several else "one seed",
        0,
    )
    if curve.paper:
        axis.plot(
            [point.x for point in curve.paper],
            [point.difference for point in curve.paper],
            label=paper_label,
            linestyle="none",
            marker="*",
            markersize=12,
            color=ORANGE,
        )
    axis.set_title(f"{curve.label}: {described} without noise")
    axis.set_ylabel("difference, points")


def _aside(axis: Axes) -> Any:
    """Return the axis's own places, shown six points to the right: beside a bar, not on it."""
    from matplotlib.transforms import ScaledTranslation

    return axis.transData + ScaledTranslation(6 / 72, 0, axis.figure.dpi_scale_trans)


def plot_comparison(data: ComparisonData) -> Figure:
    """Draw each arm's paired differences to the baseline, seed by seed, with their mean."""
    heights = [len(panel.rows) for panel in data.panels]
    with style():
        figure, axes = new_panels(
            sum(0.44 * rows + 0.55 for rows in heights) + 0.8, len(heights), height_ratios=heights
        )
        for axis, panel in zip(axes, data.panels, strict=True):
            axis.axvline(0, color=GREY, linestyle="--", zorder=1)
            for place, row in enumerate(panel.rows):
                mean = statistics.fmean(row.differences)
                # A seed stands at one height in every row, so that seeds do not hide each other.
                spread = (
                    0.2 * np.linspace(-1, 1, len(row.differences)) if row.differences[1:] else [0]
                )
                seeds = [place + float(aside) for aside in spread]
                axis.plot(row.differences, seeds, label="one seed", **ring(GREY, 5))
                if row.low is not None and row.high is not None:
                    axis.plot([row.low, row.high], [place, place], color=BLACK, linewidth=2)
                    axis.plot(
                        [mean],
                        [place],
                        label="mean, 95% bootstrap interval",
                        color=BLACK,
                        marker="D",
                        linewidth=2,
                    )
            places = range(len(panel.rows))
            axis.set_yticks(places, labels=[_wrapped(row.label) for row in panel.rows])
            axis.set_ylim(len(panel.rows) - 0.5, -0.5)  # the first row on top
            right = axis.secondary_yaxis("right")
            right.set_yticks(places, labels=[_p_value(row.p_value) for row in panel.rows])
            for side in (axis, right):
                side.tick_params(axis="y", length=0)
            right.spines["right"].set_visible(False)
            axis.spines["left"].set_visible(False)
            axis.grid(axis="y", visible=False)
            axis.set_title(panel.metric)
        axes[-1].set_xlabel(f"paired difference to {data.baseline}, points")
        add_legend(figure, axes)
    return figure


def plot_training(data: TrainingData) -> Figure:
    """Draw loss and STS-B dev by training step: the mean of each arm, and its runs as thin lines."""
    shown = [
        ("training loss, nats", [arm.losses for arm in data.arms]),
        ("STS-B dev, points", [arm.dev for arm in data.arms]),
    ]
    shown = [(ylabel, arms) for ylabel, arms in shown if any(arms)]
    if not shown:
        raise ValueError("data.arms hold neither losses nor dev scores: there is nothing to draw")
    with style():
        figure, axes = new_panels(
            2.3 * len(shown) + 0.22 * len(data.arms) + 0.5, len(shown), sharex=True
        )
        for axis, (ylabel, arms) in zip(axes, shown, strict=True):
            for number, runs in enumerate(arms):
                if runs:
                    _draw_runs(axis, runs, data.arms[number].label, number)
            values = [value for runs in arms for run in runs for value in run.values]
            if min(values) > 0 and max(values) > 10 * min(values):
                axis.set_yscale("log")
            axis.set_ylabel(ylabel)
        seeds = max(len(runs) for _, arms in shown for runs in arms)
        if seeds > 1:
            axes[0].set_title(f"mean of {seeds} seeds; thin: each seed")
        axes[-1].set_xlabel("optimizer step")
        add_legend(figure, axes)
    return figure


def _draw_runs(axis: Axes, runs: Sequence[History], label: str, number: int) -> None:
    look = line(number)
    if len(runs) > 1:
        for run in runs:
            axis.plot(run.steps, run.values, color=look["color"], linewidth=0.6, alpha=0.35)
    by_step = [dict(zip(run.steps, run.values, strict=True)) for run in runs]
    steps = [step for step in runs[0].steps if all(step in one for one in by_step)]
    means = [statistics.fmean(one[step] for one in by_step) for step in steps]
    axis.plot(steps, means, label=label, markevery=max(1, len(steps) // 8), **look)


def plot_similarity(data: SimilarityData) -> Figure:
    """Draw the distribution of cosine similarities in each bin of gold scores, encoder beside encoder."""
    if not data.encoders:
        raise ValueError("data.encoders is empty: there is nothing to draw")
    bins = data.bins()
    everything = [cosine for encoder in data.encoders for cosine in encoder.cosines]
    low, high = min(everything), max(everything)
    edges = np.linspace(low, high if high > low else low + 0.01, 41)
    shares = [
        [
            np.histogram(np.asarray(encoder.cosines)[rows], edges)[0] / max(1, len(rows))
            for rows in bins
        ]
        for encoder in data.encoders
    ]
    highest = max(share.max() for of_one in shares for share in of_one)
    with style():
        figure, axes = new_panels(4.4, len(data.encoders), beside=True, sharex=True, sharey=True)
        for axis, encoder, of_one in zip(axes, data.encoders, shares, strict=True):
            for place, (rows, share) in enumerate(zip(bins, of_one, strict=True)):
                axis.axhline(place, color=PALE, linewidth=0.8, zorder=0)
                if rows:
                    top = place + 0.9 * share / highest
                    label = "share of the pairs of a bin"
                    axis.stairs(top, edges, baseline=place, fill=True, color="#8FBBD9", label=label)
                    axis.stairs(top, edges, baseline=place, color=BLUE, linewidth=0.8)
                    median = float(np.median(np.asarray(encoder.cosines)[rows]))
                    axis.plot([median] * 2, [place, place + 0.9], color=BLACK, label="median")
            axis.set_xlabel("cosine similarity")
            axis.set_title(
                f"{plain(textwrap.fill(encoder.label, 32))}\nSpearman {encoder.spearman:.2f}"
            )
            axis.spines["left"].set_visible(False)
            axis.tick_params(axis="y", length=0)
            axis.grid(axis="y", visible=False)
        axes[0].set_ylim(0, len(bins))
        names = [
            f"{low:g} to {high:g}\nn = {len(rows):,}"
            for low, high, rows in zip(data.edges, data.edges[1:], bins, strict=False)
        ]
        axes[0].set_yticks(range(len(bins)), labels=names, verticalalignment="bottom")
        axes[0].set_ylabel(f"gold score, {data.task}")
        add_legend(figure, axes)
    return figure


def draw(data: FigureData) -> Figure:
    """Draw a figure of the kind that the data are of."""
    if isinstance(data, ProbeData):
        return plot_probe(data)
    if isinstance(data, SweepData):
        return plot_sweep(data)
    if isinstance(data, ComparisonData):
        return plot_comparison(data)
    if isinstance(data, TrainingData):
        return plot_training(data)
    return plot_similarity(data)


def _sd(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _wrapped(label: str) -> str:
    """Return an arm's label in lines, broken at its commas."""
    lines = [""]
    for part in label.split(", "):
        longer = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(longer) > 28 and lines[-1]:
            lines[-1] += ","
            lines.append(part)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def _p_value(p: float | None) -> str:
    if p is None:
        return "one seed"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
