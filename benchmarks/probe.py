"""How long the false-negative probe takes beyond embedding the sentences.

python benchmarks/probe.py [--quick] [--json FILE] [--threads N]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from timing import Report, Spread, Target, markdown_table, parser, run_benchmark, target_line

from st_gsinfonce import probe_false_negatives

DIM, ROUNDS = 384, 3
PROBE = "the probe, seconds"


class Embedded:
    """An encoder that has its embeddings already."""

    device = torch.device("cpu")

    def __init__(self, rows: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.rows = generator.standard_normal((rows, DIM), dtype=np.float32)

    def encode(self, sentences: list[str], **options: Any) -> np.ndarray:
        return self.rows


def measure(options: argparse.Namespace) -> tuple[Report, list[Target]]:
    rows, sizes, repeats = (10_000, (64, 128, 256, 512, 1024, 2048, 4096), 100)
    if options.quick:
        rows, sizes, repeats = 100, (64,), 2
    model: Any = Embedded(rows, options.seed)
    sentences = [f"Sentence {row}." for row in range(rows)]
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        probe_false_negatives(model, sentences, sizes, repeats=repeats)
        seconds.append(time.perf_counter() - start)
    spread = Spread.of(seconds)
    results = {"sentences": rows, "sizes": sizes, "repeats": repeats, "seconds": asdict(spread)}
    return results, [Target(PROBE, spread, 60)]


def markdown(report: Report) -> str:
    column = (
        f"{report['sentences']:,} sentences, batches to {report['sizes'][-1]:,}, "
        f"{report['repeats']} of each size"
    )
    table = markdown_table([column], {PROBE: [report["seconds"]]})
    return "\n\n".join([table, "\n".join(map(target_line, report["targets"]))])


if __name__ == "__main__":
    sys.exit(run_benchmark(parser(__doc__ or "").parse_args(), measure, markdown))
