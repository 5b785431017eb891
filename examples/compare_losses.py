"""Does the noise help, on your data, with your encoder? Or was it the dropout, or the seed?

    python examples/compare_losses.py                      # embedded encoder and corpus, no network
    python examples/compare_losses.py --corpus sentences.txt --model bert-base-uncased --sts-data hub
    python examples/compare_losses.py --arms infonce expected:b=10 sampled:b=10 --seeds 0-9
    python examples/compare_losses.py --mini               # a smoke run

Arms are compared over paired seeds: the same batches and initial head in every arm, and the same
dropout masks in arms of equal dropout. Finished runs are kept in OUTPUT/cells, so the same command goes
on where it was interrupted. OUTPUT/compare_losses.md and .json hold the tables, and two figures (.png, .svg
and the .json that they are drawn from) the rest: compare_losses-differences, each arm against the baseline
seed by seed, and compare_losses-training, loss and STS-B dev by step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from datasets import disable_progress_bars
from transformers.utils import logging

from st_gsinfonce.cells import ARM_SYNTAX, Arm, Cell
from st_gsinfonce.command_line import parser_of, run
from st_gsinfonce.experiments import run_grid
from st_gsinfonce.figure_data import ComparisonData, TrainingData
from st_gsinfonce.figure_files import save_figure
from st_gsinfonce.materials import NAME_HELP, GridOptions, load_materials, parse_seeds, setting_of
from st_gsinfonce.plots import draw
from st_gsinfonce.provenance import describe_run
from st_gsinfonce.report import (
    Comparison,
    GridReport,
    check_keeps,
    markdown_comparisons,
    results_of,
    to_json,
)
from st_gsinfonce.whole_files import write_atomically

DEFAULT_ARMS = ["infonce", "sampled", "expected"]
DEFAULT_DROPOUTS = (0.1, 0.2)


@dataclass
class CompareOptions(GridOptions):
    """What to compare on what."""

    name: str = field(default="compare_losses", metadata={"help": NAME_HELP})
    arms: list[str] = field(
        default_factory=lambda: [
            f"{kind}:dropout={dropout}" for dropout in DEFAULT_DROPOUTS for kind in DEFAULT_ARMS
        ],
        metadata={"help": "What to compare; the first is the baseline. " + ARM_SYNTAX},
    )


def pairs(arms: list[Arm]) -> Iterator[tuple[Arm, Arm]]:
    """Yield (treated, baseline): all against the first, noise at each dropout, sampling at each mass."""
    for arm in arms[1:]:
        yield arm, arms[0]
    for arm in arms:
        plain = Arm(dropout=arm.dropout, scale=arm.scale)
        if arm.noise != "none" and plain in arms:
            yield arm, plain
    for arm in arms:
        for other in arms:
            if arm.noise == "expected" and other.noise == "sampled" and same_mass(arm, other):
                yield other, arm


def same_mass(expected: Arm, sampled: Arm) -> bool:
    """Say whether two arms differ in the sampling alone."""
    if (expected.dropout, expected.scale) != (sampled.dropout, sampled.scale):
        return False
    if expected.log_mass is None:
        return sampled.log_mass is None and expected.noise_ratio == sampled.noise_ratio
    return expected.log_mass == sampled.log_mass


def overall_verdict(comparisons: list[Comparison], baseline: Arm) -> str:
    """Return which arms the seeds tell from the baseline, in one sentence."""
    chosen = [c for c in comparisons if c.baseline == baseline]
    if not chosen:
        return f"There is one arm only, {baseline.label}: nothing to compare."
    settled = [c for c in chosen if c.difference.is_settled]
    open_ = [c for c in chosen if not c.difference.is_settled]
    parts = []
    if settled:
        names = "; ".join(f"{c.treated.label} ({c.difference.mean:+.2f})" for c in settled)
        parts.append(f"told apart from {baseline.label} by the seeds run: {names}")
    if open_:
        names = "; ".join(f"{c.treated.label} ({c.difference.mean:+.2f})" for c in open_)
        parts.append(f"not told apart from {baseline.label}: {names}")
    return f"By {chosen[0].metric}, " + "; and ".join(parts) + "."


def save_figures(report: GridReport, comparisons: list[Comparison], path: Path) -> None:
    """Save what there is to draw, and say where; the tables do without."""
    figures: dict[str, ComparisonData | TrainingData] = {}
    if comparisons:
        figures["differences"] = ComparisonData.of(comparisons)
    if any(run.losses or run.dev for run in report.results):
        figures["training"] = TrainingData.of(report)
    try:
        for name, data in figures.items():
            save_figure(draw(data), data, f"{path}-{name}")
    except ImportError as error:
        print(f"Without the figures: {error}")
        return
    for name in figures:
        print(f"Figure: {path}-{name}.png, .svg and .json.")


def main() -> None:
    """Run, compare, print, save."""
    (options,) = parser_of(CompareOptions, __doc__).parse_args_into_dataclasses()
    disable_progress_bars()
    logging.disable_progress_bar()  # of loading; the grid's own bar stays
    arms = list(dict.fromkeys(map(Arm.parse, options.arms)))
    seeds = parse_seeds(options.seeds)
    output = Path(options.output)
    materials = load_materials(options)
    setting = setting_of(options, materials)
    # Seed by seed, so that an interrupted grid has whole pairs.
    cells = [Cell(arm, seed, setting) for seed in seeds for arm in arms]
    check_keeps(output / f"{options.name}.json", cells)
    report = GridReport(results_of(run_grid(cells, options, materials, output / "cells"), cells))
    comparisons = [
        report.compare(treated, baseline, metric)
        for metric in report.primary
        for treated, baseline in dict.fromkeys(pairs(arms))
    ]
    verdict = overall_verdict([c for c in comparisons if c.metric == report.primary[0]], arms[0])
    parts = ["# Comparison of losses", verdict, report.markdown_means()]
    if comparisons:
        parts += ["## Paired differences", markdown_comparisons(comparisons)]
        parts.append(
            "\n".join(f"- {c.verdict}" for c in comparisons if c.metric == report.primary[0])
        )
    parts += ["## Every run", report.markdown_cells(), report.provenance()]
    text = "\n\n".join(parts)
    write_atomically(output / f"{options.name}.md", text + "\n")
    record = report.to_dict(comparisons, verdict=verdict, run=describe_run())
    write_atomically(output / f"{options.name}.json", to_json(record))
    print(text)
    print(f"\nSaved as {output / options.name}.md and .json; runs are in {output / 'cells'}.")
    save_figures(report, [c for c in comparisons if c.baseline == arms[0]], output / options.name)


if __name__ == "__main__":
    run(main)
