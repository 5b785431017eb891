"""How large a batch do your sentences bear? At which size are a batch's negatives no negatives any more?

    python examples/probe_batch_size.py                    # embedded encoder and corpus, no network
    python examples/probe_batch_size.py --corpus sentences.txt --model bert-base-uncased --pooling cls
    python examples/probe_batch_size.py --corpus sentences.txt --batch_sizes 64 512 4096 --threshold 0.8
    python examples/probe_batch_size.py --mini             # a smoke run

Unsupervised training takes every two sentences of a batch for different. The larger the batch, the likelier
it holds two that mean the same. This draws batches of several sizes and looks at the most similar pairs of
each: figure 1 of the GS-InfoNCE paper, for any corpus and any encoder. It prints the figure's numbers, how
the encoder's space is shaped, the verdict, and the worst pairs, which only a reader can judge: what an
encoder takes for equal need not be.

OUTPUT.png and OUTPUT.svg are the figure (they need "st_gsinfonce[plot]"). OUTPUT.json has all numbers, and
the sentences of the worst pairs unless --private is given. Ten thousand sentences take one to two minutes on
one CPU core.
"""

from __future__ import annotations

import os
import shlex
import textwrap
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers.utils import logging

from st_gsinfonce import build_encoder, embedded_corpus, embedded_encoder, load_sentences
from st_gsinfonce.analysis import (
    BATCH_SIZES,
    FalseNegativeProbe,
    Geometry,
    check_draws,
    probe_false_negatives,
)
from st_gsinfonce.command_line import parser_of, run
from st_gsinfonce.figure_data import ProbeData, figure_data_to_json
from st_gsinfonce.figure_files import figure_paths, require_room, save_figure
from st_gsinfonce.plots import plot_probe
from st_gsinfonce.provenance import describe_run
from st_gsinfonce.sts_encoding import pooling_mode
from st_gsinfonce.whole_files import write_atomically

MINI_SENTENCES, MINI_REPEATS = 512, 3
PAIRS_SHOWN = 10
SHOWN = 300  # characters of a sentence


@dataclass
class ProbeOptions:
    """Which sentences, by which encoder, in which batches."""

    model: str = field(
        default="embedded", metadata={"help": "Encoder to judge by: embedded, hub name or folder."}
    )
    corpus: str = field(
        default="embedded", metadata={"help": "Sentences: embedded, file, folder or hub dataset."}
    )
    column: str | None = field(default=None, metadata={"help": "The corpus's text column."})
    max_sentences: int | None = field(
        default=None, metadata={"help": "Use the first so many sentences."}
    )
    pooling: str = field(
        default="model", metadata={"help": "cls, mean, ..., or model to keep the model's own."}
    )
    max_seq_length: int = field(default=32, metadata={"help": "Tokens of a text that are read."})
    batch_sizes: list[int] = field(
        default_factory=lambda: list(BATCH_SIZES),
        metadata={"help": "Sizes to draw; those larger than the corpus are left out."},
    )
    top_k: int = field(default=4, metadata={"help": "Most similar pairs of a batch to average."})
    repeats: int = field(default=100, metadata={"help": "Batches drawn of each size."})
    seed: int = field(default=0, metadata={"help": "Of the draws."})
    threshold: float = field(
        default=0.9, metadata={"help": "Cosine above which negatives are taken for false ones."}
    )
    output: str = field(
        default="runs/probe", metadata={"help": "Figure and numbers: OUTPUT.png, .svg, .json."}
    )
    private: bool = field(
        default=False,
        metadata={"help": "Save neither sentences nor folders: the worst pairs are printed only."},
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace an earlier OUTPUT."})
    mini: bool = field(
        default=False,
        metadata={
            "help": f"A smoke run: {MINI_REPEATS} batches of a size from {MINI_SENTENCES} sentences."
        },
    )

    def __post_init__(self) -> None:
        """Check the threshold; a smoke run overrides the size."""
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"--threshold is a cosine, from -1 to 1, got {self.threshold}")
        if self.max_sentences is not None and self.max_sentences < 1:
            raise ValueError(f"--max_sentences must be at least 1, got {self.max_sentences}")
        if self.column is not None and self.corpus == "embedded":
            raise ValueError(f"--column {self.column}: the embedded corpus has no columns")
        check_draws(self.batch_sizes, self.top_k, self.repeats, self.seed)
        if self.mini:
            self.max_sentences, self.repeats = MINI_SENTENCES, MINI_REPEATS
            self.batch_sizes = [n for n in self.batch_sizes if n <= MINI_SENTENCES] or [64]


def load_corpus(options: ProbeOptions) -> tuple[list[str], str, str]:
    """Return the distinct sentences, their source's name, and what was read and dropped."""
    if options.corpus == "embedded":
        sentences = list(embedded_corpus().train_sentences[: options.max_sentences])
        return sentences, "Python docs (embedded)", f"{len(sentences):,} sentences"
    corpus = load_sentences(
        options.corpus, column=options.column, max_sentences=options.max_sentences
    )
    return corpus.sentences, name_of(options.corpus), str(corpus.report)


