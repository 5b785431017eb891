"""What each process of the distributed tests does: ``torchrun distributed_worker.py BERT FOLDER``.

The same functions serve the test's own process, which is the reference: one process, the whole batch.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from conftest import make_sentences
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from torch import Tensor, nn

from st_gsinfonce import (
    CachedGSInfoNCELoss,
    GSInfoNCELoss,
    NoiseStepCallback,
    build_encoder,
    build_trainer,
)
from st_gsinfonce import losses as losses_module

BATCH = 12  # of all processes together
STEPS = 5


@dataclass(frozen=True)
class Case:
    """A loss, and what it is given."""

    columns: int = 2
    checkpointing: bool = False
    cached: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "pairs": Case(),
    "hard negatives": Case(columns=4),
    "checkpointing": Case(checkpointing=True),
    "cached": Case(cached=True),
    "cached, hard negatives": Case(columns=3, cached=True),
    "cached, checkpointing": Case(cached=True, checkpointing=True),
    "streamed": Case(columns=3, settings={"streamed": True}),
    "cached, streamed": Case(cached=True, settings={"streamed": True}),
    "expected": Case(settings={"noise": "expected"}),
    "two passes": Case(settings={"merge_views": False}),
}


def encoder(bert: Path) -> SentenceTransformer:
    """Return an encoder without dropout, in float64, with a head, in which texts differ."""
    model = build_encoder(bert, dropout=0.0, seed=0, device="cpu").double().train()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(10)
    return model


def run_case(case: Case, bert: Path, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """Return the loss of the global batch and its gradients, averaged as DDP does."""
    model = encoder(bert)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert model.transformers_model.is_gradient_checkpointing
    settings = {"seed": 0, "scale": 4.0, "gather_across_devices": world > 1, **case.settings}
    if case.cached:
        loss: GSInfoNCELoss = CachedGSInfoNCELoss(model, mini_batch_size=5, **settings)
    else:
        loss = GSInfoNCELoss(model, **settings)
    if world > 1:  # as the Trainer does; the pooler of BERT is not used
        loss.model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    rows = BATCH // world
    columns = [
        dict(model.preprocess(make_sentences(BATCH, seed)[rank * rows : (rank + 1) * rows]))
        for seed in range(case.columns)
    ]
    loss.set_step(7)
    value = loss(columns, None)
    value.backward()
    value = value.detach()
    if world > 1:
        torch.distributed.all_reduce(value)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": value / world, **found}


def train(bert: Path, output: Path, world: int, texts: int, batch: int) -> dict[str, Tensor]:
    """Train on pairs, without dropout, through the Trainer; return the weights."""
    model = encoder(bert)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        num_train_epochs=1,
        per_device_train_batch_size=batch // world,
        learning_rate=1e-3,
        warmup_steps=2,
        seed=0,
    )
    loss = GSInfoNCELoss(model, seed=0, gather_across_devices=world > 1)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(
            {"anchor": make_sentences(texts), "positive": make_sentences(texts, 1)}
        ),
        loss=loss,
        callbacks=[NoiseStepCallback(loss)],
    )
    trainer.train()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return {"steps": torch.tensor(trainer.state.global_step), **weights}


def share_output(bert: Path, output: Path, rank: int) -> None:
    """Look at the output folder late, where rank 0 writes to it as soon as it may."""
    if rank > 0:
        time.sleep(1)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output), use_cpu=True, report_to="none", per_device_train_batch_size=4
    )
    build_trainer(build_encoder(bert, seed=0, device="cpu"), make_sentences(16), arguments)
    if rank == 0:
        (output / "written").write_text("")


def main(bert: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    draws: list[Tensor] = []
    draw = losses_module.draw_noise

    def note(*args: Any, **kwargs: Any) -> Tensor:
        draws.append(draw(*args, **kwargs))
        return draws[-1]

    losses_module.draw_noise = note
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        results[name] = run_case(case, bert, rank, world)
        if name == "pairs":
            results["noise"] = draws[0]
    results["training"] = train(bert, folder / "trainer", world, STEPS * BATCH, BATCH)
    results["incomplete"] = train(bert, folder / "short", world, 65, 64 // world * world)
    share_output(bert, folder / "shared", rank)
    torch.save(results, folder / f"rank-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
