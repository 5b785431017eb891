"""What goes wrong while a training runs or saves, in this process; ``test_kills.py`` kills whole runs.

- A loss that is NaN or infinite stops the training; the error names the step, the learning rate and the
  checkpoint to go on from, and no checkpoint holds such weights, whether or not anything is logged.
- A gradient that the float16 scaler would skip is no such loss.
- An evaluator's error, and running out of memory, say what to do next; the checkpoints survive.
- A disk that is full, or a folder that cannot be written, leaves nothing under its final name, and what was
  there before stays.
- A file that is cut short or replaced by garbage is never taken for a whole one.
"""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, set_seed

from st_gsinfonce import (
    CachedGSInfoNCELoss,
    GSInfoNCELoss,
    build_encoder,
    build_trainer,
    last_checkpoint,
    save_encoder,
    strip_head,
)
from st_gsinfonce.cells import Arm, Cell, CellResult, Setting, Source
from st_gsinfonce.experiments import read_result
from st_gsinfonce.faults import LOOK_EVERY, FiniteCallback, NonFiniteError
from st_gsinfonce.weights import weights_digest
from st_gsinfonce.whole_files import write_atomically


@pytest.fixture
def encoder(tiny_bert: Path) -> SentenceTransformer:
    return build_encoder(tiny_bert, seed=0, device="cpu")


