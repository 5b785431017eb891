"""What is installed.

- The wheel holds every module and py.typed, and its description renders where packages are listed.
- The documented example runs as it stands.
- Names in ``__all__`` exist, and versions agree.
"""

from __future__ import annotations

import doctest
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import st_gsinfonce
from st_gsinfonce import objective

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_is_complete(tmp_path: Path) -> None:
    """Slow: builds the wheel."""
    source = tmp_path / "source"  # the build leaves its own folders in there
    shutil.copytree(ROOT / "st_gsinfonce", source / "st_gsinfonce")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {f"st_gsinfonce/{path.name}" for path in (ROOT / "st_gsinfonce").glob("*.py")}
    assert modules | {"st_gsinfonce/py.typed"} <= names
    assert not [name for name in names if name.split("/")[0] in ("tests", "examples", "benchmarks")]
    check = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(wheel)],
        capture_output=True,
        text=True,
    )
    assert check.returncode == 0, check.stdout


def test_the_public_names_exist() -> None:
    for name in st_gsinfonce.__all__:
        assert getattr(st_gsinfonce, name).__doc__ or name.isupper()
    assert sorted(st_gsinfonce.__all__) == sorted(set(st_gsinfonce.__all__))


def test_the_version_is_one() -> None:
    assert f"version: {st_gsinfonce.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {st_gsinfonce.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_objective_s_example_holds() -> None:
    assert doctest.testmod(objective).attempted > 0
    assert doctest.testmod(objective).failed == 0


def test_the_loss_s_example_runs(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docstring = st_gsinfonce.GSInfoNCELoss.__doc__
    assert docstring
    example = textwrap.dedent(docstring.split("Example:\n        ::\n")[1])
    assert re.search(r"bert-base-uncased", example)
    monkeypatch.chdir(tmp_path)
    exec(example.replace("bert-base-uncased", str(tiny_bert)), {})
    assert (tmp_path / "encoder" / "modules.json").is_file()
