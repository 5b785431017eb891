"""What the benchmarks share: interleaved timing, spread, ratios, and a record of where they ran.

Two things are compared within one run, in turns: whatever else the machine does meets both. A ratio is
taken round by round, and its median and quartiles over the rounds are reported.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from st_gsinfonce.provenance import describe_run

SLOW_SECONDS = 60.0  # what a contestant may take in all, three rounds excepted
Report = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    first_quartile: float
    third_quartile: float
    rounds: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        first, median, third = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, first, third, len(values))

    def __str__(self) -> str:
        """Return the median and, in parentheses, the quartiles, to three digits."""
        return f"{_digits(self.median)} ({_digits(self.first_quartile)} to {_digits(self.third_quartile)})"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


class Times:
    """Seconds a call of every contestant, by round."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self.seconds = seconds

    def milliseconds(self) -> dict[str, Spread]:
        return {
            name: Spread.of([1000 * s for s in values]) for name, values in self.seconds.items()
        }

    def ratio(self, slow: str, fast: str) -> Spread:
        """Spread of ``slow / fast`` over the rounds that both took part in."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=False)
        return Spread.of([a / b for a, b in pairs])


def interleaved(
    contestants: Mapping[str, Callable[[], object]], rounds: int, turn_seconds: float = 0.0
) -> Times:
    """Time the contestants in turns.

    Args:
        contestants: Functions without arguments, by name; each is called once beforehand.
        rounds: Turns of each. One that has taken more than ``SLOW_SECONDS`` in all stops after three.
        turn_seconds: A turn calls a fast contestant as often as it takes to last about this long.
    """
    calls = {}
    for name, run in contestants.items():
        run()
        calls[name] = max(1, math.ceil(turn_seconds / _seconds(run, 1)))
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(rounds):
        names.append(names.pop(0))  # so that nobody always follows the same neighbour
        for name in names:
            if turn < 3 or sum(seconds[name]) * calls[name] < SLOW_SECONDS:
                seconds[name].append(_seconds(contestants[name], calls[name]))
    return Times(seconds)


def _seconds(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


@dataclass(frozen=True)
class Target:
    """A bound that a ratio is to keep."""

    what: str
    ratio: Spread
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        median = self.ratio.median
        return median >= self.bound if self.at_least else median <= self.bound

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def target_line(target: Mapping[str, Any]) -> str:
    """Return a line of Markdown about a target read from a report."""
    bound = f"{'at least' if target['at_least'] else 'at most'} {target['bound']:g}"
    verdict = "met" if target["met"] else "**missed**"
    return f"- {target['what']}: {_spread(target['ratio'])}, target {bound}: {verdict}"


def markdown_table(columns: list[str], rows: Mapping[str, list[Mapping[str, Any] | None]]) -> str:
    """Return a table of spreads read from a report; None is an empty cell."""
    lines = [["", *columns], ["---"] + ["---:"] * len(columns)]
    for name, cells in rows.items():
        lines.append([name, *("" if cell is None else _spread(cell) for cell in cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _spread(entry: Mapping[str, Any]) -> str:
    return str(Spread(**entry))


def environment(seed: int) -> Report:
    """Describe this run: command, date, seed, versions, hardware."""
    command = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    return {**describe_run(), "command": shlex.join(command), "seed": seed}


def provenance(report: Report) -> str:
    """Return a line of Markdown that says where the numbers of a report come from."""
    hardware = report["hardware"]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return (
        f"`{report['command']}` on {report['date'][:10]}: {hardware['cpu']}, {hardware['cores']} cores, "
        f"{hardware['torch_threads']} thread(s) of torch, {hardware['cpu_capability']}; {versions}."
    )


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options.add_argument("--quick", action="store_true", help="a smoke run; measures nothing")
    options.add_argument("--threads", type=int, help="torch's threads; default: as torch chooses")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--show", type=Path, metavar="FILE", help="print the results of an earlier run and stop"
    )
    return options


def run_benchmark(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace], tuple[Report, list[Target]]],
    markdown: Callable[[Report], str],
) -> int:
    """Measure, or read an earlier report; print it; return the exit status: 1 for a missed target."""
    if options.show:
        report = json.loads(options.show.read_text(encoding="utf-8"))
        print(markdown(report), provenance(report), sep="\n\n")
        return 0
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    results, targets = measure(options)
    report = {
        **environment(options.seed),
        **results,
        "targets": [target.as_dict() for target in targets],
    }
    # Through JSON even where none is written: what is printed is what can be read back.
    text = json.dumps(report, indent=2)
    report = json.loads(text)
    print(markdown(report), provenance(report), sep="\n\n")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0 if options.quick or all(target.met for target in targets) else 1
