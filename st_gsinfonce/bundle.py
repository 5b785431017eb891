"""What of a saved encoder may travel: its files, stripped of the head, checked, in a folder of their own."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from sentence_transformers import SentenceTransformer

from st_gsinfonce.encoder import TRAINING_FILES, load_encoder, strip_head
from st_gsinfonce.module_list import read_modules

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Weights, settings, vocabularies (also those of SentencePiece and of byte pair encodings) and texts.
ALLOWED = ("*.safetensors", "*.json", "*.txt", "*.md", "*.model", "*.bpe", "*.codes", "*.jinja")
ALLOWED_NAMES = ("LICENSE", "LICENCE", "NOTICE")
# What runs when it is loaded, or may.
EXECUTABLE = (
    *("*.py", "*.pyc", "*.ipynb", "*.sh", "*.so", "*.dll", "*.dylib", "*.exe"),
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib", "*.npy", "*.npz"),
    *("*.h5", "*.keras", "*.msgpack", "*.zip", "*.tar", "*.tar.*", "*.tgz", "*.whl"),
)
# How pickles, archives (torch's among them), programs and scripts begin, whatever they are called.
EXECUTABLE_STARTS = (
    *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)),
    *(b"PK\x03\x04", b"\x1f\x8b", b"\x7fELF", b"MZ\x90", b"#!"),
)
# These hold text of the vocabulary, in which anything may occur.
VOCABULARY = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "*.model")

# Below these are the places of one machine or one person.
HOMES = (r"/(?:home|Users|root|mnt|media|scratch|workspace)/[\w.-]+", r"[A-Za-z]:[\\/]+Users\b")
TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")

# A sentence, a long one that is cut, other scripts, next to nothing.
SAMPLES = (
    "The noise pushes every sentence away.",
    " ".join(f"clause {number} of a long sentence," for number in range(400)),
    "Die Straße führt über die Brücke; 東京は雨です。",
    "a",
)

ENCODE_ALONE = """
import json, sys
sys.modules["st_gsinfonce"] = None  # from here on its import fails
import numpy
from sentence_transformers import SentenceTransformer
folder, samples, output = sys.argv[1:]
model = SentenceTransformer(folder, device="cpu", local_files_only=True)
numpy.save(output, model.encode(json.loads(samples), show_progress_bar=False))
"""


def is_local(value: str) -> bool:
    """Say whether a text is the path of a place on a machine, rather than the name of a model."""
    return re.match(r"(?:~|\.\.?)?[\\/]+\w|~$|[A-Za-z]:[\\/]", value) is not None


def copy_files(source: Path, target: Path, move: bool = False) -> tuple[str, ...]:
    """Copy what belongs to an encoder, without the train-only head.

    Its files are those of the folder itself and of the modules' folders. What only serves to resume a
    training, hidden files and other kinds of files are left out.

    Args:
        source: A folder written by ``save_pretrained``, the Trainer or ``fit``.
        target: An empty folder.
        move: Take the files away from the source.

    Returns:
        What was left out: files, and folders with a slash at the end.

    Raises:
        FileNotFoundError: If the folder holds no ``modules.json``.
        ValueError: If it holds something executable; names the files.
        OSError: If the disk is full.
    """
    if not (source / "modules.json").is_file():
        raise FileNotFoundError(
            f"{source} is no saved sentence-transformers model: it has no modules.json. Give a model, or a "
            "folder that save_encoder, the Trainer or fit wrote"
        )
    kept, left_out = _sort_files(source)
    _refuse_executable(source, kept)
    size = sum(path.stat().st_size for path in kept)
    free = shutil.disk_usage(target).free
    if not move and size > free:
        raise OSError(
            errno.ENOSPC,
            f"it needs {size:,} bytes, and {free:,} are free",
        )
    for path in kept:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if move:
            os.replace(path, copy)
        else:
            shutil.copyfile(path, copy)
    strip_head(target)
    for path in target.rglob("*.json"):
        if not _matches(path.name, VOCABULARY):
            _clean(path)
    return left_out


def _sort_files(source: Path) -> tuple[list[Path], tuple[str, ...]]:
    folders = {Path(module.get("path", "")).parts[:1] for module in read_modules(source)}
    kept: list[Path] = []
    left_out: dict[str, None] = {}
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if not path.is_file():
            continue
        if len(relative.parts) > 1 and relative.parts[:1] not in folders:
            left_out[f"{relative.parts[0]}/"] = None
        elif _matches(path.name, TRAINING_FILES) or any(p.startswith(".") for p in relative.parts):
            left_out[relative.as_posix()] = None
        elif _matches(path.name, (*ALLOWED, *ALLOWED_NAMES, *EXECUTABLE)) or _starts(path):
            kept.append(path)
        else:
            left_out[relative.as_posix()] = None
    return kept, tuple(left_out)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name.lower(), pattern.lower()) for pattern in patterns)


def _starts(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4).startswith(EXECUTABLE_STARTS)


def _refuse_executable(source: Path, files: Sequence[Path]) -> None:
    found = [
        path.relative_to(source).as_posix()
        for path in files
        if _matches(path.name, EXECUTABLE) or _starts(path)
    ]
    if found:
        raise ValueError(
            f"{source} holds files that can run code when they are loaded: {', '.join(found)}. Only "
            "safetensors, settings, vocabularies and texts are pushed: save the encoder anew with "
            "save_encoder, or delete them"
        )
    for path in files:
        if path.name in ("config.json", "tokenizer_config.json"):
            if "auto_map" in json.loads(path.read_text(encoding="utf-8")):
                raise ValueError(
                    f'{path} names code of its own ("auto_map"), for which a user would have to trust '
                    "remote code: push an encoder of an architecture that transformers has"
                )


def _clean(path: Path) -> None:
    """Reduce the local paths that a settings file remembers to their last part."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    if path.name == "adapter_config.json" and is_local(
        str(settings.get("base_model_name_or_path"))
    ):
        raise ValueError(
            f"{path.name}: the adapter needs the local folder "
            f"{settings['base_model_name_or_path']!r}, which nobody else has: merge the adapter into the "
            "encoder (merge_and_unload), or train it on a model of the hub"
        )
    if cleaned := list(_local_values(settings)):
        for holder, key in cleaned:
            holder[key] = re.split(r"[\\/]", holder[key].rstrip("\\/"))[-1]
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _local_values(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where settings that name a place (a path, file or folder) hold a local one."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if (
            isinstance(item, str)
            and re.search("path|file|dir|folder|cache", key)
            and is_local(item)
        ):
            yield value, key
        yield from _local_values(item)