class Spoilt(GSInfoNCELoss):
    """GS-InfoNCE, but for what is done to it in its n-th batch."""

    def __init__(
        self, model: SentenceTransformer, batch: int, spoil: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(model, seed=0)
        self.batch, self.spoil, self.seen = batch, spoil, 0

    def compute_loss_from_embeddings(self, embeddings: Any, labels: Any = None) -> Tensor:
        loss = super().compute_loss_from_embeddings(embeddings, labels)
        self.seen += 1
        return self.spoil(loss) if self.seen == self.batch else loss


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda loss: loss * factor


def nan_gradient(loss: Tensor) -> Tensor:
    """Keep the value and spoil the gradient."""
    loss.register_hook(lambda gradient: gradient * float("nan"))
    return loss


def out_of_memory(loss: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8, "lr_scheduler_type": "linear"}


def all_finite(checkpoint: Path) -> bool:
    with safe_open(checkpoint / "model.safetensors", framework="pt") as weights:
        return all(weights.get_tensor(name).isfinite().all() for name in weights.keys())  # noqa: SIM118


# --- a loss that is no number


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_the_training(
    encoder, sentences, training_arguments, tmp_path, factor
) -> None:
    trainer = build_trainer(
        encoder, sentences, training_arguments(**SAVING), loss=Spoilt(encoder, 6, times(factor))
    )
    good = tmp_path / "trainer" / "checkpoint-4"
    # 3e-3 falls to 0 over 8 steps: the sixth is taken at 3/8 of it.
    with pytest.raises(
        NonFiniteError,
        match=rf"loss of step 6 is {factor}, at the learning rate 0.001125.*checkpoint is {good}\.",
    ):
        trainer.train()
    assert last_checkpoint(good.parent) == good and all_finite(good)
    assert not (good.parent / "checkpoint-6").exists()


def test_without_a_checkpoint_it_says_so(encoder, sentences, training_arguments, tmp_path) -> None:
    trainer = build_trainer(
        encoder, sentences, training_arguments(), loss=Spoilt(encoder, 1, times(float("nan")))
    )
    with pytest.raises(NonFiniteError, match=f"step 1 .*{tmp_path / 'trainer'} holds no whole"):
        trainer.train()


def test_a_gradient_that_is_no_number_is_not_saved(
    encoder, sentences, training_arguments, tmp_path
) -> None:
    """The loss of the last step before the save is finite, what it leaves is not."""
    trainer = build_trainer(
        encoder, sentences, training_arguments(**SAVING), loss=Spoilt(encoder, 4, nan_gradient)
    )
    with pytest.raises(NonFiniteError, match="weights .* not finite after step 4, at .*0.001875"):
        trainer.train()
    assert last_checkpoint(tmp_path / "trainer").name == "checkpoint-2"
    assert not (tmp_path / "trainer" / "checkpoint-4").exists()


def test_an_accumulated_batch_counts(encoder, sentences, training_arguments) -> None:
    arguments = training_arguments(
        gradient_accumulation_steps=2, per_device_train_batch_size=8, max_steps=4
    )
    loss = Spoilt(encoder, 5, times(float("nan")))  # the first half of step 3
    with pytest.raises(NonFiniteError, match="step 3 "):
        build_trainer(encoder, sentences, arguments, loss=loss).train()


def on_a_device(values: list[float]) -> FiniteCallback:
    """A callback that has seen losses, and believes them to be on a GPU."""

    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda")

    callback = FiniteCallback()
    for step, value in enumerate(values, 1):
        callback.see(torch.tensor(value), step, 0.1 * step)
    assert callback.loss is not None
    callback.loss = callback.loss.as_subclass(Elsewhere)
    return callback


def test_an_earlier_training_is_forgotten(training_arguments) -> None:
    callback = on_a_device([float("nan")])
    arguments, state, control = (
        training_arguments(),
        TrainerState(),
        TrainerControl(should_log=True),
    )
    callback.on_train_begin(arguments, state, control)
    callback.on_step_end(arguments, state, control)
    callback.see(torch.tensor(1.0), 1, 0.1)
    callback.on_step_end(arguments, state, control)


@pytest.mark.parametrize(
    "flag", ["should_log", "should_evaluate", "should_save", "should_training_stop"]
)
def test_a_gpu_is_waited_for_when_the_trainer_waits(flag: str, training_arguments) -> None:
    callback = on_a_device([1.0, float("nan"), 1.0])
    arguments, state = training_arguments(), TrainerState(global_step=3)
    callback.on_step_end(arguments, state, TrainerControl())  # nothing is due: nobody looks
    with pytest.raises(NonFiniteError, match="step 2 is nan, at the learning rate 0.2"):
        callback.on_step_end(arguments, state, TrainerControl(**{flag: True}))
    with pytest.raises(NonFiniteError, match="step 2 is nan"):
        callback.on_epoch_end(arguments, state, TrainerControl(**{flag: True}))


def test_a_gpu_is_looked_at_now_and_then(training_arguments) -> None:
    callback = on_a_device([float("inf")])
    with pytest.raises(NonFiniteError, match="step 1 is inf"):
        callback.on_step_end(
            training_arguments(), TrainerState(global_step=LOOK_EVERY), TrainerControl()
        )


def test_the_overflow_that_a_scaler_skips_is_no_error(training_arguments) -> None:
    """In float16 the loss is finite where its scaled gradient is not, and the weights stay as they were."""
    weight = nn.Linear(1, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, enabled=True)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    loss = weight(torch.full((1, 1), 1e30)).sum()
    assert loss.isfinite()
    scaler.scale(loss).backward()
    assert weight.weight.grad is not None and not weight.weight.grad.isfinite().all()
    scaler.step(optimizer)
    callback = FiniteCallback()
    callback.see(loss, 1, 1.0)
    callback.on_step_end(
        training_arguments(),
        TrainerState(global_step=1),
        TrainerControl(should_save=True),
        model=weight,
    )


# --- other errors, and what to do


@pytest.mark.parametrize(
    ("loss", "advice"),
    [
        (GSInfoNCELoss, r"A batch of 16 .*CachedGSInfoNCELoss\(model, mini_batch_size=32\)"),
        (CachedGSInfoNCELoss, "Embedding 32 texts.*a smaller mini_batch_size"),
    ],
)
def test_out_of_memory_names_the_loss_that_needs_less(
    encoder, sentences, training_arguments, loss, advice
) -> None:
    module = loss(encoder, seed=0)
    module.register_forward_hook(lambda *_: out_of_memory(torch.zeros(())))
    trainer = build_trainer(encoder, sentences, training_arguments(), loss=module)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as raised:
        trainer.train()
    (note,) = raised.value.__notes__
    assert "--mini-batch-size" in note
    with pytest.raises(torch.OutOfMemoryError, match=advice):
        raise raised.value


class Failing(BaseEvaluator):
    """Scores once, then fails if it is told to."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.calls, self.fails, self.primary_metric = 0, fails, "score"

    def __call__(self, model: SentenceTransformer, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.calls += 1
        if self.fails and self.calls == 2:
            raise ZeroDivisionError("no pair was scored")
        return {"score": 0.1}


def test_an_evaluator_that_fails_costs_no_checkpoint(
    tiny_bert, sentences, training_arguments, tmp_path
) -> None:
    settings = SAVING | {"eval_strategy": "steps", "eval_steps": 2}

    def run(name: str, fails: bool, resume: str | None = None) -> str:
        set_seed(0)
        model = build_encoder(tiny_bert, seed=0, device="cpu")
        arguments = training_arguments(
            **settings, output_dir=str(tmp_path / name), resume_from_checkpoint=resume
        )
        trainer = build_trainer(model, sentences, arguments, evaluator=Failing(fails))
        trainer.train(resume_from_checkpoint=resume)
        return weights_digest(model)

    kept = tmp_path / "broken" / "checkpoint-2"
    with pytest.raises(ZeroDivisionError, match="no pair was scored") as raised:
        run("broken", True)
    assert raised.value.__notes__ == [
        f"The training stopped after step 4 of 8; the last whole checkpoint is {kept}."
    ]
    assert last_checkpoint(kept.parent) == kept
    assert run("broken", False, str(kept)) == run("straight", False)


# --- full disks and folders that cannot be written


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Let no file grow beyond a size, as a disk that is nearly full does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("size", [0, 500, 20_000])
@pytest.mark.parametrize("exists", [False, True])
def test_an_encoder_is_saved_whole_or_not_at_all(
    encoder: SentenceTransformer, tmp_path: Path, size: int, exists: bool
) -> None:
    folder = tmp_path / "encoder"
    if exists:
        folder.mkdir()
    with pytest.raises(OSError, match=f"{folder} cannot be written .*elsewhere"):
        with files_end_at(size):
            save_encoder(encoder, folder)
    assert sorted(tmp_path.rglob("*")) == ([folder] if exists else [])
    assert save_encoder(encoder, folder) == folder  # the model is as good as before
    SentenceTransformer(str(folder), device="cpu")


def test_a_checkpoint_on_a_full_disk_is_not_taken_for_a_whole_one(
    encoder, sentences, training_arguments, tmp_path
) -> None:
    class Fills(TrainerCallback):
        """Fills the disk before the second checkpoint is written."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))

    trainer = build_trainer(encoder, sentences, training_arguments(**SAVING), callbacks=[Fills()])
    kept = tmp_path / "trainer" / "checkpoint-2"
    with files_end_at(resource.RLIM_INFINITY), pytest.raises(Exception, match=str(kept)) as raised:
        trainer.train()
    assert "File too large" in str(raised.value) or "file size" in str(raised.value).lower()
    with pytest.warns(UserWarning, match="checkpoint-4 is skipped"):
        assert last_checkpoint(tmp_path / "trainer") == kept


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "old")
    with files_end_at(1000), pytest.raises(OSError, match="File too large: '.*/result.json'"):
        write_atomically(path, "new" * 1000)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(NotADirectoryError, match="result.json/below"):
        write_atomically(path / "below", "new")


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_where_the_folder_should_be_is_named(
    encoder: SentenceTransformer, tmp_path: Path, below: str
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(FileExistsError, match=f"{file} (exists|is a file)"):
        save_encoder(encoder, file / below if below else file)
    assert file.read_text() == "mine"


# --- files cut short, or replaced


GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "text": lambda content: b"garbage" * 100,
    "json": lambda content: b"[1, 2]",
    "nested": lambda content: b"[" * 100_000,
}


