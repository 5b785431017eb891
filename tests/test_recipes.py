"""The published settings, and that they reach the objects that train.

- Every recipe's numbers are those of its source.
- A recipe ends up in the encoder's config, the loss, the Trainer: nothing of it is lost on the way.
- By the recipe our trainer does what a plain PyTorch loop written from the publication does.
- The training script runs a recipe, flags override it, and the run and the model card say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import RunExample, make_sentences, record_losses
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.util import cos_sim
from torch import Tensor, nn

from st_gsinfonce import GSInfoNCELoss, ProjectionHead, build_encoder, build_trainer, strip_head
from st_gsinfonce.recipes import RECIPES, Recipe, get_recipe, record_in_card

# By hand from the sources: model, batch, learning rate, dropout, M, sigma.
PUBLISHED = {
    "simcse-bert-base": ("bert-base-uncased", 64, 3e-5, 0.1, 0, None),
    "simcse-bert-large": ("bert-large-uncased", 64, 1e-5, 0.1, 0, None),
    "simcse-roberta-base": ("roberta-base", 512, 1e-5, 0.1, 0, None),
    "simcse-roberta-large": ("roberta-large", 512, 3e-5, 0.1, 0, None),
    "bert-base-script": ("bert-base-uncased", 64, 3e-5, 0.2, 192, 0.5),
    "bert-large-script": ("bert-large-uncased", 64, 1e-5, 0.2, 192, 0.1),
    "roberta-base-script": ("roberta-base", 64, 1e-5, 0.1, 192, 0.1),
    "roberta-large-script": ("roberta-large", 128, 2e-5, 0.1, 192, 0.5),
    "bert-base": ("bert-base-uncased", 64, 3e-5, 0.1, 192, None),
    "bert-large": ("bert-large-uncased", 64, 1e-5, 0.1, 192, None),
    "roberta-base": ("roberta-base", 64, 1e-5, 0.1, 192, None),
    "roberta-large": ("roberta-large", 128, 2e-5, 0.1, 384, None),
}


def build(recipe: Recipe, model: Path, seed: int = 0) -> SentenceTransformer:
    return build_encoder(model, **recipe.encoder_arguments(), seed=seed, device="cpu")


def arguments_of(recipe: Recipe, output: Path, **more: Any) -> SentenceTransformerTrainingArguments:
    return SentenceTransformerTrainingArguments(
        output_dir=str(output),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        **{**recipe.trainer_arguments(), **more},
    )


def test_there_is_a_recipe_for_every_published_run() -> None:
    assert set(RECIPES) == set(PUBLISHED)
    assert all(name == recipe.name and recipe.source for name, recipe in RECIPES.items())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_reaches_the_objects(name: str, tiny_bert: Path, tmp_path: Path) -> None:
    base, batch, rate, dropout, noise, std = PUBLISHED[name]
    recipe = get_recipe(name)
    assert recipe.model == base
    model = build(recipe, tiny_bert)
    config = model.transformers_model.config
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == dropout
    drops = {m.p for m in model.modules() if isinstance(m, nn.Dropout)}
    assert drops == {dropout}
    assert model.max_seq_length == 32
    assert model[1].get_config_dict()["pooling_mode"] == "cls"
    assert isinstance(model[2], ProjectionHead)
    vectors = model.encode(["the cat"], convert_to_tensor=True)
    assert torch.equal(
        strip_head(model).encode(["the cat"], convert_to_tensor=True), vectors
    )  # train-only

    model = build(recipe, tiny_bert)
    rows = []

    def recorded(a: Tensor, b: Tensor) -> Tensor:
        rows.append(len(b))
        return cos_sim(a, b)

    loss = GSInfoNCELoss(model, **recipe.loss_arguments(), seed=0, similarity_fct=recorded)
    loss.compute_loss_from_embeddings(list(torch.randn(2, batch, 32)))
    assert rows == ([batch, noise] if noise else [batch])
    assert loss.temperature == 0.05
    assert loss.noise == "sampled" and loss.noise_weight == 1
    if std is not None:
        assert loss.noise_std == std

    arguments = arguments_of(recipe, tmp_path / "run")
    assert arguments.per_device_train_batch_size == batch
    assert arguments.learning_rate == rate
    assert arguments.num_train_epochs == 1
    assert arguments.lr_scheduler_type == "linear" and arguments.warmup_steps == 0
    assert arguments.weight_decay == 0 and arguments.max_grad_norm == 1
    assert arguments.eval_strategy == arguments.save_strategy == "steps"
    assert arguments.eval_steps == arguments.save_steps == 125
    assert arguments.load_best_model_at_end and arguments.greater_is_better
    assert arguments.metric_for_best_model == "eval_sts-dev_spearman_cosine"


def test_recipes_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        get_recipe("bert-base").dropout = 0.3  # type: ignore[misc]
    with pytest.raises(ValueError, match="no recipe 'bert'; there are bert-base, bert-large"):
        get_recipe("bert")


def test_the_head_starts_as_the_authors_do() -> None:
    head = ProjectionHead(256, seed=0)
    weights = head.linear.weight.detach()
    assert weights.mean().abs() < 1e-3 and 0.0195 < weights.std() < 0.0205
    inside = (weights.abs() < 0.02).float().mean()
    assert 0.67 < inside < 0.7  # 68.3% of a normal distribution; a uniform one of that sd has 57.7%
    assert torch.equal(head.linear.bias, torch.zeros(256))


class Recorder:
    """The batches that the Trainer collates, and the dropout's random state at its first step."""

    def __init__(self, collate: Callable[[list[dict[str, Any]]], Any]) -> None:
        self.collate = collate
        self.valid_label_columns = collate.valid_label_columns  # type: ignore[attr-defined]
        self.batches: list[list[str]] = []

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        self.batches.append([row["text"] for row in rows])
        return self.collate(rows)


