"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader meets the old one or the whole new one, even after a power cut.

    Args:
        path: The file, in a folder that exists.
        content: Text, written as UTF-8, or bytes.

    Raises:
        OSError: If it cannot be written, with its name; an older file is still there.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        handle, partial = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".partial", dir=path.parent
        )
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
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
