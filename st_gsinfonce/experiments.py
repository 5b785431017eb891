"""Grids of paired training runs: each cell run once, kept as one JSON, found again by the next run.

A grid may be killed at any time and started again, or be worked on by several processes at once: a
result is written whole or not at all, and a cell is held by a lock that ends with its process.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sentence_transformers import SentenceTransformerTrainingArguments
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import (
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from st_gsinfonce.cells import Cell, CellResult, Setting
from st_gsinfonce.encoder import build_encoder, strip_head
from st_gsinfonce.materials import GridOptions, Materials, load_materials, parse_devices
from st_gsinfonce.provenance import describe_run
from st_gsinfonce.training import build_trainer
from st_gsinfonce.weights import weights_digest
from st_gsinfonce.whole_files import write_atomically

LOGGING_STEPS = 25
_POLL_SECONDS = 1.0
_GOES_ON = "finished runs are kept in {}: the same command goes on from them"
_BAR = "{percentage:3.0f}%|{bar}| {n:.1f}/{total} runs [{elapsed}<{remaining}{postfix}]"

OnStep = Callable[[int, int], None]
"""Called with the steps done and the steps in all."""


def training_arguments(
    setting: Setting, seed: int, output_dir: str
) -> SentenceTransformerTrainingArguments:
    """Return the Trainer's arguments for a setting: AdamW, linear decay, gradients clipped at norm 1."""
    best = setting.select == "best"
    return SentenceTransformerTrainingArguments(
        output_dir=output_dir,
        seed=seed,
        per_device_train_batch_size=setting.batch_size,
        learning_rate=setting.learning_rate,
        num_train_epochs=setting.epochs,
        max_steps=setting.max_steps,
        bf16=setting.precision == "bf16",
        fp16=setting.precision == "fp16",
        use_cpu=setting.device == "cpu",
        eval_strategy="steps" if _has_dev(setting) else "no",
        eval_steps=setting.eval_steps,
        save_strategy="steps" if best else "no",
        save_steps=setting.eval_steps,
        save_total_limit=1,
        load_best_model_at_end=best,
        metric_for_best_model="eval_sts-dev_spearman_cosine" if best else None,
        greater_is_better=True if best else None,
        logging_steps=LOGGING_STEPS,
        disable_tqdm=True,
        report_to="none",
    )


def _has_dev(setting: Setting) -> bool:
    return any(source.name == "STS" for source in setting.evaluation)


