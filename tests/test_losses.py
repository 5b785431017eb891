"""The loss around the objective.

Its invariants:

- Without noise it is MultipleNegativesRankingLoss: value and gradient of every parameter.
- One column means two different views of every text from one forward pass over 2N rows; columns that
  tokenize alike share a pass, all others get one each, and the loss does not depend on which.
- A model without dropout is told so once, naming the cause, and never where no gradient is asked for.
- The noise is a function of (seed, step, call): it leaves the global generators and with them the dropout
  masks alone, and calls without gradients use one fixed draw and advance nothing.
- The number of noise vectors follows the batch at hand, their width the embeddings at hand.
- The closed form and its virtual cosine are one constant added to the denominator.
- A bad argument is a ValueError that names it.
- Statistics describe the last training batch and cost nothing unless read.
- Streaming is chosen by size or by a setting, and changes neither value nor gradients.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_sentences
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import SentenceTransformerDataCollator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score, euclidean_sim
from torch import Tensor, nn

from st_gsinfonce import losses as losses_module
from st_gsinfonce import objective, streamed
from st_gsinfonce.losses import GSInfoNCELoss
from st_gsinfonce.noise import NoiseKey, draw_noise
from st_gsinfonce.objective import expected_log_noise_mass

MakeEncoder = Callable[..., SentenceTransformer]
TEXTS = make_sentences(8)
DIM = 32


class Lookup(nn.Module):
    """An encoder without dropout that embeds a token sequence by its first token.

    Like those of sentence-transformers it writes to its input, so that none can be given twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, DIM)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        assert "sentence_embedding" not in features
        first = features["input_ids"].view(-1, features["width"])[:, 0]
        features["sentence_embedding"] = self.table(first)
        return features


