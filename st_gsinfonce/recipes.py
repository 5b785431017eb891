"""Published settings, each number with its source.

Three families. What they share is SimCSE's: the [CLS] vector through a train-only head, 32 tokens, one
epoch over a million sentences of Wikipedia (``princeton-nlp/datasets-for-simcse`` on the hub, which
``load_sentences`` takes by that name; it drops duplicates, so that an epoch may be somewhat shorter than the
published one), temperature 0.05, AdamW with a learning rate that falls
linearly to 0, no warmup, no weight decay, gradients clipped at norm 1, half precision, STS-B dev every 125
steps and the best checkpoint kept.

``simcse-ENCODER``
    Unsupervised SimCSE. Batch and learning rate: the table "Hyperparameters" of
    https://github.com/princeton-nlp/SimCSE (BERT-base 64 and 3e-5, BERT-large 64 and 1e-5, RoBERTa-base 512
    and 1e-5, RoBERTa-large 512 and 3e-5); dropout 0.1: the encoders' own, which SimCSE keeps (Gao et al.,
    2021, section 3, https://arxiv.org/abs/2104.08821).

``ENCODER-script``
    GS-InfoNCE as its authors' script runs it, gsInfoNCE/run.sh of https://github.com/caskcsg/sentemb:
    M = 192 (``random_size``) for all; BERT-base 3e-5, batch 64, dropout 0.2, sigma 0.5; BERT-large 1e-5,
    64, 0.2, 0.1; RoBERTa-base 1e-5, 64, 0.1, 0.1; RoBERTa-large 2e-5, 128, 0.1, 0.5. All with fp16.

``ENCODER``
    GS-InfoNCE as the paper's text describes it, https://arxiv.org/abs/2109.04321: noise added to SimCSE,
    whose dropout of 0.1 it does not say to change, with M three times the batch. Batch and learning rate
    are the script's, the only published source of them for these runs. It differs from the script
    in the dropout of the BERT encoders and in the M of RoBERTa-large (384), not at all for RoBERTa-base, and
    leaves sigma at 1: under cosine similarity sigma has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sentence_transformers import SentenceTransformer

SIMCSE_SOURCE = "https://github.com/princeton-nlp/SimCSE, Hyperparameters"
SCRIPT_SOURCE = "https://github.com/caskcsg/sentemb, gsInfoNCE/run.sh"
TEXT_SOURCE = f"https://arxiv.org/abs/2109.04321; batch and learning rate: {SCRIPT_SOURCE}"


@dataclass(frozen=True)
class Recipe:
    """Settings under which a published encoder was trained.

    Attributes:
        name: The recipe's own.
        model: Hub name of the encoder to start from.
        batch_size: Sentences.
        learning_rate: At the first step.
        dropout: Hidden and attention dropout.
        noise_ratio: M as a multiple of the batch, None where ``noise_size`` is given.
        noise_size: M; 0 is SimCSE.
        noise_std: Sigma.
        source: Where the numbers are from.
        pooling: What is trained and used.
        head: Whether to train through the train-only head.
        max_seq_length: Tokens.
        scale: Inverse temperature; 20 is 0.05.
        epochs: Passes over the corpus.
        eval_steps: Steps between evaluations on STS-B dev.
        warmup_steps: Steps over which the learning rate rises.
        weight_decay: AdamW's.
        max_grad_norm: Norm at which gradients are clipped.
    """

    name: str
    model: str
    batch_size: int
    learning_rate: float
    dropout: float
    noise_ratio: float | None
    noise_size: int | None
    noise_std: float
    source: str
    pooling: str = "cls"
    head: bool = True
    max_seq_length: int = 32
    scale: float = 20.0
    epochs: int = 1
    eval_steps: int = 125
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    @property
    def temperature(self) -> float:
        """1 / scale."""
        return 1 / self.scale

    def encoder_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``build_encoder``, without the model."""
        return {
            "pooling": self.pooling,
            "max_seq_length": self.max_seq_length,
            "dropout": self.dropout,
            "head": self.head,
        }

    def loss_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``GSInfoNCELoss``, without the model."""
        return {
            "scale": self.scale,
            "noise_ratio": self.noise_ratio,
            "noise_size": self.noise_size,
            "noise_std": self.noise_std,
        }

    def trainer_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``SentenceTransformerTrainingArguments`` that the recipe decides.

        The precision is none of them: it is for ``precision_arguments`` to say what the hardware can.
        The evaluator that ``metric_for_best_model`` speaks of is ``STSEvaluator()``.
        """
        return {
            "per_device_train_batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
            "num_train_epochs": self.epochs,
            "lr_scheduler_type": "linear",
            "warmup_steps": self.warmup_steps,
            "weight_decay": self.weight_decay,
            "max_grad_norm": self.max_grad_norm,
            "eval_strategy": "steps",
            "eval_steps": self.eval_steps,
            "save_strategy": "steps",
            "save_steps": self.eval_steps,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_sts-dev_spearman_cosine",
            "greater_is_better": True,
        }


