"""Folders and files that are written whole or not at all; folders never over something else."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def require_free(folder: Path) -> None:
    """Raise FileExistsError unless the folder is absent or empty and can be made where it is to be."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not overwritten: choose another folder")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise FileExistsError(
            f"{existing} is a file, so {folder} cannot be made: choose another folder"
        )


@contextmanager
def written_whole(final: Path, last: str) -> Iterator[Path]:
    """Give a folder to write to whose content becomes that of ``final`` at the end.

    Args:
        final: A free folder (see :func:`require_free`). One that exists stays the folder it is, since a mount
            point, a link or the current folder cannot be renamed over; it gets the files one by one.
        last: The file that makes such a folder usable, and so comes last.
    """
    exists = final.is_dir()
    if not exists:
        final.parent.mkdir(parents=True, exist_ok=True)
    # The usual permissions, which TemporaryDirectory's own folder lacks, go to a folder inside it.
    with tempfile.TemporaryDirectory(
        prefix=f".{final.name}.", suffix=".partial", dir=final if exists else final.parent
    ) as scratch:
        partial = Path(scratch) / "whole"
        partial.mkdir()
        yield partial
        if not exists:
            os.replace(partial, final)
            return
        for name in sorted(os.listdir(partial), key=lambda name: name == last):
            os.replace(partial / name, final / name)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader meets the old one or the whole new one, even after a power cut.

    Raises:
        OSError: If it cannot be written, with its name; an older file is still there.
    """
    try:
        handle, partial = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".partial", dir=path.parent
        )
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(partial, 0o644)  # mkstemp's own keeps others from reading
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        # A full disk's error names no file, and others the partial one.
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from error