class Spy:
    """A dot product that notes the shapes and types of its second arguments."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        self.seen.append(b)
        return a @ b.T


def tokens(rows: int = 5, width: int = 4, start: int = 0, **extra: Any) -> dict[str, Any]:
    ids = torch.arange(start, start + rows * width).view(rows, width) % 100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "width": width, **extra}


def views(rows: int = 6, dim: int = DIM, columns: int = 2) -> list[Tensor]:
    """Unit vectors, each column a blur of the first, so that no term of the loss vanishes."""
    generator = torch.Generator().manual_seed(rows * dim)
    base = torch.randn(rows, dim, generator=generator)
    return [base + torch.randn(rows, dim, generator=generator) for _ in range(columns)]


def embedding_loss(**settings: Any) -> GSInfoNCELoss:
    return GSInfoNCELoss(Lookup(), **{"seed": 0, **settings})


def plain_loss(columns: list[Tensor], *extra_logits: Tensor, scale: float = 20.0) -> Tensor:
    """Cross entropy over the cosines, with further columns of logits: the definition."""
    anchors, *others = columns
    logits = torch.cat([cos_sim(anchors, torch.cat(others)) * scale, *extra_logits], dim=1)
    return F.cross_entropy(logits, torch.arange(len(anchors)))


def without_dropout(model: SentenceTransformer) -> SentenceTransformer:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.fixture
def forwards() -> Iterator[Callable[[nn.Module], list[Tensor]]]:
    """Return a function that gives a list growing by the embeddings of every forward pass."""
    handles = []

    def watch(model: nn.Module) -> list[Tensor]:
        embeddings: list[Tensor] = []

        def add(module: nn.Module, inputs: Any, output: dict[str, Any]) -> None:
            embeddings.append(output["sentence_embedding"])

        handles.append(model.register_forward_hook(add))
        return embeddings

    yield watch
    for handle in handles:
        handle.remove()


# Without noise


@pytest.mark.parametrize("columns", [2, 4])
def test_without_noise_it_is_multiple_negatives_ranking(
    make_encoder: MakeEncoder, columns: int
) -> None:
    model = without_dropout(make_encoder()).train().double()
    texts = [make_sentences(8, seed) for seed in range(columns)]

    def run(loss: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        value = loss([model.preprocess(column) for column in texts], None)
        value.backward()
        return value, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    value, gradients = run(GSInfoNCELoss(model, noise_size=0))
    expected, expected_gradients = run(MultipleNegativesRankingLoss(model, scale=20.0))
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    assert gradients.keys() == expected_gradients.keys()
    assert all(gradient.any() for gradient in gradients.values())  # there is something to compare
    for name, gradient in gradients.items():
        close = torch.allclose(gradient, expected_gradients[name], rtol=1e-8, atol=1e-14)
        assert close, name
    with_noise, _ = run(GSInfoNCELoss(model, noise_size=24))
    assert with_noise > value


# Two views, one pass


def test_one_column_gives_two_views_in_one_forward(
    make_encoder: MakeEncoder, forwards: Callable
) -> None:
    torch.manual_seed(0)
    model = make_encoder("mean").train()
    passes = forwards(model)
    GSInfoNCELoss(model)([model.preprocess(TEXTS)], None)
    (embeddings,) = passes
    first, second = embeddings.chunk(2)
    assert len(embeddings) == 2 * len(TEXTS)
    assert (first != second).any(dim=1).all()  # dropout is on, and its masks differ
    cosines = cos_sim(first, second)
    assert cosines.diagonal().mean() > cosines.mean()  # and yet they are views of the same texts


def test_training_runs_the_encoder_once_a_step_and_tokenizes_a_text_once(
    make_encoder: MakeEncoder, train: Callable, forwards: Callable
) -> None:
    model = make_encoder()
    passes = forwards(model)
    tokenized: list[str] = []

    def preprocess(inputs: list[str], **kwargs: Any) -> dict[str, Tensor]:
        tokenized.extend(inputs)
        return model.preprocess(inputs, **kwargs)

    texts = make_sentences(40)
    train(
        model,
        GSInfoNCELoss(model),
        Dataset.from_dict({"text": texts}),
        data_collator=SentenceTransformerDataCollator(preprocess_fn=preprocess),
        max_steps=-1,
        num_train_epochs=1,
    )
    assert [len(embeddings) for embeddings in passes] == [32, 32, 16]  # 40 texts at batch 16
    assert sorted(tokenized) == sorted(texts)


@pytest.mark.parametrize(
    "columns, rows_of_passes",
    [
        pytest.param([tokens()], [10], id="one column"),
        pytest.param([tokens(), tokens(start=9)], [10], id="two alike"),
        pytest.param([tokens(), tokens(start=9), tokens(start=50)], [15], id="three alike"),
        pytest.param([tokens(), tokens(width=7)], [5, 5], id="other width"),
        pytest.param([tokens(), tokens(extra=torch.zeros(5))], [5, 5], id="other keys"),
        pytest.param([tokens(task="a"), tokens(task="b")], [5, 5], id="other setting"),
        pytest.param([tokens(task="a"), tokens(task="a")], [10], id="same setting"),
        pytest.param(
            [tokens(prompt_length=2), tokens(prompt_length=2)], [10], id="prompt length as a number"
        ),
        pytest.param(
            [tokens(prompt_length=torch.tensor(2)), tokens(prompt_length=torch.tensor(2))],
            [10],
            id="prompt length as a tensor",
        ),
        pytest.param([tokens(prompt_length=2), tokens()], [5, 5], id="one prompt"),
        pytest.param([tokens(grid=torch.zeros(3)), tokens(grid=torch.zeros(3))], [5, 5], id="grid"),
        pytest.param([tokens(number=torch.tensor(1.0))] * 2, [5, 5], id="tensor without rows"),
        pytest.param([tokens(cu_seq_lens_q=torch.arange(5))], [5, 5], id="flattened"),
        pytest.param([{"input_ids": torch.arange(20), "width": 4}], [5, 5], id="flat token ids"),
    ],
)
def test_columns_that_tokenize_alike_share_a_forward(
    columns: list[dict[str, Any]], rows_of_passes: list[int], forwards: Callable
) -> None:
    loss = embedding_loss(noise_size=4)
    passes = forwards(loss.model)
    with torch.no_grad():
        value = loss([dict(column) for column in columns], None)
        assert [len(embeddings) for embeddings in passes] == rows_of_passes
        one_by_one = [loss.model(dict(column))["sentence_embedding"] for column in columns]
        if len(columns) == 1:
            one_by_one *= 2
        assert torch.equal(value, loss.compute_loss_from_embeddings(one_by_one))


def test_unmerged_views_take_one_forward_a_column(forwards: Callable) -> None:
    loss = embedding_loss(merge_views=False)
    passes = forwards(loss.model)
    loss([tokens(), tokens(start=9)], None)
    assert [len(embeddings) for embeddings in passes] == [5, 5]


@pytest.mark.parametrize(
    "settings, columns, message",
    [
        (
            {"merge_views": False},
            [tokens()],
            "^merge_views=False needs two columns, got one: train with SimCSEDataCollator$",
        ),
        ({}, [], "^the batch has no text column$"),
    ],
)
def test_a_batch_without_two_views_is_an_error(
    settings: dict[str, Any], columns: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        embedding_loss(**settings)(columns, None)


def test_a_single_embedding_column_is_an_error() -> None:
    with pytest.raises(ValueError, match="anchors and positives, got 1 column"):
        embedding_loss().compute_loss_from_embeddings(views()[:1])


# The blind loss


@pytest.mark.parametrize(
    "prepare, cause",
    [
        (lambda m: m.eval(), "it is in eval mode, as encode() leaves it: call model.train()"),
        (lambda m: without_dropout(m).train(), "its dropout probability is 0"),
    ],
)
def test_a_model_without_dropout_is_told_once(
    make_encoder: MakeEncoder, prepare: Callable, cause: str
) -> None:
    model = prepare(make_encoder())
    loss = GSInfoNCELoss(model)
    with pytest.warns(UserWarning) as caught:
        for _ in range(3):
            loss([model.preprocess(TEXTS)], None)
        model.train(not model.training)
        loss([model.preprocess(TEXTS)], None)
    (warning,) = caught
    assert str(warning.message) == (
        "both views of every text have the same embedding, so the loss has nothing to learn from: "
        f"the model runs without dropout because {cause}"
    )


def test_a_model_that_falls_into_eval_mode_while_training_is_told(
    make_encoder: MakeEncoder,
) -> None:
    model = make_encoder().train()
    loss = GSInfoNCELoss(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss([model.preprocess(TEXTS)], None)
    model.encode(TEXTS)
    with pytest.warns(UserWarning, match="as encode\\(\\) leaves it"):
        loss([model.preprocess(TEXTS)], None)


def test_the_views_are_compared_once_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison waits for the GPU, so that one at every step would slow the training down."""
    compared: list[bool] = []
    equal = torch.equal

    def watched(*tensors: Tensor) -> bool:
        compared.append(equal(*tensors))
        return compared[-1]

    monkeypatch.setattr(torch, "equal", watched)
    loss = embedding_loss()
    for training in (True, True, False, False, True):
        loss.model.train(training)
        loss.compute_loss_from_embeddings(views())
    assert compared == [False, False, False]


