"""The model card: sentence-transformers' own, with what was trained on what, its scores and its limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model_card import generate_model_card

from st_gsinfonce.citations import GS_INFONCE, SIMCSE
from st_gsinfonce.evaluation import STSResults
from st_gsinfonce.sts_data import hub_dataset

BEGIN = (
    "<!-- st_gsinfonce: this part is rewritten by every push; write your own text outside of it -->"
)
END = "<!-- st_gsinfonce: end -->"
# What sentence-transformers' example loads until it knows the name.
PLACEHOLDER = "sentence_transformers_model_id"
TAGS = ("simcse", "gs-infonce", "unsupervised")

# Sections that hold sentences of the corpus, and those that know more than a card made anew.
CORPUS_SECTIONS = ("### Training Dataset", "### Evaluation Dataset")
KEPT_SECTIONS = ("### Framework Versions", "### BibTeX")

# What of a run's settings a reader needs; places and services are not among them.
SETTINGS = (
    *("corpus", "column", "max_sentences", "model", "pooling", "max_seq_length", "dropout", "head"),
    "precision",
)
TRAINER_SETTINGS = (
    *(
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "max_steps",
    ),
    *(
        "learning_rate",
        "lr_scheduler_type",
        "warmup_steps",
        "warmup_ratio",
        "weight_decay",
        "optim",
    ),
    *(
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "bf16",
        "fp16",
        "seed",
        "data_seed",
    ),
    *(
        "eval_strategy",
        "eval_steps",
        "save_steps",
        "load_best_model_at_end",
        "metric_for_best_model",
    ),
    *("gradient_checkpointing", "torch_compile", "dataloader_drop_last"),
)


@dataclass(frozen=True)
class Facts:
    """What a card says beside what the encoder itself shows.

    Attributes:
        repo_id: ``organisation/model`` on the hub.
        results: Scores of the encoder.
        baseline: Scores of the encoder that it was trained from, or another to compare with.
        run: What a run was started with: ``settings``, ``loss``, ``trainer``, ``versions``,
            ``hardware``, ``date``, each optional.
        base_model: Name on the hub of the encoder that it was trained from.
        license: Identifier of the licence, as the hub writes it.
        language: Code of the language.
    """

    repo_id: str
    results: STSResults | None = None
    baseline: STSResults | None = None
    run: Mapping[str, Any] | None = None
    base_model: str | None = None
    license: str | None = None
    language: str | None = None

    def __post_init__(self) -> None:
        """Check that both rows of the table have the same columns."""
        if self.baseline is not None and self.results is None:
            raise ValueError("baseline is given without results: there is nothing to compare")
        if self.baseline is not None and self.results is not None:
            if list(self.baseline.scores) != list(self.results.scores):
                raise ValueError(
                    f"baseline has the tasks {list(self.baseline.scores)}, results "
                    f"{list(self.results.scores)}: evaluate both on the same"
                )


def write_card(
    model: SentenceTransformer,
    facts: Facts,
    written: str | None = None,
    published: str | None = None,
) -> str:
    """Return the text of README.md for the hub.

    A card that sentence-transformers wrote is made anew by it; what the old one alone knows
    (hyperparameters, logs, times, versions) is taken over, sentences of the corpus are not. A text that
    somebody wrote stays as it is, but for one part between two marks.

    Args:
        model: The encoder as it will be published, without the head; its card data is filled in.
        facts: What to say about it.
        written: The README.md of the folder, if it has one.
        published: The README.md on the hub, if there is one: it takes precedence.

    Raises:
        ValueError: If the metadata of an existing card cannot be read.
    """
    old = _parse(published if published is not None else written, "README.md")
    facts = replace(
        facts,
        base_model=facts.base_model or _get(old, "base_model") or _hub_name(facts.run),
        license=facts.license or _get(old, "license"),
        language=facts.language or _get(old, "language"),
    )
    card = _fresh_card(model, facts)
    if old is not None:
        text = old.text.replace(PLACEHOLDER, facts.repo_id)
        trained = "generated_from_trainer" in (old.data.get("tags") or [])
        if published is None and (trained or PLACEHOLDER in old.text):
            text = _merge(_without_block(old.text), card.text)
            old.data["widget"] = None  # sentences of the corpus
        _fill(old, card)
        card = old
        card.text = text
    card.text = _insert(card.text, _block(model, facts, old))
    card.data["tags"] = list(dict.fromkeys([*(card.data.get("tags") or []), *TAGS]))
    if facts.results is not None:
        _enter_scores(card, facts.repo_id, facts.results)
    return str(card)


def _parse(text: str | None, name: str) -> ModelCard | None:
    if text is None:
        return None
    try:
        return ModelCard(text)
    except Exception as error:  # of YAML, of the card data's constructor, or of its validation
        raise ValueError(f"the metadata at the top of {name} cannot be read: {error}") from error


def _get(card: ModelCard | None, key: str) -> Any:
    return None if card is None else card.data.get(key)


def _hub_name(run: Mapping[str, Any] | None) -> str | None:
    name = str((run or {}).get("settings", {}).get("model") or "")
    on_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not Path(name).exists()
    return name if on_hub else None


def _fresh_card(model: SentenceTransformer, facts: Facts) -> ModelCard:
    data = model.model_card_data
    data.set_model_id(facts.repo_id)
    data.model_name = facts.repo_id.rpartition("/")[2]
    data.base_model = facts.base_model
    data.license = facts.license
    if facts.language:
        data.set_language(facts.language)
    data.set_losses([])  # for sentence-transformers' own citation
    return ModelCard(generate_model_card(model))


def _fill(card: ModelCard, fresh: ModelCard) -> None:
    """Complete the metadata of a card: its own stays, what was asked for or is computed goes in."""
    for key, value in fresh.data.to_dict().items():  # type: ignore[no-untyped-call]
        if key == "tags":
            card.data[key] = [*(card.data.get(key) or []), *value]
        elif key in ("base_model", "license", "language", "library_name") or key not in card.data:
            card.data[key] = value
        elif card.data[key] is None:
            card.data[key] = value


def _merge(old: str, fresh: str) -> str:
    """Take the sections of the old card in their order, those that the fresh one has from there."""
    known, new = dict(_sections(old)), dict(_sections(fresh))
    merged = []
    for heading, body in known.items():
        if heading in new and not heading.startswith(KEPT_SECTIONS):
            merged.append(new[heading])
        elif not heading.startswith(CORPUS_SECTIONS):
            merged.append(_without_paths(body))
        elif losses := re.findall(r"^\* Loss: .*?(?=^#### |\Z)", body, re.MULTILINE | re.DOTALL):
            merged.append(f"### Loss\n\n{''.join(losses)}")
    return "".join([*merged, *(body for heading, body in new.items() if heading not in known)])


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Split a text at its headings of the second and third level; yield heading and section."""
    heading, fenced, comment = "", False, False
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("```"):
            fenced = not fenced
        if not fenced and not comment and re.match("###? ", line):
            yield heading, "".join(lines)
            heading, lines = line.strip(), []
        if "<!--" in line:
            comment = True
        if "-->" in line:
            comment = False
        lines.append(line)
    yield heading, "".join(lines)


