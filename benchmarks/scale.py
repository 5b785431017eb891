"""How the cost of the loss grows with the batch: time, memory, and the cached loss with an encoder.

python benchmarks/scale.py [--quick] [--json FILE] [--threads N] [--sizes N ...] [--part ...]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from step import TOKENS, make_batch, make_step
from timing import (
    Report,
    Spread,
    Target,
    Times,
    interleaved,
    markdown_table,
    parser,
    run_benchmark,
    target_line,
)
from torch import nn

from st_gsinfonce import CachedGSInfoNCELoss, GSInfoNCELoss
from st_gsinfonce.encoder import build_encoder, embedded_encoder

DIM = 768
NOISE_RATIO = 3
SIZES = (64, 256, 1024, 4096, 16384)
PARTS = ("loss", "exponents", "encoder")
TIMED_ONCE = 65536  # from this size on, in the process that measures memory
MATMUL = "2,048 x 2,048 matrices multiplied"
SIDE = 2048

KINDS = {
    "plain, sampled": {"streamed": False},
    "streamed, sampled": {"streamed": True},
    "plain, expected": {"streamed": False, "noise": "expected"},
    "streamed, expected": {"streamed": True, "noise": "expected"},
}
RATIOS = (
    ("streamed, sampled", "plain, sampled"),
    ("streamed, expected", "plain, expected"),
    ("streamed, sampled", "streamed, expected"),
)

CACHED_MNRL = "CachedMultipleNegativesRankingLoss"
CACHED_EXPECTED = "ours cached, expected"
CACHED_SAMPLED = "ours cached, sampled"
MINI_BATCH = 32
CACHED_BOUNDS = {CACHED_EXPECTED: 1.02, CACHED_SAMPLED: 1.15}  # no slower, to what rounds scatter


def make_loss(kind: str, size: int, dim: int, num_noise: int) -> Callable[[], None]:
    """Return a function that computes a loss of the same vectors and its gradients."""
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randn(size, dim, generator=generator)
    positives = anchors + torch.randn(size, dim, generator=generator)
    views = [anchors.requires_grad_(), positives.requires_grad_()]
    model: Any = nn.Identity()  # the loss is given embeddings and never uses its model
    loss = GSInfoNCELoss(model, noise_size=num_noise, seed=0, **KINDS[kind])  # type: ignore[arg-type]

    def run() -> None:
        anchors.grad = positives.grad = None
        torch.autograd.backward(loss.compute_loss_from_embeddings(views))

    return run


def compared_pairs(kind: str, size: int) -> int:
    """Count the pairs of vectors whose similarity the loss is made of."""
    return size * size * (1 if "expected" in kind else 1 + NOISE_RATIO)


def operations(size: int, num_noise: int, dim: int) -> int:
    """Count the multiplications and additions of the streamed loss's matrix products.

    Forward, each anchor with each vector: the logit, and the vector's part in the anchor's gradient.
    Backward, each anchor with each candidate: the logit again, and the anchor's part in its gradient.
    """
    return 4 * size * dim * (2 * size + num_noise)


def fits(kind: str, size: int) -> bool:
    """Say whether the logits, which the plain loss holds several times, fit into free memory."""
    available: int = psutil.virtual_memory().available
    return "streamed" in kind or 4 * compared_pairs(kind, size) * 3.5 < 0.9 * available


def peak(kind: str, size: int, threads: int) -> dict[str, float]:
    """Run a loss once in a process of its own; return MiB above its inputs, and seconds."""
    command = [sys.executable, __file__, "--peak-of", kind, str(size), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def print_peak(kind: str, size: int) -> None:
    make_loss(kind, 8, DIM, 8)()  # what is loaded at first use is none of the loss's memory
    run = make_loss(kind, size, DIM, NOISE_RATIO * size)
    before = psutil.Process().memory_info().rss
    with contextlib.suppress(
        OSError
    ):  # Linux: forget the peak so far, which was that of the imports
        Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"mebibytes": (peak - before) / 2**20, "seconds": seconds}))


def matmul() -> Callable[[], object]:
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    return lambda: torch.mm(a, b)


def measure_losses(options: argparse.Namespace) -> tuple[list[Report], list[Target]]:
    results, targets = [], []
    for size in [16] if options.quick else options.sizes:
        kinds = [kind for kind in KINDS if fits(kind, size)]
        if size >= TIMED_ONCE:
            kinds = [kind for kind in kinds if "streamed" in kind]
        memory = {kind: peak(kind, size, torch.get_num_threads()) for kind in kinds}
        if size >= TIMED_ONCE:
            times = Times({kind: [once["seconds"]] for kind, once in memory.items()})
        else:
            rounds = 3 if options.quick or size > 4096 else 5 if size > 1024 else 15
            contestants: dict[str, Callable[[], object]] = {
                kind: make_loss(kind, size, DIM, NOISE_RATIO * size) for kind in kinds
            }
            contestants[MATMUL] = matmul()
            times = interleaved(contestants, rounds, 0.0 if options.quick else 0.05)
        ratios = {f"{a} / {b}": times.ratio(a, b) for a, b in RATIOS if a in kinds and b in kinds}
        shares = {} if size >= TIMED_ONCE else matmul_shares(times, size)
        results.append(
            {
                "batch": size,
                "noise": NOISE_RATIO * size,
                "milliseconds": _dicts(times.milliseconds()),
                "nanoseconds_a_pair": {
                    kind: asdict(
                        Spread.of(
                            [1e9 * s / compared_pairs(kind, size) for s in times.seconds[kind]]
                        )
                    )
                    for kind in kinds
                },
                "ratios": _dicts(ratios),
                "share_of_matmul_rate": _dicts(shares),
                "peak_mebibytes": {kind: once["mebibytes"] for kind, once in memory.items()},
            }
        )
        targets += [
            Target(f"N = {size}, {name}", ratio, 1.3)
            for name, ratio in ratios.items()
            if name.endswith(("plain, sampled", "plain, expected")) and size >= 1024
        ]
        if size >= TIMED_ONCE:
            targets += [
                Target(f"N = {size}, {kind}: peak, GiB", Spread.of([once["mebibytes"] / 1024]), 3.0)
                for kind, once in memory.items()
            ]
        if size == 4096:
            targets += [
                Target(f"N = {size}, {kind}: share of the matrix-multiply rate", share, 0.6, True)
                for kind, share in shares.items()
            ]
    return results, targets


def matmul_shares(times: Times, size: int) -> dict[str, Spread]:
    """Return the operations a second of the streamed losses, over those of one large matrix product."""
    shares = {}
    for kind in ("streamed, sampled", "streamed, expected"):
        num_noise = NOISE_RATIO * size if "sampled" in kind else 0
        work = operations(size, num_noise, DIM) / (2 * SIDE**3)
        pairs = zip(times.seconds[MATMUL], times.seconds[kind], strict=False)
        shares[kind] = Spread.of([work * product / loss for product, loss in pairs])
    return shares


def measure_exponents(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Fit the exponent of the time in N, M and D, the other two held."""
    few = options.quick
    sweeps: dict[str, list[tuple[int, int, int]]] = {
        "N (M = 0)": [(n, 0, DIM) for n in ((8, 16) if few else (512, 1024, 2048, 4096))],
        "M (N = 1,024)": [
            (8 if few else 1024, m, DIM) for m in ((8, 16) if few else (4096, 8192, 16384, 32768))
        ],
        "D (N = 1,024, M = 3,072)": [
            (*((8, 24) if few else (1024, 3072)), d)
            for d in ((8, 16) if few else (192, 384, 768, 1536))
        ],
    }
    exponents: dict[str, dict[str, float]] = {}
    for name, points in sweeps.items():
        axis = "NMD".index(name[0])
        exponents[name] = {}
        for kind in ("plain, sampled", "streamed, sampled"):
            times = interleaved(
                {str(n): make_loss(kind, n[0], n[2], n[1]) for n in points}, 2 if few else 5
            )
            logs = [math.log(statistics.median(s)) for s in times.seconds.values()]
            fit = statistics.linear_regression([math.log(point[axis]) for point in points], logs)
            exponents[name][kind] = round(fit.slope, 2)
    return exponents