def test_evaluation_is_silent(make_encoder: MakeEncoder) -> None:
    model = make_encoder().eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert GSInfoNCELoss(model)([model.preprocess(TEXTS)], None).isfinite()


# Noise


def test_noise_leaves_the_global_generators_alone() -> None:
    def states() -> tuple[list[int], tuple, list[int]]:
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        )

    loss = embedding_loss(noise_size=2000, seed=None)
    before = states()
    loss.compute_loss_from_embeddings(views())
    assert states() == before


def test_dropout_masks_are_the_same_with_and_without_noise(
    make_encoder: MakeEncoder, forwards: Callable
) -> None:
    model = make_encoder().train()
    passes = forwards(model)
    values = []
    for size in (0, 500):
        torch.manual_seed(3)
        loss = GSInfoNCELoss(model, noise_size=size)
        values.append([loss([model.preprocess(TEXTS)], None).item() for _ in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(passes[:3], passes[3:], strict=True))
    assert not torch.equal(passes[0], passes[1])  # the masks do change from step to step
    assert all(a < b for a, b in zip(*values, strict=True))


def test_a_draw_is_a_function_of_seed_step_and_call() -> None:
    columns = views()

    def losses(seed: int, step: int, calls: int = 2) -> list[float]:
        loss = embedding_loss(seed=seed)
        loss.compute_loss_from_embeddings(columns)
        loss.set_step(step)
        return [loss.compute_loss_from_embeddings(columns).item() for _ in range(calls)]

    assert losses(seed=1, step=5) == losses(seed=1, step=5)
    draws = [*losses(seed=1, step=5), *losses(seed=1, step=6), *losses(seed=2**64 - 1, step=5)]
    assert len(set(draws)) == len(draws)
    noise = draw_noise(NoiseKey(seed=1, step=5, call=1), 18, DIM)
    oracle = plain_loss(columns, cos_sim(columns[0], noise) * 20)
    assert draws[0] == pytest.approx(oracle.item(), rel=1e-5)


def test_calls_without_gradients_use_one_draw_and_advance_nothing() -> None:
    columns = views()

    def evaluate(loss: GSInfoNCELoss) -> float:
        with torch.no_grad():
            return loss.compute_loss_from_embeddings(columns).item()

    loss = embedding_loss()
    undisturbed = [loss.compute_loss_from_embeddings(columns).item() for _ in range(3)]
    loss = embedding_loss()
    evaluated = [evaluate(loss)]
    disturbed = []
    for _ in range(3):
        disturbed.append(loss.compute_loss_from_embeddings(columns).item())
        evaluated += [evaluate(loss), evaluate(loss)]
    assert disturbed == undisturbed
    loss.set_step(77)
    evaluated.append(evaluate(loss))
    assert len(set(evaluated)) == 1
    assert evaluated[0] not in undisturbed
    noise = draw_noise(NoiseKey(seed=0, step=0, call=0), 18, DIM)
    assert evaluated[0] == pytest.approx(
        plain_loss(columns, cos_sim(columns[0], noise) * 20).item()
    )


def test_seed_none_follows_torch() -> None:
    columns = views()
    torch.manual_seed(41)
    loss = embedding_loss(seed=None)
    value = loss.compute_loss_from_embeddings(columns)
    assert value == embedding_loss(seed=41).compute_loss_from_embeddings(columns)
    assert value != embedding_loss(seed=42).compute_loss_from_embeddings(columns)
    assert loss.get_config_dict()["seed"] == 41  # the card says which


def test_same_seed_same_weights(make_encoder: MakeEncoder, train: Callable) -> None:
    dataset = Dataset.from_dict({"text": make_sentences(40)})

    def weights(seed: int) -> Tensor:
        model = make_encoder()
        train(model, GSInfoNCELoss(model), dataset, seed=seed)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    first = weights(5)
    assert torch.equal(first, weights(5))
    assert not torch.equal(first, weights(6))


@pytest.mark.parametrize(
    "settings, batch_size, expected",
    [
        ({}, 5, 15),
        ({"noise_ratio": 0.5}, 6, 3),
        ({"noise_ratio": 0.7}, 6, 4),  # 4.2
        ({"noise_ratio": 0.6}, 6, 4),  # 3.6
        ({"noise_ratio": 3.0}, 1, 3),
        ({"noise_ratio": 0}, 6, 0),
        ({"noise_ratio": 0.01}, 6, 0),
        ({"noise_size": 7}, 2, 7),
        ({"noise_size": 7}, 6, 7),
        ({"noise_size": 1500}, 2, 1500),  # more than a block of rows
        ({"noise_size": 7, "noise_weight": 0}, 6, 0),
    ],
)
def test_the_number_of_noise_vectors_follows_the_batch(
    settings: dict[str, Any], batch_size: int, expected: int
) -> None:
    spy = Spy()
    embedding_loss(similarity_fct=spy, **settings).compute_loss_from_embeddings(views(batch_size))
    shapes = [tuple(seen.shape) for seen in spy.seen]
    assert shapes == [(batch_size, DIM)] + [(expected, DIM)] * (expected > 0)


@pytest.mark.parametrize("settings", [{"noise_size": 0}, {"noise_weight": 0}])
def test_noise_that_does_not_count_is_not_drawn(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses_module, "draw_noise", lambda *_, **__: pytest.fail("drawn"))
    value = embedding_loss(**settings).compute_loss_from_embeddings(views())
    torch.testing.assert_close(value, plain_loss(views()))


@pytest.mark.parametrize("dim", [2, 8, 32, 768])
def test_the_noise_is_as_wide_as_the_embeddings_at_hand(dim: int) -> None:
    spy = Spy()
    loss = embedding_loss(similarity_fct=spy)
    for width in (64, dim):
        loss.compute_loss_from_embeddings(views(dim=width))
    assert [seen.shape[1] for seen in spy.seen] == [64, 64, dim, dim]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_noise_and_loss_are_float32_whatever_the_embeddings(dtype: torch.dtype) -> None:
    spy = Spy()
    columns = [column.to(dtype) for column in views()]
    value = embedding_loss(similarity_fct=spy, scale=0.05).compute_loss_from_embeddings(columns)
    assert value.dtype == torch.float32
    noise = spy.seen[1]
    assert torch.equal(noise, draw_noise(NoiseKey(0, 0, 1), 18, DIM))


def test_the_loss_is_float32_under_autocast(make_encoder: MakeEncoder, forwards: Callable) -> None:
    model = make_encoder().train()
    passes = forwards(model)
    with torch.autocast("cpu", torch.bfloat16):
        value = GSInfoNCELoss(model, seed=0)([model.preprocess(TEXTS)], None)
    value.backward()
    embeddings = list(passes[0].float().chunk(2))
    expected = embedding_loss().compute_loss_from_embeddings(embeddings)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)  # nothing was rounded to bf16


