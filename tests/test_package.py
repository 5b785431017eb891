"""What is installed.

- The wheel holds every module and py.typed, and its description renders where packages are listed.
- The documented example runs as it stands.
- Names in ``__all__`` exist, and versions agree.
- The lowest versions that are tested are the lowest that are allowed.
- What we call that is announced to go fails a test; what the libraries call among themselves does not.
"""

from __future__ import annotations

import doctest
import inspect
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

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


def test_the_lowest_versions_are_tested() -> None:
    lowest = dict(
        line.lower().split("==")
        for line in (ROOT / "constraints-lowest.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    allowed = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    for requirement in map(Requirement, "\n".join(allowed).split()):
        floors = [each.version for each in requirement.specifier if each.operator == ">="]
        name = requirement.name.lower()
        if name == "st_gsinfonce":
            continue  # the package's own extras
        assert len(floors) == 1, requirement
        if name != "torch":  # the file says why
            assert Version(lowest[name]) == Version(floors[0]), requirement


@pytest.mark.parametrize(
    "kind", ["DeprecationWarning", "PendingDeprecationWarning", "FutureWarning"]
)
def test_what_is_announced_to_go_is_an_error_where_we_call_it(kind: str) -> None:
    call = f"import warnings; warnings.warn('going', {kind})"
    for module in ("st_gsinfonce", "st_gsinfonce.losses", "test_losses", "conftest", "__main__"):
        with pytest.raises(Warning, match="going"):
            exec(call, {"__name__": module})
    with pytest.warns(Warning, match="going"):
        exec(call, {"__name__": "transformers.trainer"})


def test_the_objective_s_example_holds() -> None:
    assert doctest.testmod(objective).attempted > 0
    assert doctest.testmod(objective).failed == 0


def test_the_loss_s_example_runs(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docstring = st_gsinfonce.GSInfoNCELoss.__doc__
    assert docstring
    docstring = inspect.cleandoc(docstring)  # Python 3.13 has done so already
    example = textwrap.dedent(docstring.split("Example:\n    ::\n")[1])
    assert re.search(r"bert-base-uncased", example)
    monkeypatch.chdir(tmp_path)
    exec(example.replace("bert-base-uncased", str(tiny_bert)), {})
    assert (tmp_path / "encoder" / "modules.json").is_file()
