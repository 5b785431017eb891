"""Evaluate encoders on the seven STS tasks and print them beside the paper's rows.

    python examples/evaluate_sts.py runs/my-encoder --baseline bert-base-uncased --pooling cls
    python examples/evaluate_sts.py ffgcc/gsInfoNCE-bert-base-uncased --data-dir FOLDER --output-dir runs/sts
    python examples/evaluate_sts.py runs/bert/encoder --baseline bert-base-uncased --figure runs/similarities

MODEL is a folder or a name on the hub; a checkpoint that still holds the train-only head is read without it.
The tasks come from the hub, or from a folder of TASK/test.jsonl. Needs ``pip install "st_gsinfonce[eval]"``.

Pooling decides the result, so the table names it. A published SimCSE or GS-InfoNCE checkpoint is a plain
transformers model and was scored on its [CLS] vector without the head; sentence-transformers by itself would
pool it by mean. A saved sentence-transformers model pools as it says, any other checkpoint by --pooling.

--figure PATH draws how the cosine similarities of a task's pairs spread by gold score, for the baseline and
for MODEL, as PATH.png, .svg and the .json that it is drawn from, and needs "st_gsinfonce[plot]".
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.util import is_sentence_transformer_model, pairwise_cos_sim

from st_gsinfonce.command_line import run
from st_gsinfonce.encoder import build_encoder, load_encoder
from st_gsinfonce.evaluation import STS_TASKS, evaluate_sts
from st_gsinfonce.figure_data import EncoderCosines, SimilarityData
from st_gsinfonce.figure_files import require_room, save_figure
from st_gsinfonce.plots import plot_similarity
from st_gsinfonce.provenance import describe_run
from st_gsinfonce.sts_data import Pairs, hub_pairs, read_pairs
from st_gsinfonce.sts_encoding import encode_once, task_prompt

# Unsupervised checkpoints of the two papers, scored by "cls_before_pooler" in their authors' scripts.
CLS_CHECKPOINTS = re.compile(r"(^|/)(unsup-simcse|(unsup-)?gsInfoNCE)-[^/]+/?$")

# Table 2 of "Smoothed Contrastive Learning for Unsupervised Sentence Embedding" (arXiv 2109.04321), cells as
# transcribed in the lists of github.com/Doragd/Awesome-Sentence-Embedding. Checked: the mean of each SimCSE
# row is its authors' reported average, and the means differ by what the paper's abstract states (1.38, 0.72,
# 1.17 and 0.28 points); the GS-InfoNCE row of BERT-base is also in the authors' repository (caskcsg/sentemb).
PAPER = {
    "SimCSE, BERT-base": (68.40, 82.41, 74.38, 80.91, 78.56, 76.85, 72.23),
    "GS-InfoNCE, BERT-base": (70.12, 82.57, 75.21, 82.89, 80.23, 79.70, 72.70),
    "SimCSE, BERT-large": (70.88, 84.16, 76.43, 84.50, 79.76, 79.26, 73.88),
    "GS-InfoNCE, BERT-large": (73.75, 85.09, 77.35, 84.44, 79.88, 79.94, 73.48),
    "SimCSE, RoBERTa-base": (70.16, 81.77, 73.24, 81.36, 80.65, 80.22, 68.56),
    "GS-InfoNCE, RoBERTa-base": (71.12, 83.24, 75.00, 82.61, 81.36, 81.26, 69.62),
    "SimCSE, RoBERTa-large": (72.86, 83.99, 75.62, 84.77, 81.80, 81.98, 71.26),
    "GS-InfoNCE, RoBERTa-large": (71.76, 84.91, 76.79, 84.35, 81.74, 82.97, 71.71),
}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what to evaluate, and on which data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", metavar="MODEL", nargs="+", help="folder or hub name")
    parser.add_argument(
        "--baseline", metavar="MODEL", help="the first row, to compare the others to"
    )
    parser.add_argument(
        "--pooling", default="cls", help="of a checkpoint that does not say: cls (default), mean..."
    )
    parser.add_argument("--data-dir", help="folder of TASK/test.jsonl (default: the hub)")
    parser.add_argument("--output-dir", help="leave MTEB's result files here")
    parser.add_argument(
        "--figure", metavar="PATH", help="draw the similarities by gold score, before and after"
    )
    parser.add_argument(
        "--figure-task",
        "--figure_task",
        choices=STS_TASKS,
        default="STSBenchmark",
        help="whose test pairs the figure shows (default: STSBenchmark)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier figure")
    parser.add_argument("--batch-size", type=int, default=64, help="default: 64")
    parser.add_argument("--device", help="cpu, cuda... (default: the best there is)")
    options = parser.parse_args(arguments)
    if options.figure is not None:
        if options.baseline is None or len(options.models) != 1:
            parser.error(
                f"--figure draws one MODEL beside its --baseline, got {len(options.models)} and "
                f"{'no' if options.baseline is None else 'one'} baseline"
            )
        require_room(options.figure, "--figure", overwrite=options.overwrite)
    return options


def load(name: str, pooling: str, device: str | None = None) -> tuple[SentenceTransformer, str]:
    """Return an encoder as it should be scored, and why it pools as it does."""
    if CLS_CHECKPOINTS.search(name):
        return _pooled(name, "cls", device), "as published"
    if is_sentence_transformer_model(name):
        return load_encoder(name, device=device), "its own"
    return _pooled(name, pooling, device), "--pooling"


def _pooled(name: str, pooling: str, device: str | None) -> SentenceTransformer:
    return build_encoder(name, pooling=pooling, max_seq_length=None, head=False, device=device)


def table(rows: Mapping[str, Mapping[str, float]], signed: bool = False) -> str:
    """Return rows of points under their heads, each column as wide as it must be."""
    heads = ["", *next(iter(rows.values()))]
    form = "+.2f" if signed else ".2f"
    lines = [
        heads,
        *([name, *(format(v, form) for v in row.values())] for name, row in rows.items()),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def paper_rows() -> dict[str, dict[str, float]]:
    """Return the paper's rows by task, their average computed from the cells."""
    return {
        f"paper: {name}": {
            **dict(zip(STS_TASKS, cells, strict=True)),
            "Avg.": sum(cells) / len(cells),
        }
        for name, cells in PAPER.items()
    }


