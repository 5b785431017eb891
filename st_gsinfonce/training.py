"""Compose encoder, collator, loss and evaluator into a SentenceTransformerTrainer that checks its input."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list, extract_model_from_parallel
from datasets import Dataset, IterableDataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.evaluation import BaseEvaluator
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.training_args import ParallelMode

from st_gsinfonce.checkpoints import numbered_checkpoints
from st_gsinfonce.collator import SimCSEDataCollator
from st_gsinfonce.encoder import has_head
from st_gsinfonce.faults import CarefulTrainer
from st_gsinfonce.losses import GSInfoNCELoss
from st_gsinfonce.weights import weights_digest
from st_gsinfonce.whole_files import write_atomically

LossFactory = Callable[[SentenceTransformer], nn.Module]
Precision = Literal["auto", "bf16", "fp16", "fp32"]

DIGEST_FILE = "weights.sha256"


def build_trainer(
    model: SentenceTransformer,
    sentences: Sequence[str] | Dataset | IterableDataset,
    args: SentenceTransformerTrainingArguments,
    *,
    loss: nn.Module | LossFactory | None = None,
    evaluator: BaseEvaluator | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    overwrite: bool = False,
) -> SentenceTransformerTrainer:
    """Return a Trainer that trains the encoder on single sentences by unsupervised SimCSE.

    It is sentence-transformers' own Trainer, with five additions: the noise is keyed by the optimizer
    step, so that a resumed run draws what the uninterrupted one would have; the best checkpoint's
    weights are checked to be the ones that end up in the model; a model trained in half precision
    encodes in full precision afterwards; wrong input is found before the training starts; and a
    training whose loss is NaN stops before it saves such weights (:mod:`~st_gsinfonce.faults`).

    Args:
        model: The encoder, usually of :func:`~st_gsinfonce.encoder.build_encoder`.
        sentences: Strings, or a dataset with one column of them.
        args: The Trainer's arguments. With ``resume_from_checkpoint`` set, the output folder may hold
            the run to go on with; give the same value to ``train``.
        loss: Any loss on (anchor, positive) pairs, or a function of the model that makes one. None is
            ``GSInfoNCELoss(model, seed=args.seed)``.
        evaluator: For evaluation while training, and to choose the best checkpoint.
        callbacks: Further callbacks.
        overwrite: Delete the checkpoints of an earlier run in the output folder.

    Raises:
        ValueError: For sentences that are no text (names the row), fewer of them than one batch, a batch
            of one, all the same, or given by a generator, a dataset with several columns or one taken for
            labels, a model without dropout, ``push_to_hub`` while the model has its train-only head,
            several GPUs in one process, or ``overwrite`` while resuming.
        FileExistsError: If the output folder holds something and neither resuming nor ``overwrite``
            is asked for.
        OSError: If the output folder cannot be written.
    """
    if args.parallel_mode == ParallelMode.NOT_DISTRIBUTED:
        raise ValueError(
            f"one process would train on {args.n_gpu} GPUs (DataParallel): start one process a GPU with "
            f"torchrun --nproc-per-node {args.n_gpu}, or set CUDA_VISIBLE_DEVICES=0"
        )
    if overwrite and args.resume_from_checkpoint:
        raise ValueError(
            "overwrite deletes the checkpoints that resume_from_checkpoint goes on from: give one of them"
        )
    dataset = _as_dataset(sentences)
    if isinstance(dataset, Dataset):
        _check_sentences(dataset, args.train_batch_size * args.world_size)
    if args.push_to_hub and has_head(model):
        raise ValueError(
            "push_to_hub=True would publish checkpoints with the train-only head, which "
            "sentence-transformers alone does not load: train with push_to_hub=False, then push what "
            "strip_head(model) returns"
        )
    if not makes_two_views(model):
        raise ValueError(
            "the model has no dropout, so both views of a sentence would be the same and there is "
            "nothing to learn: build_encoder(..., dropout=0.1), or another model"
        )
    if args.train_batch_size * args.world_size < 2:
        raise ValueError(
            f"per_device_train_batch_size is {args.per_device_train_batch_size}: the negatives are the other "
            "sentences of a batch, so it must be at least 2"
        )
    output = Path(args.output_dir or ".")
    _check_output_once(output, args, overwrite=overwrite)
    trainer = CarefulTrainer(
        model=model,
        args=args,
        train_dataset=dataset,
        loss=GSInfoNCELoss(model, seed=args.seed) if loss is None else loss,
        evaluator=evaluator,
        data_collator=SimCSEDataCollator(model.preprocess, prompts=args.prompts),
        # Ours first: others that evaluate at the end then meet the right weights in full precision.
        callbacks=[FullPrecisionCallback(), BestWeightsCallback(), *callbacks],
    )
    trainer.add_callback(NoiseStepCallback(trainer.loss))
    if overwrite and args.process_index == 0:  # not before it is sure that there is a Trainer
        _delete_checkpoints(output)
    return trainer


class NoiseStepCallback(TrainerCallback):
    """Key the noise of every GS-InfoNCE loss by the optimizer step, so that resuming is exact.

    Args:
        loss: The Trainer's loss, or its dict of losses; losses inside of other losses are found.
    """

    def __init__(self, loss: nn.Module | dict[str, nn.Module]) -> None:
        losses = loss.values() if isinstance(loss, dict) else [loss]
        self.losses = [m for loss in losses for m in loss.modules() if isinstance(m, GSInfoNCELoss)]

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell the losses how many steps are done."""
        for loss in self.losses:
            loss.set_step(state.global_step)