def plain_loop(
    recipe: Recipe,
    model: SentenceTransformer,
    batches: list[list[str]],
    decay: bool = True,
    clip: bool = True,
) -> tuple[list[float], list[float]]:
    """Train as the publication says, by PyTorch and transformers alone: losses and gradient norms."""
    bert, head = model.transformers_model, model[2].linear
    assert bert is not None
    parameters = [*bert.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    bert.train()
    losses, norms = [], []
    for step, texts in enumerate(batches):
        for group in optimizer.param_groups:
            left = 1 - step / len(batches) if decay else 1
            group["lr"] = recipe.learning_rate * left
        tokens = model.tokenizer(
            texts, padding=True, truncation=True, max_length=32, return_tensors="pt"
        )
        twice = {key: torch.cat([value, value]) for key, value in tokens.items()}
        views = torch.tanh(head(bert(**twice).last_hidden_state[:, 0])).chunk(2)
        similarity = F.normalize(views[0]) @ F.normalize(views[1]).T
        loss = F.cross_entropy(similarity / recipe.temperature, torch.arange(len(texts)))
        optimizer.zero_grad()
        loss.backward()
        limit = recipe.max_grad_norm if clip else float("inf")
        norms.append(nn.utils.clip_grad_norm_(parameters, limit).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def test_the_trainer_equals_a_plain_loop(tiny_bert: Path, tmp_path: Path) -> None:
    # A learning rate that moves the tiny encoder: at 3e-5 a wrong schedule would not show.
    recipe = replace(get_recipe("simcse-bert-base"), batch_size=16, learning_rate=2e-3)
    model = build(recipe, tiny_bert)
    loss = GSInfoNCELoss(model, **recipe.loss_arguments(), seed=0)
    ours = record_losses(loss)
    states: list[Tensor] = []
    loss.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
    arguments = arguments_of(
        recipe,
        tmp_path / "run",
        eval_strategy="no",
        save_strategy="no",
        load_best_model_at_end=False,
    )
    trainer = build_trainer(model, make_sentences(320), arguments, loss=loss)
    trainer.data_collator = recorder = Recorder(trainer.data_collator)
    trainer.train()
    assert len(ours) == 20 and len(recorder.batches) >= 20
    batches = recorder.batches[:20]
    assert sorted(sum(batches, [])) == sorted(make_sentences(320))

    def theirs(**wrong: bool) -> tuple[Tensor, Tensor]:
        fresh = build(recipe, tiny_bert)
        torch.set_rng_state(states[0])
        losses, norms = plain_loop(recipe, fresh, batches, **wrong)
        return torch.tensor(losses), torch.tensor(norms)

    losses, norms = theirs()
    assert norms.max() > 1 > norms.min()  # the clipping has something to do
    assert ours[-1] < ours[0] - 0.1
    torch.testing.assert_close(torch.tensor(ours), losses, rtol=0, atol=1e-5)
    for wrong in ("decay", "clip"):  # the comparison can fail
        assert (theirs(**{wrong: False})[0] - losses).abs().max() > 1e-3


def test_the_card_names_the_recipe(make_encoder: Callable[..., SentenceTransformer]) -> None:
    model = make_encoder()
    record_in_card(model, get_recipe("bert-base-script"))
    data = model.model_card_data
    assert data.model_name == "bert-base-uncased trained by the recipe bert-base-script"
    assert "recipe:bert-base-script" in data.tags and "sentence-transformers" in data.tags
    record_in_card(model, get_recipe("bert-base-script"), {"dropout": 0.3})
    assert data.model_name is not None and data.model_name.endswith("with dropout=0.3")
    record_in_card(model, get_recipe("bert-base-script"), {"model": "mine"})
    assert data.model_name == "mine trained by the recipe bert-base-script"


@pytest.fixture
def script(run_example: RunExample) -> RunExample:
    return partial(run_example, "train_unsup.py")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_script_parses_a_recipe(name: str, script: RunExample) -> None:
    base, batch, rate, dropout, noise, _ = PUBLISHED[name]
    module = script("--recipe", name, "--output", "o", name="module")
    settings, arguments = module["parse_arguments"]()
    assert settings.corpus == "princeton-nlp/datasets-for-simcse"
    assert (settings.model, settings.dropout) == (base, dropout)
    assert (arguments.per_device_train_batch_size, arguments.learning_rate) == (batch, rate)
    assert (settings.noise_size, settings.noise_ratio) in ((noise, None), (None, noise / batch))
    assert module["recipe_changes"](get_recipe(name), settings, arguments) == {}


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        (["--learning-rate", "1e-4"], {"learning_rate": 1e-4}),
        (["--noise-ratio", "8"], {"noise_ratio": 8.0, "noise_size": None}),
        (["--noise-size", "0"], {"noise_size": 0}),
        (["--no-head", "--dropout", "0.3"], {"head": False, "dropout": 0.3}),
        (["--max-steps", "5"], {"max_steps": 5}),
        (
            ["--similarity", "dot", "--gradient-accumulation-steps", "2", "--noise-mean", "0.1"],
            {"similarity": "dot", "gradient_accumulation_steps": 2, "noise_mean": 0.1},
        ),
        (
            ["--corpus", "mine.txt", "--max-sentences", "9"],
            {"corpus": "mine.txt", "max_sentences": 9},
        ),
        (
            ["--noise", "expected", "--virtual-cosine", "0.5"],
            {"noise": "expected", "virtual_cosine": 0.5, "noise_size": None},
        ),
        (["--eval-data", "none"], {"eval_data": "none"}),
        # typed, but what the recipe says
        (["--dropout", "0.2"], {}),
    ],
)
def test_flags_override_a_recipe(
    flags: list[str], changes: dict[str, Any], script: RunExample
) -> None:
    given = ["--recipe", "bert-base-script", "--output", "o"]
    module = script(*given, *flags, name="module")
    settings, arguments = module["parse_arguments"]()
    recipe = get_recipe("bert-base-script")
    assert module["recipe_changes"](recipe, settings, arguments) == changes
    assert settings.scale == 20 and arguments.per_device_train_batch_size == 64  # the rest stays