@pytest.mark.parametrize("similarity", [dot_score, euclidean_sim])
def test_the_scale_and_place_of_the_noise_count_beyond_cosine(similarity: Callable) -> None:
    def value(**settings: Any) -> float:
        loss = embedding_loss(similarity_fct=similarity, scale=0.1, **settings)
        return loss.compute_loss_from_embeddings(views()).item()

    assert len({value(), value(noise_std=2.0), value(noise_mean=1.0), value(noise_weight=2.0)}) == 4


def test_under_cosine_the_mean_of_the_noise_counts_and_its_scale_does_not() -> None:
    def value(**settings: Any) -> float:
        return embedding_loss(**settings).compute_loss_from_embeddings(views()).item()

    assert value(noise_std=0.5) == pytest.approx(value(), rel=1e-6)
    assert value(noise_mean=1.0) != pytest.approx(value(), rel=1e-3)


def test_hard_negatives_and_weighted_noise_stand_in_the_denominator() -> None:
    columns = views(columns=4)
    value = embedding_loss(noise_size=9, noise_weight=0.3).compute_loss_from_embeddings(columns)
    noise = draw_noise(NoiseKey(0, 0, 1), 9, DIM)
    oracle = plain_loss(columns, cos_sim(columns[0], noise) * 20 + math.log(0.3))
    torch.testing.assert_close(value, oracle, rtol=1e-5, atol=1e-6)
    assert value > embedding_loss(noise_size=9, noise_weight=0.3).compute_loss_from_embeddings(
        columns[:2]
    )