class FullPrecisionCallback(TrainerCallback):
    """Leave the model as it came: after training in bf16 or fp16 it would encode in that for ever.

    The Trainer wraps the model's forward pass in autocast and leaves it so. The encoder in memory then
    gives other vectors than the same encoder loaded from disk.
    """

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the wrapper off."""
        if model is not None:
            extract_model_from_parallel(model, keep_fp32_wrapper=False)


class BestWeightsCallback(TrainerCallback):
    """Check that the model ends with the best checkpoint's weights when the Trainer was to load them.

    sentence-transformers logs and goes on when that loading fails, and the last weights pass for the
    best. A digest of the weights is kept in each checkpoint to tell them apart.
    """

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the digest of the weights into the checkpoint."""
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        if model is not None and args.load_best_model_at_end and state.is_world_process_zero:
            if folder.is_dir():
                write_atomically(folder / DIGEST_FILE, weights_digest(model) + "\n")

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Compare the digests.

        Raises:
            RuntimeError: If the model does not hold the best checkpoint's weights.
        """
        best = state.best_model_checkpoint
        if model is None or not args.load_best_model_at_end or not state.is_world_process_zero:
            return
        if best is None:
            if state.best_metric is not None:
                warnings.warn(
                    f"the model holds the last step's weights: there is no checkpoint of step "
                    f"{state.best_global_step}, the best (score {state.best_metric})",
                    stacklevel=2,
                )
            return
        if not Path(best).is_dir():
            raise RuntimeError(
                f"the best checkpoint, {best} (score {state.best_metric}), is gone, and the model holds "
                "the last step's weights: train anew, or use these as they are"
            )
        digest = Path(best) / DIGEST_FILE
        if digest.is_file():
            if digest.read_text().strip() != weights_digest(model):
                raise RuntimeError(
                    f"the best checkpoint, {best} (score {state.best_metric}), could not be loaded into "
                    "the model, which holds the last step's weights: see the error logged above; the "
                    "checkpoint is still there, and strip_head(checkpoint, output) makes an encoder of it"
                )


def makes_two_views(model: SentenceTransformer) -> bool:
    """Say whether two passes over a text in training mode differ, as SimCSE needs; no RNG is touched."""
    devices = [model.device] if model.device.type == "cuda" else []
    mode = model.training
    model.train()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            features = model.preprocess(["two views of one text"] * 8)
            features = {
                key: value.to(model.device) if isinstance(value, torch.Tensor) else value
                for key, value in features.items()
            }
            views = model(features)["sentence_embedding"]  # (8, D)
    finally:
        model.train(mode)
    return not torch.equal(views[:-1], views[1:])


def precision_arguments(precision: Precision = "auto", *, use_cpu: bool = False) -> dict[str, bool]:
    """Return the Trainer's arguments for a precision: ``bf16``, ``fp16``, and ``use_cpu`` where it is True.

    "auto" is bfloat16 where the hardware computes it fast: on NVIDIA GPUs from Ampere on, and on CPUs
    with AVX512-BF16 or AMX, where torch can tell; float16 on older GPUs; else float32. The master
    weights stay float32 in all of them, and so does the loss. Without an NVIDIA GPU bfloat16 is trained
    on the CPU, also beside a GPU of Apple's.

    Args:
        precision: "auto", "bf16", "fp16" or "fp32".
        use_cpu: Train on the CPU, also where there is a GPU.

    Raises:
        ValueError: For another name, or fp16 on the CPU.
    """
    if precision not in ("auto", "bf16", "fp16", "fp32"):
        raise ValueError(f'precision must be "auto", "bf16", "fp16" or "fp32", got {precision!r}')
    gpu = torch.cuda.is_available() and not use_cpu
    if precision == "fp16" and not gpu:
        raise ValueError('precision "fp16" needs a GPU: use "auto", "bf16" or "fp32"')
    if precision == "auto":
        precision = _fast_precision(gpu, use_cpu)
    chosen = {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    if use_cpu or (precision == "bf16" and not gpu):
        chosen["use_cpu"] = True
    return chosen


def _fast_precision(gpu: bool, use_cpu: bool) -> Precision:
    if gpu:
        return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"
    if torch.backends.mps.is_available() and not use_cpu:
        return "fp32"
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "fp32"


def _as_dataset(sentences: Sequence[str] | Dataset | IterableDataset) -> Dataset | IterableDataset:
    if isinstance(sentences, (Dataset, IterableDataset)):
        return sentences
    if isinstance(sentences, str):
        raise ValueError("sentences must be a list of strings, got one string")
    if not hasattr(sentences, "__len__"):
        raise ValueError(
            f"sentences must be a list or a dataset, got a {type(sentences).__name__}: list(...) makes one"
        )
    for row, sentence in enumerate(sentences, start=1):
        if not isinstance(sentence, str):
            raise ValueError(f"sentence {row} is {sentence!r}, not a string: see load_sentences")
    return Dataset.from_dict({"text": list(sentences)})


def _check_sentences(dataset: Dataset, batch_size: int) -> None:
    columns = dataset.column_names
    if len(columns) != 1:
        raise ValueError(
            f"the dataset has the columns {columns}, but SimCSE trains on one column of texts: keep it "
            'with dataset.select_columns("text")'
        )
    column = columns[0]
    if column in ("label", "labels", "score", "scores"):
        raise ValueError(
            f"the Trainer takes a column named {column!r} for labels: "
            f'dataset.rename_column({column!r}, "text")'
        )
    distinct: set[str] = set()
    for row, sentence in enumerate(_column(dataset, column), start=1):
        if not isinstance(sentence, str) or not sentence.strip():
            raise ValueError(
                f"column {column!r}, row {row} is {sentence!r}, not a text: load_sentences drops such "
                "rows and says which"
            )
        if len(distinct) < 2:
            distinct.add(sentence)
    if len(dataset) < batch_size:
        raise ValueError(
            f"{len(dataset)} sentences are fewer than one batch of {batch_size}: give more sentences or "
            "a smaller per_device_train_batch_size"
        )
    if len(distinct) < 2:
        raise ValueError(
            f"all {len(dataset)} sentences are the same, so there is no negative: give distinct ones"
        )


def _column(dataset: Dataset, column: str) -> Iterator[object]:
    for batch in dataset.iter(batch_size=1000):
        yield from batch[column]


def _check_output_once(
    folder: Path, args: SentenceTransformerTrainingArguments, *, overwrite: bool
) -> None:
    """Look on the main process alone and tell the others, which might see what it has written since."""
    problem: list[OSError | None] = [None]
    if args.process_index == 0:
        try:
            _check_output(folder, args, overwrite=overwrite)
        except OSError as error:
            problem = [error]
    (error_of_main,) = broadcast_object_list(problem)
    if error_of_main is not None:
        raise error_of_main


def _check_output(
    folder: Path, args: SentenceTransformerTrainingArguments, *, overwrite: bool
) -> None:
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    if entries and not overwrite and not args.resume_from_checkpoint:
        raise FileExistsError(
            f"output_dir {folder} holds {entries[0].name}"
            f"{' and more' if len(entries) > 1 else ''}, perhaps of another run: choose another folder, "
            "resume (resume_from_checkpoint), or overwrite"
        )
    try:
        os.fspath(folder).encode()
    except UnicodeEncodeError as error:
        raise OSError(
            f"output_dir {os.fspath(folder)!a} has characters that this locale cannot read: choose another "
            "folder, or a locale of UTF-8 (PYTHONUTF8=1)"
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"output_dir {os.fspath(folder)} cannot be written: {error.strerror}"
        ) from error


def _delete_checkpoints(folder: Path) -> None:
    for entry in numbered_checkpoints(folder).values():
        if entry.is_symlink():
            entry.unlink()
        elif entry.is_dir():
            shutil.rmtree(entry)
