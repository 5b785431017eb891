"""The trainer.

- What is wrong with the input is said before the first step, by row, column or argument.
- Nothing in the output folder is overwritten unless asked.
- The best checkpoint's weights end up in the model, also where they are not the last, or it is an error.
- A resumed run ends with the weights of the uninterrupted one, bit for bit, noise and head included.
- The same seed gives the same weights; noise changes neither batches nor dropout masks.
- After training in half precision the model encodes as it will when loaded.
"""

from __future__ import annotations

import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sentence_transformer.losses import (
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from transformers import TrainerCallback, set_seed

from st_gsinfonce import GSInfoNCELoss, build_encoder, strip_head
from st_gsinfonce.training import (
    DIGEST_FILE,
    NoiseStepCallback,
    build_trainer,
    makes_two_views,
    precision_arguments,
)
from st_gsinfonce.weights import weights_digest


@pytest.fixture
def encoder(tiny_bert: Path) -> SentenceTransformer:
    return build_encoder(tiny_bert, seed=0, device="cpu")


class Scripted(BaseEvaluator):
    """Scores taken from a list, so that the best step is known beforehand."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = iter(scores)
        self.primary_metric = "score"

    def __call__(self, model: SentenceTransformer, *args: Any, **kwargs: Any) -> dict[str, float]:
        model.encode(["the cat"])
        return {"score": next(self.scores)}


class Snapshots(TrainerCallback):
    """Digests of the weights after each step."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.digests[state.global_step] = weights_digest(model)


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_score",
    "greater_is_better": True,
    "max_steps": 6,
}


# --- input


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        (["a b", None, "c d"], "sentence 2 is None"),
        (["a b", float("nan")], "sentence 2 is nan"),
        (["a b"] * 20 + ["  "], "row 21 is '  '"),
        (["a b", ""] * 16, "row 2 is ''"),
        ("a b", "got one string"),
        ([], "0 sentences are fewer than one batch of 16"),
        (["a b", "c d"], "2 sentences are fewer than one batch of 16"),
        (["a b"] * 20, "all 20 sentences are the same"),
    ],
)
def test_bad_sentences_are_named(encoder, training_arguments, sentences, message) -> None:
    with pytest.raises(ValueError, match=message):
        build_trainer(encoder, sentences, training_arguments())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"text": ["a"] * 20, "source": ["b"] * 20},
            r"columns \['text', 'source'\].*select_columns",
        ),
        ({"label": [f"a {i}" for i in range(20)]}, "named 'label' for labels.*rename_column"),
        ({"text": [f"a {i}" for i in range(19)] + [None]}, "row 20 is None"),
    ],
)
def test_bad_datasets_are_named(encoder, training_arguments, columns, message) -> None:
    with pytest.raises(ValueError, match=message):
        build_trainer(encoder, Dataset.from_dict(columns), training_arguments())


def test_a_model_without_dropout_is_refused(tiny_bert, sentences, training_arguments) -> None:
    model = build_encoder(tiny_bert, dropout=0.0, device="cpu")
    with pytest.raises(ValueError, match="no dropout"):
        build_trainer(model, sentences, training_arguments())


def test_looking_for_dropout_changes_nothing(encoder) -> None:
    encoder.eval()
    state = torch.get_rng_state()
    assert makes_two_views(encoder)
    assert torch.equal(torch.get_rng_state(), state)
    assert not encoder.training


def test_push_to_hub_with_a_head_is_refused(encoder, sentences, training_arguments) -> None:
    with pytest.raises(ValueError, match="train-only head"):
        build_trainer(encoder, sentences, training_arguments(push_to_hub=True))


def test_several_gpus_in_one_process_are_refused(encoder, sentences, tmp_path) -> None:
    class TwoGPUs(SentenceTransformerTrainingArguments):
        n_gpu = property(
            lambda self: 2
        )  # from which the library concludes that it uses DataParallel

    arguments = TwoGPUs(output_dir=str(tmp_path / "trainer"), use_cpu=True)
    with pytest.raises(ValueError, match="2 GPUs.*torchrun --nproc-per-node 2.*CUDA_VISIBLE"):
        build_trainer(encoder, sentences, arguments)