# The closed form


@pytest.mark.parametrize("dim", [8, 32])
@pytest.mark.parametrize(
    "settings, log_mass",
    [
        ({"noise_size": 12}, lambda dim: expected_log_noise_mass(dim, 20.0, 12)),
        (
            {"noise_size": 12, "noise_weight": 2.0},
            lambda dim: expected_log_noise_mass(dim, 20.0, 24),
        ),
        ({"noise_ratio": 0.5}, lambda dim: expected_log_noise_mass(dim, 20.0, 3)),
        ({}, lambda dim: expected_log_noise_mass(dim, 20.0, 18)),
        ({"virtual_cosine": 0.55}, lambda dim: 20 * 0.55),
        ({"virtual_cosine": -1.0}, lambda dim: -20.0),
        ({"virtual_cosine": 1.0}, lambda dim: 20.0),
        ({"scale": 5.0, "virtual_cosine": 0.55}, lambda dim: 5 * 0.55),
    ],
)
def test_expected_noise_is_one_constant_in_the_denominator(
    settings: dict[str, Any], log_mass: Callable[[int], float], dim: int
) -> None:
    columns = views(dim=dim)
    value = embedding_loss(noise="expected", **settings).compute_loss_from_embeddings(columns)
    constant = torch.full((len(columns[0]), 1), log_mass(dim))
    oracle = plain_loss(columns, constant, scale=settings.get("scale", 20.0))
    torch.testing.assert_close(value, oracle, rtol=1e-5, atol=1e-6)


