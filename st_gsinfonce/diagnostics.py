"""What a training looks like from inside: a callback that logs what the loss saw."""

from __future__ import annotations

import csv
import math
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformerTrainer
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_gsinfonce.losses import GSInfoNCELoss
from st_gsinfonce.objective import GSInfoNCEStatistics

METRICS = tuple(field.name for field in fields(GSInfoNCEStatistics))
FROM_TRAINER = ("step", "epoch", "loss", "grad_norm", "learning_rate")


class DiagnosticsCallback(TrainerCallback):
    """Log positive and negative cosine, alignment, uniformity and the noise's share, beside the loss.

    The numbers are those of the last batch, over at most 256 of its anchors
    (:class:`~st_gsinfonce.objective.GSInfoNCEStatistics`); under several processes, of the main one's.
    They go to whatever the Trainer reports to (``report_to``), to ``trainer.state.log_history``, and to
    a CSV file if one is named, there together with the loss, the learning rate and the gradient norm
    (before clipping) that the Trainer itself logs in the same step.

    A collapsing encoder shows as negative cosine and uniformity that rise towards 1 and 0; noise that
    does nothing as a share near 0. With a loss that calls ours several times a step, such as
    ``MatryoshkaLoss``, the last call counts. Between two logs nothing is computed.

    Args:
        trainer: The Trainer to add it to, with a ``GSInfoNCELoss`` as its loss or inside of it. In a
            dict of losses the names become prefixes: ``"qa_positive_cosine"``.
        csv_file: A file to add a row a log to; it is never written over, and a resumed run goes on in it.

    Raises:
        ValueError: If the Trainer has no GS-InfoNCE loss, or the file holds something else.

    Example:
        ::

            trainer = build_trainer(model, sentences, args)
            trainer.add_callback(DiagnosticsCallback(trainer, csv_file="runs/mine.csv"))
            trainer.train()
    """

    def __init__(
        self, trainer: SentenceTransformerTrainer, csv_file: str | os.PathLike[str] | None = None
    ) -> None:
        self.trainer = trainer
        self.losses = _losses_of(trainer.loss)
        self.csv_file = None if csv_file is None else Path(csv_file)
        names = [f"{prefix}{metric}" for prefix in self.losses for metric in METRICS]
        self.columns = [*FROM_TRAINER, *names]
        if self.csv_file is not None:
            _check_header(self.csv_file, self.columns)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Log the diagnostics beside the training loss."""
        if logs is None or "loss" not in logs:  # of an evaluation, of the end, or our own
            return
        found = {
            f"{prefix}{metric}": value
            for prefix, loss in self.losses.items()
            if (statistics := loss.statistics) is not None
            for metric, value in asdict(statistics).items()
            if not math.isnan(value)
        }
        self.trainer.log(dict(found))
        if self.csv_file is not None and state.is_world_process_zero:
            self._write_row({**logs, "step": state.global_step, **found})

    def _write_row(self, row: dict[str, float]) -> None:
        assert self.csv_file is not None
        self.csv_file.parent.mkdir(parents=True, exist_ok=True)
        with self.csv_file.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, restval="", extrasaction="ignore")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)


def _losses_of(loss: nn.Module | dict[str, nn.Module]) -> dict[str, GSInfoNCELoss]:
    """Return the GS-InfoNCE losses by the prefix of their names."""
    named = (
        {f"{name}_": each for name, each in loss.items()} if isinstance(loss, dict) else {"": loss}
    )
    found = {
        prefix: module
        for prefix, each in named.items()
        for module in each.modules()
        if isinstance(module, GSInfoNCELoss)
    }
    if not found:
        raise ValueError(
            "the Trainer's loss must be a GSInfoNCELoss or hold one, got "
            f"{', '.join(type(each).__name__ for each in named.values())}: other losses keep no statistics"
        )
    return found


def _check_header(path: Path, columns: list[str]) -> None:
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        header = next(csv.reader(file), None)
    if header is not None and header != columns:
        raise ValueError(
            f"csv_file {path} starts with {','.join(header)[:80]!r}, not with the diagnostics' "
            f"{','.join(columns)[:80]!r}, and is not written to: name another file"
        )