def _simcse(name: str, model: str, batch_size: int, learning_rate: float) -> Recipe:
    return Recipe(
        f"simcse-{name}", model, batch_size, learning_rate, 0.1, None, 0, 1.0, SIMCSE_SOURCE
    )


def _script(
    name: str, model: str, batch_size: int, learning_rate: float, dropout: float, std: float
) -> Recipe:
    return Recipe(
        f"{name}-script", model, batch_size, learning_rate, dropout, None, 192, std, SCRIPT_SOURCE
    )


def _text(name: str, model: str, batch_size: int, learning_rate: float) -> Recipe:
    return Recipe(name, model, batch_size, learning_rate, 0.1, 3.0, None, 1.0, TEXT_SOURCE)


_BERT_BASE = "bert-base", "bert-base-uncased"
_BERT_LARGE = "bert-large", "bert-large-uncased"
_ROBERTA_BASE = "roberta-base", "roberta-base"
_ROBERTA_LARGE = "roberta-large", "roberta-large"

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _text(*_BERT_BASE, 64, 3e-5),
        _text(*_BERT_LARGE, 64, 1e-5),
        _text(*_ROBERTA_BASE, 64, 1e-5),
        _text(*_ROBERTA_LARGE, 128, 2e-5),
        _script(*_BERT_BASE, 64, 3e-5, 0.2, 0.5),
        _script(*_BERT_LARGE, 64, 1e-5, 0.2, 0.1),
        _script(*_ROBERTA_BASE, 64, 1e-5, 0.1, 0.1),
        _script(*_ROBERTA_LARGE, 128, 2e-5, 0.1, 0.5),
        _simcse(*_BERT_BASE, 64, 3e-5),
        _simcse(*_BERT_LARGE, 64, 1e-5),
        _simcse(*_ROBERTA_BASE, 512, 1e-5),
        _simcse(*_ROBERTA_LARGE, 512, 3e-5),
    )
}
"""The recipes by name."""


def get_recipe(name: str) -> Recipe:
    """Return a recipe.

    Raises:
        ValueError: If there is none of that name; lists those there are.
    """
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]


def record_in_card(
    model: SentenceTransformer, recipe: Recipe, changes: Mapping[str, object] | None = None
) -> None:
    """Name the recipe in the encoder's model card: in its title and its tags.

    Call it before the first save, which writes the card.

    Args:
        model: The encoder; only its card's data change.
        recipe: What it is trained by.
        changes: Settings in which the training differs from the recipe.
    """
    others = dict(changes or {})
    title = f"{others.pop('model', recipe.model)} trained by the recipe {recipe.name}"
    if others:
        title += " with " + ", ".join(f"{name}={value}" for name, value in others.items())
    model.model_card_data.model_name = title
    model.model_card_data.add_tags([f"recipe:{recipe.name}"])
