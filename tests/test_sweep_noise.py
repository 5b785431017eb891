"""The script that sweeps the noise, run as a user runs it.

- Its points are the paper's numbers of vectors, and the masses that its docstring names.
- It shares its runs with compare_losses.py.
- The best mass is chosen on STS-B dev, whatever the test sets say.
- The paper's numbers stand beside ours with their sources, and no others; in the figure as a difference.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import RunExample
from test_cells import SETTING, result_of
from test_report import RUN

from st_gsinfonce.cells import Arm, Cell
from st_gsinfonce.figure_data import Point, SweepData, read_figure_data
from st_gsinfonce.report import GridReport

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*has .* pairs:UserWarning"),  # a made-up STS set
    pytest.mark.filterwarnings("ignore:.*is superseded:UserWarning"),
]


def test_the_points(run_example: RunExample) -> None:
    module = run_example("sweep_noise.py", name="module")
    options = module["SweepOptions"]()
    assert options.ratios == [0, 0.5, 1, 2, 3, 4, 8, 16]  # the paper's table 3
    assert options.masses == [5.5, 8, 9, 10, 11, 12, 13, 14, 16]
    assert {ratio: score for ratio, (score, _) in module["PAPER"].items()} == {0: 76.25, 3: 77.63}
    assert all("https://" in source for _, source in module["PAPER"].values())


@pytest.mark.slow
def test_both_sweeps(
    run_example: RunExample,
    grid_flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Slow: trains every point of both sweeps."""
    run_example("compare_losses.py", *grid_flags, "--arms", "infonce", "sampled", "expected:b=10")
    cells = set((tmp_path / "out" / "cells").iterdir())
    capsys.readouterr()
    run_example("sweep_noise.py", *grid_flags, "--ratios", "3", "0", "0.5", "--masses", "10", "8")
    printed = capsys.readouterr().out
    more = set((tmp_path / "out" / "cells").iterdir())
    assert cells < more and len(more) == 6 + 4  # no noise, M = 3 and b = 10 were there
    for name in ("ratio", "mass"):
        text = (tmp_path / "out" / f"sweep_{name}.md").read_text(encoding="utf-8")
        assert text in printed + "\n"
        assert (tmp_path / "out" / f"sweep_{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert (tmp_path / "out" / f"sweep_{name}.svg").is_file()
    check_figures(tmp_path / "out")
    ratio = (tmp_path / "out" / "sweep_ratio.md").read_text(encoding="utf-8").splitlines()
    points = [line.split(" | ") for line in ratio if line.startswith(("| none", "| GS sampled, M"))]
    rows = [row for row in points if "95%" not in row][:3]
    assert [row[0] for row in rows] == [
        "| none",
        "| GS sampled, M = 0.5 x batch",
        "| GS sampled, M = 3 x batch",
    ]
    assert [row[-1].strip(" |") for row in rows] == ["76.25", "", "77.63"]
    assert rows[0][1:3] == ["", ""] and float(rows[2][2]) == pytest.approx(
        float(rows[2][1]) / 20, abs=0.01
    )
    assert any("could not be checked" in line for line in ratio)
    mass = json.loads((tmp_path / "out" / "sweep_mass.json").read_text(encoding="utf-8"))
    assert [arm["log_mass"] for arm in mass["arms"]] == [None, 8.0, 10.0]
    assert mass["paper"] == {} and mass["best"]["chosen_on"] == "STS-B dev"
    dev = {arm["arm"]: arm["mean"]["STS-B dev"] for arm in mass["arms"][1:]}
    assert dev[mass["best"]["arm"]] == max(dev.values())
    assert "Best mass by STS-B dev alone" in printed


def check_figures(output: Path) -> None:
    """Assert that the figures are drawn from the scores of the tables."""
    ratio = read_figure_data(output / "sweep_ratio-figure.json")
    mass = read_figure_data(output / "sweep_mass-figure.json")
    assert isinstance(ratio, SweepData) and isinstance(mass, SweepData)
    assert (ratio.log_x, ratio.scale) == (True, None) and (mass.log_x, mass.scale) == (False, 20)
    for name, data, x in (("ratio", ratio, (0.5, 3.0)), ("mass", mass, (8.0, 10.0))):
        record = json.loads((output / f"sweep_{name}.json").read_text(encoding="utf-8"))
        assert [curve.label for curve in data.curves] == ["Avg.", "STS-B dev"]
        for curve in data.curves:
            assert curve.x == x
            scores = [
                tuple(cell["scores"][curve.label] for cell in arm["cells"])
                for arm in record["arms"]
            ]
            assert [curve.baseline, *curve.scores] == scores
    assert [curve.paper for curve in ratio.curves] == [(Point(3.0, 1.38),), ()]
    assert [curve.paper for curve in mass.curves] == [(), ()]


def test_no_noise_alone_has_no_figure(
    run_example: RunExample,
    grid_flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_example("sweep_noise.py", *grid_flags, "--sweep", "ratio", "--ratios", "0", "--seeds", "0")
    assert "without noise to sweep there is no figure" in capsys.readouterr().out
    assert not list(tmp_path.glob("out/*.png"))


def test_the_best_mass_is_chosen_on_dev_alone(
    run_example: RunExample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = run_example("sweep_noise.py", name="module")
    plain = Arm()
    results = []
    for arm, dev, test in (
        (plain, 99.0, 10.0),  # no noise is no mass
        (Arm("expected", 0.0, 9.0), 80.0, 75.0),
        (Arm("expected", 0.0, 12.0), 81.0, 60.0),
    ):
        for seed in (0, 1):
            scores = {"STS-B dev": dev + seed, "Avg.": test + seed}
            made = result_of(Cell(arm, seed, SETTING), **scores)
            mass = replace(made, run=RUN, log_mass=arm.log_mass)
            results.append(mass)
    module["save"]("mass", GridReport(results), plain, tmp_path / "sweep_mass")
    record = json.loads((tmp_path / "sweep_mass.json").read_text(encoding="utf-8"))
    assert record["best"]["arm"] == "expected:b=12,dropout=0.1"
    assert "b = 12, a virtual negative of cosine 0.6 (81.50)" in capsys.readouterr().out


@pytest.mark.slow
def test_without_matplotlib_the_tables_are_saved(
    run_example: RunExample,
    grid_flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Slow: trains the points of a sweep."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run_example("sweep_noise.py", *grid_flags, "--sweep", "mass", "--mini")
    assert "without the figure: figures need matplotlib" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "cells",
        "sweep-mini_mass.json",
        "sweep-mini_mass.md",
    ]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--sweep", "sigma"], "--sweep must be ratio, mass or both"),
        (["--masses", "30"], "log_mass must be between"),
        (["--ratios", "-1"], "noise_ratio must be"),
    ],
)
def test_what_is_wrong_ends_with_a_reason(
    run_example: RunExample, grid_flags: list[str], extra: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match=f"(?s)error: .*{message}"):
        run_example("sweep_noise.py", *grid_flags, *extra)
