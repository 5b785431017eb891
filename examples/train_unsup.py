"""Train a sentence encoder without labels by GS-InfoNCE, on your sentences.

    python examples/train_unsup.py --corpus sentences.txt --output runs/mine
    python examples/train_unsup.py --corpus sentences.txt --output runs/mine --resume
    torchrun --nproc-per-node 4 examples/train_unsup.py --corpus sentences.txt --output runs/mine \
        --per-device-train-batch-size 16 --gather-across-devices
    python examples/train_unsup.py --recipe bert-base-script --output runs/paper
    python examples/train_unsup.py --help    # every setting, those of the Trainer included

The defaults are the paper's for BERT-base: [CLS] through a train-only head, 32 tokens, batch 64, learning
rate 3e-5, one epoch, temperature 0.05, three times as many noise vectors as sentences in a batch, and the
best checkpoint by STS-B dev every 125 steps. On several devices each process takes a batch of its own:
with --gather-across-devices all of them together are one batch of the loss. OUTPUT/encoder holds the
result, which sentence-transformers alone loads; OUTPUT/checkpoints what is needed to resume;
OUTPUT/run.json the settings. --recipe starts from published settings instead, which flags override; its
corpus is the published one, a million sentences from the hub, unless --corpus names another.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.util import cos_sim, dot_score
from transformers import HfArgumentParser, set_seed
from transformers.utils import logging

from st_gsinfonce import (
    CachedGSInfoNCELoss,
    DiagnosticsCallback,
    GSInfoNCELoss,
    STSEvaluator,
    build_encoder,
    build_trainer,
    last_checkpoint,
    load_sentences,
    precision_arguments,
    save_encoder,
)
from st_gsinfonce.command_line import parser_of, run
from st_gsinfonce.provenance import describe_run
from st_gsinfonce.recipes import RECIPES, Recipe, get_recipe, record_in_card
from st_gsinfonce.sources import WIKI1M
from st_gsinfonce.whole_files import write_atomically

SIMILARITIES = {"cos": cos_sim, "dot": dot_score}


@dataclass
class UnsupArguments:
    """What to train on what, and the loss."""

    output: str = field(metadata={"help": "Folder of the run."})
    corpus: str | None = field(
        default=None,
        metadata={
            "help": "File (txt, csv, tsv, jsonl, parquet), folder of files, or hub dataset; with --recipe "
            f"{WIKI1M} by default."
        },
    )
    recipe: str | None = field(
        default=None, metadata={"help": f"Published settings: {', '.join(RECIPES)}."}
    )
    column: str | None = field(default=None, metadata={"help": "The corpus's text column."})
    max_sentences: int | None = field(default=None, metadata={"help": "Use the first so many."})
    model: str = field(
        default="bert-base-uncased",
        metadata={
            "help": "Encoder to start from: hub name or folder; a SimCSE encoder to go on with."
        },
    )
    pooling: str = field(
        default="cls", metadata={"help": "cls, mean, ..., or 'model' to keep the model's own."}
    )
    max_seq_length: int = field(default=32, metadata={"help": "Tokens of a text that are read."})
    dropout: float | None = field(
        default=None, metadata={"help": "Of every dropout; None: the model's own."}
    )
    head: bool = field(default=True, metadata={"help": "Train through SimCSE's train-only head."})
    precision: str = field(default="auto", metadata={"help": "auto, bf16, fp16 or fp32."})
    eval_data: str = field(
        default="hub",
        metadata={
            "help": "STS-B dev: 'hub', a folder with STSBenchmark/validation.jsonl, or 'none'."
        },
    )
    resume: bool = field(
        default=False,
        metadata={"help": "Go on from the last whole checkpoint; before the first, begin anew."},
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace an earlier run in OUTPUT."})
    scale: float = field(default=20.0, metadata={"help": "1 / temperature."})
    noise: str = field(
        default="sampled", metadata={"help": "sampled, or expected: the closed form."}
    )
    noise_ratio: float | None = field(
        default=None,
        metadata={
            "help": "Noise vectors per sentence of a batch; without any of the three flags for it, 3."
        },
    )
    noise_size: int | None = field(default=None, metadata={"help": "Noise vectors; 0: none."})
    noise_weight: float = field(default=1.0, metadata={"help": "Weight of the noise's sum."})
    noise_mean: float = field(default=0.0, metadata={"help": "Mean of the noise."})
    noise_std: float = field(default=1.0, metadata={"help": "Standard deviation of the noise."})
    virtual_cosine: float | None = field(
        default=None, metadata={"help": "Mass of expected noise, as one negative with this cosine."}
    )
    noise_seed: int | None = field(default=None, metadata={"help": "None: that of --seed."})
    similarity: str = field(default="cos", metadata={"help": "cos or dot."})
    gather_across_devices: bool = field(
        default=False, metadata={"help": "Negatives from all devices."}
    )
    mini_batch_size: int | None = field(
        default=None,
        metadata={"help": "Embed so many texts at a time: a large batch in little memory."},
    )
    diagnostics: bool = field(
        default=True,
        metadata={"help": "Log cosines, alignment, uniformity and the noise's share; a CSV too."},
    )


def parse_arguments() -> tuple[UnsupArguments, SentenceTransformerTrainingArguments]:
    """Parse both dataclasses; ours come first, since the Trainer's defaults depend on them."""
    ours = HfArgumentParser(UnsupArguments, add_help=False, allow_abbrev=False)
    if {"-h", "--help"} & set(sys.argv):
        settings = UnsupArguments(output="OUTPUT")
    else:
        settings, _ = ours.parse_args_into_dataclasses(return_remaining_strings=True)
    recipe = None if settings.recipe is None else get_recipe(settings.recipe)
    parser = parser_of((UnsupArguments, SentenceTransformerTrainingArguments), __doc__)
    parser.set_defaults(
        output_dir=str(Path(settings.output) / "checkpoints"),
        per_device_train_batch_size=64,
        learning_rate=3e-5,
        num_train_epochs=1,
        logging_steps=25,
        save_steps=125,
        save_total_limit=2,
        report_to="none",
        **precision_arguments(settings.precision),
    )
    if settings.eval_data != "none":
        parser.set_defaults(
            eval_strategy="steps",
            eval_steps=125,
            load_best_model_at_end=True,
            metric_for_best_model="eval_sts-dev_spearman_cosine",
            greater_is_better=True,
        )
    if recipe is not None:
        parser.set_defaults(**recipe_defaults(recipe, settings))
    settings, arguments = parser.parse_args_into_dataclasses()
    if settings.corpus is None:
        raise ValueError(
            "--corpus is missing: give a file or folder of sentences or a hub dataset, or a --recipe"
        )
    return settings, arguments