def test_no_expected_noise_is_no_noise() -> None:
    columns = views()
    values = [
        embedding_loss(noise=noise, noise_size=0).compute_loss_from_embeddings(columns)
        for noise in ("expected", "sampled")
    ]
    assert torch.equal(*values)


# Arguments


WANTED = {
    "scale": "a positive number",
    "noise_weight": "0 or a positive number",
    "noise_mean": "a number",
    "noise_std": "a positive number",
    "noise_ratio": "0 or a positive number",
    "noise_size": "0 or a positive integer",
    "seed": "None or an integer from 0 to 2**64 - 1",
    "virtual_cosine": "in [-1, 1]",
}
HOLDS = 'noise="expected" holds under cosine similarity and noise_mean=0 alone, got '
FUNCTION = "similarity_fct must be a function, streamed a bool or None, got "


@pytest.mark.parametrize(
    "name, values",
    [
        *[(n, (-1.0, math.nan, math.inf, True, "1")) for n in ("noise_weight", "noise_ratio")],
        *[(n, (0.0, -1.0, math.nan, math.inf, True, "1")) for n in ("scale", "noise_std")],
        ("noise_mean", (math.nan, -math.inf, True)),
        ("noise_size", (-1, 1.5, 3.0, math.nan, True, "1")),
        ("seed", (-1, 1.5, 3.0, math.nan, True, "1", 2**64)),
        ("virtual_cosine", (1.01, -1.01, math.nan, math.inf, True)),
    ],
)
def test_a_number_out_of_range_is_named_with_the_range(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        settings: dict[str, Any] = {name: value}
        if name == "virtual_cosine":
            settings["noise"] = "expected"
        with pytest.raises(ValueError) as caught:
            GSInfoNCELoss(Lookup(), **settings)
        assert str(caught.value) == f"{name} must be {WANTED[name]}, got {value!r}"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"noise": "none"}, 'noise must be "sampled" or "expected", got \'none\''),
        ({"noise": None}, 'noise must be "sampled" or "expected", got None'),
        ({"similarity_fct": "cos"}, f"{FUNCTION}similarity_fct='cos', streamed=None"),
        ({"streamed": "yes"}, f"{FUNCTION}similarity_fct={cos_sim!r}, streamed='yes'"),
        (
            {"noise_ratio": 3.0, "noise_size": 192},
            "noise_ratio=3.0 and noise_size=192 both say how many noise vectors there are: give one "
            "of them",
        ),
        (
            {"noise": "expected", "similarity_fct": dot_score},
            f'{HOLDS}similarity_fct=dot_score and noise_mean=0.0: use noise="sampled"',
        ),
        (
            {"noise": "expected", "noise_mean": 0.1},
            f'{HOLDS}similarity_fct=cos_sim and noise_mean=0.1: use noise="sampled"',
        ),
        (
            {"virtual_cosine": 0.5},
            'virtual_cosine is the mass of expected noise: add noise="expected"',
        ),
        *[
            (
                {"noise": "expected", "virtual_cosine": 0.5, **extra},
                "virtual_cosine is the whole mass of the noise: leave out noise_ratio, noise_size and "
                "noise_weight",
            )
            for extra in ({"noise_ratio": 1.0}, {"noise_size": 1}, {"noise_weight": 0.5})
        ],
        (
            {"streamed": True, "similarity_fct": euclidean_sim},
            "streamed=True needs cosine similarity or dot_score, got similarity_fct=euclidean_sim: "
            "use streamed=False",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_what_to_do(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        GSInfoNCELoss(Lookup(), **settings)
    assert str(caught.value) == message


def test_either_cosine_serves_expected_noise() -> None:
    columns = views()
    values = [
        embedding_loss(noise="expected", similarity_fct=cosine).compute_loss_from_embeddings(
            columns
        )
        for cosine in (cos_sim, objective.cos_sim)
    ]
    assert torch.equal(*values)


# What the card and the trainer read


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"noise_size": 5, "seed": 3, "noise_mean": 0.5},
        {"noise": "expected", "virtual_cosine": 0.55, "scale": 10},
        {"similarity_fct": dot_score, "merge_views": False},
    ],
)
def test_the_config_is_every_setting_as_a_plain_value(settings: dict[str, Any]) -> None:
    config = GSInfoNCELoss(Lookup(), **settings).get_config_dict()
    assert config.keys() == inspect.signature(GSInfoNCELoss).parameters.keys() - {"model"}
    assert json.loads(json.dumps(config)) == config
    assert all(value is None or isinstance(value, (int, float, str)) for value in config.values())
    given = {name: value for name, value in settings.items() if name != "similarity_fct"}
    assert config == {**config, **given}
    assert "similarity_fct" not in settings or "dot" in config["similarity_fct"]


