"""The script that pushes, run as a user runs it but in this process, offline.

- A dry run prints what would go up and the card, and leaves the folder.
- Scores are read from files, or made on the spot for the encoder and what it came from.
- What is wrong ends with one line and a non-zero status; a token is no argument.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import RunExample

from st_gsinfonce import STS_TASKS, STSResults, build_encoder, hub

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*the published split:UserWarning", "ignore:.*superseded:UserWarning"
)

Run = Callable[..., str]


@pytest.fixture
def run(
    run_example: RunExample,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Return a function that runs the script on a checkpoint and gives what it printed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(hub, "encode_alone", lambda folder, scratch: hub.encode_samples(folder))

    def start(*arguments: object) -> str:
        run_example("push_to_hub.py", *arguments)
        return capsys.readouterr().out

    return start


@pytest.fixture
def encoder(tiny_bert: Path, tmp_path: Path) -> Path:
    build_encoder(tiny_bert, seed=0, device="cpu").save_pretrained(str(tmp_path / "encoder"))
    return tmp_path / "encoder"


@pytest.fixture
def sts_folder(tmp_path: Path, sentences: list[str]) -> Path:
    generator = random.Random(1)
    for task in STS_TASKS:
        rows = []
        for _ in range(20):
            first, second = generator.sample(sentences, 2)
            score = generator.uniform(0, 5)
            rows.append(json.dumps({"sentence1": first, "sentence2": second, "score": score}))
        path = tmp_path / "sts" / task / "test.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(rows))
    return tmp_path / "sts"


def test_a_dry_run(run: Run, encoder: Path, tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    record.write_text(json.dumps({"loss": {"scale": 20.0, "noise_size": 192}}))
    output = run(
        *("--encoder", encoder, "--repo-id", "galaxy/towel", "--dry-run", "--run", record),
        *("--license", "apache-2.0", "--base-model", "google-bert/bert-base-uncased"),
    )
    assert "galaxy/towel (new, private)" in output and "model.safetensors" in output
    assert 'SentenceTransformer("galaxy/towel")' in output and '"noise_size": 192' in output
    assert "license: apache-2.0" in output and "base_model: google-bert/bert-base-uncased" in output
    folder = Path(re.findall(r"Nothing was pushed\. What would be lies in (.*)", output)[0])
    assert (folder / "README.md").read_text(encoding="utf-8") in output
    public = run("--encoder", encoder, "--repo-id", "galaxy/towel", "--dry-run", "--public")
    assert "PUBLIC: everyone can download it" in public


@pytest.mark.slow
def test_scores_are_made(run: Run, encoder: Path, tiny_bert: Path, sts_folder: Path) -> None:
    """Slow: imports MTEB and evaluates two encoders on seven tasks."""
    common = ("--encoder", encoder, "--repo-id", "galaxy/towel", "--dry-run")
    output = run(*common, "--sts-data", sts_folder, "--baseline", tiny_bert)
    table = [line for line in output.splitlines() if re.match(r"\| \S+ \(|\| Difference", line)]
    assert [line.split(" | ")[0] for line in table] == [
        f"| local/{tiny_bert.name} (before)",
        "| galaxy/towel (after)",
        "| Difference",
    ]
    assert set(re.findall(r"[+-][\d.]+", table[2])) == {"+0.00"}  # untrained, the same pooling
    assert "pooling: cls (before: cls)" in output and "mteb/sickr-sts" in output


def test_scores_are_read(run: Run, encoder: Path, tmp_path: Path) -> None:
    for name, score in (("after", 0.5), ("before", 0.4)):
        scores = dict.fromkeys(STS_TASKS, score)
        results = STSResults(scores, f"local/{name}", "0" * 40, "cls", {}, {}, 1.0)
        (tmp_path / f"{name}.json").write_text(results.to_json())
    files = ("--results", tmp_path / "after.json", "--baseline", tmp_path / "before.json")
    output = run("--encoder", encoder, "--repo-id", "galaxy/towel", "--dry-run", *files)
    assert "| local/before (before) | 40.00" in output and "| +10.00 |" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repo-id", "bare"], r"error: repo_id must be USER/MODEL"),
        (["--baseline", "bert"], r"error: --baseline is an encoder: give --sts-data"),
        (["--encoder", "/nowhere"], r"error: /nowhere is no saved"),
        (["--results", "/nowhere.json"], r"error: .*/nowhere.json"),
    ],
)
def test_mistakes_end_in_one_line(
    run: Run, encoder: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("--encoder", encoder, "--repo-id", "galaxy/towel", "--dry-run", *arguments)
    assert re.match(message, str(stopped.value.code))
    assert "\n" not in str(stopped.value.code)


def test_a_token_is_no_argument(run: Run, encoder: Path) -> None:
    with pytest.raises(ValueError, match="not used by the HfArgumentParser"):
        try:
            run("--encoder", encoder, "--repo-id", "galaxy/towel", "--dry-run", "--token", "hf_x")
        except SystemExit as stopped:
            raise ValueError(str(stopped.code)) from None
