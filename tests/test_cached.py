"""The cached loss.

Its invariants:

- Without dropout it is GSInfoNCELoss: the value, the gradient of every embedding and of every parameter,
  whatever the size of the mini-batches.
- With dropout it is the loss of the same mini-batches embedded once, with gradients, under the same random
  state: the second pass replays the masks of the first, and the generators end where one pass leaves them.
- The noise is keyed as everywhere: one draw a step, or one for each dimension of MatryoshkaLoss.
- Whatever scales the loss scales the gradients; several batches add up.
- It trains wherever the plain loss does.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CARRIED_IN_FLOAT32, falls, make_sentences
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from torch import Tensor, nn

from st_gsinfonce import CachedGSInfoNCELoss, GSInfoNCELoss, NoiseStepCallback, build_encoder
from st_gsinfonce import losses as losses_module
from st_gsinfonce.training import build_trainer

BATCH = 8
SETTINGS = {"seed": 0, "scale": 4.0}  # a scale at which noise counts for an untrained encoder
EXACT = {"rtol": 1e-9, "atol": 1e-13}  # in float64
CARRIED = {"rtol": 1e-5, "atol": 1e-8} if CARRIED_IN_FLOAT32 else EXACT

Run = tuple[Tensor, Tensor, dict[str, Tensor]]
"""The loss, the gradients of all embeddings in the order of texts and columns, and of the parameters."""


@pytest.fixture
def encode_in_double(tiny_bert: Path) -> Callable[..., SentenceTransformer]:
    """Return a factory of tiny encoders in float64 with a head, in training mode."""

    def make(dropout: float = 0.0) -> SentenceTransformer:
        model = build_encoder(tiny_bert, dropout=dropout, seed=0, device="cpu").double().train()
        with torch.no_grad():  # untrained, all texts are alike, and no noise is as near as they are
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.mul_(10)
        return model

    return make


def columns_of(model: SentenceTransformer, columns: int) -> list[dict[str, Any]]:
    return [model.preprocess(make_sentences(BATCH, seed)) for seed in range(columns)]


def gradients(
    model: SentenceTransformer, compute: Callable[[], Tensor], factor: float = 1.0
) -> Run:
    """Run a loss forward and backward, times a factor that is taken out of the gradients again."""
    passes: list[Tensor] = []

    def watch(module: nn.Module, inputs: Any, output: dict[str, Any]) -> None:
        embedding = output["sentence_embedding"]
        if embedding.requires_grad:
            embedding.retain_grad()
            passes.append(embedding)

    handle = model.register_forward_hook(watch)
    model.zero_grad()
    loss = compute()
    (factor * loss).backward()
    handle.remove()
    parameters = {n: p.grad / factor for n, p in model.named_parameters() if p.grad is not None}
    embeddings = torch.cat([embedding.grad for embedding in passes]) / factor
    return loss.detach(), embeddings, parameters


def assert_same(found: Run, expected: Run) -> None:
    torch.testing.assert_close(found[0], expected[0], **EXACT)
    assert expected[1].any(dim=1).all()  # every text has a gradient to compare
    torch.testing.assert_close(found[1], expected[1], **CARRIED)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        torch.testing.assert_close(found[2][name], gradient, **CARRIED, msg=lambda m, n=name: n + m)


# --- without dropout


@pytest.mark.parametrize("mini_batch_size", [1, 3, BATCH, BATCH + 5])
@pytest.mark.parametrize("columns", [2, 4], ids=["pairs", "hard negatives"])
@pytest.mark.parametrize("noise", ["sampled", "expected"])
def test_without_dropout_it_is_the_plain_loss(
    encode_in_double: Callable, mini_batch_size: int, columns: int, noise: str
) -> None:
    model = encode_in_double()

    def run(kind: type[GSInfoNCELoss], **settings: Any) -> Run:
        loss = kind(model, **SETTINGS, noise=noise, **settings)
        return gradients(model, lambda: loss(columns_of(model, columns), None))

    plain = run(GSInfoNCELoss)
    assert plain[2]["2.linear.weight"].any()  # the head takes part
    assert_same(run(CachedGSInfoNCELoss, mini_batch_size=mini_batch_size), plain)


@pytest.mark.parametrize("factor", [3.0, -0.25, 2.0**16])
def test_what_scales_the_loss_scales_the_gradients(
    encode_in_double: Callable, factor: float
) -> None:
    model = encode_in_double()
    plain = GSInfoNCELoss(model, **SETTINGS)
    cached = CachedGSInfoNCELoss(model, **SETTINGS, mini_batch_size=3)
    runs = [
        gradients(model, lambda loss=loss: loss(columns_of(model, 2), None), factor)
        for loss in (cached, plain)
    ]
    assert_same(*runs)


def test_gradients_of_several_batches_add_up(encode_in_double: Callable) -> None:
    model = encode_in_double()

    def accumulate(loss: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        for _ in range(3):
            (loss(columns_of(model, 2), None) / 3).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain = accumulate(GSInfoNCELoss(model, **SETTINGS))
    cached = accumulate(CachedGSInfoNCELoss(model, **SETTINGS, mini_batch_size=3))
    fixed = accumulate(GSInfoNCELoss(model, **SETTINGS, noise_size=0))
    assert cached.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(cached[name], gradient, **CARRIED)
    assert any(not torch.allclose(fixed[name], plain[name]) for name in plain)  # noise has its part


def test_two_forwards_before_their_backwards(encode_in_double: Callable) -> None:
    """Each backward pass carries its own batch's gradients, not those of the last one."""
    model = encode_in_double()

    def run(kind: type[GSInfoNCELoss], **settings: Any) -> dict[str, Tensor]:
        loss = kind(model, **SETTINGS, **settings)
        first, second = columns_of(model, 4)[:2], columns_of(model, 4)[2:]
        model.zero_grad()
        values = [loss(first, None), 5 * loss(second, None)]
        for value in values:
            value.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain, cached = run(GSInfoNCELoss), run(CachedGSInfoNCELoss, mini_batch_size=3)
    for name, gradient in plain.items():
        torch.testing.assert_close(cached[name], gradient, **CARRIED)


