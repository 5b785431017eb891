"""Tables of a grid: means, every cell, paired differences, verdicts; as Markdown and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from st_gsinfonce.cells import Arm, Cell, CellResult
from st_gsinfonce.significance import PairedDifference, paired_difference

PRIMARY = ("Avg.", "STS-B dev", "docs MRR@10")
"""The scores that arms are compared by, as far as they were computed."""


@dataclass(frozen=True)
class Comparison:
    """Two arms of a grid, compared by one score."""

    metric: str
    treated: Arm
    baseline: Arm
    difference: PairedDifference

    @property
    def verdict(self) -> str:
        """The comparison in one sentence."""
        return self.difference.verdict(self.treated.label, self.baseline.label, self.metric)


class GridReport:
    """The results of a grid by arm and seed.

    Args:
        results: Of one setting.

    Raises:
        ValueError: If there is no result, or they are of different settings.
    """

    def __init__(self, results: Iterable[CellResult]) -> None:
        self.results = list(results)
        if len({result.cell.setting for result in self.results}) != 1:
            raise ValueError("a report takes the results of one setting, at least one")
        self.setting = self.results[0].cell.setting
        self.arms: dict[Arm, dict[int, CellResult]] = {}
        for result in self.results:
            self.arms.setdefault(result.cell.arm, {})[result.cell.seed] = result
        self.metrics = list(self.results[0].scores)
        self.primary = [metric for metric in PRIMARY if metric in self.metrics]

    def scores(self, arm: Arm, metric: str) -> dict[int, float]:
        """Return an arm's scores by seed."""
        return {seed: result.scores[metric] for seed, result in sorted(self.arms[arm].items())}

    def mean(self, arm: Arm, metric: str) -> float:
        """Return an arm's mean score."""
        return statistics.fmean(self.scores(arm, metric).values())

    def sd(self, arm: Arm, metric: str) -> float | None:
        """Return the standard deviation over seeds (n - 1), None for one seed."""
        scores = self.scores(arm, metric).values()
        return statistics.stdev(scores) if len(scores) > 1 else None

    def compare(self, treated: Arm, baseline: Arm, metric: str) -> Comparison:
        """Compare two arms over the seeds that both have.

        Raises:
            ValueError: If they share none.
        """
        first, second = self.scores(treated, metric), self.scores(baseline, metric)
        seeds = [seed for seed in first if seed in second]
        difference = paired_difference([first[s] for s in seeds], [second[s] for s in seeds])
        return Comparison(metric, treated, baseline, difference)

    def best(self, arms: Iterable[Arm], metric: str) -> Arm:
        """Return the arm with the highest mean, the first of equals."""
        return max(arms, key=lambda arm: self.mean(arm, metric))

    def markdown_means(self) -> str:
        """Return the table of means and standard deviations, arm by arm."""
        rows = []
        for arm, by_seed in self.arms.items():
            cells = [_mean_sd(self.mean(arm, m), self.sd(arm, m)) for m in self.metrics]
            rows.append([arm.label, str(len(by_seed)), *cells])
        return markdown_table(["Arm", "Seeds", *self.metrics], rows)

    def markdown_cells(self) -> str:
        """Return the table of every cell."""
        rows = [
            [arm.label, str(seed), *(f"{result.scores[m]:.2f}" for m in self.metrics)]
            for arm, by_seed in self.arms.items()
            for seed, result in sorted(by_seed.items())
        ]
        return markdown_table(["Arm", "Seed", *self.metrics], rows)

    def provenance(self) -> str:
        """Return the setting, and all versions and hardware of the runs, in a few lines."""
        setting = self.setting
        length = (
            f"{setting.max_steps} steps" if setting.max_steps > 0 else f"{setting.epochs:g} epoch"
        )
        hardware = sorted({_hardware(result.run["hardware"]) for result in self.results})
        numbers: dict[str, set[str]] = {}
        for result in self.results:
            for name, number in result.run["versions"].items():
                numbers.setdefault(name, set()).add(number)
        versions = ", ".join(f"{name} {' and '.join(sorted(n))}" for name, n in numbers.items())
        return (
            f"Encoder {setting.encoder.name} ({setting.encoder.sha256[:12]}), pooling {setting.pooling}, "
            f"{'train-only head' if setting.head else 'no head'}; corpus {setting.corpus.name} "
            f"({setting.corpus.sha256[:12]}); {length}, batch {setting.batch_size}, learning rate "
            f"{setting.learning_rate:g}, {setting.max_seq_length} tokens, {setting.precision}; "
            f"weights scored: {setting.select}. Scores x 100.\n\n"
            f"Hardware: {'; '.join(hardware)}. Versions: {versions}."
        )

    def to_dict(self, comparisons: Sequence[Comparison], **more: Any) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            **more,
            "setting": asdict(self.setting),
            "arms": [
                {
                    "arm": str(arm),
                    "label": arm.label,
                    "log_mass": next(iter(by_seed.values())).log_mass,
                    "mean": {m: self.mean(arm, m) for m in self.metrics},
                    "sd": {m: self.sd(arm, m) for m in self.metrics},
                    "cells": [
                        {"seed": seed, "file": result.cell.file_name, "scores": dict(result.scores)}
                        for seed, result in sorted(by_seed.items())
                    ],
                }
                for arm, by_seed in self.arms.items()
            ],
            "comparisons": [
                {
                    "metric": c.metric,
                    "treated": str(c.treated),
                    "baseline": str(c.baseline),
                    **_without_nan(asdict(c.difference)),
                    "more_seeds": c.difference.more_seeds,
                    "verdict": c.verdict,
                }
                for c in comparisons
            ],
        }


