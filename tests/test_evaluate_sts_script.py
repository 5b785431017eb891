"""Invariants pinned here.

- The paper's rows are right: averages and improvements as the papers' own texts state them.
- Published checkpoints pool by [CLS] whatever sentence-transformers would do, saved models as they say,
  other checkpoints as told; the table says which, and a train-only head has no part in it.
- The script prints one table with every model and the paper, then differences that add up.
- Its figure holds the cosines by which the printed score was computed, before and after.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from st_gsinfonce.encoder import build_encoder, has_head
from st_gsinfonce.evaluation import STS_TASKS, evaluate_sts, pooling_mode
from st_gsinfonce.figure_data import EncoderCosines, SimilarityData, read_figure_data

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*the published split:UserWarning", "ignore:.*superseded:UserWarning"
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "evaluate_sts.py"
    spec = importlib.util.spec_from_file_location("evaluate_sts_script", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, sentences: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    generator = random.Random(1)
    for task in STS_TASKS:
        (folder / task).mkdir()
        with (folder / task / "test.jsonl").open("w") as file:
            for _ in range(20):
                first, second = generator.sample(sentences, 2)
                row = {"sentence1": first, "sentence2": second, "score": generator.uniform(0, 5)}
                file.write(json.dumps(row) + "\n")
    return folder


def test_the_papers_rows_agree_with_what_the_papers_say(script: ModuleType) -> None:
    averages = {name: row["Avg."] for name, row in script.paper_rows().items()}
    simcse = {
        "BERT-base": 76.25,
        "BERT-large": 78.41,
        "RoBERTa-base": 76.57,
        "RoBERTa-large": 78.90,
    }
    better = {"BERT-base": 1.38, "BERT-large": 0.72, "RoBERTa-base": 1.17, "RoBERTa-large": 0.28}
    for base, average in simcse.items():
        assert round(averages[f"paper: SimCSE, {base}"], 2) == average
        found = round(averages[f"paper: GS-InfoNCE, {base}"], 2) - average
        assert found == pytest.approx(better[base], abs=0.005)
    assert len(averages) == 8


@pytest.mark.parametrize(
    ("name", "pooling", "reason"),
    [
        ("unsup-simcse-bert-base-uncased", "cls", "as published"),
        ("gsInfoNCE-bert-base-uncased", "cls", "as published"),
        ("my-bert", "mean", "--pooling"),
    ],
)
def test_a_plain_checkpoint_pools_as_published_or_as_told(
    script: ModuleType, tiny_bert: Path, tmp_path: Path, name: str, pooling: str, reason: str
) -> None:
    folder = tmp_path / name
    shutil.copytree(tiny_bert, folder)
    model, why = script.load(str(folder), "mean", "cpu")
    assert (pooling_mode(model), why) == (pooling, reason)
    assert pooling_mode(SentenceTransformer(str(folder), device="cpu")) == "mean"
    assert model.max_seq_length == 64  # nothing is cut that the encoder can read


@pytest.mark.parametrize(
    "name",
    [
        "princeton-nlp/unsup-simcse-bert-base-uncased",
        "princeton-nlp/unsup-simcse-roberta-large",
        "ffgcc/gsInfoNCE-roberta-base",
    ],
)
def test_the_published_names_are_known(script: ModuleType, name: str) -> None:
    assert script.CLS_CHECKPOINTS.search(name)
    assert script.mteb_name(name) == name


@pytest.mark.parametrize(
    "name", ["princeton-nlp/sup-simcse-bert-base-uncased", "my/unsup-simcse-bert/checkpoint-125"]
)
def test_other_names_are_not(script: ModuleType, name: str) -> None:
    assert not script.CLS_CHECKPOINTS.search(name)


def test_a_saved_encoder_pools_as_it_says_and_loses_its_head(
    script: ModuleType, tiny_bert: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    build_encoder(tiny_bert, pooling="max", device="cpu").save_pretrained(str(folder))
    assert has_head(folder)
    model, why = script.load(str(folder), "cls", "cpu")
    assert (pooling_mode(model), why) == ("max", "its own")
    assert not has_head(model)


def test_one_table_with_the_paper_and_differences_that_add_up(
    script: ModuleType,
    make_encoder: Callable[..., SentenceTransformer],
    tiny_bert: Path,
    pairs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = tmp_path / "saved"
    make_encoder("mean").save_pretrained(str(saved))
    options = ["--data-dir", str(pairs), "--output-dir", str(tmp_path / "out"), "--device", "cpu"]
    script.main([str(saved), "--baseline", str(tiny_bert), *options])
    printed = capsys.readouterr().out
    expected = evaluate_sts(make_encoder("mean"), data_dir=pairs, show_progress_bar=False)

    def numbers(start: str, section: str) -> list[float]:
        (line,) = (line for line in section.splitlines() if line.startswith(f"{start} "))
        return [float(cell) for cell in line[len(start) :].split()]

    first, *others = printed.split("points above (+) or below (-)")
    assert f"{saved}: pooling mean (its own)" in first
    assert f"{tiny_bert}: pooling cls (--pooling)" in first
    row = numbers(f"{saved} [mean]", first.split("Avg.")[1])
    assert row == pytest.approx(list(expected.row().values()), abs=0.006)
    baseline = numbers(f"{tiny_bert} [cls]", first.split("Avg.")[1])
    paper = numbers("paper: GS-InfoNCE, BERT-base", first)
    assert paper == [*script.PAPER["GS-InfoNCE, BERT-base"], 77.63]
    (section,) = others
    for start, other in ((f"{tiny_bert} [cls]", baseline), ("paper: GS-InfoNCE, BERT-base", paper)):
        found = numbers(start, section)
        assert found == pytest.approx([a - b for a, b in zip(row, other, strict=True)], abs=0.011)
    assert {folder.name for folder in (tmp_path / "out" / "results").iterdir()} == {
        "local__saved",
        f"local__{tiny_bert.name}",
    }


def test_a_model_that_is_nowhere_is_named(script: ModuleType, pairs: Path) -> None:
    with pytest.raises(OSError, match="nobody/nothing"):
        script.main(["nobody/nothing", "--data-dir", str(pairs), "--device", "cpu"])


def test_the_figure_shows_before_and_after(
    script: ModuleType,
    make_encoder: Callable[..., SentenceTransformer],
    tiny_bert: Path,
    pairs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    saved = tmp_path / "saved"
    make_encoder("mean").save_pretrained(str(saved))
    command = [
        str(saved),
        "--baseline",
        str(tiny_bert),
        "--data-dir",
        str(pairs),
        "--device",
        "cpu",
    ]
    command += ["--figure", str(tmp_path / "figures" / "sts"), "--figure_task", "STS13"]
    script.main(command)
    printed = capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert names == ["sts.json", "sts.png", "sts.svg"]
    assert f"{tmp_path}/figures/sts.png" in printed
    data = read_figure_data(tmp_path / "figures" / "sts.json")
    assert isinstance(data, SimilarityData) and data.task == "STS13 test"
    rows = [json.loads(line) for line in (pairs / "STS13" / "test.jsonl").open()]
    assert list(data.gold) == [row["score"] for row in rows]
    before, after = data.encoders
    assert (before.label, after.label) == (f"{tiny_bert.name} [cls]", "saved [mean]")
    for encoder, pooling in ((before, "cls"), (after, "mean")):
        expected = evaluate_sts(
            make_encoder(pooling, 64), ["STS13"], data_dir=pairs, show_progress_bar=False
        )
        assert encoder.spearman == pytest.approx(100 * expected.average)
        first, second = (
            make_encoder(pooling, 64).encode([row[column] for row in rows]).astype(np.float64)
            for column in ("sentence1", "sentence2")
        )
        lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
        cosines = (first * second).sum(axis=1) / lengths
        assert list(encoder.cosines) == pytest.approx(cosines.tolist(), abs=1e-6)
    with pytest.raises(FileExistsError, match=r"--figure: .*sts\.png exists .*--overwrite"):
        script.main(command)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([], "--figure draws one MODEL beside its --baseline, got 1 and no baseline"),
        (["other", "--baseline", "b"], "got 2 and one baseline"),
        (["--baseline", "b", "--figure-task", "STS22"], "invalid choice: 'STS22'"),
    ],
)
def test_a_figure_needs_a_baseline_and_one_model(
    script: ModuleType, extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(["model", *extra, "--figure", "figure"])
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_table_is_printed(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    data = SimilarityData("STS13 test", (1.0, 2.0), (EncoderCosines("x", 100.0, (0.1, 0.2)),))
    script.save(data, str(tmp_path / "figure"))
    assert "Without the figure: figures need matplotlib: pip install" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