# --- with dropout


def mini_batches(column: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Yield rows of a column, ``size`` at a time, without columns that are padding alone."""
    for start in range(0, BATCH, size):
        rows = slice(start, start + size)
        width = int(column["attention_mask"][rows].sum(dim=1).max())
        yield {
            key: value[rows, :width] if isinstance(value, Tensor) else value
            for key, value in column.items()
        }


@pytest.mark.parametrize("mini_batch_size", [1, 3, BATCH])
@pytest.mark.parametrize("columns", [1, 2], ids=["one column", "pairs"])
def test_with_dropout_the_second_pass_replays_the_first(
    encode_in_double: Callable, mini_batch_size: int, columns: int
) -> None:
    model = encode_in_double(dropout=0.3)

    def reference() -> Tensor:
        batch = columns_of(model, columns)
        embeddings = [
            torch.cat(
                [
                    model(part)["sentence_embedding"]
                    for part in mini_batches(column, mini_batch_size)
                ]
            )
            for column in (batch * 2 if columns == 1 else batch)
        ]
        assert columns > 1 or (embeddings[0] != embeddings[1]).any(dim=1).all()  # two views
        return GSInfoNCELoss(model, **SETTINGS).compute_loss_from_embeddings(embeddings)

    def cached() -> Tensor:
        loss = CachedGSInfoNCELoss(model, **SETTINGS, mini_batch_size=mini_batch_size)
        return loss(columns_of(model, columns), None)

    def run(compute: Callable[[], Tensor], seed: int) -> tuple[Run, Tensor]:
        torch.manual_seed(seed)
        result = gradients(model, compute)
        return result, torch.get_rng_state()

    (expected, state), (found, state_after) = run(reference, 1), run(cached, 1)
    assert_same(found, expected)
    assert torch.equal(state, state_after)
    other, _ = run(cached, 2)
    assert not torch.allclose(other[1], expected[1])  # the masks have their part


# --- noise


def test_noise_is_drawn_once_a_step(encode_in_double: Callable, monkeypatch: Any) -> None:
    keys: list[tuple[int, int, int]] = []
    draw = losses_module.draw_noise

    def spy(key: Any, *args: Any, **kwargs: Any) -> Tensor:
        keys.append((key.step, key.call, args[1]))
        return draw(key, *args, **kwargs)

    monkeypatch.setattr(losses_module, "draw_noise", spy)
    model = encode_in_double(dropout=0.1)
    loss = CachedGSInfoNCELoss(model, **SETTINGS, mini_batch_size=3)
    for step in (4, 5):
        loss.set_step(step)
        loss(columns_of(model, 1), None).backward()
        with torch.no_grad():
            loss(columns_of(model, 1), None)
    assert keys == [(4, 1, 32), (0, 0, 32), (5, 1, 32), (0, 0, 32)]

    keys.clear()
    inner = CachedGSInfoNCELoss(model, **SETTINGS, mini_batch_size=3)
    matryoshka = MatryoshkaLoss(model, inner, [32, 16, 8])
    inner.set_step(7)
    matryoshka(columns_of(model, 1), None).backward()
    assert keys == [(7, 1, 32), (7, 2, 16), (7, 3, 8)]


@pytest.mark.parametrize("mini_batch_size", [3, BATCH])
def test_matryoshka_around_it_is_matryoshka_around_the_plain_loss(
    encode_in_double: Callable, mini_batch_size: int
) -> None:
    model = encode_in_double()

    def run(inner: GSInfoNCELoss) -> tuple[Tensor, dict[str, Tensor]]:
        loss = MatryoshkaLoss(model, inner, [32, 16, 8], [1.0, 0.5, 0.25])
        model.zero_grad()
        value = loss(columns_of(model, 2), None)
        value.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return value.detach(), grads

    value, grads = run(CachedGSInfoNCELoss(model, **SETTINGS, mini_batch_size=mini_batch_size))
    expected, expected_grads = run(GSInfoNCELoss(model, **SETTINGS))
    torch.testing.assert_close(value, expected, **EXACT)
    for name, gradient in expected_grads.items():
        torch.testing.assert_close(grads[name], gradient, **CARRIED)


# --- without gradients


def test_without_gradients_it_is_the_plain_loss_and_keeps_nothing(
    encode_in_double: Callable,
) -> None:
    model = encode_in_double(dropout=0.1).eval()
    cached = CachedGSInfoNCELoss(model, **SETTINGS, mini_batch_size=3)
    with torch.no_grad():
        values = [
            loss(columns_of(model, 2), None) for loss in (cached, GSInfoNCELoss(model, **SETTINGS))
        ]
        assert not values[0].requires_grad
        torch.testing.assert_close(*values, **EXACT)
    assert cached.statistics is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_eval_mode_with_gradients_is_the_plain_loss(encode_in_double: Callable) -> None:
    model = encode_in_double(dropout=0.1).eval()
    plain = GSInfoNCELoss(model, **SETTINGS)
    cached = CachedGSInfoNCELoss(model, **SETTINGS, mini_batch_size=3)
    assert_same(
        gradients(model, lambda: cached(columns_of(model, 2), None)),
        gradients(model, lambda: plain(columns_of(model, 2), None)),
    )


def test_equal_views_are_told(encode_in_double: Callable) -> None:
    model = encode_in_double()
    with pytest.warns(UserWarning, match="dropout probability is 0"):
        CachedGSInfoNCELoss(model)(columns_of(model, 1), None)


def test_statistics_are_the_plain_loss_s(encode_in_double: Callable) -> None:
    model = encode_in_double()
    plain = GSInfoNCELoss(model, **SETTINGS)
    cached = CachedGSInfoNCELoss(model, **SETTINGS, mini_batch_size=3)
    for loss in (plain, cached):
        loss(columns_of(model, 2), None)
    # What the comparisons here rest on: neither the noise nor the positives are all there is.
    assert 0.01 < plain.statistics.noise_share < 0.99
    assert plain.statistics.negative_cosine < 0.95
    for name, value in vars(plain.statistics).items():
        assert getattr(cached.statistics, name) == pytest.approx(value, rel=1e-9)


# --- settings


def test_settings(make_encoder: Callable) -> None:
    model = make_encoder()
    loss = CachedGSInfoNCELoss(model, 10.0, noise_size=5, seed=3, mini_batch_size=7)
    plain = GSInfoNCELoss(model, 10.0, noise_size=5, seed=3)
    assert loss.get_config_dict() == {**plain.get_config_dict(), "mini_batch_size": 7}
    json.dumps(loss.get_config_dict())
    assert "repl4nlp-1.31" in loss.citation and plain.citation in loss.citation
    assert isinstance(loss, GSInfoNCELoss) and loss.temperature == 0.1
    stock = inspect.signature(CachedMultipleNegativesRankingLoss).parameters["mini_batch_size"]
    assert CachedGSInfoNCELoss(model).mini_batch_size == stock.default == 32


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None, "8"])
def test_a_bad_mini_batch_size_is_named(make_encoder: Callable, size: Any) -> None:
    with pytest.raises(
        ValueError, match=f"mini_batch_size must be a positive integer, got {size!r}"
    ):
        CachedGSInfoNCELoss(make_encoder(), mini_batch_size=size)


def test_bad_settings_of_the_plain_loss_are_named(make_encoder: Callable) -> None:
    with pytest.raises(ValueError, match="scale must be a positive number, got 0"):
        CachedGSInfoNCELoss(make_encoder(), scale=0)


def test_a_model_without_mini_batches_is_refused(make_encoder: Callable) -> None:
    tokenizer = make_encoder().tokenizer.backend_tokenizer
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)])
    with pytest.raises(ValueError, match="StaticEmbedding.*use GSInfoNCELoss"):
        CachedGSInfoNCELoss(model)


def test_several_gpus_in_one_process_are_refused(make_encoder: Callable) -> None:
    model = make_encoder()
    loss = CachedGSInfoNCELoss(model)
    loss.model = nn.DataParallel(model)  # as the Trainer does
    with pytest.raises(ValueError, match="DataParallel.*torchrun"):
        loss([model.preprocess(make_sentences(4))], None)


def test_a_batch_without_texts_is_an_error(encode_in_double: Callable) -> None:
    with pytest.raises(ValueError, match="0 column"):
        CachedGSInfoNCELoss(encode_in_double())([], None)


# --- training


@pytest.mark.parametrize("columns", [["text"], ["anchor", "positive"], ["anchor", "good", "bad"]])
def test_it_trains_in_the_trainer(
    make_encoder: Callable, train: Callable, columns: list[str]
) -> None:
    model = make_encoder("mean")
    texts = make_sentences(48)
    rows = {name: make_sentences(48, 1) if name == "bad" else texts for name in columns}
    losses = train(
        model,
        CachedGSInfoNCELoss(model, seed=0, mini_batch_size=5),
        Dataset.from_dict(rows),
        max_steps=16,
        per_device_train_batch_size=12,
        gradient_accumulation_steps=2,
    )
    assert len(losses) == 32
    assert falls(losses)


def test_it_trains_through_build_trainer(
    tiny_bert: Path, sentences: list[str], training_arguments: Callable
) -> None:
    model = build_encoder(tiny_bert, seed=0, device="cpu")
    trainer = build_trainer(
        model,
        sentences,
        training_arguments(max_steps=3),
        loss=lambda m: CachedGSInfoNCELoss(m, seed=0, mini_batch_size=6),
    )
    (callback,) = [
        c for c in trainer.callback_handler.callbacks if isinstance(c, NoiseStepCallback)
    ]
    assert callback.losses == [trainer.loss]
    steps: list[int] = []
    trainer.loss.set_step = steps.append
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    assert steps == [0, 1, 2]
    assert any(not torch.equal(before[n], p) for n, p in model.named_parameters())
    assert trainer.loss.statistics is not None
