"""The diagnostics callback.

- What it logs is what the loss saw in the batch of that step, beside the Trainer's own numbers.
- The numbers go where the Trainer reports to, and to a CSV that is never written over.
- The training itself is the same with it and without it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from torch import nn
from transformers import TrainerCallback

from st_gsinfonce import DiagnosticsCallback, GSInfoNCELoss, build_trainer
from st_gsinfonce.diagnostics import FROM_TRAINER, METRICS

Train = Callable[..., Any]


@pytest.fixture
def start(
    make_encoder: Callable[..., SentenceTransformer],
    sentences: list[str],
    training_arguments: Callable[..., Any],
) -> Train:
    """Return a function that makes a trainer which logs every step."""

    def make(
        loss: Callable[[SentenceTransformer], nn.Module] | None = None, **settings: Any
    ) -> Any:
        torch.manual_seed(0)
        model = make_encoder()
        arguments = training_arguments(
            **{"logging_strategy": "steps", "logging_steps": 1, **settings}
        )
        return build_trainer(model, sentences, arguments, loss=loss or GSInfoNCELoss(model, seed=0))

    return make


def logged(trainer: Any, key: str) -> dict[int, float]:
    return {row["step"]: row[key] for row in trainer.state.log_history if key in row}


def test_each_log_of_the_loss_has_its_diagnostics(start: Train) -> None:
    trainer = start()
    seen: dict[int, dict[str, float]] = {}

    class Spy(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen[state.global_step] = vars(trainer.loss.statistics)

    trainer.add_callback(Spy())
    trainer.add_callback(DiagnosticsCallback(trainer))
    trainer.train()
    assert set(seen) == set(logged(trainer, "loss")) == {1, 2, 3, 4}
    for metric in METRICS:
        assert logged(trainer, metric) == {step: values[metric] for step, values in seen.items()}
    assert len({values["noise_share"] for values in seen.values()}) == 4  # it does change


def test_trackers_are_given_them(start: Train) -> None:
    trainer = start()
    told: list[dict[str, float]] = []

    class Tracker(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            told.append(dict(logs))

    trainer.add_callback(Tracker())
    trainer.add_callback(DiagnosticsCallback(trainer))
    trainer.train()
    assert sum("uniformity" in row for row in told) == 4
    assert sum("loss" in row for row in told) == 4


def test_the_training_is_the_same(start: Train) -> None:
    losses = []
    for watched in (False, True):
        trainer = start()
        if watched:
            trainer.add_callback(DiagnosticsCallback(trainer))
        trainer.train()
        losses.append(logged(trainer, "loss"))
    assert losses[0] == losses[1]


def test_the_csv_holds_what_was_logged(start: Train, tmp_path: Path) -> None:
    path = tmp_path / "new" / "diagnostics.csv"
    trainer = start()
    trainer.add_callback(DiagnosticsCallback(trainer, csv_file=path))
    trainer.train()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm", "learning_rate", *METRICS):
        assert [float(row[key]) for row in rows] == list(logged(trainer, key).values())


def test_a_resumed_run_has_each_step_once(start: Train, tmp_path: Path) -> None:
    path = tmp_path / "diagnostics.csv"
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    folder = str(tmp_path / "run")
    whole = start(output_dir=str(tmp_path / "whole"), **settings)
    whole.add_callback(DiagnosticsCallback(whole, csv_file=tmp_path / "whole.csv"))
    whole.train()

    class Killed(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                raise KeyboardInterrupt

    first = start(output_dir=folder, **settings)
    first.add_callback(DiagnosticsCallback(first, csv_file=path))
    first.add_callback(Killed())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    with path.open("a", newline="") as file:
        file.write(
            "\0" * 9 + "," * (len(METRICS) + len(FROM_TRAINER) - 1) + "\r\n"
        )  # after a power cut
        file.write("4,0.9,0.1")  # cut in the middle of a row
    resumed = start(output_dir=folder, resume_from_checkpoint=f"{folder}/checkpoint-2", **settings)
    resumed.add_callback(DiagnosticsCallback(resumed, csv_file=path))
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert path.read_text() == (tmp_path / "whole.csv").read_text()


def test_no_other_run_adds_to_a_file(start: Train, tmp_path: Path) -> None:
    trainer = start()
    trainer.add_callback(DiagnosticsCallback(trainer, csv_file=tmp_path / "d.csv"))
    trainer.train()
    kept = (tmp_path / "d.csv").read_text()
    with pytest.raises(FileExistsError, match=r"d\.csv holds 4 rows of an earlier run"):
        trainer.train()
    assert (tmp_path / "d.csv").read_text() == kept


@pytest.mark.parametrize("settings", [{"logging_strategy": "no"}, {"logging_steps": 500}])
def test_it_says_if_no_log_will_come(start: Train, settings: dict[str, Any]) -> None:
    trainer = start(**settings)
    trainer.add_callback(DiagnosticsCallback(trainer))
    with pytest.warns(UserWarning, match="4 steps ends before its first log"):
        trainer.train()


def test_a_file_that_cannot_be_written(start: Train, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    trainer = start()
    for wrong in (tmp_path, tmp_path / "file" / "d.csv"):
        with pytest.raises(OSError, match=r"csv_file '.*' cannot be written: "):
            DiagnosticsCallback(trainer, csv_file=wrong)


def test_a_disk_that_fills_up_does_not_stop_a_training(start: Train, tmp_path: Path) -> None:
    trainer = start()
    callback = DiagnosticsCallback(trainer, csv_file=tmp_path / "d.csv")

    class Full(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                callback.csv_file = Path("/dev/full")

    trainer.add_callback(Full())
    trainer.add_callback(callback)
    with pytest.warns(UserWarning, match="/dev/full lacks a row: .*No space left"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert len((tmp_path / "d.csv").read_text().splitlines()) == 3


def test_an_encoder_that_diverged_shows(start: Train, tmp_path: Path) -> None:
    trainer = start()
    callback = DiagnosticsCallback(trainer, csv_file=tmp_path / "d.csv")
    nan = torch.full((3, 8), math.nan, requires_grad=True)
    trainer.loss.compute_loss_from_embeddings([nan, nan])
    callback.on_log(trainer.args, trainer.state, trainer.control, {"loss": math.nan})
    assert "nan,nan,nan,nan,nan" in (tmp_path / "d.csv").read_text()
    one = torch.ones(1, 8, requires_grad=True)
    trainer.loss.compute_loss_from_embeddings([one, one])
    callback.on_log(trainer.args, trainer.state, trainer.control, {"loss": 0.0})
    assert (tmp_path / "d.csv").read_text().splitlines()[-1].count("nan") == 0


def test_a_file_of_something_else_stays(start: Train, tmp_path: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("my,notes\n1,2\n")
    with pytest.raises(ValueError, match=r"notes\.csv has the columns my, notes, not the"):
        DiagnosticsCallback(start(), csv_file=path)
    assert path.read_text() == "my,notes\n1,2\n"


def test_losses_inside_of_losses_and_dicts_of_losses(start: Train) -> None:
    trainer = start(lambda model: MatryoshkaLoss(model, GSInfoNCELoss(model, seed=0), [32, 16]))
    trainer.add_callback(DiagnosticsCallback(trainer))
    trainer.train()
    assert set(logged(trainer, "alignment")) == {1, 2, 3, 4}
    trainer.loss = {"qa": GSInfoNCELoss(trainer.model), "news": GSInfoNCELoss(trainer.model)}
    names = DiagnosticsCallback(trainer).columns
    assert "qa_alignment" in names and "news_noise_share" in names


def test_a_loss_without_statistics_is_refused(start: Train) -> None:
    with pytest.raises(ValueError, match="got MultipleNegativesRankingLoss"):
        DiagnosticsCallback(start(lambda model: MultipleNegativesRankingLoss(model)))


@pytest.mark.parametrize("clip", [1.0, float("inf")])
def test_the_gradient_norm_is_that_before_clipping(
    start: Train, clip: float, tmp_path: Path
) -> None:
    trainer = start(max_grad_norm=clip)
    trainer.add_callback(DiagnosticsCallback(trainer, csv_file=tmp_path / "d.csv"))
    trainer.train()
    with (tmp_path / "d.csv").open(newline="") as file:
        norms = [float(row["grad_norm"]) for row in csv.DictReader(file)]
    assert len(norms) == 4 and all(1.5 < norm < math.inf for norm in norms)