def test_more_processes_are_a_change(script: RunExample, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("--recipe", "bert-base", "--output", "o", name="module")
    settings, arguments = module["parse_arguments"]()
    monkeypatch.setattr(type(arguments), "world_size", 4)
    changes = module["recipe_changes"](get_recipe("bert-base"), settings, arguments)
    assert changes == {"processes": 4}


def test_without_a_recipe_a_corpus_is_needed(script: RunExample) -> None:
    with pytest.raises(SystemExit, match="error: --corpus is missing: give a file"):
        script("--output", "o")


def test_an_unknown_recipe_ends_with_a_reason(script: RunExample) -> None:
    with pytest.raises(SystemExit, match="no recipe 'bert-huge'; there are bert-base"):
        script("--recipe", "bert-huge", "--corpus", "c", "--output", "o")


def test_the_run_and_the_card_say_which_recipe(
    script: RunExample, tiny_bert: Path, tmp_path: Path
) -> None:
    Path("corpus.txt").write_text("\n".join(make_sentences(32)), encoding="utf-8")
    flags = f"--model {tiny_bert} --per-device-train-batch-size 16 --max-steps 2 --precision fp32"
    more = "--use-cpu true --disable-tqdm true --eval-data none --corpus corpus.txt --output run"
    script("--recipe", "bert-base-script", *flags.split(), *more.split())
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["recipe"]["name"] == "bert-base-script"
    assert record["recipe"]["dropout"] == record["settings"]["dropout"] == 0.2
    assert record["recipe"]["changes"]["per_device_train_batch_size"] == 16
    assert record["loss"]["noise_size"] == 192
    assert record["recipe"]["changes"]["corpus"] == "corpus.txt"
    card = (tmp_path / "run" / "encoder" / "README.md").read_text()
    assert "recipe:bert-base-script" in card
    assert (
        f"# {tiny_bert.name} trained by the recipe bert-base-script with corpus=corpus.txt, "
        in card
    )
    assert "max_steps=2" in card and str(tiny_bert) not in card.partition("## Model Details")[0]
    config = json.loads((tmp_path / "run" / "encoder" / "config.json").read_text())
    assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == 0.2
