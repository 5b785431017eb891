"""What a grid of runs needs, loaded once per process: encoder, sentences, data to score on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from st_gsinfonce.cells import Setting, Source
from st_gsinfonce.corpus import load_sentences
from st_gsinfonce.embedded import embedded_corpus
from st_gsinfonce.encoder import embedded_encoder, load_encoder
from st_gsinfonce.evaluation import STS_TASKS, STSEvaluator, evaluate_sts, require_mteb
from st_gsinfonce.sts_data import hub_pairs, read_pairs
from st_gsinfonce.training import precision_arguments
from st_gsinfonce.weights import weights_digest

MINI_SENTENCES, MINI_STEPS = 512, 3
NAME_HELP = "File name of tables and figures in OUTPUT; --mini appends -mini."


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class GridOptions:
    """The common command line of the scripts that run grids; see the field's help."""

    output: str = _option(
        "runs/experiments",
        "Folder of tables, and of OUTPUT/cells, where finished runs are kept and found again.",
    )
    name: str = _option("grid", NAME_HELP)
    seeds: str = _option("0-5", "Seeds, as in 0-9 or 0,3,7; fewer than 6 can settle nothing.")
    devices: str = _option(
        "auto",
        "auto (all GPUs, else this process), or a list: cuda:0,cuda:1. Cells run side by side.",
    )
    model: str = _option("embedded", "Encoder to start from: embedded, hub name or folder.")
    corpus: str = _option("embedded", "Sentences: embedded, file, folder or hub dataset.")
    column: str | None = _option(None, "The corpus's text column.")
    max_sentences: int | None = _option(None, "Use the first so many sentences.")
    sts_data: str = _option(
        "none",
        "STS tasks: none, hub, or a folder of TASK/test.jsonl, STSBenchmark/validation.jsonl.",
    )
    pooling: str = _option("cls", "cls, mean, ..., or model to keep the model's own.")
    head: bool = _option(True, "Train through SimCSE's train-only head.")
    max_seq_length: int = _option(32, "Tokens of a text that are read.")
    batch_size: int = _option(64, "Sentences in a batch.")
    learning_rate: float = _option(3e-5, "At the first step.")
    epochs: float = _option(1.0, "Passes over the corpus.")
    max_steps: int = _option(-1, "Stop after so many steps; -1: after the epochs.")
    precision: str = _option("auto", "auto, bf16, fp16 or fp32.")
    eval_steps: int = _option(125, "Steps between evaluations on STS-B dev.")
    select: str = _option("final", "Weights to score: final, or best on STS-B dev.")
    mini: bool = _option(
        False, f"A smoke run: {MINI_STEPS} steps on {MINI_SENTENCES} sentences, two seeds."
    )

    def __post_init__(self) -> None:
        """Check what goes together; a smoke run overrides the size."""
        if Path(self.name).name != self.name or self.name in ("", ".."):
            raise ValueError(f"--name must be a file's name without a folder, got {self.name!r}")
        if self.select not in ("final", "best"):
            raise ValueError(f"--select must be final or best, got {self.select!r}")
        if self.select == "best" and self.sts_data == "none":
            raise ValueError("--select best needs --sts-data: the best is chosen on STS-B dev")
        if self.corpus != "embedded" and self.sts_data == "none":
            raise ValueError(
                "there is nothing to score on: give --sts-data hub or a folder, or train on the embedded "
                "corpus, which has held-out pairs"
            )
        for name in ("max_sentences", "batch_size", "eval_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.max_steps < 1 and self.max_steps != -1:
            raise ValueError(f"--max_steps must be -1 or at least 1, got {self.max_steps}")
        if not self.epochs > 0:
            raise ValueError(f"--epochs must be positive, got {self.epochs}")
        if self.column is not None and self.corpus == "embedded":
            raise ValueError(f"--column {self.column}: the embedded corpus has no columns")
        if self.mini:
            self.max_steps, self.max_sentences = MINI_STEPS, MINI_SENTENCES
            self.name = f"{self.name.removesuffix('-mini')}-mini"
            self.seeds = ",".join(map(str, parse_seeds(self.seeds)[:2]))


MOST_SEEDS = 10_000
"""More than anybody can train, less than memory holds."""


def parse_seeds(text: str) -> list[int]:
    """Return the numbers of a list of ranges: "0-2,7" gives 0, 1, 2, 7.

    Raises:
        ValueError: If the text is none, or names a seed twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal():
            raise ValueError(f"--seeds must be like 0-9 or 0,3,7, got {text!r}")
        if not int(first) <= int(last) < 2**32:
            raise ValueError(f"--seeds must be rising and below 2**32, got {text!r}")
        if int(last) - int(first) >= MOST_SEEDS:
            raise ValueError(
                f"--seeds must be at most {MOST_SEEDS:,} from one to another, got {text!r}"
            )
        seeds += range(int(first), int(last) + 1)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds must be distinct and at least one, got {text!r}")
    return seeds


@dataclass(frozen=True)
class Materials:
    """The loaded data of a grid.

    Attributes:
        encoder_path: What ``build_encoder`` loads.
        encoder: The same by content.
        sentences: To train on.
        corpus: The same by content.
        evaluation: The data to score on, by content.
        dev: Scores STS-B dev, or None.
        score: Returns an encoder's scores in points, by name.
    """

    encoder_path: str
    encoder: Source
    sentences: list[str]
    corpus: Source
    evaluation: tuple[Source, ...]
    dev: STSEvaluator | None
    score: Callable[[SentenceTransformer], dict[str, float]]


def load_materials(options: GridOptions) -> Materials:
    """Load what the options name.

    Raises:
        ImportError: If the embedded encoder or the STS tasks are asked for without the package for them.
        OSError: If the encoder, the corpus or the STS data cannot be found.
        ValueError: If they are malformed.
    """
    embedded = embedded_corpus() if options.corpus == "embedded" else None
    if embedded is not None:
        sentences = list(embedded.train_sentences[: options.max_sentences])
    else:
        sentences = load_sentences(
            options.corpus, column=options.column, max_sentences=options.max_sentences
        ).sentences
    path = os.fspath(embedded_encoder()) if options.model == "embedded" else options.model
    dev, folder, sources = None, None, []
    if options.sts_data != "none":
        require_mteb()  # and not after the first training
        folder = None if options.sts_data == "hub" else options.sts_data
        sources.append(Source("STS", _sts_digest(folder)))
        dev = STSEvaluator(data_dir=folder, batch_size=128, write_csv=False)
    docs = None
    if embedded is not None:
        sources.append(Source("docs", _digest(embedded.heldout_pairs)))
        docs = docs_evaluator(embedded.heldout_pairs)

    def score(model: SentenceTransformer) -> dict[str, float]:
        scores = {}
        if dev is not None:
            scores["STS-B dev"] = 100 * dev(model)[f"{dev.name}_spearman_cosine"]
            results = evaluate_sts(model, data_dir=folder, batch_size=128, show_progress_bar=False)
            scores |= results.row()
        if docs is not None:
            metrics = docs(model)
            scores["docs MRR@10"] = 100 * float(metrics["docs_cosine_mrr@10"])
            scores["docs recall@1"] = 100 * float(metrics["docs_cosine_recall@1"])
        return scores

    return Materials(
        encoder_path=path,
        encoder=Source(
            _name(options.model, "all-MiniLM-L6-v2 (embedded)"),
            _encoder_digest(path, own_pooling=options.pooling == "model"),
        ),
        sentences=sentences,
        corpus=Source(_name(options.corpus, "Python docs (embedded)"), _digest(sentences)),
        evaluation=tuple(sources),
        dev=dev,
        score=score,
    )


def setting_of(options: GridOptions, materials: Materials) -> Setting:
    """Return the setting that the options describe, with everything automatic decided.

    Raises:
        ValueError: For an unknown precision, or one that the hardware lacks.
    """
    device = device_kind(parse_devices(options.devices))
    precision = precision_arguments(
        options.precision,  # type: ignore[arg-type]  # checked there
        use_cpu=device == "cpu",
    )
    return Setting(
        encoder=materials.encoder,
        corpus=materials.corpus,
        evaluation=materials.evaluation,
        pooling=options.pooling,
        head=options.head,
        max_seq_length=options.max_seq_length,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        epochs=options.epochs,
        max_steps=options.max_steps,
        precision=next((name for name in ("bf16", "fp16") if precision[name]), "fp32"),
        device=device,
        eval_steps=options.eval_steps,
        select=options.select,  # type: ignore[arg-type]  # checked by the options
    )


def parse_devices(text: str) -> list[str]:
    """Return the devices to start a worker on each; empty means none, but this process.

    Raises:
        ValueError: If the text is no list of devices of one kind, or names a GPU that is not there.
    """
    gpus = torch.cuda.device_count()
    if text == "auto":
        return [f"cuda:{index}" for index in range(gpus)] if gpus > 1 else []
    devices = [device.strip() for device in text.split(",")]
    known = {"cpu", *(f"cuda:{index}" for index in range(gpus))}
    if unknown := [device for device in devices if device not in known]:
        raise ValueError(
            f"--devices: {unknown[0]!r} is none of {', '.join(sorted(known))}, nor is it auto"
        )
    if len({device.partition(":")[0] for device in devices}) > 1:
        raise ValueError(f"--devices must be of one kind, for seeds to be paired, got {text!r}")
    return devices


def device_kind(devices: list[str]) -> str:
    """Return "cpu", "cuda" or "mps"."""
    if devices:
        return devices[0].partition(":")[0]
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def docs_evaluator(pairs: Iterable[tuple[str, str]]) -> InformationRetrievalEvaluator:
    """Return an evaluator that finds the body of each (summary, body) pair by its summary."""
    pairs = list(pairs)
    return InformationRetrievalEvaluator(
        {f"q{i}": summary for i, (summary, _) in enumerate(pairs)},
        {f"d{i}": body for i, (_, body) in enumerate(pairs)},
        {f"q{i}": {f"d{i}"} for i in range(len(pairs))},
        mrr_at_k=[10],
        precision_recall_at_k=[1],
        name="docs",
        write_csv=False,
    )


def _digest(rows: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()


def _sts_digest(folder: str | None) -> str:
    splits = [(task, "test") for task in STS_TASKS] + [("STSBenchmark", "validation")]
    return _digest(read_pairs(folder, *split) if folder else hub_pairs(*split) for split in splits)


def _encoder_digest(path: str, *, own_pooling: bool) -> str:
    model = load_encoder(path, device="cpu")
    weights = weights_digest(model)
    if not own_pooling:
        return weights
    # Modules that are kept decide as much as the weights, which these have none of.
    return _digest(
        [weights, *((type(m).__name__, getattr(m, "pooling_mode", None)) for m in model)]
    )


def _name(value: str, embedded: str) -> str:
    """Return a name without the machine's folders."""
    if value == "embedded":
        return embedded
    return Path(value).name if Path(value).exists() else value
