"""Speed of a whole training step, beside MultipleNegativesRankingLoss on two equal columns.

python benchmarks/step.py [--quick] [--json FILE] [--threads N]
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from timing import Report, Target, interleaved, markdown_table, parser, run_benchmark, target_line
from torch import Tensor, nn

from st_gsinfonce import GSInfoNCELoss
from st_gsinfonce.encoder import build_encoder, embedded_encoder

OURS = "ours, one forward of 2N rows, noise sampled"
MNRL = "MultipleNegativesRankingLoss, two forwards of N rows"
OURS_BF16 = "ours, under bfloat16 autocast"
RATIOS = ((OURS, MNRL), (OURS, OURS_BF16))

TOKENS = 32


def make_batch(model: SentenceTransformer, rows: int) -> dict[str, Any]:
    """Tokenize texts that are longer than a row, so that each fills it."""
    texts = [
        f"Text {row} " + "tells of a river that runs through the old town. " * 5
        for row in range(rows)
    ]
    features = model.preprocess(texts)
    assert features["input_ids"].shape == (rows, TOKENS)
    return features


def make_step(
    loss: nn.Module,
    columns: Callable[[], list[dict[str, Any]]],
    dtype: torch.dtype | None = None,
) -> Callable[[], Tensor]:
    """Return one training step as the Trainer takes it."""
    parameters = [p for p in loss.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-5)
    loss.train()

    def step() -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            value: Tensor = loss(columns(), None)
        torch.autograd.backward(value)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step


def measure(options: argparse.Namespace) -> tuple[Report, list[Target]]:
    rows, rounds = (4, 2) if options.quick else (64, 9)
    encoder = build_encoder(
        embedded_encoder(), max_seq_length=TOKENS, seed=options.seed, device="cpu"
    )
    features = make_batch(encoder, rows)

    def ours() -> nn.Module:
        return GSInfoNCELoss(copy.deepcopy(encoder), seed=options.seed)

    def one_column() -> list[dict[str, Any]]:
        return [dict(features)]

    steps = {
        OURS: make_step(ours(), one_column),
        MNRL: make_step(
            MultipleNegativesRankingLoss(copy.deepcopy(encoder)),
            lambda: [dict(features), dict(features)],
        ),
        OURS_BF16: make_step(ours(), one_column, torch.bfloat16),
    }
    times = interleaved(steps, rounds)
    ratios = {pair: times.ratio(*pair) for pair in RATIOS}
    results = {
        "batch": rows,
        "noise": 3 * rows,
        "tokens": TOKENS,
        "parameters": sum(p.numel() for p in encoder.parameters()),
        "milliseconds": {k: asdict(v) for k, v in times.milliseconds().items()},
        "ratios": {f"{a} / {b}": asdict(ratio) for (a, b), ratio in ratios.items()},
    }
    targets = [Target(f"{OURS} / {MNRL}", ratios[OURS, MNRL], 1.0)]
    return results, targets


def markdown(report: Report) -> str:
    column = f"batch {report['batch']}, {report['tokens']} tokens"
    tables = [
        markdown_table([column], {name: [entry] for name, entry in report[kind].items()})
        for kind in ("milliseconds", "ratios")
    ]
    return "\n\n".join([*tables, "\n".join(map(target_line, report["targets"]))])


if __name__ == "__main__":
    sys.exit(run_benchmark(parser(__doc__ or "").parse_args(), measure, markdown))
