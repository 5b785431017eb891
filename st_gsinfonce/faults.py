"""A Trainer that stops at a loss that is no number, and says what to do when a training stops."""

from __future__ import annotations

import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainer
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_gsinfonce.cached import CachedGSInfoNCELoss
from st_gsinfonce.checkpoints import last_checkpoint

LOOK_EVERY = 100
"""Steps after which the losses are looked at even if nothing is logged, evaluated or saved."""

LITTLE = 100_000_000
"""Bytes free, below which a training that fails may have failed for want of more."""


class NonFiniteError(RuntimeError):
    """The loss or the weights are NaN or infinite; the training has stopped before they were saved."""


class CarefulTrainer(SentenceTransformerTrainer):
    """sentence-transformers' Trainer, for which a training that fails says why and where to go on.

    It adds to the errors of a training, and stops where the original would go on with NaN:

    - The loss is checked by a :class:`FiniteCallback`.
    - CUDA running out of memory advises the loss that needs less.
    - Any error after the first step names the checkpoint to resume from, and a disk that is full.

    Args:
        *args: As for the superclass.
        **kwargs: As for the superclass.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.finite = FiniteCallback()
        self.add_callback(self.finite)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the superclass does.

        Raises:
            NonFiniteError: If the loss or the weights are not finite.
        """
        try:
            return super().train(*args, **kwargs)
        except NonFiniteError:
            raise
        except Exception as error:
            if step := self.state.global_step:
                error.add_note(
                    f"The training stopped after step {step} of {self.state.max_steps}; "
                    f"{_where_to_go_on(self.args)}."
                )
            if note := _disk_note(Path(self.args.output_dir or ".")):
                error.add_note(note)
            raise

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take a step as the superclass does, and look at its loss."""
        try:
            loss: Tensor = super().training_step(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            error.add_note(_memory_advice(self.loss, self.args))
            raise
        assert self.optimizer is not None
        # With a learning rate for each module, the first group's stands for all.
        rate = self.optimizer.param_groups[0]["lr"]
        self.finite.see(loss, self.state.global_step + 1, rate)
        return loss


class FiniteCallback(TrainerCallback):
    """Stop a training whose loss or weights are not finite, before such weights are saved.

    The losses are kept on their device, so that no step waits for a GPU; they are looked at when the
    Trainer waits anyway, before it logs, evaluates, saves or ends, and every `LOOK_EVERY` steps. On a CPU
    that is every step. Before the Trainer evaluates, saves or ends, the weights are looked at too, since a
    finite loss may have a gradient that is not.

    It is the loss that counts and not its gradient: in float16 the gradient scaler skips steps whose scaled
    gradient overflows, which is as it should be. What the Trainer logs cannot be used for this: with
    ``logging_nan_inf_filter``, its default, it leaves out losses that are NaN.
    """

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        self.step: Tensor | None = None
        self.rates: dict[int, float] = {}

    def see(self, loss: Tensor, step: int, rate: float) -> None:
        """Keep the loss of a step, unless an earlier one was not finite."""
        loss = loss.detach()
        if self.loss is None or self.step is None:
            self.loss, self.step = loss.clone(), torch.full_like(loss, step, dtype=torch.long)
        else:
            good = self.loss.isfinite()
            self.loss = torch.where(good, loss, self.loss)
            self.step = torch.where(good, step, self.step)
        self.rates[step] = rate

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget an earlier training."""
        self.loss = self.step = None
        self.rates.clear()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Look, if it is time to.

        Raises:
            NonFiniteError: If the loss or the weights are not finite.
        """
        weights_matter = (
            control.should_evaluate or control.should_save or control.should_training_stop
        )
        due = weights_matter or control.should_log or state.global_step % LOOK_EVERY == 0
        if self.loss is None or not (due or self.loss.device.type == "cpu"):
            return
        rate = next(reversed(self.rates.values()))
        self._check_losses(args)
        if model is not None and weights_matter:
            _check_weights(model, args, state.global_step, rate)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look, where it is the end of an epoch that evaluates or saves."""
        self.on_step_end(args, state, control, **kwargs)

    def _check_losses(self, args: TrainingArguments) -> None:
        assert self.loss is not None and self.step is not None
        loss = self.loss.item()
        if not math.isfinite(loss):
            step = int(self.step.item())
            raise NonFiniteError(
                f"the loss of step {step} is {loss}, at the learning rate {self.rates[step]:g}: the "
                f"training has stopped, and {_where_to_go_on(args)}. {_ADVICE}"
            )
        self.rates = {step: rate for step, rate in self.rates.items() if step == max(self.rates)}


_ADVICE = (
    "Try a lower learning rate, a warmup, or bf16 in place of fp16; resuming with the same settings meets "
    "the same step again"
)


def _check_weights(model: nn.Module, args: TrainingArguments, step: int, rate: float) -> None:
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise NonFiniteError(
                f"the weights {name} are not finite after step {step}, at the learning rate {rate:g}, "
                "though its loss was finite: the training has stopped before they were saved, and "
                f"{_where_to_go_on(args)}. {_ADVICE}"
            )


def _where_to_go_on(args: TrainingArguments) -> str:
    folder = args.output_dir or "."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of checkpoints that are not whole
        try:
            return f"the last whole checkpoint is {last_checkpoint(folder)}"
        except FileNotFoundError:
            return f"{folder} holds no whole checkpoint to go on from"


def _disk_note(folder: Path) -> str | None:
    """Torch does not say that it was the disk."""
    if not folder.is_dir() or (free := shutil.disk_usage(folder).free) > LITTLE:
        return None
    return f"The disk of {folder} has {free:,} bytes free: make room there, or choose another output_dir."


def _memory_advice(loss: nn.Module | dict[str, nn.Module], args: TrainingArguments) -> str:
    if isinstance(loss, CachedGSInfoNCELoss):
        return (
            f"Embedding {loss.mini_batch_size} texts at a time was too much: give CachedGSInfoNCELoss a "
            "smaller mini_batch_size (in examples/train_unsup.py --mini-batch-size); the loss stays the same."
        )
    return (
        f"A batch of {args.per_device_train_batch_size} was too much to embed at once: "
        "CachedGSInfoNCELoss(model, mini_batch_size=32) embeds 32 texts at a time and gives the loss of the "
        "whole batch (in examples/train_unsup.py --mini-batch-size 32)."
    )
