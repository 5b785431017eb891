"""Find the checkpoint to go on from after a training that was cut short."""

from __future__ import annotations

import json
import warnings
import zipfile
from os import PathLike
from pathlib import Path

from safetensors import SafetensorError, safe_open


def last_checkpoint(folder: str | PathLike[str]) -> Path:
    """Return the newest whole checkpoint of a training, to resume from.

    A process that is killed while it saves leaves a part of a checkpoint, from which the Trainer's
    ``resume_from_checkpoint=True`` would try to go on. Whole is one whose ``trainer_state.json``, which
    the Trainer writes last, can be read and whose weights and optimizer all open; nothing is unpickled.

    Args:
        folder: The Trainer's ``output_dir``.

    Returns:
        The folder of the checkpoint, for ``trainer.train(resume_from_checkpoint=...)``.

    Raises:
        FileNotFoundError: If there is no whole checkpoint.

    Warns:
        UserWarning: For every newer checkpoint that is not whole.
    """
    folder = Path(folder)
    steps = {
        int(number): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (number := path.name.removeprefix("checkpoint-")).isdecimal() and path.is_dir()
    }
    for _, checkpoint in sorted(steps.items(), reverse=True):
        damage = _damage(checkpoint)
        if damage is None:
            return checkpoint
        warnings.warn(f"{checkpoint} is skipped: {damage}", stacklevel=2)
    raise FileNotFoundError(
        f"{folder} holds no whole checkpoint: start without resuming"
        + (", and overwrite, which deletes those that are not whole" if steps else "")
    )


def _damage(checkpoint: Path) -> str | None:
    """Say what a checkpoint lacks, or None."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "it has no trainer_state.json, which is written last"
    except (ValueError, RecursionError) as error:
        return f"its trainer_state.json is cut short ({error})"
    except OSError as error:
        return f"its trainer_state.json cannot be read ({error})"
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        return "its trainer_state.json does not say which step it is of"
    weights = sorted(checkpoint.rglob("*.safetensors"))
    if not weights:
        return "it has no weights"
    for path in weights:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{path.relative_to(checkpoint)} cannot be opened ({error})"
    for path in sorted([*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")]):
        # torch.save writes zip files, whose directory comes last.
        if not zipfile.is_zipfile(path):
            return f"{path.name} is cut short"
    return None