# --- output


def test_a_batch_of_one_has_no_negatives(encoder, sentences, training_arguments) -> None:
    for batch in (0, 1):
        arguments = training_arguments(per_device_train_batch_size=batch)
        message = f"per_device_train_batch_size is {batch}: the negatives are .* at least 2"
        with pytest.raises(ValueError, match=message):
            build_trainer(encoder, sentences, arguments)


def test_another_run_is_not_overwritten(encoder, sentences, training_arguments, tmp_path) -> None:
    old = tmp_path / "trainer" / "checkpoint-3" / "model.safetensors"
    old.parent.mkdir(parents=True)
    old.write_text("precious")
    with pytest.raises(FileExistsError, match="checkpoint-3"):
        build_trainer(encoder, sentences, training_arguments())
    assert old.read_text() == "precious"
    build_trainer(encoder, sentences, training_arguments(resume_from_checkpoint=str(old.parent)))
    assert old.read_text() == "precious"
    (tmp_path / "trainer" / "notes.txt").write_text("mine")
    (tmp_path / "trainer" / "checkpoint-for-the-paper").mkdir()
    (tmp_path / "trainer" / "checkpoint-9").symlink_to(tmp_path / "trainer" / "notes.txt")
    with pytest.raises(
        ValueError, match="no such logger"
    ):  # of the Trainer: there will be no new run
        arguments = training_arguments(report_to=["no such logger"])
        build_trainer(encoder, sentences, arguments, overwrite=True)
    assert old.read_text() == "precious"
    build_trainer(encoder, sentences, training_arguments(), overwrite=True)
    names = sorted(path.name for path in (tmp_path / "trainer").iterdir())
    assert names == ["checkpoint-for-the-paper", "notes.txt"]


def test_a_folder_that_the_locale_cannot_write_is_said(
    encoder, sentences, training_arguments
) -> None:
    with pytest.raises(OSError, match=r"output_dir 'run-\\udce9' has characters"):
        build_trainer(encoder, sentences, training_arguments(output_dir="run-\udce9"))


