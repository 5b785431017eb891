"""The list of a saved model's modules, ``modules.json``, read with care: it may be anybody's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_modules(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a model folder's ``modules.json``; none where there is no such file.

    Raises:
        ValueError: If it is no list of entries, or one of them names a folder outside of the model's.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): get the model anew") from error
    if not isinstance(modules, list) or not all(isinstance(entry, dict) for entry in modules):
        raise ValueError(f"{path} is damaged (it is no list of modules): get the model anew")
    for entry in modules:
        where = entry.get("path", "")
        if not isinstance(where, str) or Path(where).is_absolute() or ".." in Path(where).parts:
            raise ValueError(
                f"{path} has a module with the path {where!r}, which is no folder of the model: do not "
                "use a model of this origin"
            )
    return modules