def encode_samples(model_or_folder: SentenceTransformer | Path) -> NDArray[np.float32]:
    """Encode a few texts by an encoder, or by the one in a folder."""
    if isinstance(model_or_folder, SentenceTransformer):
        model = model_or_folder
    else:
        model = load_encoder(model_or_folder, device="cpu", local_files_only=True)
    with modes_kept(model):
        return np.asarray(model.encode(list(SAMPLES), show_progress_bar=False), dtype=np.float32)


@contextmanager
def modes_kept(model: SentenceTransformer) -> Iterator[None]:
    """Put every module back into the mode, train or eval, in which it was: encoding ends in eval."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def encode_alone(folder: Path, scratch: Path) -> NDArray[np.float32]:
    """Encode the same texts in a new process with sentence-transformers alone, offline.

    Raises:
        ValueError: If the folder does not load there.
    """
    output = scratch / "vectors.npy"
    done = subprocess.run(
        [sys.executable, "-c", ENCODE_ALONE, str(folder), json.dumps(SAMPLES), str(output)],
        cwd=scratch,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(
            "what would be pushed does not load with sentence-transformers alone, without code from "
            f"elsewhere: {reason}"
        )
    return np.asarray(np.load(output, allow_pickle=False), dtype=np.float32)


def compare(ours: NDArray[np.float32], theirs: NDArray[np.float32], exact: bool) -> float:
    """Return the largest difference of two sets of vectors, relative to the largest number in them.

    Args:
        ours: Vectors of the encoder that was given.
        theirs: Vectors of what would be pushed.
        exact: Whether both came from float32 on a CPU, rather than from another precision or device.

    Raises:
        ValueError: If the vectors are not the same.
    """
    if ours.shape != theirs.shape:
        raise ValueError(
            f"the encoder gives vectors of {ours.shape[-1]} numbers, what would be pushed of "
            f"{theirs.shape[-1]}: a setting such as truncate_dim is not saved with a model"
        )
    difference = float(np.abs(ours - theirs).max() / max(np.abs(ours).max(), 1e-12))
    if not difference <= (1e-4 if exact else 2e-2):  # not a number is no equality either
        raise ValueError(
            f"what would be pushed encodes to other vectors than the encoder given (relative difference "
            f"{difference:.2g}): push a model that is saved and loaded as it encodes"
        )
    return difference


def is_exact(model: SentenceTransformer) -> bool:
    """Say whether an encoder computes in float32 on a CPU."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return model.device.type == "cpu" and dtypes <= {torch.float32}


def refuse_leaks(folder: Path, secrets: Iterable[str], places: Iterable[Path]) -> None:
    """Search the bytes of every file for tokens, and every text for paths of this machine.

    Raises:
        ValueError: If something is found; names the file and the path, never the token.
    """
    tokens = [secret.encode() for secret in secrets if len(secret) >= 8]
    roots = [re.escape(str(place)) for place in places if len(place.parts) > 2]
    local = re.compile(rf"(?<![\w:/.<\\-])(?:{'|'.join([*HOMES, *roots])})(?![\w-])")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if any(_holds(path, token) for token in tokens):
            raise ValueError(f"{name} holds your access token: remove it, and revoke the token")
        text = _text(path)
        if TOKEN.search(text.encode()):
            raise ValueError(f"{name} holds an access token (hf_...): remove it, and revoke it")
        if found := local.search(text):
            raise ValueError(
                f"{name} names a folder of this machine ({found[0]}): remove it, and push again"
            )


def _holds(path: Path, needle: bytes) -> bool:
    if path.stat().st_size == 0:
        return False
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return view.find(needle) >= 0


def _text(path: Path) -> str:
    """Return what a file says in words; of weights, their metadata."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="numpy") as weights:
            return str(weights.metadata())
    return "" if _matches(path.name, VOCABULARY) else path.read_text(encoding="utf-8")
