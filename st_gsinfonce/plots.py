"""Figures from numbers; matplotlib is imported by the function that draws."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Mean scores along a swept setting.

    Attributes:
        label: For the legend.
        x: The setting.
        mean: Mean score over seeds at each x, in points.
        sd: Standard deviation over seeds at each x, None for a single seed.
        baseline: Score without what is swept: a horizontal line.
    """

    label: str
    x: Sequence[float]
    mean: Sequence[float]
    sd: Sequence[float | None]
    baseline: float | None = None


def plot_sweep(
    path: str | os.PathLike[str], curves: Sequence[Curve], xlabel: str, title: str
) -> None:
    """Draw mean scores with one standard deviation over seeds, and save the figure.

    Args:
        path: File to write; its ending says in which format.
        curves: Drawn one below the other, each on its own scale.
        xlabel: What x is, with its unit.
        title: Of the figure.

    Raises:
        ImportError: If matplotlib is not installed; names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'st_gsinfonce[plot]'") from error
    figure = Figure(figsize=(6.4, 2.4 * len(curves) + 0.6), layout="constrained")
    axes = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for number, (axis, curve) in enumerate(zip(axes, curves, strict=True)):
        color = f"C{number}"
        bars = [deviation or 0.0 for deviation in curve.sd]
        axis.errorbar(curve.x, curve.mean, yerr=bars, color=color, marker="o", capsize=3)
        if curve.baseline is not None:
            axis.axhline(curve.baseline, color="0.4", linestyle="--", label="no noise")
            axis.legend(frameon=False)
        axis.set_ylabel(f"{curve.label}, points")
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel(xlabel)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
