"""Read STS pairs: from a folder of JSON lines, or from the hub where MTEB keeps them.

A folder holds ``TASK/SPLIT.jsonl`` for each task, one object a line: ``sentence1`` and ``sentence2``
(text), ``score`` (the human judgement, a number; only its rank matters).
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import NamedTuple

STS_TASKS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STSBenchmark", "SICK-R")
"""The seven tasks of the paper's table, by their MTEB names and in its order."""

# Pairs in the published splits: fewer means a sample, and a score that no table can hold.
_PAIRS = {
    ("STS12", "test"): 3108,
    ("STS13", "test"): 1500,
    ("STS14", "test"): 3750,
    ("STS15", "test"): 3000,
    ("STS16", "test"): 1186,
    ("STSBenchmark", "test"): 1379,
    ("STSBenchmark", "validation"): 1500,
    ("SICK-R", "test"): 9927,
}

# Where MTEB takes each task from, so that an evaluator can be built without MTEB.
_HUB = {
    "STS12": ("mteb/sts12-sts", "a0d554a64d88156834ff5ae9920b964011b16384"),
    "STS13": ("mteb/sts13-sts", "7e90230a92c190f1bf69ae9002b8cea547a64cca"),
    "STS14": ("mteb/sts14-sts", "6031580fec1f6af667f0bd2da0a551cf4f0b2375"),
    "STS15": ("mteb/sts15-sts", "ae752c7c21bf194d8b67fd573edf7ae58183cbe3"),
    "STS16": ("mteb/sts16-sts", "4d8694f8f0e0100860b497b999b3dbed754a0513"),
    "STSBenchmark": ("mteb/stsbenchmark-sts", "b0fddb56ed78048fa8b90373c8a3cfc37b684831"),
    "SICK-R": ("mteb/sickr-sts", "20a6d6f312dd54037fe07a32d58e5e168867909d"),
}


class Pairs(NamedTuple):
    """The columns of a split; row i of each belongs together."""

    sentence1: list[str]
    sentence2: list[str]
    score: list[float]


def hub_dataset(task: str) -> tuple[str, str] | None:
    """Return the hub data set and the revision that MTEB takes a task from, None if not one of the seven."""
    return _HUB.get(task)


def read_pairs(data_dir: str | Path, task: str, split: str) -> Pairs:
    """Read ``data_dir/TASK/SPLIT.jsonl``; blank lines are skipped, other keys ignored.

    Raises:
        FileNotFoundError: If there is no such file; the message names task and path.
        ValueError: On a row that is no such object, named by file and line; or if the scores are all
            the same.

    Warns:
        UserWarning: If the split does not have the published number of pairs.
    """
    path = Path(data_dir) / task / f"{split}.jsonl"
    if not path.is_file():
        raise FileNotFoundError(
            f"{task}: there is no {path}; data_dir must hold {task}/{split}.jsonl with one object a "
            "line: sentence1, sentence2, score"
        )
    pairs = Pairs([], [], [])
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                sentence1, sentence2, score = _parse_row(line, f"{path}:{number}")
                pairs.sentence1.append(sentence1)
                pairs.sentence2.append(sentence2)
                pairs.score.append(score)
    if len(set(pairs.score)) < 2:
        raise ValueError(f"{task}: {path} needs at least two different scores to correlate with")
    warn_of_sample(task, split, len(pairs.score))
    return pairs


def _parse_row(line: str, where: str) -> tuple[str, str, float]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a line of JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, got {line.strip()[:80]!r}")
    for key in ("sentence1", "sentence2"):
        if not isinstance(row.get(key), str):
            raise ValueError(f"{where}: {key} must be text, got {row.get(key)!r}")
    score = row.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise ValueError(f"{where}: score must be a finite number, got {score!r}")
    return row["sentence1"], row["sentence2"], float(score)


def hub_pairs(task: str, split: str) -> Pairs:
    """Load one of the seven tasks from the hub, at the revision that MTEB pins.

    Raises:
        ValueError: If ``task`` is none of the seven.
    """
    from datasets import load_dataset

    if task not in _HUB:
        raise ValueError(
            f"task must be one of {', '.join(STS_TASKS)} without data_dir, got {task!r}"
        )
    path, revision = _HUB[task]
    rows = load_dataset(path, revision=revision, split=split)
    warn_of_sample(task, split, len(rows))
    return Pairs(*(list(rows[column]) for column in Pairs._fields))


def warn_of_sample(task: str, split: str, pairs: int) -> None:
    """Warn if a split of a known task does not have the published number of pairs."""
    published = _PAIRS.get((task, split), pairs)
    if pairs != published:
        warnings.warn(
            f"{task} {split} has {pairs} pairs, the published split {published}: the score compares "
            "with no published one",
            stacklevel=4,
        )