def test_the_defaults_are_the_papers_on_one_device() -> None:
    assert GSInfoNCELoss(Lookup()).get_config_dict() == {
        "scale": 20.0,
        "noise": "sampled",
        "noise_ratio": 3.0,
        "noise_size": None,
        "noise_weight": 1.0,
        "noise_mean": 0.0,
        "noise_std": 1.0,
        "virtual_cosine": None,
        "seed": None,
        "similarity_fct": "cos_sim",
        "gather_across_devices": False,
        "merge_views": True,
        "streamed": None,
    }


def test_the_card_cites_both_papers_and_the_temperature() -> None:
    loss = embedding_loss(scale=20)
    assert loss.citation.count("@inproceedings{") == 2
    assert "2022.coling-1.434" in loss.citation
    assert "2021.emnlp-main.552" in loss.citation
    assert loss.temperature == pytest.approx(0.05)


def test_statistics_describe_the_last_training_batch() -> None:
    columns = views(columns=3)
    loss = embedding_loss(noise_size=9)
    assert loss.statistics is None
    with torch.no_grad():
        loss.compute_loss_from_embeddings(columns)
    assert loss.statistics is None
    loss.compute_loss_from_embeddings(views(rows=3))
    loss.compute_loss_from_embeddings([column.requires_grad_() for column in columns])
    with torch.no_grad():
        loss.compute_loss_from_embeddings(views(rows=3))
    anchors, *others = (column.detach() for column in columns)
    cosines = cos_sim(anchors, torch.cat(others))
    noise = cos_sim(anchors, draw_noise(NoiseKey(0, 0, 2), 9, DIM))
    positive = torch.eye(*cosines.shape, dtype=torch.bool)
    shares = torch.cat([cosines, noise], dim=1).mul(20).softmax(dim=1)[:, cosines.shape[1] :]
    statistics = loss.statistics
    assert statistics.positive_cosine == pytest.approx(cosines[positive].mean().item(), abs=1e-5)
    assert statistics.negative_cosine == pytest.approx(cosines[~positive].mean().item(), abs=1e-5)
    assert statistics.noise_share == pytest.approx(shares.sum(dim=1).mean().item(), abs=1e-5)
    assert statistics == loss.statistics  # reading changes nothing


def test_statistics_look_at_256_anchors_at_most() -> None:
    anchors, positives = views(rows=300)
    loss = embedding_loss()
    loss.compute_loss_from_embeddings([anchors, positives])
    cosines = F.cosine_similarity(anchors, positives)[:256]
    assert loss.statistics.positive_cosine == pytest.approx(cosines.mean().item(), abs=1e-6)


