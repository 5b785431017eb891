"""Figures as files: PNG, SVG, and the JSON of the numbers, from which a figure can be drawn again."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from st_gsinfonce.figure_data import FigureData, figure_data_to_json, read_figure_data
from st_gsinfonce.figure_style import style
from st_gsinfonce.plots import draw
from st_gsinfonce.whole_files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = ("png", "svg", "json")
DPI = 200


def figure_from_json(path: str | os.PathLike[str]) -> Figure:
    """Draw a figure again from the JSON that `save_figure` left.

    Raises:
        OSError: If there is no such file.
        ValueError: If it is no JSON of a figure; names the file and what is wrong.
    """
    return draw(read_figure_data(path))


def figure_paths(path: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the files of a figure by ending; one of the `ENDINGS` at the end of ``path`` is dropped.

    Raises:
        ValueError: If ``path`` names a folder.
    """
    name = os.fspath(path)
    stem, dot, ending = name.rpartition(".")
    base = stem if dot and ending in ENDINGS else name
    if not base or base.endswith(("/", os.sep)) or Path(base).name in ("", "..") or base == ".":
        raise ValueError(f"a figure needs a file's name, without or with its ending, got {name!r}")
    return {ending: Path(f"{base}.{ending}") for ending in ENDINGS}


def require_room(path: str | os.PathLike[str], option: str, *, overwrite: bool = False) -> None:
    """Find what would keep a figure from being saved before the work for it is done.

    Args:
        path: As for `save_figure`.
        option: By which the user gave the path, for the message.
        overwrite: Whether files that are there may be replaced.

    Raises:
        FileExistsError: If a file of the figure is there and may not be replaced.
        OSError: If the folder cannot be written.
    """
    for file in figure_paths(path).values():
        if file.is_dir() or (file.exists() and not overwrite):
            raise FileExistsError(
                f"{option}: {file} exists and is not overwritten: give another path"
                + ("" if file.is_dir() else ", or --overwrite")
            )
        folder = next(parent for parent in file.parents if parent.exists())
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise OSError(f"{option}: {file} cannot be written: {error.strerror}") from error


def save_figure(
    figure: Figure,
    data: FigureData,
    path: str | os.PathLike[str],
    *,
    json_path: str | os.PathLike[str] | None = None,
    **more: Any,
) -> dict[str, Path]:
    """Write PATH.png, PATH.svg and PATH.json, each whole or not at all.

    The same figure gives the same bytes with the same version of matplotlib.

    Args:
        figure: What one of the functions here returned for ``data``.
        data: What the figure was drawn from; `figure_from_json` draws it again.
        path: Without its ending, or with one of the three.
        json_path: Where the JSON goes instead.
        **more: Further entries of the JSON.

    Returns:
        The files by ending.
    """
    paths = figure_paths(path)
    if json_path is not None:
        paths["json"] = Path(json_path)
    content: dict[str, str | bytes] = {"json": figure_data_to_json(data, **more)}
    with style():
        for ending, options in (("png", {"dpi": DPI}), ("svg", {"metadata": {"Date": None}})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=ending, **options)
            content[ending] = buffer.getvalue()
    for ending, file in paths.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content[ending])
    return paths
