"""Speed of the seven STS tasks beside a plain ``mteb.evaluate``: same data, same batches, same scores.

python benchmarks/evaluate.py --sts-data FOLDER [--repeats 3] [--json FILE] [--quick]

The encoder is the embedded all-MiniLM-L6-v2. A round is one plain evaluation and one of ours, in
alternating order. Plain MTEB has its data loaded beforehand; ours is timed with reading, hashing and all.
Where others use the machine too, the wall clock measures them as well: then compare CPU time, with
--threads 1 (more threads spin while they wait for a core).
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mteb
import psutil
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from timing import Report, Spread, Target, markdown_table, parser, run_benchmark, target_line

from st_gsinfonce import STS_TASKS, embedded_encoder, evaluate_sts
from st_gsinfonce.sts_data import read_pairs

PLAIN = "mteb.evaluate"
OURS = "evaluate_sts"
QUICK_TASKS = ("STS16",)


def plain(model: SentenceTransformer, tasks: list[Any], batch_size: int) -> dict[str, float]:
    """Evaluate as MTEB's documentation says to."""
    outcome = mteb.evaluate(
        model,
        tasks,
        cache=None,
        co2_tracker=False,
        show_progress_bar=False,
        encode_kwargs={"batch_size": batch_size, "show_progress_bar": False},
    )
    return {result.task_name: result.get_score() for result in outcome.task_results}


def loaded_tasks(folder: Path, names: tuple[str, ...]) -> list[Any]:
    tasks = []
    for name in names:
        task = mteb.get_task(name)
        task.dataset = {"test": Dataset.from_dict(read_pairs(folder, name, "test")._asdict())}
        task.data_loaded = True
        tasks.append(task)
    return tasks


def observed(run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return what a call gave, its wall and CPU seconds, and by how much resident memory rose (MiB)."""
    process = psutil.Process()
    before = peak = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.05):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        outcome = run()
    finally:
        seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        done.set()
        watcher.join()
    return outcome, {**seconds, "memory_rise_mib": (peak - before) / 2**20}


def measure(options: argparse.Namespace) -> tuple[Report, list[Target]]:
    names = QUICK_TASKS if options.quick else STS_TASKS
    model = SentenceTransformer(str(embedded_encoder()), device="cpu")
    tasks = loaded_tasks(options.sts_data, names)
    contestants: dict[str, Callable[[], dict[str, float]]] = {
        PLAIN: lambda: plain(model, tasks, options.batch_size),
        OURS: lambda: dict(
            evaluate_sts(
                model, names, options.sts_data, options.batch_size, show_progress_bar=False
            ).scores
        ),
    }
    model.encode(["warm up"] * options.batch_size)
    scores: dict[str, dict[str, float]] = {}
    rounds: list[dict[str, dict[str, float]]] = []
    order = [PLAIN, OURS]
    for turn in range(1 if options.quick else options.repeats):
        seen = {}
        for name in order:
            scores[name], seen[name] = observed(contestants[name])
            print(f"round {turn + 1}, {name}: {seen[name]}", file=sys.stderr)
        rounds.append({name: seen[name] for name in contestants})
        order.reverse()

    sentences = [
        text for task in tasks for side in task.column_names for text in task.dataset["test"][side]
    ]
    distinct = len(set(sentences))
    dimensions = model.get_embedding_dimension() or 0
    ratios = {
        what: Spread.of([r[PLAIN][key] / r[OURS][key] for r in rounds])
        for what, key in (("wall clock", "wall_s"), ("CPU time", "cpu_s"))
    }
    further = f" --threads {options.threads}" if options.threads else ""
    further += " --quick" if options.quick else ""
    results: Report = {
        # without this machine's paths
        "command": "python benchmarks/evaluate.py --sts-data FOLDER "
        f"--repeats {options.repeats} --batch-size {options.batch_size}{further}",
        "encoder": "all-MiniLM-L6-v2, as published",
        "batch_size": options.batch_size,
        "mteb": version("mteb"),
        "sentences": len(sentences),
        "distinct_sentences": distinct,
        "embeddings_mib": distinct * dimensions * 4 / 2**20,
        "rounds": rounds,
        "ratios": {what: asdict(spread) for what, spread in ratios.items()},
        "scores": scores[OURS],
        "largest_difference_of_scores": max(
            abs(scores[OURS][task] - scores[PLAIN][task]) for task in names
        ),
    }
    return results, [
        Target(f"{PLAIN} takes as long as {OURS}, times, by {what}", ratio, 1.35, at_least=True)
        for what, ratio in ratios.items()
    ]


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    rows = {
        name: [
            asdict(Spread.of([r[name][key] for r in report["rounds"]]))
            for key in ("wall_s", "cpu_s", "memory_rise_mib")
        ]
        for name in (PLAIN, OURS)
    }
    ratios = [*report["ratios"].values(), None]
    return "\n".join(
        [
            f"{report['encoder']}, batch {report['batch_size']}: {report['sentences']:,} sentences, "
            f"{report['distinct_sentences']:,} distinct; their embeddings take "
            f"{report['embeddings_mib']:.0f} MiB. Median (quartiles).",
            "",
            markdown_table(["wall, s", "CPU, s", "rise of memory, MiB"], {**rows, "ratio": ratios}),
            "",
            f"Largest difference of a score: {report['largest_difference_of_scores']:.1e}",
            *(target_line(target) for target in report["targets"]),
        ]
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--sts-data", type=Path, help="folder of TASK/test.jsonl")
    options.add_argument("--repeats", type=int, default=3, help="rounds; default: 3")
    options.add_argument("--batch-size", type=int, default=32, help="of both; default: 32")
    arguments = options.parse_args()
    if arguments.sts_data is None and arguments.show is None:
        options.error("--sts-data is needed")
    warnings.filterwarnings("ignore", module="mteb")
    return run_benchmark(arguments, measure, markdown)


if __name__ == "__main__":
    sys.exit(main())