def markdown_comparisons(comparisons: Sequence[Comparison]) -> str:
    """Return the table of paired differences."""
    rows = []
    for c in comparisons:
        d = c.difference
        several = d.seeds > 1
        rows.append(
            [
                c.treated.label,
                c.baseline.label,
                c.metric,
                f"{d.mean:+.2f}",
                f"{d.low:+.2f} to {d.high:+.2f}" if several else "",
                f"{d.p_value:.3f}" if several else "",
                str(d.seeds),
                "" if not several else "-" if d.more_seeds is None else str(d.more_seeds),
            ]
        )
    heads = ["Arm", "Against", "Score", "Difference", "95% interval", "p", "Seeds", "More needed"]
    return markdown_table(heads, rows)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, its first column to the left, the others to the right."""
    lines = [f"| {' | '.join(heads)} |", f"|:---|{'---:|' * (len(heads) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def results_of(results: Mapping[Cell, CellResult], cells: Iterable[Cell]) -> list[CellResult]:
    """Return the results of some cells, in their order, each once."""
    return [results[cell] for cell in dict.fromkeys(cells)]


def to_json(record: Mapping[str, Any]) -> str:
    """Return a record as JSON text."""
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def check_keeps(path: Path, cells: Iterable[Cell]) -> None:
    """Raise an error where a report in the file has runs that the one to come would not have.

    Args:
        path: JSON of a report; need not exist.
        cells: Those of the report to come.

    Raises:
        FileExistsError: If the file has other runs, or is no report.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        earlier = {cell["file"] for arm in record["arms"] for cell in arm["cells"]}
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as error:
        raise FileExistsError(
            f"{path} exists and is no report ({error!r}): move it away, or choose another --name or --output"
        ) from error
    if lost := sorted(earlier - {cell.file_name for cell in cells}):
        raise FileExistsError(
            f"{path} reports {len(lost)} runs that these options leave out, such as {lost[0]}: choose "
            "another --name or --output for this report, or ask for those runs, too"
        )


def _hardware(hardware: Mapping[str, Any]) -> str:
    if hardware["gpu"]:
        return str(hardware["gpu"])
    threads = hardware["torch_threads"]
    return f"{hardware['cpu']}, {hardware['cores']} cores, {threads} thread{'s'[: threads != 1]}"


def _mean_sd(mean: float, sd: float | None) -> str:
    return f"{mean:.2f}" if sd is None else f"{mean:.2f} ± {sd:.2f}"


def _without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: None if v != v else list(v) if isinstance(v, tuple) else v for k, v in values.items()
    }