def name_of(value: str) -> str:
    """Return a name without the machine's folders."""
    return Path(value).resolve().name if Path(value).exists() else value


def table(probe: FalseNegativeProbe) -> str:
    """Return a row for each batch size."""
    lines = [f"{'batch':>8}{'cosine':>10}{'sd':>8}{'Gaussian':>10}{'sd':>8}"]
    for p in probe.points:
        sds = [f"{sd:.3f}" if probe.repeats > 1 else "" for sd in (p.sd, p.gaussian_sd)]
        lines.append(
            f"{p.batch_size:>8,}{p.mean:>10.3f}{sds[0]:>8}{p.gaussian_mean:>10.3f}{sds[1]:>8}"
        )
    return "\n".join(lines)


def worst_pairs(probe: FalseNegativeProbe, tokens: int | None) -> str:
    """Return the most similar pairs met in the largest batches."""
    largest = probe.points[-1]
    lines = [
        f"The most similar negatives in {probe.repeats} batches of {largest.batch_size:,}; the encoder reads "
        f"{tokens} tokens of each:"
    ]
    for pair in largest.pairs[:PAIRS_SHOWN]:
        met = f"among the top {probe.top_k} of {pair.batches} batches"
        lines.append(f"\n  {pair.cosine:.3f}, {met}")
        for sentence in (pair.first, pair.second):
            text = printable(sentence)
            lines.append(
                textwrap.fill(text, 100, initial_indent="    - ", subsequent_indent="      ")
            )
    return "\n".join(lines)


def printable(sentence: str) -> str:
    """Return the beginning of a sentence, without what a terminal would obey."""
    text = "".join(c if c.isprintable() else " " for c in sentence[: SHOWN + 1])
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def geometry_lines(geometry: Geometry) -> str:
    """Return how the encoder's space is shaped, a line for each number."""
    words = {
        "Anisotropy, the mean cosine of two sentences": geometry.anisotropy,
        "Uniformity, lower where more even": geometry.uniformity,
        f"Effective rank, of {geometry.dim} dimensions": geometry.effective_rank,
    }
    return "\n".join(f"{name:<46}{value:>8.3f}" for name, value in words.items())


def main() -> None:
    """Load, encode, probe, print, save."""
    (options,) = parser_of(ProbeOptions, __doc__).parse_args_into_dataclasses()
    logging.disable_progress_bar()  # of loading; the encoding's own bar stays
    require_room(options.output, "--output", overwrite=options.overwrite)
    sentences, corpus_name, report = load_corpus(options)
    corpus = f"{corpus_name}: {report}"
    print(corpus)
    model = build_encoder(
        os.fspath(embedded_encoder()) if options.model == "embedded" else options.model,
        pooling=None if options.pooling == "model" else options.pooling,
        max_seq_length=options.max_seq_length,
        head=False,
    )
    name = "all-MiniLM-L6-v2 (embedded)" if options.model == "embedded" else name_of(options.model)
    encoder = f"{name}, pooling {pooling_mode(model)}, {model.max_seq_length} tokens"
    print(encoder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        probe = probe_false_negatives(
            model,
            sentences,
            options.batch_sizes,
            options.top_k,
            options.repeats,
            options.seed,
            show_progress_bar=True,
        )
    for warning in caught:
        print(f"Note: {warning.message}.")
    verdict = probe.verdict(options.threshold)
    print(
        f"\nMean of the {probe.top_k} largest cosines of a batch, over {probe.repeats} batches; Gaussian: of "
        f"vectors without meaning\n\n{table(probe)}\n\n{geometry_lines(probe.geometry)}\n\n"
        f"{worst_pairs(probe, model.max_seq_length)}\n\n{verdict}\n"
    )
    run = describe_run()
    if options.private:
        words = shlex.split(run["command"])
        run["command"] = shlex.join(Path(w).name if Path(w).is_absolute() else w for w in words)
        probe = replace(probe, points=tuple(replace(p, pairs=()) for p in probe.points))
    title = f"{name}; {len(sentences):,} sentences of {corpus_name}"
    data = ProbeData(probe, options.threshold, title)
    record = {
        "verdict": verdict,
        "encoder": encoder,
        "corpus": corpus,
        "run": run,
    }
    try:
        files = save_figure(plot_probe(data), data, options.output, **record)
        print(f"Saved as {', '.join(map(str, files.values()))}.")
    except ImportError as error:
        path = figure_paths(options.output)["json"]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, figure_data_to_json(data, **record))
        print(f"Saved as {path}, without the figure: {error}")


if __name__ == "__main__":
    run(main)
