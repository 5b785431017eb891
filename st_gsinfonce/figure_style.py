"""How figures look: one style, whatever the user's matplotlib is set to, and without a display.

Lines differ by marker and dash as well as by colour, and the colours by how bright they are, so that a
figure can be read without colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = (
    6.4  # inches: text of 10 points is 14 pixels high where a page shows the figure 640 pixels wide
)
TEXT = 10.0  # points
BLACK, ORANGE, BLUE, GREY, PALE = "#000000", "#D55E00", "#0072B2", "#707070", "#D9D9D9"

# Okabe and Ito's colours, which colour-blind people tell apart. Six colours, seven markers and five dashes
# have no common divisor: 210 lines differ.
_COLORS = (BLACK, ORANGE, BLUE, "#E69F00", "#009E73", "#CC79A7")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))

_SETTINGS: Any = {
    "font.family": ["DejaVu Sans"],  # matplotlib brings it along
    "font.size": TEXT,
    "axes.titlesize": TEXT,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 6,
    "errorbar.capsize": 3,
    "svg.fonttype": "path",
    "svg.hashsalt": "st_gsinfonce",  # else names inside the file are drawn by chance
}
_TWO_COLUMNS = 40  # characters of a legend's entry up to which two stand side by side


@contextmanager
def style() -> Iterator[None]:
    """Set matplotlib to our settings and nobody else's, and back afterwards.

    Raises:
        ImportError: If matplotlib is not installed; names the extra.
    """
    try:
        import matplotlib
        import matplotlib.figure  # noqa: F401  # what `new_panels` needs is asked for here, too
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'st_gsinfonce[plot]'") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def plain(text: str) -> str:
    """Return a text of somebody else's in which ``$`` stands for itself and not for mathematics."""
    return text.replace("$", r"\$")


def new_panels(
    height: float, count: int, *, beside: bool = False, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure without pyplot, with panels one below or beside the other.

    Args:
        height: In inches.
        count: Of panels.
        beside: In one row.
        **options: Of ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    shape = (1, count) if beside else (count, 1)
    axes = list(figure.subplots(*shape, squeeze=False, **options).flat)
    for axis in axes:
        axis.grid(visible=True)
        axis.margins(x=0.06, y=0.1)
    return figure, axes


def add_legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Put one legend for all panels below them, where it hides nothing."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if len(entries) > 1:
        columns = 1 if max(map(len, entries)) > _TWO_COLUMNS else 2
        figure.legend(
            entries.values(),
            entries.keys(),
            loc="outside lower center",
            ncols=columns,
            handlelength=3,
        )


def line(number: int) -> dict[str, Any]:
    """Return colour, marker and dashes of one of several lines."""
    return {
        "color": _COLORS[number % len(_COLORS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _DASHES[number % len(_DASHES)],
    }


def ring(color: str, size: float) -> dict[str, Any]:
    """Return the style of single points, drawn as rings."""
    return {
        "linestyle": "none",
        "marker": "o",
        "markersize": size,
        "markerfacecolor": "none",
        "markeredgecolor": color,
    }


def draw_means(
    axis: Axes,
    x: Sequence[float],
    means: Sequence[float],
    sds: Sequence[float] | None,
    label: str,
    number: int,
) -> None:
    """Draw a line through means, with bars of one standard deviation where there are any."""
    if sds is not None:
        axis.errorbar(x, means, yerr=sds, fmt="none", ecolor=line(number)["color"])
    axis.plot(x, means, label=label, **line(number))
