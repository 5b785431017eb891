"""Find the checkpoint to go on from after a training that was cut short."""

from __future__ import annotations

import json
import warnings
import zipfile
from os import PathLike
from pathlib import Path

from safetensors import SafetensorError, safe_open

from st_gsinfonce.module_list import read_modules

# What resuming needs, and the names of it; DeepSpeed has the first two in a folder of its own.
NEEDED = {
    "optimizer": ("optimizer*", "global_step*"),
    "learning rate's schedule": ("scheduler.pt", "global_step*"),
    "random state": ("rng_state*.pth",),
}


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """Return what has the name of a checkpoint in a Trainer's folder, by step, whole or not."""
    return {
        int(number): path
        for path in folder.glob("checkpoint-*")
        if (number := path.name.removeprefix("checkpoint-")).isdecimal()
    }


def last_checkpoint(folder: str | PathLike[str]) -> Path:
    """Return the newest whole checkpoint of a training, to resume from.

    A process that is killed while it saves leaves a part of a checkpoint, from which the Trainer's
    ``resume_from_checkpoint=True`` would try to go on. Whole is one whose ``trainer_state.json``, which
    the Trainer writes last, can be read and which has weights, optimizer, learning rate and random state,
    all of which open; nothing is unpickled. One of ``save_only_model=True`` is not whole: what was trained on
    from it would not be what the uninterrupted training gives.

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
    steps = {step: path for step, path in numbered_checkpoints(folder).items() if path.is_dir()}
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
    try:
        read_modules(checkpoint)
    except ValueError as error:
        return str(error)
    for what, names in NEEDED.items():
        if not any(path for name in names for path in checkpoint.glob(name)):
            return f"it has no {what} ({' or '.join(names)}), which save_only_model=True leaves out"
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
        # torch.save writes zip files, whose directory comes last, with a checksum of each part.
        try:
            with zipfile.ZipFile(path) as file:
                bad = file.testzip()
        except (zipfile.BadZipFile, OSError) as error:
            return f"{path.name} is cut short ({error})"
        if bad is not None:
            return f"{path.name} is damaged in {bad}"
    return None