def recipe_defaults(recipe: Recipe, settings: UnsupArguments) -> dict[str, Any]:
    """Return what the recipe sets, but for what goes with flags that were typed."""
    defaults = {
        "corpus": WIKI1M,
        "model": recipe.model,
        **recipe.encoder_arguments(),
        **recipe.loss_arguments(),
    }
    defaults |= recipe.trainer_arguments()
    if settings.eval_data == "none":
        for name in (
            "eval_strategy",
            "load_best_model_at_end",
            "metric_for_best_model",
            "greater_is_better",
        ):
            del defaults[name]
    # How much noise there is can be said in three ways; the typed one counts.
    if any(
        x is not None for x in (settings.noise_ratio, settings.noise_size, settings.virtual_cosine)
    ):
        del defaults["noise_ratio"], defaults["noise_size"]
    return defaults


def recipe_changes(
    recipe: Recipe, settings: UnsupArguments, arguments: SentenceTransformerTrainingArguments
) -> dict[str, Any]:
    """Return the settings in which the run differs from its recipe."""
    used = {**arguments.to_dict(), **vars(settings)}  # to_dict has plain values
    used["processes"] = arguments.world_size
    # Without evaluation there is no best checkpoint either: one change, not several.
    evaluated = UnsupArguments(output="", eval_data=settings.eval_data)
    wanted = recipe_defaults(recipe, evaluated) | {
        "max_steps": -1,
        "max_sentences": None,
        "noise": "sampled",
        "noise_weight": 1.0,
        "noise_mean": 0.0,
        "virtual_cosine": None,
        "similarity": "cos",
        "gradient_accumulation_steps": 1,
        "processes": 1,
    }
    changes = {name: used[name] for name, value in wanted.items() if used[name] != value}
    if settings.eval_data == "none":
        changes["eval_data"] = "none"
    for name in {"corpus", "model"} & changes.keys():
        if Path(changes[name]).exists():  # the card is no place for a machine's folders
            changes[name] = Path(changes[name]).name
    return changes


def build_loss(model: SentenceTransformer, settings: UnsupArguments, seed: int) -> GSInfoNCELoss:
    """Return the loss that the settings describe."""
    if settings.similarity not in SIMILARITIES:
        raise ValueError(f"--similarity must be cos or dot, got {settings.similarity!r}")
    loss: Callable[..., GSInfoNCELoss] = GSInfoNCELoss
    if settings.mini_batch_size is not None:
        loss = partial(CachedGSInfoNCELoss, mini_batch_size=settings.mini_batch_size)
    return loss(
        model,
        scale=settings.scale,
        noise_ratio=settings.noise_ratio,
        noise_size=settings.noise_size,
        noise_weight=settings.noise_weight,
        noise_mean=settings.noise_mean,
        noise_std=settings.noise_std,
        noise=settings.noise,
        virtual_cosine=settings.virtual_cosine,
        seed=seed if settings.noise_seed is None else settings.noise_seed,
        similarity_fct=SIMILARITIES[settings.similarity],
        gather_across_devices=settings.gather_across_devices,
    )


