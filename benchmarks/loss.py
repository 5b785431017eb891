"""Speed of the loss alone, forward and backward, beside what else computes it.

python benchmarks/loss.py [--quick] [--json FILE] [--threads N] [--batch 64 256 512]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from timing import Report, Target, interleaved, markdown_table, parser, run_benchmark, target_line
from torch import Tensor, nn

from st_gsinfonce import GSInfoNCELoss
from st_gsinfonce.objective import gs_infonce

LISTING = "listing 1 of the paper"
MNRL = "MultipleNegativesRankingLoss"
SAMPLED = "ours, noise sampled"
GIVEN = "ours, noise given"
EXPECTED = "ours, noise expected"
NO_NOISE = "ours, no noise"

DIM = 768
NOISE_RATIO = 3
RATIOS = ((LISTING, SAMPLED), (SAMPLED, MNRL), (EXPECTED, NO_NOISE), (NO_NOISE, MNRL))


def listing_1(anchors: Tensor, positives: Tensor, num_noise: int) -> Tensor:
    """The paper's listing, which broadcasts every pair to a (N, C, D) tensor; noise included."""
    noise = torch.randn(num_noise, anchors.shape[1])
    cosines = F.cosine_similarity(anchors.unsqueeze(1), positives.unsqueeze(0), dim=-1)
    noise_cosines = F.cosine_similarity(anchors.unsqueeze(1), noise.unsqueeze(0), dim=-1)
    logits = torch.cat([cosines, noise_cosines], dim=1) / 0.05  # (N, N + M)
    return F.cross_entropy(logits, torch.arange(len(anchors)))


def listing_fits(batch: int, num_noise: int) -> bool:
    """Say whether the listing's tensors, four at its peak, fit into the memory that is free."""
    needed = 4.5 * batch * (batch + num_noise) * DIM * 4
    available: int = psutil.virtual_memory().available
    return needed < available


def contestants(batch: int) -> dict[str, Callable[[], None]]:
    """Return what is compared: each computes a loss of the same vectors, and its gradients."""
    num_noise = NOISE_RATIO * batch
    anchors = torch.randn(batch, DIM)
    positives = anchors + torch.randn(batch, DIM)
    given = torch.randn(num_noise, DIM)
    anchors.requires_grad_()
    positives.requires_grad_()
    model: Any = nn.Identity()  # the losses are given embeddings and never use their model
    mnrl = MultipleNegativesRankingLoss(model)
    sampled = GSInfoNCELoss(model, noise_ratio=NOISE_RATIO, seed=0)
    expected = GSInfoNCELoss(model, noise_ratio=NOISE_RATIO, noise="expected")
    no_noise = GSInfoNCELoss(model, noise_size=0)

    def with_backward(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            anchors.grad = positives.grad = None
            torch.autograd.backward(loss())

        return run

    views = [anchors, positives]
    losses: dict[str, Callable[[], Tensor]] = {
        LISTING: lambda: listing_1(anchors, positives, num_noise),
        MNRL: lambda: mnrl.compute_loss_from_embeddings(views, anchors),
        SAMPLED: lambda: sampled.compute_loss_from_embeddings(views),
        GIVEN: lambda: gs_infonce(anchors, positives, given),
        EXPECTED: lambda: expected.compute_loss_from_embeddings(views),
        NO_NOISE: lambda: no_noise.compute_loss_from_embeddings(views),
    }
    if not listing_fits(batch, num_noise):
        print(f"N = {batch}: too little free memory for the listing, left out", file=sys.stderr)
        del losses[LISTING]
    return {name: with_backward(loss) for name, loss in losses.items()}


def measure(options: argparse.Namespace) -> tuple[Report, list[Target]]:
    results, targets = [], []
    for batch in (8, 16) if options.quick else options.batch:
        rounds, turn_seconds = (3, 0.0) if options.quick else (21, 0.05)
        times = interleaved(contestants(batch), rounds, turn_seconds)
        ratios = {
            pair: times.ratio(*pair)
            for pair in RATIOS
            if LISTING in times.seconds or LISTING not in pair
        }
        results.append(
            {
                "batch": batch,
                "noise": NOISE_RATIO * batch,
                "dim": DIM,
                "milliseconds": {k: asdict(v) for k, v in times.milliseconds().items()},
                "ratios": {f"{a} / {b}": asdict(ratio) for (a, b), ratio in ratios.items()},
            }
        )
        if batch == 64 and LISTING in times.seconds:
            what = f"N = 64, {LISTING} / {SAMPLED}"
            targets.append(Target(what, ratios[LISTING, SAMPLED], 50, at_least=True))
        bound = 1.25 if batch < 256 else 1.1
        targets.append(
            Target(f"N = {batch}, {EXPECTED} / {NO_NOISE}", ratios[EXPECTED, NO_NOISE], bound)
        )
    return {"results": results}, targets


def markdown(report: Report) -> str:
    results = report["results"]
    columns = [f"N = {result['batch']}, M = {result['noise']}" for result in results]

    def table(kind: str) -> str:
        names = dict.fromkeys(name for result in results for name in result[kind])
        return markdown_table(
            columns, {name: [result[kind].get(name) for result in results] for name in names}
        )

    return "\n\n".join(
        [
            table("milliseconds"),
            table("ratios"),
            "\n".join(map(target_line, report["targets"])),
        ]
    )


if __name__ == "__main__":
    options = parser(__doc__ or "")
    options.add_argument("--batch", type=int, nargs="+", default=[64, 256, 512], metavar="N")
    sys.exit(run_benchmark(options.parse_args(), measure, markdown))
