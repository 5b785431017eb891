"""The loss together with what its users already use.

Each combination trains some steps: every loss is finite, the encoder moves (both asserted by the ``train``
fixture), and where the tiny encoder can learn in so few steps, the loss falls. Beyond that:

- MatryoshkaLoss sees one forward pass a step, and noise as wide as each of its dimensions.
- Losses over layers need one forward a column, and say so where they cannot have it.
- An adapter is all that LoRA trains; its saved model gives the same vectors, elsewhere too.
- Padding, prompts, batch samplers, accumulation and incomplete batches change how many rows there are,
  never what a row is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import falls, make_sentences, record_losses
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.losses import (
    AdaptiveLayerLoss,
    Matryoshka2dLoss,
    MatryoshkaLoss,
)
from sentence_transformers.util import cos_sim
from torch import Tensor

from st_gsinfonce.collator import SimCSEDataCollator
from st_gsinfonce.encoder import build_encoder, save_encoder
from st_gsinfonce.losses import GSInfoNCELoss

STEPS = 14
TEXTS = make_sentences(64)
DATASET = Dataset.from_dict({"text": TEXTS})


@pytest.fixture
def model(tiny_bert: Path) -> SentenceTransformer:
    """A tiny encoder that learns within a dozen steps, head included."""
    return build_encoder(tiny_bert, pooling="mean", seed=0, device="cpu")


def rows_of_forwards(model: SentenceTransformer) -> list[int]:
    """Return a list to which every forward pass of the Transformer adds its number of rows."""
    rows: list[int] = []
    model[0].register_forward_hook(
        lambda module, inputs, output: rows.append(len(output["token_embeddings"]))
    )
    return rows


# Other losses around it


def test_matryoshka(model: SentenceTransformer, train: Callable) -> None:
    shapes: list[tuple[int, ...]] = []

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        shapes.append(tuple(b.shape))
        return cos_sim(a, b)

    inner = GSInfoNCELoss(model, seed=0, noise_size=7, similarity_fct=similarity)
    rows = rows_of_forwards(model)
    losses = train(model, MatryoshkaLoss(model, inner, [32, 16, 4]), DATASET, max_steps=STEPS)
    assert falls(losses)
    assert rows == [32] * STEPS
    assert shapes == [(rows, dim) for dim in (32, 16, 4) for rows in (16, 7)] * STEPS


def test_matryoshka_with_expected_noise(model: SentenceTransformer, train: Callable) -> None:
    inner = GSInfoNCELoss(model, noise="expected", noise_ratio=0.5)
    losses = train(model, MatryoshkaLoss(model, inner, [32, 8]), DATASET, max_steps=STEPS)
    assert falls(losses)


WRAPPERS = [
    pytest.param(AdaptiveLayerLoss, (), id="AdaptiveLayerLoss"),
    pytest.param(Matryoshka2dLoss, ([32, 16],), id="Matryoshka2dLoss"),
]


@pytest.mark.parametrize("wrapper, arguments", WRAPPERS)
def test_losses_over_layers(
    model: SentenceTransformer, train: Callable, wrapper: Any, arguments: tuple[Any, ...]
) -> None:
    loss = wrapper(model, GSInfoNCELoss(model, seed=0, merge_views=False), *arguments)
    rows = rows_of_forwards(model)
    losses = train(
        model, loss, DATASET, data_collator=SimCSEDataCollator(model.preprocess), max_steps=STEPS
    )
    assert falls(losses)
    assert set(rows) == {16}  # each view by itself


@pytest.mark.parametrize("wrapper, arguments", WRAPPERS)
def test_losses_over_layers_cannot_take_one_column(
    model: SentenceTransformer, train: Callable, wrapper: Any, arguments: tuple[Any, ...]
) -> None:
    loss = wrapper(model, GSInfoNCELoss(model, merge_views=False), *arguments)
    with pytest.raises(ValueError, match="merge_views=False needs two columns.*SimCSEDataCollator"):
        train(model, loss, DATASET)


# Ways to train


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"gradient_checkpointing": True}, id="gradient checkpointing"),
        pytest.param({"bf16": True}, id="bf16"),
        pytest.param({"batch_sampler": "no_duplicates"}, id="no duplicates"),
        pytest.param({"dataloader_drop_last": True}, id="drop last"),
    ],
)
def test_training_arguments(
    model: SentenceTransformer, train: Callable, settings: dict[str, Any]
) -> None:
    losses = train(model, GSInfoNCELoss(model, seed=0), DATASET, max_steps=STEPS, **settings)
    assert falls(losses)


def test_gradient_accumulation(model: SentenceTransformer, train: Callable) -> None:
    rows = rows_of_forwards(model)
    losses = train(
        model,
        GSInfoNCELoss(model, seed=0),
        DATASET,
        max_steps=10,
        gradient_accumulation_steps=4,
        per_device_train_batch_size=8,
    )
    assert rows == [16] * 40
    assert falls(losses)


def test_gradient_checkpointing_changes_no_gradient(tiny_bert: Path, train: Callable) -> None:
    def weights(**settings: Any) -> Tensor:
        model = build_encoder(tiny_bert, seed=0, device="cpu")
        train(model, GSInfoNCELoss(model), DATASET, **settings)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(weights(), weights(gradient_checkpointing=True))


@pytest.mark.slow
@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.7"),
    reason="today's transformers can only be compiled by torch 2.7 or newer",
)
def test_torch_compile(model: SentenceTransformer, train: Callable) -> None:
    """Slow: the compiler takes its time."""
    loss = GSInfoNCELoss(model, seed=0)
    compiled: list[bool] = []
    loss.register_forward_pre_hook(
        lambda module, inputs: compiled.append(not isinstance(module.model, SentenceTransformer))
    )
    losses = train(model, loss, DATASET, max_steps=STEPS, torch_compile_backend="eager")
    assert all(compiled)
    assert falls(losses)


@pytest.fixture(params=["add_adapter", "get_peft_model"])
def adapted(request: pytest.FixtureRequest, model: SentenceTransformer) -> SentenceTransformer:
    """The tiny encoder with low-rank adapters, added in either of the two usual ways."""
    config = LoraConfig(r=4, target_modules=["query", "value", "dense"])
    if request.param == "get_peft_model":
        model[0].model = get_peft_model(model[0].model, config)
        return model
    try:
        model.add_adapter(config)
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(f"transformers refuses the installed peft: {error}")
    return model


def test_lora(
    adapted: SentenceTransformer, train: Callable, tmp_path: Path, encode_elsewhere: Callable
) -> None:
    before = {name: parameter.detach().clone() for name, parameter in adapted[0].named_parameters()}
    untrained = adapted.encode(TEXTS[:8], convert_to_tensor=True)
    loss = GSInfoNCELoss(adapted, seed=0)
    losses = train(adapted, loss, DATASET, max_steps=STEPS, learning_rate=2e-2)
    assert falls(losses)
    for name, parameter in adapted[0].named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora" not in name or "pooler" in name), (
            name
        )
    trained = adapted.encode(TEXTS[:8], convert_to_tensor=True)
    assert not torch.allclose(trained, untrained)
    if isinstance(adapted[0].model, PeftModel):  # sentence-transformers saves what it made itself
        adapted[0].model = adapted[0].model.merge_and_unload()
        trained = adapted.encode(TEXTS[:8], convert_to_tensor=True)
    elif Version(transformers.__version__) < Version("5.9"):
        pytest.skip("transformers before 5.9 does not read back the adapters that it has saved")
    folder = save_encoder(adapted, tmp_path / "encoder")
    assert torch.equal(encode_elsewhere(folder, TEXTS[:8]), trained.cpu())


def test_model_init_with_a_loss_as_a_callable(
    tiny_bert: Path, training_arguments: Callable
) -> None:
    """A hyperparameter search makes a model for each trial; the loss must follow it."""
    made: list[SentenceTransformer] = []
    losses: list[list[float]] = []

    def make_model() -> SentenceTransformer:
        made.append(build_encoder(tiny_bert, pooling="mean", seed=0, device="cpu"))
        return made[-1]

    def make_loss(model: SentenceTransformer) -> GSInfoNCELoss:
        loss = GSInfoNCELoss(model, seed=0)
        losses.append(record_losses(loss))
        return loss

    trainer = SentenceTransformerTrainer(
        model_init=make_model,
        args=training_arguments(max_steps=STEPS),
        train_dataset=DATASET,
        loss=make_loss,
    )
    trainer.train()
    assert trainer.model is made[-1]
    start = copy.deepcopy(make_model().state_dict())
    moved = [not torch.equal(start[name], p) for name, p in trainer.model.named_parameters()]
    assert any(moved)
    assert falls(losses[-1])


# Inputs


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_pooling_and_padding(
    tiny_bert: Path, train: Callable, pooling: str, padding_side: str
) -> None:
    model = build_encoder(tiny_bert, pooling=pooling, seed=0, device="cpu")
    model.tokenizer.padding_side = padding_side
    losses = train(model, GSInfoNCELoss(model, seed=0), DATASET, max_steps=STEPS)
    if pooling == "mean":  # an untrained attention brings [CLS] little of the words
        assert falls(losses)


@pytest.mark.parametrize("collate", [False, True])
@pytest.mark.parametrize("include_prompt", [False, True])
def test_prompts(
    model: SentenceTransformer, train: Callable, include_prompt: bool, collate: bool
) -> None:
    prompts = {"text": "the cat "}
    model.set_pooling_include_prompt(include_prompt)
    rows = rows_of_forwards(model)
    widths: set[int] = set()
    model[0].register_forward_pre_hook(
        lambda module, inputs: widths.add(inputs[0]["input_ids"].shape[1])
    )
    collator = SimCSEDataCollator(model.preprocess, prompts=prompts) if collate else None
    losses = train(
        model,
        GSInfoNCELoss(model, seed=0),
        DATASET,
        data_collator=collator,
        prompts=prompts,
        max_steps=STEPS,
    )
    assert rows == [32] * STEPS
    assert max(widths) == 11  # seven words, two special tokens, two of the prompt
    assert falls(losses)


def test_an_incomplete_last_batch(model: SentenceTransformer, train: Callable) -> None:
    noise_rows: list[int] = []

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        noise_rows.append(len(b))
        return cos_sim(a, b)

    rows = rows_of_forwards(model)
    train(
        model,
        GSInfoNCELoss(model, similarity_fct=similarity),
        Dataset.from_dict({"text": make_sentences(65)}),
        num_train_epochs=1,
        max_steps=-1,
    )
    assert rows == [32, 32, 32, 32, 2]
    assert noise_rows[1::2] == [48, 48, 48, 48, 3]
