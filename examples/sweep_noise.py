"""How much noise? The number of noise vectors, as in the paper's table 3, and the mass that they stand for.

    python examples/sweep_noise.py                        # embedded encoder and corpus, no network
    python examples/sweep_noise.py --sweep mass --corpus sentences.txt --sts-data hub --seeds 0-9
    python examples/sweep_noise.py --mini                 # a smoke run

Two sweeps over paired seeds. "ratio": M as a multiple of the batch, sampled. "mass": the logarithm b of
the expected noise sum, which acts as one virtual negative that has cosine b / scale with every anchor; at
the paper's setting for BERT-base b is 5.5 and the cosine 0.28. The best mass is chosen on STS-B dev alone.

Runs are kept in OUTPUT/cells and shared with compare_losses.py; OUTPUT/sweep_ratio and sweep_mass (.md,
.json, .png, .svg) hold tables and figures, sweep_ratio-figure.json and sweep_mass-figure.json what the
figures are drawn from. --name gives them another name than sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import disable_progress_bars
from transformers.utils import logging

from st_gsinfonce.cells import Arm, Cell
from st_gsinfonce.command_line import parser_of, run
from st_gsinfonce.experiments import run_grid
from st_gsinfonce.figure_data import Curve, Point, SweepData
from st_gsinfonce.figure_files import save_figure
from st_gsinfonce.materials import NAME_HELP, GridOptions, load_materials, parse_seeds, setting_of
from st_gsinfonce.plots import plot_sweep
from st_gsinfonce.provenance import describe_run
from st_gsinfonce.report import (
    Comparison,
    GridReport,
    check_keeps,
    markdown_table,
    results_of,
    to_json,
)
from st_gsinfonce.whole_files import write_atomically

DEV = "STS-B dev"

# Average of the seven STS tasks, BERT-base, one run each. The paper's table 3 has further columns; these two
# are the ones that its authors' code confirms.
PAPER = {
    0.0: (76.25, "unsupervised SimCSE, https://github.com/princeton-nlp/SimCSE"),
    3.0: (77.63, "https://github.com/caskcsg/sentemb/tree/main/gsInfoNCE, M = 192, dropout 0.2"),
}


@dataclass
class SweepOptions(GridOptions):
    """What to sweep."""

    name: str = field(default="sweep", metadata={"help": NAME_HELP})
    sweep: str = field(default="both", metadata={"help": "ratio, mass or both."})
    ratios: list[float] = field(
        default_factory=lambda: [0, 0.5, 1, 2, 3, 4, 8, 16],
        metadata={
            "help": "M as multiples of the batch; 0, no noise, is always among them. --mini: 3 alone."
        },
    )
    masses: list[float] = field(
        default_factory=lambda: [5.5, 8, 9, 10, 11, 12, 13, 14, 16],
        metadata={"help": "Log masses b; no noise is always among the points. --mini: 10 alone."},
    )
    dropout: float = field(default=0.1, metadata={"help": "Of every run."})


def main() -> None:
    """Run both sweeps as one grid, then print and save each."""
    (options,) = parser_of(SweepOptions, __doc__).parse_args_into_dataclasses()
    disable_progress_bars()
    logging.disable_progress_bar()  # of loading; the grid's own bar stays
    if options.sweep not in ("ratio", "mass", "both"):
        raise ValueError(f"--sweep must be ratio, mass or both, got {options.sweep!r}")
    if options.mini:
        options.ratios, options.masses = [3], [10]
    tail = f"dropout={options.dropout}"
    sweeps = {
        "ratio": [Arm.parse(f"sampled:ratio={ratio},{tail}") for ratio in sorted(options.ratios)],
        "mass": [Arm.parse(f"expected:b={mass},{tail}") for mass in sorted(options.masses)],
    }
    plain = Arm(dropout=options.dropout)
    chosen = {
        name: list(dict.fromkeys([plain, *arms]))
        for name, arms in sweeps.items()
        if options.sweep in (name, "both")
    }
    output = Path(options.output)
    materials = load_materials(options)
    setting = setting_of(options, materials)
    cells = {
        name: [Cell(arm, seed, setting) for seed in parse_seeds(options.seeds) for arm in arms]
        for name, arms in chosen.items()
    }
    everything = [cell for some in cells.values() for cell in some]
    paths = {name: output / f"{options.name}_{name}" for name in cells}
    for name, some in cells.items():
        check_keeps(Path(f"{paths[name]}.json"), some)
    results = run_grid(everything, options, materials, output / "cells")
    for name, some in cells.items():
        report = GridReport(results_of(results, some))
        save(name, report, plain, paths[name])


def save(name: str, report: GridReport, plain: Arm, path: Path) -> None:
    """Print and save one sweep."""
    arms = [arm for arm in report.arms if arm != plain]
    comparisons = [report.compare(arm, plain, metric) for metric in report.primary for arm in arms]
    primary = report.primary[0]
    paper = PAPER if name == "ratio" and primary == "Avg." else {}
    sentences = [c.verdict for c in comparisons if c.metric == primary]
    best = report.best(arms, DEV) if name == "mass" and DEV in report.metrics else None
    if best is not None:
        sentences.insert(
            0,
            f"Best mass by {DEV} alone: b = {best.log_mass:g}, a virtual negative of cosine "
            f"{(best.log_mass or 0) / best.scale:.3g} ({report.mean(best, DEV):.2f}).",
        )
    title = {
        "ratio": "Number of noise vectors, as a multiple of the batch",
        "mass": "Log mass of the noise, b = log(lambda M 0F1(; D/2; s^2/4))",
    }[name]
    parts = [f"# {title}", table(report, comparisons, plain, paper)]
    if paper:
        sources = "; ".join(f"{ratio:g}: {source}" for ratio, (_, source) in paper.items())
        parts.append(
            f"Paper: BERT-base trained on a million sentences, one run, STS average ({sources}). The "
            "paper's other values are left out: their source could not be checked."
        )
    parts += ["\n".join(f"- {sentence}" for sentence in sentences)]
    parts += ["## Every run", report.markdown_cells(), report.provenance()]
    text = "\n\n".join(parts)
    record = report.to_dict(
        comparisons,
        sweep=name,
        best=None if best is None else {"arm": str(best), "chosen_on": DEV},
        paper={f"{ratio:g}": {"Avg.": value, "source": s} for ratio, (value, s) in paper.items()},
        run=describe_run(),
    )
    write_atomically(Path(f"{path}.md"), text + "\n")
    write_atomically(Path(f"{path}.json"), to_json(record))
    print(text)
    if not arms:
        print(f"\nSaved as {path}.md and .json; without noise to sweep there is no figure.")
        return
    try:
        data = figure_data(name, report, arms, plain, paper)
        save_figure(plot_sweep(data), data, path, json_path=f"{path}-figure.json")
        print(f"\nSaved as {path}.md, .json, .png and .svg.")
    except ImportError as error:
        print(f"\nSaved as {path}.md and .json, without the figure: {error}")


def table(
    report: GridReport,
    comparisons: Sequence[Comparison],
    plain: Arm,
    paper: dict[float, tuple[float, str]],
) -> str:
    """Return a row for each point: what it is, its scores, its difference to no noise."""
    primary = report.primary[0]
    differences = {c.treated: c.difference for c in comparisons if c.metric == primary}
    rows = []
    for arm, by_seed in sorted(report.arms.items(), key=lambda item: position(item[0])):
        mass = next(iter(by_seed.values())).log_mass
        row = ["none" if arm == plain else arm.label.partition(", dropout")[0]]
        row += ["", ""] if mass is None else [f"{mass:.2f}", f"{mass / arm.scale:.2f}"]
        for metric in report.metrics:
            sd = report.sd(arm, metric)
            row.append(f"{report.mean(arm, metric):.2f}" + ("" if sd is None else f" ± {sd:.2f}"))
        d = differences.get(arm)
        row.append("" if d is None else f"{d.mean:+.2f}")
        row.append("" if d is None or d.seeds < 2 else f"{d.low:+.2f} to {d.high:+.2f}")
        row.append("" if d is None or d.seeds < 2 else f"{d.p_value:.3f}")
        if paper:
            row.append(f"{paper[arm.noise_ratio][0]:.2f}" if arm.noise_ratio in paper else "")
        rows.append(row)
    heads = ["Noise", "b", "Virtual cosine", *report.metrics, f"{primary} against none"]
    heads += ["95% interval", "p", *(["Paper, Avg."] if paper else [])]
    return markdown_table(heads, rows)


def position(arm: Arm) -> float:
    """Return where an arm lies on the axis; no noise lies first."""
    if arm.noise == "none":
        return float("-inf")
    return arm.noise_ratio if arm.log_mass is None else arm.log_mass


def figure_data(
    name: str,
    report: GridReport,
    arms: Sequence[Arm],
    plain: Arm,
    paper: dict[float, tuple[float, str]],
) -> SweepData:
    """Return what the figure is drawn from: a curve for each score that arms are compared by."""
    ordered = sorted(arms, key=position)
    published = tuple(
        Point(ratio, round(score - paper[0.0][0], 2))
        for ratio, (score, _) in paper.items()
        if ratio > 0
    )
    curves = tuple(
        Curve(
            label=metric,
            x=tuple(position(arm) for arm in ordered),
            scores=tuple(tuple(report.scores(arm, metric).values()) for arm in ordered),
            baseline=tuple(report.scores(plain, metric).values()),
            paper=published if metric == "Avg." else (),
        )
        for metric in report.primary
    )
    if name == "ratio":
        return SweepData(
            curves,
            xlabel="noise vectors M, as a multiple of the batch",
            title="Number of noise vectors",
            log_x=True,
            paper_label="paper (BERT-base, a million sentences, noise at dropout 0.2)",
        )
    return SweepData(
        curves, xlabel="log mass of the noise b, nats", title="Mass of the noise", scale=plain.scale
    )


if __name__ == "__main__":
    run(main)