def test_a_step_s_graph_goes_with_its_loss() -> None:
    nodes: list[weakref.ref[Any]] = []

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            nodes.append(weakref.ref(ctx))
            return x.clone()

    loss = embedding_loss()
    value = loss.compute_loss_from_embeddings([Marked.apply(v.requires_grad_()) for v in views()])
    assert all(node() is not None for node in nodes) and len(nodes) == 2
    del value
    assert all(node() is None for node in nodes)  # statistics can be read, and hold none of it
    assert loss.statistics


def test_statistics_nobody_reads_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**arguments: Any) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr(objective, "gs_infonce_statistics", fail)
    loss = embedding_loss()
    loss.compute_loss_from_embeddings(views())
    with pytest.raises(AssertionError, match="computed"):
        assert loss.statistics


def test_several_gpus_in_one_process_are_refused(make_encoder: MakeEncoder) -> None:
    model = make_encoder()
    loss = GSInfoNCELoss(model)
    loss.model = nn.DataParallel(model)  # as the Trainer does
    with pytest.raises(ValueError) as caught:
        loss([model.preprocess(TEXTS)], None)
    assert str(caught.value) == (
        "one process trains on several GPUs (DataParallel), where random states cannot be replayed: "
        "start one process a GPU with torchrun, or set CUDA_VISIBLE_DEVICES=0"
    )


def test_gathering_on_one_device_changes_nothing() -> None:
    values = [
        embedding_loss(gather_across_devices=gather).compute_loss_from_embeddings(views())
        for gather in (False, True)
    ]
    assert torch.equal(*values)


# Streaming


def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every use of the streamed objective; its tiles are small."""
    monkeypatch.setattr(streamed, "BLOCK_ROWS", 4)
    monkeypatch.setattr(streamed, "TILE_ROWS", 4)
    uses: list[int] = []
    compute = losses_module.gs_infonce_streamed

    def spy(**arguments: Any) -> Tensor:
        uses.append(len(arguments["anchors"]))
        assert callable(arguments.get("noise", list))  # drawn in blocks, never held whole
        return compute(**arguments)

    monkeypatch.setattr(losses_module, "gs_infonce_streamed", spy)
    return uses


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"noise_size": 1500, "noise_mean": 0.3, "noise_std": 2.0, "noise_weight": 0.01},
        {"noise_size": 0},
        {"noise": "expected"},
        {"noise": "expected", "virtual_cosine": 0.6},
        {"similarity_fct": dot_score, "scale": 0.1},
    ],
)
def test_streaming_changes_neither_value_nor_gradients(
    settings: dict[str, Any], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = streams(monkeypatch)

    def run(streamed: bool | None) -> list[Tensor]:
        inputs = [column.double().requires_grad_() for column in views(columns=columns)]
        value = embedding_loss(streamed=streamed, **settings).compute_loss_from_embeddings(inputs)
        value.backward()
        return [value.detach(), *(column.grad for column in inputs)]

    dense = run(False)
    assert all(gradient.any() for gradient in dense[1:])
    assert run(None)[0] == dense[0] and not uses  # small: at once
    for found, expected in zip(run(True), dense, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert uses == [6]


def test_streaming_is_chosen_by_the_number_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = streams(monkeypatch)
    columns = views()
    logits = 6 * (6 + 18)
    assert logits < losses_module.STREAMED_FROM
    for threshold, streamed_ in ((logits + 1, False), (logits, True)):
        monkeypatch.setattr(losses_module, "STREAMED_FROM", threshold)
        embedding_loss().compute_loss_from_embeddings(columns)
        assert bool(uses) == streamed_
    embedding_loss(streamed=False).compute_loss_from_embeddings(columns)
    embedding_loss(similarity_fct=euclidean_sim).compute_loss_from_embeddings(columns)
    monkeypatch.setattr(losses_module, "STREAMED_FROM", 6 * 6 + 1)  # a given mass has no logits
    embedding_loss(noise="expected", virtual_cosine=0.3).compute_loss_from_embeddings(columns)
    assert len(uses) == 1