def difference(row: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return by how many points a row is above another."""
    return {task: points - other[task] for task, points in row.items()}


def mteb_name(name: str) -> str:
    """Return a name fit for MTEB: the hub's own, or the last part of a folder's path."""
    return Path(name).resolve().name if Path(name).exists() else name


def cosines_of(
    model: SentenceTransformer, pairs: Pairs, task: str, batch_size: int
) -> tuple[float, ...]:
    """Return the cosine similarity of each pair, of vectors encoded as the task's score has them."""
    sentences = list(dict.fromkeys([*pairs.sentence1, *pairs.sentence2]))
    vectors = encode_once(model, sentences, task, task_prompt(model, task), batch_size, True)
    rows = {sentence: row for row, sentence in enumerate(sentences)}
    first, second = (
        vectors[[rows[sentence] for sentence in column]]
        for column in (pairs.sentence1, pairs.sentence2)
    )
    return tuple(pairwise_cos_sim(first, second).tolist())


def main(command_line: Sequence[str] | None = None) -> None:
    """Evaluate each model and print the table, then the differences in points."""
    arguments = parse_arguments(command_line)
    names = [name for name in (arguments.baseline, *arguments.models) if name is not None]
    rows: dict[str, dict[str, float]] = {}
    drawn: list[EncoderCosines] = []
    task, folder = arguments.figure_task, arguments.data_dir
    if arguments.figure is not None:
        pairs = read_pairs(folder, task, "test") if folder else hub_pairs(task, "test")
        SimilarityData(task, tuple(pairs.score), ())  # what it refuses is found before the work
    for name in dict.fromkeys(names):
        model, reason = load(name, arguments.pooling, arguments.device)
        results = evaluate_sts(
            model,
            data_dir=arguments.data_dir,
            batch_size=arguments.batch_size,
            output_dir=arguments.output_dir,
            name=mteb_name(name),
        )
        print(
            f"{name}: pooling {results.pooling} ({reason}), {results.seconds:.0f} s, "
            f"revision {results.revision}"
        )
        label = f"{name} [{results.pooling}]"
        rows[label] = results.row()
        if arguments.figure is not None:
            cosines = cosines_of(model, pairs, task, arguments.batch_size)
            shown = f"{mteb_name(name)} [{results.pooling}]"
            drawn.append(EncoderCosines(shown, rows[label][task], cosines))
    paper = paper_rows()
    print("\ncosine_spearman times 100; rows of the paper: its Table 2, arXiv 2109.04321\n")
    print(table({**rows, **paper}))

    references = dict(paper)
    if arguments.baseline is not None:
        first = next(iter(rows))
        references = {first: rows.pop(first), **references}
    for name, row in rows.items():
        print(f"\n{name}, points above (+) or below (-)\n")
        print(table({other: difference(row, points) for other, points in references.items()}, True))
    if arguments.figure is not None:
        data = SimilarityData(f"{task} test", tuple(pairs.score), tuple(drawn))
        save(data, arguments.figure)


def save(data: SimilarityData, path: str) -> None:
    """Save the figure and say where; the table does without."""
    try:
        files = save_figure(plot_similarity(data), data, path, run=describe_run())
    except ImportError as error:
        print(f"\nWithout the figure: {error}")
    else:
        print(f"\nFigure: {', '.join(map(str, files.values()))}")


if __name__ == "__main__":
    run(main)