def test_unwritable_output_is_said(encoder, sentences, training_arguments, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written"):
        build_trainer(
            encoder, sentences, training_arguments(output_dir=str(tmp_path / "file" / "below"))
        )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_output_is_said(encoder, sentences, training_arguments, tmp_path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="cannot be written"):
        build_trainer(encoder, sentences, training_arguments())


# --- what is trained


def test_the_default_loss_takes_the_trainer_s_seed(encoder, sentences, training_arguments) -> None:
    trainer = build_trainer(encoder, sentences, training_arguments(seed=7))
    assert isinstance(trainer.loss, GSInfoNCELoss)
    assert trainer.loss.seed == 7


@pytest.mark.parametrize(
    "loss",
    [MultipleNegativesRankingLoss, lambda model: GSInfoNCELoss(model, noise="expected")],
    ids=["stock", "ours, by a function"],
)
def test_any_two_column_loss_trains(encoder, sentences, training_arguments, loss) -> None:
    before = weights_digest(encoder)
    build_trainer(encoder, sentences, training_arguments(max_steps=2), loss=loss).train()
    assert weights_digest(encoder) != before


def test_an_iterable_dataset_trains(encoder, sentences, training_arguments) -> None:
    stream = Dataset.from_dict({"text": sentences}).to_iterable_dataset()
    assert isinstance(stream, IterableDataset)
    before = weights_digest(encoder)
    build_trainer(encoder, stream, training_arguments(max_steps=2)).train()
    assert weights_digest(encoder) != before


def test_the_step_reaches_losses_inside_of_losses(encoder) -> None:
    inner = GSInfoNCELoss(encoder)
    callback = NoiseStepCallback({"a": MatryoshkaLoss(encoder, inner, [32, 16])})
    assert callback.losses == [inner]


# --- best checkpoint


def run_to_the_best(
    encoder: SentenceTransformer, sentences: list[str], arguments: Any
) -> Snapshots:
    snapshots = Snapshots()
    trainer = build_trainer(
        encoder,
        sentences,
        arguments,
        evaluator=Scripted([0.1, 0.9, 0.2]),
        callbacks=[snapshots],
    )
    trainer.train()
    return snapshots


def test_the_best_weights_end_up_in_the_model(
    encoder, sentences, training_arguments, tmp_path, encode_elsewhere
) -> None:
    snapshots = run_to_the_best(encoder, sentences, training_arguments(**BEST))
    assert weights_digest(encoder) == snapshots.digests[4] != snapshots.digests[6]
    expected = torch.tensor(encoder.encode(sentences[:4]))
    plain = strip_head(tmp_path / "trainer" / "checkpoint-4", tmp_path / "plain")
    assert torch.equal(encode_elsewhere(plain, sentences[:4]), expected)
    assert not (plain / DIGEST_FILE).exists()
    assert not (plain / "optimizer.pt").exists()


def test_failing_to_load_the_best_is_an_error(
    encoder, sentences, training_arguments, tmp_path
) -> None:
    class Vandal(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 6:
                (tmp_path / "trainer" / "checkpoint-4" / "model.safetensors").write_bytes(b"")

    trainer = build_trainer(
        encoder,
        sentences,
        training_arguments(**BEST),
        evaluator=Scripted([0.1, 0.9, 0.2]),
        callbacks=[Vandal()],
    )
    with pytest.raises(RuntimeError, match=r"checkpoint-4.*could not be loaded"):
        trainer.train()


@pytest.mark.parametrize("when", ["in the training", "before resuming"])
def test_a_best_checkpoint_that_is_gone_is_said(
    encoder, sentences, training_arguments, tmp_path, when
) -> None:
    best = tmp_path / "trainer" / "checkpoint-4"

    class Vandal(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 6 and when == "in the training":
                shutil.rmtree(best)

    def build(**more: Any) -> SentenceTransformerTrainer:
        arguments = training_arguments(**BEST, **more)  # to step 6
        return build_trainer(
            encoder,
            sentences,
            arguments,
            evaluator=Scripted([0.1, 0.9, 0.2, 0.2]),
            callbacks=[Vandal()],
        )

    if when == "in the training":
        with pytest.raises(RuntimeError, match=r"the best checkpoint, .*checkpoint-4 .* is gone"):
            build().train()
        return
    build().train()
    shutil.rmtree(best)
    last = str(tmp_path / "trainer" / "checkpoint-6")
    # Newer releases of transformers forget a best checkpoint that is gone, older ones look for it in vain.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            build(resume_from_checkpoint=last).train(resume_from_checkpoint=last)
            said = [str(warning.message) for warning in caught]
        except RuntimeError as error:
            said = [str(error)]
    assert any("the model holds the last step's weights" in text for text in said)


# --- repeatable


def train_once(
    tiny_bert: Path, sentences: list[str], arguments: Any, **loss: Any
) -> SentenceTransformer:
    set_seed(arguments.seed)
    model = build_encoder(tiny_bert, seed=arguments.seed, device="cpu")
    build_trainer(
        model, sentences, arguments, loss=lambda m: GSInfoNCELoss(m, seed=arguments.seed, **loss)
    ).train()
    return model


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights(
    tiny_bert, sentences, training_arguments, tmp_path
) -> None:
    """Slow: three trainings."""

    def weights(seed: int, name: str) -> str:
        arguments = training_arguments(seed=seed, output_dir=str(tmp_path / name))
        return weights_digest(train_once(tiny_bert, sentences, arguments))

    assert weights(1, "a") == weights(1, "b") != weights(2, "c")


@pytest.mark.slow
def test_noise_moves_neither_batches_nor_dropout(
    tiny_bert, sentences, training_arguments, tmp_path, monkeypatch
) -> None:
    """Slow: several trainings. At learning rate 0 the embeddings show the batches and the masks alone."""

    def embeddings(name: str, **loss: Any) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        compute = GSInfoNCELoss.compute_loss_from_embeddings

        def spy(self: Any, columns: Any, labels: Any = None) -> torch.Tensor:
            seen.extend(column.detach().clone() for column in columns)
            return compute(self, columns, labels)

        monkeypatch.setattr(GSInfoNCELoss, "compute_loss_from_embeddings", spy)
        arguments = training_arguments(
            learning_rate=0.0, seed=3, output_dir=str(tmp_path / name), max_steps=6
        )
        train_once(tiny_bert, sentences, arguments, **loss)
        monkeypatch.undo()
        return seen

    without = embeddings("none", noise_size=0)
    for name, loss in {"sampled": {}, "expected": {"noise": "expected"}}.items():
        with_noise = embeddings(name, **loss)
        assert len(with_noise) == len(without) == 12
        assert all(torch.equal(a, b) for a, b in zip(with_noise, without, strict=True))
    assert not torch.equal(without[0], without[1])  # dropout is on


@pytest.mark.parametrize("noise", ["sampled", "expected"])
def test_a_resumed_run_is_the_uninterrupted_one(
    tiny_bert, sentences, training_arguments, tmp_path, noise
) -> None:
    settings = {
        "save_strategy": "steps",
        "save_steps": 5,
        "max_steps": 10,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 8,
        "lr_scheduler_type": "linear",
    }

    def run(resume: str | None = None) -> str:
        set_seed(0)
        arguments = training_arguments(**settings, resume_from_checkpoint=resume)
        model = build_encoder(tiny_bert, seed=0, device="cpu")
        trainer = build_trainer(
            model, sentences, arguments, loss=GSInfoNCELoss(model, noise=noise, seed=0)
        )
        trainer.train(resume_from_checkpoint=resume)
        return weights_digest(model)

    straight = run()
    shutil.rmtree(tmp_path / "trainer" / "checkpoint-10")
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    assert run(resume=str(tmp_path / "trainer" / "checkpoint-5")) == straight


# --- precision


def test_half_precision_leaves_no_trace(encoder, sentences, training_arguments, tmp_path) -> None:
    arguments = training_arguments(bf16=True)
    build_trainer(encoder, sentences, arguments).train()
    vectors = strip_head(encoder).encode(sentences)
    encoder.save_pretrained(str(tmp_path / "plain"))
    loaded = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    assert np.array_equal(loaded.encode(sentences), vectors)


@pytest.mark.parametrize(
    ("gpu", "capability", "cpu", "expected"),
    [
        (False, None, {"avx512_bf16": True}, {"bf16": True, "fp16": False, "use_cpu": True}),
        (False, None, {"amx_bf16": True}, {"bf16": True, "fp16": False, "use_cpu": True}),
        (False, None, {"avx2": True}, {"bf16": False, "fp16": False}),
        (True, (8, 0), {}, {"bf16": True, "fp16": False}),
        (True, (7, 5), {}, {"bf16": False, "fp16": True}),
    ],
)
def test_precision_follows_the_hardware(
    monkeypatch: pytest.MonkeyPatch,
    gpu: bool,
    capability: tuple[int, int],
    cpu: dict[str, bool],
    expected: dict[str, bool],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu, raising=False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert precision_arguments("auto") == expected


def test_precision_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'fp8'"):
        precision_arguments("fp8")  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU"):
        precision_arguments("fp16")
    assert precision_arguments("fp32") == {"bf16": False, "fp16": False}


def test_the_cpu_s_precision_is_the_cpu_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a GPU that computes float16, and a chip of Apple's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for capable in (True, False):
        monkeypatch.setattr(
            torch.cpu, "get_capabilities", lambda c=capable: {"avx512_bf16": c}, raising=False
        )
        expected = {"bf16": capable, "fp16": False, "use_cpu": True}
        assert precision_arguments(use_cpu=True) == expected
    with pytest.raises(ValueError, match="needs a GPU"):
        precision_arguments("fp16", use_cpu=True)


def test_resuming_and_overwriting_exclude_each_other(
    encoder, sentences, training_arguments, tmp_path
) -> None:
    checkpoint = tmp_path / "trainer" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    arguments = training_arguments(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(ValueError, match="deletes the checkpoints"):
        build_trainer(encoder, sentences, arguments, overwrite=True)
    assert checkpoint.is_dir()


def test_a_generator_is_named(encoder, sentences, training_arguments) -> None:
    with pytest.raises(ValueError, match=r"got a generator: list\(\.\.\.\)"):
        build_trainer(encoder, (s for s in sentences), training_arguments())
