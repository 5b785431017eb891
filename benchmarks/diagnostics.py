"""What the diagnostics cost when they are logged at every step, beside a whole training step.

python benchmarks/diagnostics.py [--quick] [--json FILE] [--threads N]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

import torch
from step import TOKENS, make_batch, make_step
from timing import Report, Target, interleaved, markdown_table, parser, run_benchmark, target_line

from st_gsinfonce import GSInfoNCELoss
from st_gsinfonce.encoder import build_encoder, embedded_encoder

STEP = "a training step, bfloat16 autocast, noise sampled"
DIAGNOSTICS = "its diagnostics"


def measure(options: argparse.Namespace) -> tuple[Report, list[Target]]:
    sizes, rounds = ((4,), 2) if options.quick else ((64, 256), 7)
    encoder = build_encoder(
        embedded_encoder(), max_seq_length=TOKENS, seed=options.seed, device="cpu"
    )
    loss = GSInfoNCELoss(encoder, seed=options.seed)
    results, targets = [], []
    for rows in sizes:
        features = make_batch(encoder, rows)
        step = make_step(loss, lambda features=features: [dict(features)], torch.bfloat16)
        step()  # from here on there is a batch to look at
        times = interleaved({STEP: step, DIAGNOSTICS: lambda: loss.statistics}, rounds)
        ratio = times.ratio(DIAGNOSTICS, STEP)
        results.append(
            {
                "batch": rows,
                "milliseconds": {k: asdict(v) for k, v in times.milliseconds().items()},
                "ratio": asdict(ratio),
            }
        )
        targets.append(Target(f"batch {rows}, {DIAGNOSTICS} / {STEP}", ratio, 0.02))
    return {"sizes": results}, targets


def markdown(report: Report) -> str:
    sizes = report["sizes"]
    rows = {name: [size["milliseconds"][name] for size in sizes] for name in (STEP, DIAGNOSTICS)}
    rows["ratio"] = [size["ratio"] for size in sizes]
    table = markdown_table([f"batch {size['batch']}" for size in sizes], rows)
    return "\n\n".join([table, "\n".join(map(target_line, report["targets"]))])


if __name__ == "__main__":
    sys.exit(run_benchmark(parser(__doc__ or "").parse_args(), measure, markdown))