def main() -> None:
    """Load, evaluate, train, evaluate, save."""
    settings, arguments = parse_arguments()
    main_process = arguments.process_index == 0
    run, encoder_folder = Path(settings.output), Path(settings.output) / "encoder"
    if settings.resume and settings.overwrite:
        raise ValueError(
            "--overwrite deletes the checkpoints that --resume goes on from: give one of them"
        )
    if encoder_folder.exists() and not settings.overwrite:
        raise FileExistsError(
            f"{encoder_folder} holds the encoder of a finished run: choose another --output; to train it "
            f"further, add --model {encoder_folder}; --overwrite starts this run anew"
        )
    starts_anew = settings.overwrite
    record = run / "run.json"
    if settings.resume:
        try:
            arguments.resume_from_checkpoint = str(last_checkpoint(arguments.output_dir))
        except FileNotFoundError:
            if not run.is_dir():
                raise
            # It was killed before its first checkpoint was whole; without a record it is no run of ours.
            starts_anew = record.is_file()
    elif main_process and not settings.overwrite:
        refuse_another_run(record)
    set_seed(arguments.seed)
    logging.disable_progress_bar()  # of loading and saving; the training's own bar stays

    corpus = load_sentences(
        settings.corpus, column=settings.column, max_sentences=settings.max_sentences
    )
    evaluator = None
    if settings.eval_data != "none":
        folder = None if settings.eval_data == "hub" else settings.eval_data
        evaluator = STSEvaluator(data_dir=folder)
    model = build_encoder(
        settings.model,
        pooling=None if settings.pooling == "model" else settings.pooling,
        max_seq_length=settings.max_seq_length,
        dropout=settings.dropout,
        head=settings.head,
        seed=arguments.seed,
        device="cpu" if arguments.use_cpu else None,
    )
    recipe = None if settings.recipe is None else get_recipe(settings.recipe)
    changes = {} if recipe is None else recipe_changes(recipe, settings, arguments)
    if recipe is not None:
        record_in_card(model, recipe, changes)
    trainer = build_trainer(
        model,
        corpus.sentences,
        arguments,
        loss=build_loss(model, settings, arguments.seed),
        evaluator=evaluator,
        overwrite=starts_anew,
    )
    if starts_anew and main_process:
        (run / "diagnostics.csv").unlink(missing_ok=True)
    if settings.diagnostics:
        trainer.add_callback(DiagnosticsCallback(trainer, csv_file=run / "diagnostics.csv"))
    previous = run / "encoder.overwritten"
    if main_process:
        if settings.overwrite and encoder_folder.exists():
            shutil.rmtree(previous, ignore_errors=True)
            encoder_folder.rename(previous)  # kept until the new one is whole
        if settings.resume and arguments.resume_from_checkpoint is None:
            print(f"{run} holds no whole checkpoint: the run begins at its first step")
        print(f"{settings.corpus}: {corpus.report}")
        write_settings(
            record,
            {
                "settings": asdict(settings),
                "recipe": None if recipe is None else asdict(recipe) | {"changes": changes},
                "loss": trainer.loss.get_config_dict(),
                "trainer": arguments.to_sanitized_dict(),
            },
            resumed=settings.resume,
            replace=settings.overwrite,
        )
    before = evaluator(model)[evaluator.primary_metric] if evaluator else None
    if before is not None and main_process:
        print(f"STS-B dev before training: {100 * before:.2f}", flush=True)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)

    after = evaluator(model)[evaluator.primary_metric] if evaluator else None
    if not main_process:
        return
    save_encoder(model, encoder_folder)
    shutil.rmtree(previous, ignore_errors=True)
    if before is not None and after is not None:
        best = trainer.state.best_model_checkpoint
        step = f" (step {best.rsplit('-', 1)[-1]}, the best)" if best else ""
        print(
            f"STS-B dev after training{step}: {100 * after:.2f}, {100 * (after - before):+.2f} points"
        )
    print(f"Saved to {encoder_folder}: SentenceTransformer({str(encoder_folder)!r}) loads it.")


def refuse_another_run(record: Path) -> None:
    """Raise an error where another run has left its record, or is about to train."""
    if record.exists():
        raise FileExistsError(
            f"{record} is of another run: choose another --output, go on with that run by --resume, or "
            "start it anew by --overwrite"
        )


def write_settings(path: Path, settings: dict[str, Any], *, resumed: bool, replace: bool) -> None:
    """Keep what the run was started with beside its results; a resumed run must go on with the same."""
    if resumed and path.is_file():
        try:
            started = json.loads(path.read_text(encoding="utf-8"))
            started = {part: dict(started[part]) for part in ("settings", "loss", "trainer")}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}, which tells what the run was started with, is damaged ({error!r}): delete it to "
                "go on with the settings given"
            ) from error
        free = {"resume", "overwrite", "resume_from_checkpoint", "disable_tqdm", "device"}
        changed = [
            f"{name}: {started[part].get(name)!r}, now {value!r}"
            for part in started
            for name, value in json.loads(json.dumps(settings[part])).items()
            if name not in free and started[part].get(name) != value
        ]
        if changed:
            raise ValueError(
                f"--resume goes on with the settings that the run was started with ({path}), but these "
                f"differ: {'; '.join(changed)}"
            )
        return
    if not (resumed or replace):
        refuse_another_run(path)  # one started while this one loaded
    record = describe_run() | settings
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