def measure_encoder(options: argparse.Namespace) -> tuple[list[Report], list[Target]]:
    results, targets = [], []
    encoder = build_encoder(
        embedded_encoder(), max_seq_length=TOKENS, seed=options.seed, device="cpu"
    )
    for batch in (4,) if options.quick else (64, 128, 256, 512):
        features = make_batch(encoder, batch)
        ours = partial(CachedGSInfoNCELoss, mini_batch_size=MINI_BATCH, seed=options.seed)

        def two_columns(features: dict[str, Any] = features) -> list[dict[str, Any]]:
            return [dict(features), dict(features)]

        losses: dict[str, Callable[..., nn.Module]] = {
            CACHED_MNRL: partial(CachedMultipleNegativesRankingLoss, mini_batch_size=MINI_BATCH),
            CACHED_EXPECTED: partial(ours, noise="expected"),
            CACHED_SAMPLED: ours,
        }
        steps = {
            name: make_step(make(copy.deepcopy(encoder)), two_columns)
            for name, make in losses.items()
        }
        times = interleaved(steps, 2 if options.quick else 7 if batch < 256 else 5)
        ratios = {name: times.ratio(name, CACHED_MNRL) for name in CACHED_BOUNDS}
        results.append(
            {
                "batch": batch,
                "milliseconds": _dicts(times.milliseconds()),
                "ratios": {f"{k} / {CACHED_MNRL}": asdict(v) for k, v in ratios.items()},
            }
        )
        targets += [
            Target(f"batch {batch}, {name} / {CACHED_MNRL}", ratios[name], bound)
            for name, bound in CACHED_BOUNDS.items()
        ]
    return results, targets