@pytest.fixture(scope="module")
def two_checkpoints(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a training with two real checkpoints."""
    from conftest import make_sentences
    from sentence_transformers import SentenceTransformerTrainingArguments

    folder = tmp_path_factory.mktemp("two")
    arguments = SentenceTransformerTrainingArguments(
        str(folder / "run"),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=16,
    )
    model = build_encoder(tiny_bert, seed=0, device="cpu")
    build_trainer(model, make_sentences(64), arguments).train()
    return folder / "run"


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize(
    "name",
    [
        "trainer_state.json",
        "model.safetensors",
        "2_ProjectionHead/model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
    ],
)
def test_a_damaged_checkpoint_is_skipped(
    two_checkpoints: Path, tmp_path: Path, name: str, garbage: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_checkpoints, run)
    assert last_checkpoint(run) == run / "checkpoint-2"
    damaged = run / "checkpoint-2" / name
    damaged.write_bytes(GARBAGE[garbage](damaged.read_bytes()))
    with pytest.warns(UserWarning, match=f"checkpoint-2 is skipped: .*{name}"):
        assert last_checkpoint(run) == run / "checkpoint-1"


@pytest.fixture
def result() -> CellResult:
    source = Source("corpus.txt", "0" * 64)
    cell = Cell(Arm(), 0, Setting(source, source, (source,)))
    return CellResult(cell, {"Avg.": 1.0}, {}, {}, {}, None, 1, None, {}, "0" * 64, {})


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_damaged_result_is_no_result(result: CellResult, tmp_path: Path, garbage: str) -> None:
    path = tmp_path / result.cell.file_name
    path.write_text(result.to_json())
    assert read_result(result.cell, tmp_path) == result
    path.write_bytes(GARBAGE[garbage](path.read_bytes()))
    with pytest.warns(UserWarning, match=f"{path.name} is damaged"):
        assert read_result(result.cell, tmp_path) is None


def test_the_result_of_another_cell_is_no_result(result: CellResult, tmp_path: Path) -> None:
    other = replace(result, cell=replace(result.cell, seed=1))
    (tmp_path / result.cell.file_name).write_text(other.to_json())
    with pytest.warns(UserWarning, match="the result of another cell"):
        assert read_result(result.cell, tmp_path) is None


@pytest.mark.parametrize("huge", ["noise_ratio", "scale"])
def test_a_result_with_a_huge_number_is_a_value_error(result: CellResult, huge: str) -> None:
    values = json.loads(result.to_json())
    values["cell"]["arm"][huge] = 10**400
    with pytest.raises(ValueError, match="not the JSON of a cell"):
        CellResult.from_json(json.dumps(values))


def test_a_damaged_encoder_is_named(encoder: SentenceTransformer, tmp_path: Path) -> None:
    folder = save_encoder(encoder, tmp_path / "encoder")
    (folder / "modules.json").write_text("[{")
    with pytest.raises(ValueError, match=f"{folder / 'modules.json'} is damaged"):
        strip_head(folder)
