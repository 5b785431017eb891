"""Small faults put into the code are noticed by its tests.

mutmut changes one thing at a time in the modules that a training's numbers and its encoder hang on, and
runs the tests that reach the change; ``[tool.mutmut]`` in pyproject.toml names both. Its invariants:

- At least nine in ten of these mutants fail a test, in every module.
- The others are those that ``surviving_mutants.json`` lists, each with the reason why no test fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = [
    pytest.mark.nightly,  # a thousand runs of the tests
    pytest.mark.skipif(not hasattr(os, "fork"), reason="mutmut forks"),
]

HERE = Path(__file__).parent
LISTED = HERE / "surviving_mutants.json"
COPIED = ("st_gsinfonce", "tests", "pyproject.toml", "setup.cfg", "README.md")
NOTICED = {"killed", "timeout"}
MISSED = {"survived", "no tests"}


class Mutant(NamedTuple):
    """One change, the module it is in, and how the tests met it."""

    name: str
    module: str
    status: str


def run_mutmut(folder: Path, *arguments: str) -> str:
    """Return what a command of mutmut prints in the copy of the project."""
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def parse(results: str) -> Iterator[Mutant]:
    """Read the lines ``st_gsinfonce.objective.x_unit__mutmut_1: killed``."""
    for line in results.splitlines():
        if found := re.fullmatch(r"\s+(st_gsinfonce\.(\w+)\.\S+): ([\w ]+)", line):
            yield Mutant(*found.groups())


def changed_lines(diff: str) -> str:
    """Return what a unified diff takes out and puts in, as one line: ``a + b -> a - b``."""
    sides: dict[str, list[str]] = {"-": [], "+": []}
    for line in diff.splitlines():
        if line[:1] in sides and not line.startswith(("---", "+++")):
            sides[line[0]].append(line[1:].strip())
    return " -> ".join(" ".join(lines) for lines in sides.values())


def function_of(mutant: Mutant) -> str:
    """Return ``losses.Loss.forward`` for ``st_gsinfonce.losses.xǁLossǁforward__mutmut_2``."""
    mangled = mutant.name.rsplit(".", 1)[1].rsplit("__mutmut_", 1)[0]
    path = mangled.removeprefix("x_") if mangled.startswith("x_") else mangled[2:]
    return f"{mutant.module}.{path.replace('ǁ', '.')}"


def listed() -> list[tuple[str, str]]:
    """The function and the change of every survivor that there is a reason for."""
    return [
        (function, change)
        for group in json.loads(LISTED.read_text(encoding="utf-8"))
        for function, changes in group["mutants"].items()
        for change in changes
    ]


def lines(mutants: set[tuple[str, str]]) -> str:
    return "\n".join(f"{function}: {change}" for function, change in sorted(mutants))


def test_the_list_gives_reasons() -> None:
    groups = json.loads(LISTED.read_text(encoding="utf-8"))
    assert all(group.keys() == {"reason", "mutants"} and group["reason"] for group in groups)
    assert len(set(listed())) == len(listed())


def test_mutants_are_killed_but_for_those_listed(tmp_path: Path) -> None:
    for name in COPIED:
        source, copy = HERE.parent / name, tmp_path / name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    run_mutmut(tmp_path, "run", "--max-children", str(workers))

    mutants = list(parse(run_mutmut(tmp_path, "results", "--all", "true")))
    assert len(mutants) > 1000
    assert {mutant.status for mutant in mutants} <= NOTICED | MISSED
    made = Counter(mutant.module for mutant in mutants)
    noticed = Counter(mutant.module for mutant in mutants if mutant.status in NOTICED)
    for module, number in made.items():
        print(f"{module}: {noticed[module]} of {number} ({noticed[module] / number:.1%})")
    print(f"all: {noticed.total()} of {made.total()} ({noticed.total() / made.total():.1%})")

    survivors = {
        (function_of(mutant), changed_lines(run_mutmut(tmp_path, "show", mutant.name)))
        for mutant in mutants
        if mutant.status in MISSED
    }
    new, gone = survivors - set(listed()), set(listed()) - survivors
    assert not new, "test these, or list them with the reason:\n" + lines(new)
    assert not gone, "take these off the list:\n" + lines(gone)
    for module, number in made.items():
        assert noticed[module] >= 0.9 * number, module