def _dicts(spreads: dict[str, Spread]) -> dict[str, dict[str, Any]]:
    return {name: asdict(spread) for name, spread in spreads.items()}


def measure(options: argparse.Namespace) -> tuple[Report, list[Target]]:
    results: Report = {}
    targets: list[Target] = []
    if "loss" in options.part:
        results["loss"], found = measure_losses(options)
        targets += found
    if "exponents" in options.part:
        results["exponents"] = measure_exponents(options)
    if "encoder" in options.part:
        results["encoder"], found = measure_encoder(options)
        targets += found
    return results, targets


def markdown(report: Report) -> str:
    def table(results: list[Report], columns: list[str], kind: str) -> str:
        names = dict.fromkeys(name for result in results for name in result[kind])
        rows = {name: [result[kind].get(name) for result in results] for name in names}
        return markdown_table(columns, rows)

    parts = []
    if "loss" in report:
        results = report["loss"]
        columns = [f"N = {result['batch']:,}" for result in results]
        parts += ["Milliseconds a call:", table(results, columns, "milliseconds")]
        parts += ["Nanoseconds a compared pair:", table(results, columns, "nanoseconds_a_pair")]
        parts += ["Ratios:", table(results, columns, "ratios")]
        if any(result["share_of_matmul_rate"] for result in results):
            shares = table(results, columns, "share_of_matmul_rate")
            parts += ["Share of the machine's matrix-multiply rate:", shares]
        parts += ["Peak memory above the inputs, MiB:", _peaks(results, columns)]
    if "exponents" in report:
        parts += ["Time grows with the power:", _exponents(report["exponents"])]
    if "encoder" in report:
        results = report["encoder"]
        columns = [f"batch {result['batch']}" for result in results]
        parts += ["Milliseconds a step:", table(results, columns, "milliseconds")]
        parts += ["Ratios:", table(results, columns, "ratios")]
    return "\n\n".join([*parts, "\n".join(map(target_line, report["targets"]))])


def _peaks(results: list[Report], columns: list[str]) -> str:
    lines = [["", *columns], ["---"] + ["---:"] * len(columns)]
    for kind in KINDS:
        found = [result["peak_mebibytes"].get(kind) for result in results]
        lines.append([kind, *("" if mib is None else f"{mib:,.0f}" for mib in found)])
    return _lines(lines)


def _exponents(exponents: dict[str, dict[str, float]]) -> str:
    kinds = list(next(iter(exponents.values())))
    lines = [["of", *kinds], ["---"] + ["---:"] * len(kinds)]
    lines += [[name, *(f"{fit[kind]:.2f}" for kind in kinds)] for name, fit in exponents.items()]
    return _lines(lines)


def _lines(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        default=SIZES,
        metavar="N",
        help="batches of the loss alone; 65536 takes 10^14 operations",
    )
    options.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--peak-of", nargs=2, metavar=("KIND", "N"), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.peak_of:
        torch.set_num_threads(arguments.threads)
        print_peak(arguments.peak_of[0], int(arguments.peak_of[1]))
        return 0
    return run_benchmark(arguments, measure, markdown)


if __name__ == "__main__":
    sys.exit(main())