def run_cell(
    cell: Cell,
    materials: Materials,
    on_step: OnStep | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> CellResult:
    """Train and score one cell.

    Args:
        cell: What to run.
        materials: What it runs on.
        on_step: For progress.
        folder: Where the checkpoints are while it trains; None is the system's temporary folder.

    Raises:
        ValueError: If the materials are not those of the cell.
    """
    setting, arm = cell.setting, cell.arm
    for name in ("encoder", "corpus", "evaluation"):
        if getattr(setting, name) != getattr(materials, name):
            raise ValueError(
                f"the cell's {name} is {getattr(setting, name)}, but {getattr(materials, name)} is "
                "loaded: start the grid again with the data that it began with, or a new output folder"
            )
    set_seed(cell.seed)
    model = build_encoder(
        materials.encoder_path,
        pooling=None if setting.pooling == "model" else setting.pooling,
        max_seq_length=setting.max_seq_length,
        dropout=arm.dropout,
        head=setting.head,
        seed=cell.seed,
        device=setting.device,
    )
    # No card is made of this encoder: no examples for it, and no questions to the hub.
    model.model_card_data.widget = [{"source_sentence": ""}]
    model.model_card_data.local_files_only = True
    loss = arm.build_loss(model, setting.batch_size, cell.seed)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=_scratch(cell), dir=folder) as scratch:
        trainer = build_trainer(
            model,
            materials.sentences,
            training_arguments(setting, cell.seed, scratch),
            loss=loss,
            evaluator=materials.dev,
            callbacks=[_StepCallback(on_step)] if on_step else [],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    trained = time.perf_counter()
    strip_head(model)
    scores = materials.score(model)
    history = trainer.state.log_history
    statistics = {} if loss.statistics is None else asdict(loss.statistics)
    dim = model.get_embedding_dimension() or 0
    best = trainer.state.best_model_checkpoint if setting.select == "best" else None
    return CellResult(
        cell=cell,
        scores=scores,
        dev={
            int(entry["step"]): 100 * entry["eval_sts-dev_spearman_cosine"]
            for entry in history
            if "eval_sts-dev_spearman_cosine" in entry
        },
        losses={int(entry["step"]): entry["loss"] for entry in history if "loss" in entry},
        # A last batch of one sentence has no other candidates to tell of.
        statistics={name: value for name, value in statistics.items() if not math.isnan(value)},
        log_mass=None if arm.noise == "none" else arm.mass(dim, setting.batch_size),
        steps=trainer.state.global_step,
        best_step=int(best.rsplit("-", 1)[-1]) if best else None,
        seconds={
            "training": round(trained - started, 1),
            "evaluation": round(time.perf_counter() - trained, 1),
        },
        weights_sha256=weights_digest(model),
        run=describe_run(),
    )


def _scratch(cell: Cell) -> str:
    """How the name of the cell's temporary folder begins."""
    return f".{cell.file_name}-"


class _StepCallback(TrainerCallback):
    def __init__(self, on_step: OnStep) -> None:
        self.on_step = on_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.on_step(state.global_step, state.max_steps)


def read_result(cell: Cell, folder: str | os.PathLike[str]) -> CellResult | None:
    """Return a cell's result, or None if the folder has none that is whole.

    Warns:
        UserWarning: If there is a file that cannot be read as the cell's result.
    """
    path = Path(folder) / cell.file_name
    try:
        result = CellResult.from_json(path.read_text(encoding="utf-8"))
        if result.cell.key != cell.key:
            raise ValueError(f"it is the result of another cell, {result.cell.arm}")
        return result
    except FileNotFoundError:
        return None
    except ValueError as error:
        warnings.warn(f"{path} is damaged, the cell is run again: {error}", stacklevel=2)
        return None


def run_grid(
    cells: Sequence[Cell],
    options: GridOptions,
    materials: Materials,
    folder: str | os.PathLike[str],
) -> dict[Cell, CellResult]:
    """Run the cells that have no result yet, and return the results of all.

    Args:
        cells: What to run, in this order; a cell named twice is run once.
        options: What the materials were loaded from; workers load them again.
        materials: What the cells run on.
        folder: Where results are kept, made if it is not there.

    Raises:
        RuntimeError: If a worker failed and the others did not do its runs.
        OSError: If the folder cannot be written.
    """
    folder, cells = Path(folder), list(dict.fromkeys(cells))
    folder.mkdir(parents=True, exist_ok=True)
    pending = [cell for cell in cells if read_result(cell, folder) is None]
    devices = parse_devices(options.devices)[: len(pending)]
    try:
        with progress(len(cells), done=len(cells) - len(pending)) as bar:
            if devices:
                _run_workers(pending, options, folder, devices, bar)
            else:
                _work(pending, materials, folder, bar)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(_GOES_ON.format(folder))
        raise
    results = {cell: read_result(cell, folder) for cell in cells}
    return {cell: result for cell, result in results.items() if result is not None}


def progress(cells: int, done: int) -> Any:
    """Return the bar of a grid: its runs, whole and in parts, and the time left."""
    return tqdm(
        total=cells,
        initial=done,
        bar_format=_BAR,
        smoothing=0,  # by the mean of all runs: several may end at once
        mininterval=_POLL_SECONDS,
    )


def _work(
    pending: Sequence[Cell],
    materials: Materials,
    folder: Path,
    bar: Any,
    command: str | None = None,
) -> None:
    """Run what nobody else runs or has run, then wait for what others do, or take it over."""
    left = list(pending)
    while left:
        others = []
        for cell in left:
            before = bar.n
            with _claim(cell, folder) as claimed:
                if not claimed:
                    others.append(cell)
                elif read_result(cell, folder) is None:
                    for killed in folder.glob(f"{_scratch(cell)}*"):
                        shutil.rmtree(killed)  # its checkpoints, which are whole models
                    result = run_cell(cell, materials, _show_steps(cell, bar), folder)
                    if command is not None:
                        result = replace(result, run={**result.run, "command": command})
                    write_atomically(folder / cell.file_name, result.to_json())
            if cell not in others:
                bar.update(before + 1 - bar.n)
        if len(others) == len(left):
            time.sleep(_POLL_SECONDS)
        left = others


@contextmanager
def _claim(cell: Cell, folder: Path) -> Iterator[bool]:
    """Say whether this process, and no other that lives, has the cell."""
    path = folder / f".{cell.file_name}.lock"
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        # Removed while held, and only beside a result: who gets hold of the removed file runs nothing.
        if (folder / cell.file_name).exists():
            path.unlink(missing_ok=True)
        lock.release()


def _show_steps(cell: Cell, bar: Any) -> OnStep:
    before = bar.n

    def show(step: int, steps: int) -> None:
        doing = f"step {step}/{steps}" if step < steps else "scoring"
        bar.set_postfix_str(f"{cell.arm}, seed {cell.seed}: {doing}", refresh=False)
        bar.update(before + step / steps - bar.n)

    return show


def _run_workers(
    pending: Sequence[Cell], options: GridOptions, folder: Path, devices: list[str], bar: Any
) -> None:
    plan = {
        # A script's own options, in a subclass, say which cells there are: workers are told these.
        "options": {f.name: getattr(options, f.name) for f in fields(GridOptions)}
        | {"devices": "auto"},
        "cells": [asdict(cell) for cell in pending],
        "folder": os.fspath(folder),
        "command": describe_run()["command"],
    }
    left = set(pending)
    with ExitStack() as running:  # left early, it ends the workers: see _end_with_the_grid
        workers = [
            running.enter_context(_start_worker(device, len(devices), json.dumps(plan)))
            for device in devices
        ]
        while any(worker.poll() is None for worker in workers):
            time.sleep(_POLL_SECONDS)
            done = {cell for cell in left if (folder / cell.file_name).exists()}
            bar.update(len(done))
            left -= done
    failed = [
        f"the worker on {device} failed with status {worker.returncode}"
        for device, worker in zip(devices, workers, strict=True)
        if worker.returncode != 0
    ]
    if not failed:
        return
    if all((folder / cell.file_name).exists() for cell in pending):
        warnings.warn(f"{failed[0]}; the others did its runs", stacklevel=3)
        return
    raise RuntimeError(f"{failed[0]}, see above; {_GOES_ON.format(folder)}")


def _start_worker(device: str, workers: int, plan: str) -> subprocess.Popen[str]:
    kind, _, index = device.partition(":")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if kind == "cuda" and visible:
        index = visible.split(",")[int(index)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": index}
    if kind == "cpu":
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    worker = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, text=True, env=environment
    )
    assert worker.stdin is not None
    worker.stdin.write(plan + "\n")
    worker.stdin.flush()  # and stays open: see _end_with_the_grid
    return worker


def _worker() -> None:
    """Work on the plan that comes by standard input."""
    plan = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_grid, daemon=True).start()
    logging.disable(logging.INFO)
    cells = [Cell.from_dict(values) for values in plan["cells"]]
    materials = load_materials(GridOptions(**plan["options"]))
    with tqdm(disable=True) as bar:
        _work(cells, materials, Path(plan["folder"]), bar, plan["command"])


def _end_with_the_grid() -> None:
    """End this process when the one that started it ends, killed or not: its side of the pipe closes."""
    # Not by sys.stdin itself, whose lock a thread may not hold at the interpreter's exit.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    try:
        _worker()
    except KeyboardInterrupt:  # of the grid, too, which says so
        sys.exit(130)
