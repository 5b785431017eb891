"""Train a sentence encoder by GS-InfoNCE in three to six minutes: no arguments, no network, no GPU.

    python examples/quickstart.py
    python examples/quickstart.py --max-steps 5                  # a smoke run
    python examples/quickstart.py --sts-data FOLDER              # also on STS-B, from TASK/SPLIT.jsonl

The start is a small encoder's [CLS] vector, which was not trained to stand for a sentence (the encoder
pools by mean): it plays the raw pre-trained encoder. The sentences are those of Python's own
documentation. Both are measured on held-out documentation: does the summary line of a docstring find the
text that follows it?

The noise is the expected one at a mass far above the published, one virtual negative of cosine 0.5: in this
setting it gave a better encoder by STS than none; elsewhere it need not, see "Does the noise help?" in the
README.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from transformers import set_seed
from transformers.utils import logging

from st_gsinfonce import (
    GSInfoNCELoss,
    STSEvaluator,
    build_encoder,
    build_trainer,
    embedded_corpus,
    embedded_encoder,
    load_encoder,
    precision_arguments,
    save_encoder,
)
from st_gsinfonce.command_line import parser_of, run
from st_gsinfonce.materials import docs_evaluator
from st_gsinfonce.provenance import describe_run
from st_gsinfonce.whole_files import write_atomically

VIRTUAL_COSINE = 0.5
QUERY = "How do I parse the arguments of the command line?"


@dataclass
class QuickstartArguments:
    """Settings of the quick start; the defaults need nothing."""

    output: str = field(
        default="runs/quickstart", metadata={"help": "New folder for the trained encoder."}
    )
    max_steps: int = field(
        default=-1, metadata={"help": "Stop after so many steps; -1: one epoch."}
    )
    sts_data: str | None = field(
        default=None,
        metadata={"help": "Folder with STSBenchmark/validation.jsonl: evaluate on it too."},
    )
    json: str | None = field(
        default=None, metadata={"help": "New file for the scores and how they were made."}
    )
    precision: str = field(default="auto", metadata={"help": "auto, bf16, fp16 or fp32."})
    seed: int = field(default=42, metadata={"help": "Of batches, dropout, head and noise."})


class Measurement:
    """The evaluations of the quick start, run on one encoder after the other."""

    def __init__(self, pairs: tuple[tuple[str, str], ...], sts_data: str | None) -> None:
        self.docs = docs_evaluator(pairs)
        self.sts = STSEvaluator(data_dir=sts_data, write_csv=False) if sts_data else None
        self.rows: list[tuple[str, dict[str, float]]] = []

    def __call__(self, label: str, model: SentenceTransformer) -> dict[str, float]:
        """Evaluate, keep the row and return it: scores x 100."""
        metrics = self.docs(model)
        row = {
            "docs MRR@10": 100 * metrics["docs_cosine_mrr@10"],
            "docs recall@1": 100 * metrics["docs_cosine_recall@1"],
        }
        if self.sts is not None:
            row["STS-B dev"] = 100 * self.sts(model)[self.sts.primary_metric]
        self.rows.append((label, row))
        return row

    def table(self) -> str:
        """Return the rows as text."""
        columns = list(self.rows[0][1])
        lines = [" " * 40 + "".join(f"{column:>15}" for column in columns)]
        for label, row in self.rows:
            lines.append(f"{label:<40}" + "".join(f"{row[column]:>15.2f}" for column in columns))
        return "\n".join(lines)


def main() -> None:
    """Evaluate, train, evaluate, save, reload, search."""
    (settings,) = parser_of(QuickstartArguments, __doc__).parse_args_into_dataclasses()
    started = time.perf_counter()
    output = Path(settings.output)
    if output.exists():
        raise FileExistsError(
            f"{output} exists and is not overwritten: give --output another folder"
        )
    if settings.json and Path(settings.json).exists():
        raise FileExistsError(
            f"{settings.json} exists and is not overwritten: give --json another file"
        )
    precision = precision_arguments(settings.precision)
    set_seed(settings.seed)
    logging.disable_progress_bar()  # of loading and saving; the training's own bar stays

    corpus = embedded_corpus()
    print(
        f"1. Evaluate an untrained encoder on {len(corpus.heldout_pairs)} held-out documentation pairs.\n"
        f"2. Train it by GS-InfoNCE on {len(corpus.train_sentences)} sentences of Python's documentation"
        f"{'' if settings.max_steps < 0 else f', {settings.max_steps} steps'}, "
        f"its noise one virtual negative of cosine {VIRTUAL_COSINE}.\n"
        f"3. Evaluate it again, save it to {output}, reload it and search with it.\n"
        f"About {'3' if precision['bf16'] else '6'} minutes on 2 CPU cores; nothing is downloaded.\n"
    )
    model = build_encoder(embedded_encoder(), seed=settings.seed)
    measure = Measurement(corpus.heldout_pairs, settings.sts_data)
    before = measure("before: [CLS], untrained", model)
    print(measure.table(), "\n", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=scratch,
            max_steps=settings.max_steps,
            num_train_epochs=1,
            per_device_train_batch_size=64,
            learning_rate=3e-5,
            seed=settings.seed,
            logging_steps=25,
            save_strategy="no",
            report_to="none",
            **precision,
        )
        loss = GSInfoNCELoss(model, noise="expected", virtual_cosine=VIRTUAL_COSINE)
        trainer = build_trainer(model, corpus.train_sentences, arguments, loss=loss)
        training = trainer.train()

    after = measure("after: [CLS], GS-InfoNCE", model)
    measure("for reference: as published, mean-pooled", load_reference(model))
    save_encoder(model, output)

    vectors = model.encode(list(measure.docs.corpus), convert_to_numpy=True)
    reloaded = SentenceTransformer(str(output), device=str(model.device))
    again = reloaded.encode(list(measure.docs.corpus), convert_to_numpy=True)
    if not np.array_equal(vectors, again):
        raise RuntimeError(
            f"the encoder reloaded from {output} gives other vectors than the trained one"
        )

    if settings.json:
        record = {
            **describe_run(),
            "settings": asdict(settings) | precision,
            "loss": trainer.loss.get_config_dict(),
            "steps": training.global_step,
            "seconds": {
                "training": round(training.metrics["train_runtime"], 1),
                "all": round(time.perf_counter() - started, 1),
            },
            "scores": dict(measure.rows),
        }
        Path(settings.json).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(settings.json), json.dumps(record, indent=2) + "\n")

    print(f"\n{measure.table()}\n")
    print("Scores x 100; texts are cut to 32 tokens.")
    gain = after["docs MRR@10"] - before["docs MRR@10"]
    print(f"Training moved docs MRR@10 by {gain:+.2f} points.")
    print(f"\nSaved to {output}; sentence-transformers alone loads it. With the reloaded encoder:")
    print(f"\n  {QUERY}")
    for score, text in nearest(reloaded, QUERY, list(measure.docs.corpus)):
        print(f"  {score:.2f}  {text if len(text) < 80 else text[:77] + '...'}")
    print(f"\nDone in {time.perf_counter() - started:.0f} s.")


def load_reference(like: SentenceTransformer) -> SentenceTransformer:
    """Return the encoder as it was published, on the same footing: 32 tokens."""
    reference = load_encoder(embedded_encoder(), device=str(like.device))
    reference.max_seq_length = like.max_seq_length
    return reference


def nearest(
    model: SentenceTransformer, query: str, texts: list[str], count: int = 3
) -> list[tuple[float, str]]:
    """Return the texts nearest to a query with their cosine similarities, best first."""
    similarities = model.similarity(model.encode([query]), model.encode(texts))[0]
    best = torch.topk(similarities, count)
    return [
        (score, texts[i])
        for score, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


if __name__ == "__main__":
    run(main)