def _without_paths(text: str) -> str:
    """Reduce absolute paths, of which a Trainer's settings may have some, to their last part."""
    paths = r"(?<![\w:/.<\\-])(?:~?(?:/[\w.@+-]+)+/|[A-Za-z]:\\(?:[\w.@+ -]+\\)+)(?=[\w.@+-])"
    return re.sub(paths, "", text)


def _without_block(text: str) -> str:
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + after if mark and end else text


def _insert(text: str, block: str) -> str:
    """Put the block where the last one was, else before the details of training, else at the end."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if mark and end:
        return before + block + after
    before, heading, after = text.partition("\n## Training Details\n")
    return f"{before.rstrip()}\n\n{block}\n{heading}{after}"


def _block(model: SentenceTransformer, facts: Facts, old: ModelCard | None) -> str:
    parts = [BEGIN, _introduction(facts, old)]
    if facts.results is not None:
        parts.append(_scores(facts, facts.results))
    if facts.run is not None:
        parts.append(_recipe(facts.run))
    parts.append(_limits(model, facts))
    text = _without_block(old.text) if old is not None else ""
    if missing := [c for c in (GS_INFONCE, SIMCSE) if c.strip().splitlines()[0] not in text]:
        entries = "\n".join(f"```bibtex\n{citation.strip()}\n```" for citation in missing)
        parts.append(f"### Papers to cite\n\n{entries}")
    return "\n\n".join([*parts, END])


def _introduction(facts: Facts, old: ModelCard | None) -> str:
    settings = (facts.run or {}).get("settings", {})
    tags = _get(old, "tags") or []
    sentences = next((t.partition(":")[2] for t in tags if t.startswith("dataset_size:")), None)
    corpus = _base_name(settings.get("corpus"))
    rows = {
        "Trained from": facts.base_model or _base_name(settings.get("model")) or "not stated",
        "Trained on": f"{corpus}, single sentences without labels"
        if corpus
        else "single sentences without labels",
        "Sentences": f"{int(sentences):,}" if sentences and sentences.isdigit() else None,
        "Licence": facts.license or "not stated: ask whoever published this before you use it",
    }
    return (
        "## Trained without labels, by GS-InfoNCE\n\n"
        "Two dropout views of each sentence are drawn together, and apart from the other sentences of "
        "the batch ([SimCSE](https://arxiv.org/abs/2104.08821)) and from Gaussian noise "
        "([GS-InfoNCE](https://arxiv.org/abs/2109.04321)). The projection head of the training is not "
        "part of this model.\n\n"
    ) + _table(rows)


def _scores(facts: Facts, results: STSResults) -> str:
    heads = list(results.row())
    rows = {f"{facts.repo_id} (after)": results.row()}
    if facts.baseline is not None:
        before = facts.baseline.row()
        rows = {f"{facts.baseline.model_name} (before)": before, **rows}
    lines = [f"| {n} | " + " | ".join(f"{v:.2f}" for v in row.values()) for n, row in rows.items()]
    if facts.baseline is not None:
        gains = (results.row()[head] - facts.baseline.row()[head] for head in heads)
        lines.append("| Difference | " + " | ".join(f"{gain:+.2f}" for gain in gains))
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    poolings = f"pooling: {results.pooling}"
    if facts.baseline is not None:
        poolings += f" (before: {facts.baseline.pooling})"
    return "\n".join(
        [
            "### Semantic textual similarity",
            "",
            f"| | {' | '.join(heads)} |",
            f"|:---|{'---:|' * len(heads)}",
            *(f"{line} |" for line in lines),
            "",
            "Spearman's correlation of cosine similarity and human score, times 100, on the test splits "
            f"as MTEB defines them ({versions}; {poolings}; "
            f"{sum(results.pairs.values()):,} pairs; encoder {results.revision[:12]}).",
        ]
    )


def _recipe(run: Mapping[str, Any]) -> str:
    loss = dict(run.get("loss") or {})
    settings = {key: run.get("settings", {}).get(key) for key in SETTINGS}
    for key in ("corpus", "model"):
        settings[key] = _base_name(settings[key])
    trainer = {key: (run.get("trainer") or {}).get(key) for key in TRAINER_SETTINGS}
    parts = ["### Recipe", _table(settings)]
    if loss:
        code = json.dumps({key: _base_name(value) for key, value in loss.items()}, indent=2)
        parts.append(f"Every setting of the loss:\n\n```json\n{code}\n```")
    if any(value is not None for value in trainer.values()):
        parts.append(f"The Trainer's settings that shape the result:\n\n{_table(trainer)}")
    made = {**(run.get("versions") or {}), **(run.get("hardware") or {}), "date": run.get("date")}
    if any(value is not None for value in made.values()):
        parts.append(f"Made with:\n\n{_table(made)}")
    return "\n\n".join(parts)


def _limits(model: SentenceTransformer, facts: Facts) -> str:
    limits = [
        f"Texts are cut after {model.max_seq_length} tokens, special ones included; it learned from "
        "single sentences.",
        "A similarity ranks texts, it is no probability: choose a threshold on data of your own.",
        "Close vectors mean similar wording and topic. Negation, numbers, names and who did what to whom "
        "may be missed; nothing checks whether a text is true.",
        "It knows the language and the domain of its base model and its corpus, with their biases; "
        "others were not tested.",
    ]
    if facts.results is None:
        limits.append("No scores were given with it.")
    else:
        limits.append(
            "The scores are those of one training. Another seed moves the average by up to a point or "
            "so, so a smaller difference says little."
        )
    return "### Limits\n\n" + "\n".join(f"- {limit}" for limit in limits)


def _table(rows: Mapping[str, object]) -> str:
    lines = [
        f"| {key} | {str(value).replace('|', chr(92) + '|')} |"
        for key, value in rows.items()
        if value is not None
    ]
    return "\n".join(["| | |", "|:---|:---|", *lines])


def _base_name(value: Any) -> Any:
    """Return the last part of what is a path rather than a name on the hub; other things as they are."""
    if not isinstance(value, str):
        return value
    pieces = [piece for piece in re.split(r"[\\/]", value) if piece]
    named = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", value) and not re.search(r"\.[A-Za-z]\w*$", value)
    return value if named and not Path(value).exists() else (pieces or [value])[-1]


def _enter_scores(card: ModelCard, repo_id: str, results: STSResults) -> None:
    """Enter each of the seven tasks as MTEB names it, in place of scores that were there before."""
    entries = []
    for task, score in results.scores.items():
        if (dataset := hub_dataset(task)) is not None:
            entries.append(
                EvalResult(
                    task_type="sentence-similarity",
                    task_name="STS",
                    dataset_type=dataset[0],
                    dataset_name=f"{task} (default)",
                    dataset_config="default",
                    dataset_split="test",
                    dataset_revision=dataset[1],
                    metric_type="cosine_spearman",
                    metric_name="cosine_spearman",
                    metric_value=score,
                    source_name="MTEB",
                    source_url="https://github.com/embeddings-benchmark/mteb/",
                )
            )
    replaced = {entry.dataset_type for entry in entries} | {*results.scores, "STS-average"}
    others = [e for e in card.data.get("eval_results") or [] if e.dataset_type not in replaced]
    card.data["eval_results"] = [*others, *entries]
    card.data["model_name"] = repo_id.rpartition("/")[2]
