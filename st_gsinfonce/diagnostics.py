"""What a training looks like from inside: a callback that logs what the loss saw."""

from __future__ import annotations

import csv
import io
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformerTrainer
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_gsinfonce.losses import GSInfoNCELoss
from st_gsinfonce.objective import GSInfoNCEStatistics
from st_gsinfonce.whole_files import write_atomically

METRICS = tuple(field.name for field in fields(GSInfoNCEStatistics))
FROM_TRAINER = ("step", "epoch", "loss", "grad_norm", "learning_rate")


class DiagnosticsCallback(TrainerCallback):
    """Log positive and negative cosine, alignment, uniformity and the noise's share, beside the loss.

    The numbers are those of the last batch, over at most 256 of its anchors
    (:class:`~st_gsinfonce.objective.GSInfoNCEStatistics`); under several processes, of the main one's.
    They go to whatever the Trainer reports to (``report_to``), to ``trainer.state.log_history``, and to
    a CSV file if one is named, there together with the loss, the learning rate and the gradient norm
    (before clipping) that the Trainer itself logs in the same step. That is every ``logging_steps``, 500
    by default; in between nothing is computed.

    A collapsing encoder shows as negative cosine and uniformity that rise towards 1 and 0, one that
    diverged as NaN; noise that does nothing as a share near 0. With a loss that calls ours several times a
    step the last call counts: in ``MatryoshkaLoss`` that of the smallest dimension.

    Args:
        trainer: The Trainer to add it to, with a ``GSInfoNCELoss`` as its loss or inside of it. In a
            dict of losses the names become prefixes (``"qa_positive_cosine"``), and each shows its own
            last batch, which may be that of an earlier step.
        csv_file: A file to add a row a log to. A resumed run goes on in it, without the rows of steps
            that it does again; no other run may have rows in it.

    Raises:
        ValueError: If the Trainer has no GS-InfoNCE loss, or the file holds something else.
        OSError: If the file cannot be written.
        FileExistsError: When a training begins at its first step, if the file holds rows.

    Warns:
        UserWarning: When a training begins that ends before its first log; when the file cannot be
            written any more, which does not stop the training.

    Example:
        ::

            args = SentenceTransformerTrainingArguments("runs/mine", logging_steps=25)
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
        if self.csv_file is not None and trainer.is_world_process_zero():
            _check_file(self.csv_file, self.columns)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the rows of the steps that are done, and say if no log will come."""
        never = args.logging_strategy == "no" or (
            args.logging_strategy == "steps"
            and not args.logging_first_step
            and state.logging_steps > state.max_steps
        )
        if never:
            warnings.warn(
                f"the training of {state.max_steps} steps ends before its first log: there will be no "
                f"diagnostics; set logging_steps, which is {args.logging_steps:g}, or logging_strategy",
                stacklevel=2,
            )
        if self.csv_file is None or not state.is_world_process_zero:
            return
        rows = _read_rows(self.csv_file, self.columns)
        if rows and state.global_step == 0:
            raise FileExistsError(
                f"csv_file {self.csv_file} holds {len(rows)} rows of an earlier run: resume that "
                "run, or name another file"
            )
        done = [row for row in rows if int(row["step"]) <= state.global_step]
        write_atomically(self.csv_file, _as_csv(self.columns, done))

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
            # NaN where there are no negatives says nothing; where the encoder gives NaN it is the news.
            if not math.isnan(value) or math.isnan(statistics.positive_cosine)
        }
        if found:
            self.trainer.log(dict(found))
        if self.csv_file is not None and state.is_world_process_zero:
            row = {**logs, "step": state.global_step, **found}
            try:
                with self.csv_file.open("a", newline="", encoding="utf-8") as file:
                    file.write(_as_csv(self.columns, [row], header=False))
            except OSError as error:
                warnings.warn(f"csv_file {self.csv_file} lacks a row: {error}", stacklevel=2)


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


def _check_file(path: Path, columns: list[str]) -> None:
    """Make the file, or look whether the one that is there can be gone on with."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", newline="", encoding="utf-8") as file:
            file.seek(0)
            header = next(csv.reader(file), None)
            if header is None:
                file.write(_as_csv(columns, []))
    except OSError as error:
        raise OSError(
            f"csv_file {os.fspath(path)!r} cannot be written: {error.strerror}"
        ) from error
    except (UnicodeDecodeError, csv.Error):
        header = ["no text"]
    if header not in (None, columns):
        raise ValueError(
            f"csv_file {path} has the columns {', '.join(header)[:200]}, not the diagnostics' "
            f"{', '.join(columns)}, and is not written to: name another file"
        )


def _read_rows(path: Path, columns: list[str]) -> list[dict[str, str]]:
    """Return the rows that are whole: a kill may have cut the last, a power cut left zeros in it."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        lines = file.read().split("\r\n")[1:-1]  # what follows the last line's end is no whole row
    rows = [dict(zip(columns, r, strict=True)) for r in csv.reader(lines) if len(r) == len(columns)]
    return [row for row in rows if row["step"].isdecimal()]


def _as_csv(
    columns: list[str], rows: Iterable[Mapping[str, object]], *, header: bool = True
) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
