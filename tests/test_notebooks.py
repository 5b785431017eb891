"""The notebooks as committed; `.ci/run` executes them.

- Each was run from top to bottom, and its outputs are there, without an error or a warning.
- Each opens on a hosted notebook: a badge that leads to itself, and a cell that installs the package.
- What they import exists; they are thin, and tell nothing of the machine they ran on.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = {"quickstart", "false_negatives", "what_the_noise_does"}


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_they_are_there_and_ci_runs_them() -> None:
    assert {path.stem for path in NOTEBOOKS} == NAMES
    assert "jupyter execute notebooks/*.ipynb" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_was_run_from_top_to_bottom(path: Path) -> None:
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    for output in outputs:
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr", output["text"]
    shown = json.dumps(outputs)
    assert not re.search(r"/(home|root|tmp|usr|work|Users)/|site-packages", shown)
    assert path.stat().st_size < 500_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_opens_on_a_hosted_notebook(path: Path) -> None:
    first = source(cells(path, "markdown")[0])
    assert first.startswith("# ") and f"/notebooks/{path.name})" in first
    assert "https://colab.research.google.com/" in first
    install = source(cells(path, "code")[0])
    assert '%pip install --quiet "st_gsinfonce[quickstart,plot]"' in install
    assert 'if find_spec("st_gsinfonce") is None:' in install


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_thin_and_what_it_imports_exists(path: Path) -> None:
    code = [source(cell) for cell in cells(path, "code")[1:]]
    imported = 0
    for node in ast.walk(ast.parse("\n".join(code))):
        assert not isinstance(node, ast.ClassDef)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("st_gsinfonce"):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names)
            imported += len(node.names)
    assert imported >= 2
    assert max(len(text.splitlines()) for text in code) <= 30
