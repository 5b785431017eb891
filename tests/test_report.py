"""Tables of a grid.

- Means, deviations and differences are those of the cells, worked out by hand here.
- Arms are compared over the seeds that both have, never over others.
- Every number of the Markdown is in the JSON, at full precision.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_cells import SETTING, result_of

from st_gsinfonce.cells import Arm, Cell, CellResult
from st_gsinfonce.report import (
    GridReport,
    check_keeps,
    markdown_comparisons,
    markdown_table,
    to_json,
)
from st_gsinfonce.significance import paired_difference

PLAIN, NOISY, WIDE = Arm(), Arm("expected", 0.0, 10.0), Arm(dropout=0.2)
SCORES = {PLAIN: [70.0, 71.0, 75.0], NOISY: [71.0, 73.0, 78.0], WIDE: [70.5]}
RUN = {
    "command": "python x.py",
    "versions": {"python": "3.11", "torch": "2.13"},
    "hardware": {"gpu": None, "cpu": "A CPU", "cores": 2, "torch_threads": 1},
}


def results() -> list[CellResult]:
    return [
        replace(
            result_of(Cell(arm, seed, SETTING), **{"STS-B dev": 90 - score, "Avg.": score}), run=RUN
        )
        for arm, scores in SCORES.items()
        for seed, score in enumerate(scores)
    ]


@pytest.fixture
def report() -> GridReport:
    return GridReport(results())


def test_means_and_deviations(report: GridReport) -> None:
    assert report.mean(PLAIN, "Avg.") == 72.0 and report.mean(NOISY, "Avg.") == 74.0
    assert report.sd(PLAIN, "Avg.") == pytest.approx(7**0.5)  # (4 + 1 + 9) / 2
    assert report.sd(WIDE, "Avg.") is None
    assert report.scores(NOISY, "Avg.") == {0: 71.0, 1: 73.0, 2: 78.0}
    assert report.metrics == ["STS-B dev", "Avg."] and report.primary == ["Avg.", "STS-B dev"]


def test_comparisons_pair_by_seed(report: GridReport) -> None:
    found = report.compare(NOISY, PLAIN, "Avg.")
    assert found.difference == paired_difference(SCORES[NOISY], SCORES[PLAIN])
    assert found.difference.differences == (1.0, 2.0, 3.0)
    shared = report.compare(WIDE, PLAIN, "Avg.").difference
    assert shared.differences == (0.5,)  # seed 0 alone is in both
    backwards = GridReport(reversed(results())).compare(NOISY, PLAIN, "Avg.")
    assert backwards.difference == found.difference
    assert found.verdict.startswith(f"{NOISY.label} and {PLAIN.label} cannot be told apart: +2.00")


def test_the_best_arm(report: GridReport) -> None:
    assert report.best(SCORES, "Avg.") == NOISY
    assert report.best(SCORES, "STS-B dev") == WIDE  # 19.5; dev is 90 minus the average here


def test_markdown(report: GridReport) -> None:
    means = report.markdown_means().splitlines()
    assert means[0] == "| Arm | Seeds | STS-B dev | Avg. |"
    assert means[2] == "| InfoNCE, dropout 0.1 | 3 | 18.00 ± 2.65 | 72.00 ± 2.65 |"
    assert means[4] == "| InfoNCE, dropout 0.2 | 1 | 19.50 | 70.50 |"
    assert len(report.markdown_cells().splitlines()) == 2 + 7
    assert "| GS expected, b = 10, dropout 0.1 | 2 | 12.00 | 78.00 |" in report.markdown_cells()
    table = markdown_comparisons(
        [report.compare(NOISY, PLAIN, "Avg."), report.compare(WIDE, PLAIN, "Avg.")]
    )
    rows = table.splitlines()
    assert rows[2].startswith("| GS expected, b = 10, dropout 0.1 | InfoNCE, dropout 0.1 | Avg. ")
    assert "| +2.00 | +1.00 to +3.00 | 0.250 | 3 |" in rows[2]
    assert rows[3].endswith("| +0.50 |  |  | 1 |  |")  # one seed has no interval
    assert (
        "A CPU, 2 cores, 1 thread." in report.provenance() and "torch 2.13" in report.provenance()
    )
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n|:---|---:|\n| 1 | 2 |"


def test_json_holds_everything(report: GridReport) -> None:
    comparisons = [report.compare(arm, PLAIN, "Avg.") for arm in (NOISY, WIDE)]
    record = json.loads(to_json(report.to_dict(comparisons, verdict="so it is")))
    assert record["verdict"] == "so it is"
    assert [arm["arm"] for arm in record["arms"]] == list(map(str, SCORES))
    assert record["arms"][0]["mean"]["Avg."] == 72.0 and record["arms"][2]["sd"]["Avg."] is None
    assert record["arms"][1]["cells"][2]["scores"]["Avg."] == 78.0
    assert record["arms"][1]["cells"][2]["file"] == Cell(NOISY, 2, SETTING).file_name
    first, second = record["comparisons"]
    assert first["differences"] == [1.0, 2.0, 3.0] and first["p_value"] == 0.25
    assert first["more_seeds"] == comparisons[0].difference.more_seeds
    assert second["p_value"] is None and second["low"] is None  # one seed: JSON has no NaN
    assert record["setting"]["batch_size"] == 64


def test_every_version_and_hardware_is_told() -> None:
    other = {
        **RUN,
        "versions": {"python": "3.11", "torch": "2.14"},
        "hardware": {"gpu": None, "cpu": "A CPU", "cores": 2, "torch_threads": 2},
    }
    first, *rest = results()
    text = GridReport([replace(first, run=other), *rest]).provenance()
    assert "python 3.11, torch 2.13 and 2.14." in text
    assert "A CPU, 2 cores, 1 thread; A CPU, 2 cores, 2 threads." in text


def test_a_report_keeps_the_runs_of_the_one_before(tmp_path: Path, report: GridReport) -> None:
    path = tmp_path / "grid.json"
    cells = [result.cell for result in report.results]
    check_keeps(path, [])  # there is none
    path.write_text(to_json(report.to_dict([])), encoding="utf-8")
    check_keeps(path, [*cells, Cell(PLAIN, 9, SETTING)])
    with pytest.raises(
        FileExistsError, match=f"reports 1 runs .*{cells[0].file_name}: choose another"
    ):
        check_keeps(path, cells[1:])
    for text in ("no JSON", "[]", "{}", '{"arms": [{"cells": [{}]}]}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(FileExistsError, match="is no report .*move it away"):
            check_keeps(path, cells)


def test_settings_do_not_mix() -> None:
    other = result_of(Cell(PLAIN, 0, replace(SETTING, batch_size=8)))
    with pytest.raises(ValueError, match="results of one setting"):
        GridReport([*results(), other])
    with pytest.raises(ValueError, match="results of one setting"):
        GridReport([])
