"""The objective is its equation, whatever the sizes, the precision and the input.

The invariants:

1. Value and gradient equal the equation's, taken pair by pair in float64 with the derivative worked out
   by hand, and those of the paper's listing 1; without noise those of MultipleNegativesRankingLoss.
2. The value keeps its relative precision when it is small; it is never negative; it is exactly 0 for one
   anchor without noise, and more noise never lowers it. The order of negatives and noise does not matter.
3. The noise takes no gradient. Its standard deviation has no effect under cosine similarity and mean 0.
4. The expected noise sum is the mean of the sampled ones, and a constant in every denominator; its
   logarithm agrees with three other ways to compute it, and is finite for every size.
5. Half precision, autocast, a zero vector, tiny and huge vectors and scales: finite, no NaN in a gradient.
6. A wrong argument is an error that names it.
7. A key names its noise: equal keys draw equal vectors, in blocks or at once, different keys different
   ones, and no other random generator notices.
"""

from __future__ import annotations

import doctest
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn

from st_gsinfonce import objective
from st_gsinfonce.noise import NOISE_BLOCK_ROWS, NoiseKey, draw_noise, noise_blocks
from st_gsinfonce.objective import (
    cos_sim,
    expected_log_noise_mass,
    gs_infonce,
    gs_infonce_statistics,
)

Gradients = tuple[np.ndarray, np.ndarray]  # of the anchors, (N, D), and the candidates, (C, D)

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
# In float32, builds of torch sum in different orders: 1.1e-5 was seen where the scale is above 20.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}

properties = settings(max_examples=40, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Batch:
    """Random vectors, every positive at a relative ``distance`` from its anchor."""

    anchors: Tensor  # (N, D)
    candidates: Tensor  # (C, D)
    noise: Tensor  # (M, D)
    offset: int = 0

    @classmethod
    def make(
        cls,
        n: int = 6,
        m: int = 9,
        dim: int = 8,
        *,
        offset: int = 0,
        hard: int = 0,
        distance: float = 0.5,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> Batch:
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int) -> Tensor:
            return torch.randn(rows, dim, generator=generator, dtype=torch.float64)

        anchors = normal(n)
        positives = anchors + distance * normal(n)
        candidates = torch.cat([normal(offset), positives, normal(hard)])
        return cls(anchors.to(dtype), candidates.to(dtype), normal(m).to(dtype), offset)


def backward(
    loss: Callable[[Tensor, Tensor], Tensor], anchors: Tensor, candidates: Tensor
) -> tuple[float, Gradients]:
    """Return a loss and its gradients at copies of the two tensors."""
    a, c = (tensor.detach().clone().requires_grad_() for tensor in (anchors, candidates))
    value = loss(a, c)
    value.backward()
    gradients = tuple(torch.zeros_like(t) if t.grad is None else t.grad.double() for t in (a, c))
    return value.item(), (gradients[0].numpy(), gradients[1].numpy())


def double_loop(
    batch: Batch, scale: float = 20.0, noise_weight: float = 1.0, constant: float = 0.0
) -> tuple[float, Gradients]:
    """Return the equation's value and gradients, pair by pair.

    ``constant`` is added to every denominator. With p(x) the share of x in the denominator,
    dl_i / dcos(h_i, x) = s (p(x) - [x is the positive]), and dcos(a, b) / da = (b/|b| - cos a/|a|) / |a|.
    """
    anchors, candidates, noise = (
        tensor.double().numpy() for tensor in (batch.anchors, batch.candidates, batch.noise)
    )
    total, d_anchors, d_candidates = 0.0, np.zeros_like(anchors), np.zeros_like(candidates)
    lengths = [math.sqrt(x @ x) for x in candidates]
    for i, anchor in enumerate(anchors):
        length = math.sqrt(anchor @ anchor)
        unit = anchor / length
        others = []  # all of the denominator but the positive, as (part, cosine, unit vector, candidate)
        for j, candidate in enumerate(candidates):
            x = candidate / lengths[j]
            cosine = float(unit @ x)
            term = (math.exp(scale * cosine), cosine, x, j)
            if j == batch.offset + i:
                positive, positive_cosine, positive_unit, positive_j = term
            else:
                others.append(term)
        for g in noise:
            x = g / math.sqrt(g @ g)
            cosine = float(unit @ x)
            others.append((noise_weight * math.exp(scale * cosine), cosine, x, None))
        rest = math.fsum([*(term[0] for term in others), constant])
        denominator = positive + rest
        total += math.log1p(rest / positive)  # -log(positive / denominator), to all its digits
        # The positive's share less 1 is minus the share of the rest.
        terms = [*others, (-rest, positive_cosine, positive_unit, positive_j)]
        for part, cosine, x, j in terms:
            slope = scale * part / denominator / len(anchors)
            d_anchors[i] += slope * (x - cosine * unit) / length
            if j is not None:
                d_candidates[j] += slope * (unit - cosine * x) / lengths[j]
    return total / len(anchors), (d_anchors, d_candidates)


def listing_1(
    anchors: Tensor, candidates: Tensor, noise: Tensor, temperature: float = 0.05
) -> Tensor:
    """The paper's listing: broadcast cosines over the temperature, noise appended, cross entropy."""
    cosines = F.cosine_similarity(anchors.unsqueeze(1), candidates.unsqueeze(0), dim=-1)
    noise_cosines = F.cosine_similarity(anchors.unsqueeze(1), noise.unsqueeze(0), dim=-1)
    logits = torch.cat([cosines, noise_cosines], dim=1) / temperature  # (N, C + M)
    return F.cross_entropy(logits, torch.arange(len(anchors)))


def assert_same(
    found: tuple[float, Gradients], wanted: tuple[float, Gradients], tolerance: float
) -> None:
    """Compare values, and gradients relative to their largest component."""
    assert found[0] == pytest.approx(wanted[0], rel=tolerance, abs=tolerance)
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


def ours(batch: Batch, **arguments: Any) -> tuple[float, Gradients]:
    arguments = {"noise": batch.noise, "offset": batch.offset, **arguments}
    return backward(lambda a, c: gs_infonce(a, c, **arguments), batch.anchors, batch.candidates)


def value(batch: Batch, **arguments: Any) -> float:
    arguments = {"noise": batch.noise, "offset": batch.offset, **arguments}
    return gs_infonce(batch.anchors, batch.candidates, **arguments).item()


# 1. The equation


def test_the_comparison_can_fail() -> None:
    batch = Batch.make(hard=2, offset=1)
    wanted = double_loop(batch)
    assert_same(ours(batch), wanted, 1e-10)
    assert min(np.abs(gradient).max() for gradient in wanted[1]) > 1e-3
    slips: list[tuple[float, Gradients]] = [
        ours(batch, noise_weight=1.0001),
        ours(batch, scale=20.001),
        ours(batch, noise=batch.noise[1:]),
        ours(batch, offset=0),
        backward(  # right in value, without the gradient that reaches the candidates
            lambda a, c: gs_infonce(a, c.detach(), batch.noise, offset=1),
            batch.anchors,
            batch.candidates,
        ),
        (wanted[0], (6 * wanted[1][0], wanted[1][1])),
    ]
    for slip in slips:
        with pytest.raises(AssertionError):
            assert_same(slip, wanted, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("noise_weight", [0, 0.3, 1, 7])
def test_equals_the_equation_at_the_corners(dtype: torch.dtype, noise_weight: float) -> None:
    layouts = itertools.cycle([(0, 0), (0, 5), (3, 0), (2, 4)])
    for (n, m, dim), (offset, hard) in zip(
        itertools.product((1, 33), (0, 100), (2, 1024)), layouts, strict=False
    ):
        batch = Batch.make(n, m, dim, offset=offset, hard=hard, dtype=dtype)
        wanted = double_loop(batch, noise_weight=noise_weight)
        assert_same(ours(batch, noise_weight=noise_weight), wanted, TOLERANCE[dtype])


@properties
@given(
    n=st.integers(1, 33),
    m=st.integers(0, 100),
    dim=st.integers(2, 1024),
    offset=st.integers(0, 8),
    hard=st.integers(0, 8),
    noise_weight=st.sampled_from([0, 0.3, 1, 7]),
    scale=st.floats(0.5, 50),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32),
)
def test_equals_the_equation_anywhere(
    n: int,
    m: int,
    dim: int,
    offset: int,
    hard: int,
    noise_weight: float,
    scale: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    batch = Batch.make(n, m, dim, offset=offset, hard=hard, dtype=dtype, seed=seed)
    wanted = double_loop(batch, scale, noise_weight)
    assert_same(ours(batch, scale=scale, noise_weight=noise_weight), wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "m", "dim"), [(1, 3, 2), (8, 24, 64), (33, 99, 768)])
def test_equals_the_papers_listing(dtype: torch.dtype, n: int, m: int, dim: int) -> None:
    batch = Batch.make(n, m, dim, hard=n % 4, distance=2.0, dtype=dtype)
    exact = batch.noise.double()  # the listing in float64: in float32 it would be what errs
    wanted = backward(
        lambda a, c: listing_1(a, c, exact), batch.anchors.double(), batch.candidates.double()
    )
    assert_same(ours(batch), wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [1.0, 20.0, 50.0])
@pytest.mark.parametrize("columns", [1, 3])
def test_without_noise_equals_multiple_negatives_ranking(
    dtype: torch.dtype, scale: float, columns: int
) -> None:
    # Far positives: at a small loss it would be their logarithms' difference that errs.
    batch = Batch.make(16, 0, 32, hard=16 * (columns - 1), distance=2.0, dtype=dtype)
    theirs = MultipleNegativesRankingLoss(nn.Identity(), scale=scale)  # type: ignore[arg-type]
    wanted = backward(
        lambda a, c: theirs.compute_loss_from_embeddings([a, *c.chunk(columns)], a),
        batch.anchors,
        batch.candidates,
    )
    assert_same(ours(batch, noise=None, scale=scale), wanted, TOLERANCE[dtype])


def test_gradcheck() -> None:
    batch = Batch.make(4, 5, 3, offset=1, hard=2)
    inputs = tuple(t.clone().requires_grad_() for t in (batch.anchors, batch.candidates))
    for arguments in ({"noise": batch.noise, "noise_weight": 0.3}, {"log_noise_mass": 15.0}, {}):
        assert torch.autograd.gradcheck(
            lambda a, c, kwargs=arguments: gs_infonce(a, c, offset=1, **kwargs), inputs
        )


def test_another_similarity() -> None:
    batch = Batch.make(5, 7, 4, hard=3)

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return a @ b.T

    logits = 0.5 * torch.cat([dot(batch.anchors, t) for t in (batch.candidates, batch.noise)], 1)
    wanted = F.cross_entropy(logits, torch.arange(5)).item()
    assert value(batch, similarity=dot, scale=0.5) == pytest.approx(wanted, rel=1e-12)
    # A cosine that the objective does not recognise takes the general way to the same number.
    general = ours(batch, similarity=lambda a, b: cos_sim(a, b))
    assert_same(general, ours(batch), 1e-12)


def test_the_mean_over_shards_is_the_loss_of_the_whole() -> None:
    batch = Batch.make(8, 6)
    shards = [
        gs_infonce(batch.anchors[start : start + 4], batch.candidates, batch.noise, offset=start)
        for start in (0, 4)
    ]
    assert torch.stack(shards).mean().item() == pytest.approx(value(batch), rel=1e-12)


def test_the_docstrings_example_runs() -> None:
    assert doctest.testmod(objective).attempted > 0
    assert doctest.testmod(objective).failed == 0


# 2. The value


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_values_known_on_paper(dtype: torch.dtype, relative: float) -> None:
    views = torch.eye(4, dtype=dtype)
    small = gs_infonce(views, views).item()
    assert small == pytest.approx(math.log1p(3 * math.exp(-20)), rel=relative, abs=0)
    # One noise vector is the anchor itself, the other at a right angle to it.
    one = gs_infonce(views[:1], views[:1], views[:2], noise_weight=0.5, scale=3).item()
    assert one == pytest.approx(math.log(1 + 0.5 * (1 + math.exp(-3))), rel=relative)
    by_mass = gs_infonce(views[:1], views[:1], log_noise_mass=18.0).item()
    assert by_mass == pytest.approx(math.log(1 + math.exp(-2)), rel=relative)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [1.0, 20.0, 1000.0])
def test_one_anchor(dtype: torch.dtype, scale: float) -> None:
    batch = Batch.make(1, 3, 16, dtype=dtype)
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
        loss, gradients = ours(batch, noise=None, scale=scale)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients)
    assert value(batch, scale=1.0) > 0
    assert value(batch, noise=None, log_noise_mass=0.0, scale=1.0) > 0
    assert value(batch, noise=None, log_noise_mass=-math.inf, scale=scale) == 0
    against = Batch(batch.anchors, -1e6 * batch.anchors, batch.noise)
    assert value(against, noise=None, similarity=lambda a, b: a @ b.T, scale=scale) == 0


batches = st.builds(
    Batch.make,
    n=st.integers(1, 12),
    m=st.integers(0, 20),
    dim=st.integers(2, 40),
    offset=st.integers(0, 3),
    hard=st.integers(0, 6),
    seed=st.integers(0, 2**32),
)


@properties
@given(batches, st.floats(0.1, 1000), st.floats(0, 100))
def test_is_never_negative(batch: Batch, scale: float, noise_weight: float) -> None:
    loss, gradients = ours(batch, scale=scale, noise_weight=noise_weight)
    assert 0 <= loss < math.inf
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@properties
@given(batches, st.randoms(use_true_random=False))
def test_order_does_not_matter(batch: Batch, shuffle: random.Random) -> None:
    n, offset = len(batch.anchors), batch.offset
    before = list(range(offset))
    positives = list(range(n))
    hard = list(range(offset + n, len(batch.candidates)))
    noise = list(range(len(batch.noise)))
    for order in (positives, hard, noise):
        shuffle.shuffle(order)
    candidates = batch.candidates[before + [offset + i for i in positives] + hard]
    permuted = Batch(batch.anchors[positives], candidates, batch.noise[noise], offset)
    assert value(permuted) == pytest.approx(value(batch), rel=1e-12, abs=1e-14)


@properties
@given(batches, st.lists(st.floats(0, 1e6), min_size=2, max_size=2).map(sorted))
def test_more_noise_never_lowers_it(batch: Batch, weights: list[float]) -> None:
    none = value(batch, noise=None)
    less, more = (value(batch, noise_weight=weight) for weight in weights)
    slack = 1 + 1e-14
    assert none <= less * slack and less <= more * slack
    if len(batch.noise) and weights[1] > 2 * weights[0] and weights[1] > 1e-3:
        assert less < more


# 3. The noise in the loss


def test_noise_takes_no_gradient() -> None:
    batch = Batch.make()
    noise = batch.noise.clone().requires_grad_()
    anchors = batch.anchors.clone().requires_grad_()
    gs_infonce(anchors, batch.candidates, noise).backward()
    assert anchors.grad is not None and anchors.grad.abs().max() > 0
    assert noise.grad is None
    assert not gs_infonce(batch.anchors, batch.candidates, noise).requires_grad


def test_the_standard_deviation_counts_under_a_dot_product_alone() -> None:
    batch = Batch.make(8, dim=32, dtype=torch.float32)
    narrow, wide = (draw_noise(NoiseKey(1, 2, 3), 24, 32, std=std) for std in (0.1, 3.0))
    assert not torch.allclose(narrow, wide)
    assert_same(ours(batch, noise=narrow), ours(batch, noise=wide), 1e-5)
    dot = {"similarity": lambda a, b: a @ b.T, "scale": 1.0}
    assert value(batch, noise=wide, **dot) > value(batch, noise=narrow, **dot) + 0.01


def test_noise_of_another_precision_than_the_embeddings() -> None:
    batch = Batch.make()
    wanted = ours(batch, noise=batch.noise.float().double())
    assert_same(ours(batch, noise=batch.noise.float()), wanted, 0)


# 4. The expected noise sum


@pytest.mark.parametrize(
    ("dim", "scale"), [(2, 1.0), (16, 5.0), (64, 10.0), (384, 20.0), (768, 20.0)]
)
def test_expected_is_the_mean_of_the_sampled(dim: int, scale: float) -> None:
    draws, num_noise, weight = 10_000, 192, 0.3
    noise = draw_noise(NoiseKey(0, 0, 0), draws, dim, std=0.5)
    anchor = torch.randn(1, dim, generator=torch.Generator().manual_seed(1))
    sums = num_noise * weight * (scale * cos_sim(anchor, noise).double()).exp()
    expected = math.exp(expected_log_noise_mass(dim, scale, num_noise, weight))
    error = sums.std().item() / math.sqrt(draws)
    assert error < 0.03 * expected  # or there would be nothing to see
    assert abs(sums.mean().item() - expected) < 3 * error


@properties
@given(batches, st.floats(-30, 30))
def test_a_mass_is_a_constant_in_the_denominator(batch: Batch, mass: float) -> None:
    without = Batch(batch.anchors, batch.candidates, batch.noise[:0], batch.offset)
    wanted = double_loop(without, constant=math.exp(mass))
    assert_same(ours(without, noise=None, log_noise_mass=mass), wanted, 1e-10)


SIZES = [2, 3, 8, 33, 128, 768, 1024, 8192]
SCALES = [1.0, 2.5, 20.0, 50.0, 333.0, 1000.0]


def test_expected_agrees_with_scipy_where_scipy_can() -> None:
    compared = {"hyp0f1": 0, "ive": 0}
    for dim, scale in itertools.product(SIZES, SCALES):
        found = expected_log_noise_mass(dim, scale, 1)
        if found < 700:  # e^709 is the largest float
            direct = math.log(scipy.special.hyp0f1(dim / 2, scale**2 / 4))
            assert found == pytest.approx(direct, rel=1e-10, abs=1e-11), (dim, scale)
            compared["hyp0f1"] += 1
        order = dim / 2 - 1
        bessel = scipy.special.ive(order, scale)  # I_order(scale) e^-scale, 0 where it underflows
        if bessel > 1e-300:
            log_gamma = math.lgamma(dim / 2)
            by_bessel = math.log(bessel) + scale + log_gamma + order * math.log(2 / scale)
            # The summands cancel: their rounding limits the agreement.
            slack = 1e-14 * (log_gamma + 1)
            assert found == pytest.approx(by_bessel, rel=1e-10, abs=slack), (dim, scale)
            compared["ive"] += 1
    assert all(20 < count < len(SIZES) * len(SCALES) for count in compared.values())


def test_expected_agrees_with_many_digits() -> None:
    with mpmath.workdps(50):
        for dim, scale in itertools.product(SIZES, SCALES):
            exact = mpmath.log(192 * mpmath.hyp0f1(mpmath.mpf(dim) / 2, mpmath.mpf(scale) ** 2 / 4))
            found = expected_log_noise_mass(dim, scale, 192)
            assert found == pytest.approx(float(exact), rel=1e-12), (dim, scale)


def test_expected_is_finite_and_monotone() -> None:
    table = np.array(
        [[expected_log_noise_mass(d, s, 1_000_000) for s in SCALES] for d in SIZES]
    )  # (dimensions, scales)
    assert np.isfinite(table).all()
    assert (np.diff(table, axis=0) < 0).all()  # a wider space has fewer close directions
    assert (np.diff(table, axis=1) > 0).all()
    assert (table > math.log(1_000_000)).all()
    assert (table < math.log(1_000_000) + np.array(SCALES)).all()  # no cosine exceeds 1


def test_expected_of_known_cases() -> None:
    one = expected_log_noise_mass(1, 3.0, 1)  # the sphere in one dimension is {-1, 1}
    assert one == pytest.approx(math.log(math.cosh(3.0)), rel=1e-13)
    far = expected_log_noise_mass(1, 1e5, 1)  # its largest terms are near k = 50,000
    assert far == pytest.approx(1e5 - math.log(2), rel=1e-13)
    three = expected_log_noise_mass(3, 3.0, 5, 0.2)  # and in three a cosine is uniform on [-1, 1]
    assert three == pytest.approx(math.log(math.sinh(3.0) / 3.0), rel=1e-13)
    papers = expected_log_noise_mass(768, 20.0, 192)
    assert (round(papers, 2), round(papers / 20, 2)) == (5.52, 0.28)
    assert expected_log_noise_mass(768, 20.0, 0) == -math.inf
    assert expected_log_noise_mass(768, 20.0, 192, 0.0) == -math.inf
    doubled = expected_log_noise_mass(768, 20.0, 384, 1.5)
    assert doubled == pytest.approx(papers + math.log(3), rel=1e-13)


# 5. Hard cases


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [1e-8, 1.0, 1e4])
@pytest.mark.parametrize("scale", [1.0, 20.0, 1000.0])
def test_hard_input_stays_finite(dtype: torch.dtype, norm: float, scale: float) -> None:
    batch = Batch.make(7, 21, 64, hard=2)
    anchors = norm * F.normalize(batch.anchors)
    candidates = norm * F.normalize(batch.candidates)
    anchors[2] = 0
    candidates[4] = 0
    candidates[1] = anchors[1]  # a cosine of 1
    candidates[3] = -anchors[3]  # a loss of about twice the scale
    low = Batch(anchors.to(dtype), candidates.to(dtype), batch.noise.to(dtype))
    for arguments in ({}, {"noise": None}, {"noise": None, "log_noise_mass": scale / 2}):
        loss, gradients = ours(low, scale=scale, **arguments)
        assert math.isfinite(loss)
        assert all(np.isfinite(gradient).all() for gradient in gradients)
        assert (gradients[0][2] == 0).all() and (gradients[1][4] == 0).all()
        if norm == 1.0 and scale < 1000:  # where a constant holds the whole denominator
            assert all(np.abs(gradient).max() > 0 for gradient in gradients)


@pytest.mark.parametrize("length", [1e-8, 1e4])
def test_lengths_do_not_matter(length: float) -> None:
    batch = Batch.make(7, 21, 64, dtype=torch.float32)
    other = Batch(length * batch.anchors, batch.candidates / length, length * batch.noise)
    assert value(other) == pytest.approx(value(batch), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    low = Batch.make(8, 24, 64, dtype=dtype)
    wide = Batch(low.anchors.float(), low.candidates.float(), low.noise.float())
    rounded, exact = ours(low), ours(wide)
    assert rounded[0] == exact[0]
    for rounded_gradient, gradient in zip(rounded[1], exact[1], strict=True):
        np.testing.assert_array_equal(
            rounded_gradient, torch.from_numpy(gradient).to(dtype).double()
        )


def test_autocast_changes_nothing() -> None:
    batch = Batch.make(8, 24, 64, dtype=torch.float32)
    statistics = gs_infonce_statistics(batch.anchors, batch.candidates, batch.noise)

    def under_autocast(anchors: Tensor, candidates: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (anchors @ candidates.T).dtype == torch.bfloat16  # it is on
            assert gs_infonce_statistics(anchors, candidates, batch.noise) == statistics
            return gs_infonce(anchors, candidates, batch.noise)

    assert_same(backward(under_autocast, batch.anchors, batch.candidates), ours(batch), 0)


# 6. Wrong arguments

VECTORS = torch.ones(4, 3)


SHAPE = "must be a floating point tensor of shape (rows, dim), got"
DIMENSION = "has dimension 2, but the anchors have 3"
ALONE = (
    "log_noise_mass stands for the whole noise sum, weight included: give it without noise and "
    "noise_weight"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[
            ({"scale": value}, f"scale must be a positive number, got {value!r}")
            for value in (0.0, -20.0, math.nan, math.inf)
        ],
        *[
            ({"noise_weight": value}, f"noise_weight must be 0 or a positive number, got {value!r}")
            for value in (-0.1, math.nan, math.inf)
        ],
        *[
            ({"log_noise_mass": value}, f"log_noise_mass must be a number or -inf, got {value!r}")
            for value in (math.nan, math.inf)
        ],
        ({"log_noise_mass": 1.0, "noise": VECTORS}, ALONE),
        ({"log_noise_mass": 1.0, "noise_weight": 0.5}, ALONE),
        ({"anchors": VECTORS[:0]}, "anchors is empty: the loss of no anchor is not defined"),
        ({"anchors": VECTORS[0]}, f"anchors {SHAPE} torch.float32 of shape (3,)"),
        ({"anchors": VECTORS.long()}, f"anchors {SHAPE} torch.int64 of shape (4, 3)"),
        ({"candidates": VECTORS[:, :2]}, f"candidates {DIMENSION}"),
        ({"candidates": VECTORS[None]}, f"candidates {SHAPE} torch.float32 of shape (1, 4, 3)"),
        ({"noise": VECTORS[:, :2]}, f"noise {DIMENSION}"),
        ({"noise": VECTORS.long()}, f"noise {SHAPE} torch.int64 of shape (4, 3)"),
        *[
            (
                {"candidates": VECTORS[:rows], "offset": offset},
                f"the positives of 4 anchors at offset {offset} are the candidates {offset} to {last}, "
                f"but there are {rows} candidates",
            )
            for rows, offset, last in ((3, 0, 3), (4, -1, 2), (4, 1, 4))
        ],
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    assert gs_infonce(VECTORS, VECTORS).isfinite()
    with pytest.raises(ValueError) as caught:
        gs_infonce(**{"anchors": VECTORS, "candidates": VECTORS, **arguments})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("dim", 0, "at least 1"),
        ("dim", -3, "at least 1"),
        ("scale", 0.0, "a positive number"),
        ("scale", -1.0, "a positive number"),
        ("scale", math.nan, "a positive number"),
        ("num_noise", -1, "0 or a positive number"),
        ("noise_weight", -1.0, "0 or a positive number"),
        ("noise_weight", math.inf, "0 or a positive number"),
    ],
)
def test_a_wrong_argument_of_the_expectation_is_named(name: str, value: float, wanted: str) -> None:
    good: dict[str, Any] = {"dim": 8, "scale": 20.0, "num_noise": 3, "noise_weight": 1.0}
    assert math.isfinite(expected_log_noise_mass(**good))
    with pytest.raises(ValueError) as caught:
        expected_log_noise_mass(**{**good, name: value})
    assert str(caught.value) == f"{name} must be {wanted}, got {value!r}"


# 7. The noise itself


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_noise", [0, 1, 1000, NOISE_BLOCK_ROWS, 1500, 3000])
def test_blocks_are_the_whole(device: str, num_noise: int) -> None:
    key = NoiseKey(seed=5, step=6, call=7)
    whole = draw_noise(key, num_noise, 5, mean=1.0, std=2.0, device=device)
    assert whole.shape == (num_noise, 5)
    assert (whole.dtype, whole.device.type) == (torch.float32, device)
    blocks = list(noise_blocks(key, num_noise, 5, mean=1.0, std=2.0, device=device))
    assert [len(block) for block in blocks] == [
        min(NOISE_BLOCK_ROWS, num_noise - start) for start in range(0, num_noise, NOISE_BLOCK_ROWS)
    ]
    assert torch.equal(torch.cat([whole[:0], *blocks]), whole)
    assert torch.equal(draw_noise(key, num_noise, 5, mean=1.0, std=2.0, device=device), whole)


@pytest.mark.parametrize("dim", [1, 5, 64])
def test_more_noise_begins_with_less(dim: int) -> None:
    key = NoiseKey(seed=5, step=6, call=7)
    most = draw_noise(key, 3000, dim)
    for num_noise in (1, 17, 1000, 1500, 2999):
        assert torch.equal(draw_noise(key, num_noise, dim), most[:num_noise])


@pytest.mark.parametrize("device", DEVICES)
def test_different_keys_and_blocks_draw_different_vectors(device: str) -> None:
    numbers = (0, 1, 2**32, 2**32 + 1)  # torch's generator on the CPU tells no two of them apart
    keys = [NoiseKey(*numbers) for numbers in itertools.product(numbers, repeat=3)]
    keys += [NoiseKey(seed, 0, 0) for seed in (2**63, 2**64 - 1)]
    firsts = [tuple(draw_noise(key, 1, 4, device=device).flatten().tolist()) for key in keys]
    blocks = [block[0].tolist() for block in noise_blocks(keys[0], 5000, 4, device=device)]
    seen = {*firsts, *map(tuple, blocks)}
    assert len(seen) == len(firsts) + len(blocks) - 1  # a draw's first block is not new


@pytest.mark.parametrize("device", DEVICES)
def test_no_other_generator_notices(device: str) -> None:
    def states() -> list[Any]:
        on_gpu = [torch.cuda.get_rng_state()] if device == "cuda" else []
        return [t.tolist() for t in (torch.get_rng_state(), *on_gpu)] + [
            random.getstate(),
            [
                part if isinstance(part, (str, int, float)) else part.tolist()
                for part in np.random.get_state()
            ],
        ]

    before = states()
    assert torch.rand(1).numel() and states() != before  # the comparison can fail
    before = states()
    first = draw_noise(NoiseKey(0, 0, 0), 2000, 3, device=device)
    assert states() == before
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    assert torch.equal(draw_noise(NoiseKey(0, 0, 0), 2000, 3, device=device), first)


@pytest.mark.parametrize("device", DEVICES)
def test_noise_is_standard_normal_and_independent(device: str) -> None:
    rows, dim = 5 * NOISE_BLOCK_ROWS, 40
    noise = draw_noise(NoiseKey(0, 0, 0), rows, dim, device=device).double().cpu().numpy()
    assert scipy.stats.kstest(noise.ravel(), "norm").pvalue > 0.01
    assert abs(noise.mean()) < 3 / math.sqrt(noise.size)
    assert abs((noise**2).mean() - 1) < 3 * math.sqrt(2 / noise.size)
    assert np.abs(noise).max() > 4
    off_diagonal = ~np.eye(dim, dtype=bool)
    for values in (noise, noise**2):  # components, within a vector, and their sizes
        assert np.abs(np.corrcoef(values.T)[off_diagonal]).max() < 5 / math.sqrt(rows)
    for lag in (1, NOISE_BLOCK_ROWS):  # from one vector, and from one block, to the next
        correlation = np.corrcoef(noise[:-lag].ravel(), noise[lag:].ravel())[0, 1]
        assert abs(correlation) < 4 / math.sqrt(noise.size)


def test_mean_and_standard_deviation() -> None:
    key = NoiseKey(0, 1, 1)
    standard = draw_noise(key, 2000, 6)
    moved = draw_noise(key, 2000, 6, mean=-2.0, std=0.5)
    torch.testing.assert_close(moved, standard * 0.5 - 2.0, rtol=0, atol=0)
    torch.testing.assert_close(draw_noise(key, 2000, 6, mean=1.0), standard + 1.0, rtol=0, atol=0)
    torch.testing.assert_close(draw_noise(key, 2000, 6, std=3.0), standard * 3.0, rtol=0, atol=0)


# Statistics of a batch


@pytest.mark.parametrize("noise_weight", [0, 0.3, 7])
@pytest.mark.parametrize(("offset", "hard"), [(0, 0), (2, 3)])
def test_statistics(noise_weight: float, offset: int, hard: int) -> None:
    batch = Batch.make(6, 9, 8, offset=offset, hard=hard)
    cosines = [
        [F.cosine_similarity(a, c, dim=0).item() for c in batch.candidates] for a in batch.anchors
    ]
    positives = [row[offset + i] for i, row in enumerate(cosines)]
    negatives = [c for i, row in enumerate(cosines) for j, c in enumerate(row) if j != offset + i]
    shares = []
    for anchor, row in zip(batch.anchors, cosines, strict=True):
        mass = noise_weight * sum(
            math.exp(5 * F.cosine_similarity(anchor, g, dim=0).item()) for g in batch.noise
        )
        shares.append(mass / (sum(math.exp(5 * cosine) for cosine in row) + mass))
    anchors = batch.anchors.clone().requires_grad_()
    found = gs_infonce_statistics(
        anchors, batch.candidates, batch.noise, scale=5.0, noise_weight=noise_weight, offset=offset
    )
    assert found.positive_cosine == pytest.approx(np.mean(positives), abs=1e-6)
    assert found.negative_cosine == pytest.approx(np.mean(negatives), abs=1e-6)
    assert found.noise_share == pytest.approx(np.mean(shares), abs=1e-6)
    assert found.alignment == pytest.approx(np.mean([2 - 2 * c for c in positives]), abs=1e-6)
    kernel = np.mean([math.exp(-2 * (2 - 2 * c)) for c in negatives])
    assert found.uniformity == pytest.approx(math.log(kernel), abs=1e-6)


def test_statistics_at_the_limits() -> None:
    one = torch.tensor([[3.0, 4.0]])
    alone = gs_infonce_statistics(one, one)
    assert alone.positive_cosine == pytest.approx(1.0)
    assert math.isnan(alone.negative_cosine) and math.isnan(alone.uniformity)
    assert alone.noise_share == 0
    half = gs_infonce_statistics(one, one, log_noise_mass=20.0)  # as heavy as the positive
    assert half.noise_share == pytest.approx(0.5)


def test_statistics_of_a_collapsed_and_of_a_perfect_batch() -> None:
    collapsed = gs_infonce_statistics(torch.ones(5, 8), torch.ones(5, 8))
    assert collapsed.alignment == pytest.approx(0, abs=1e-6)
    assert collapsed.uniformity == pytest.approx(0, abs=1e-6)  # the highest there is
    assert collapsed.negative_cosine == pytest.approx(1)
    perfect = gs_infonce_statistics(torch.eye(5, 8), torch.eye(5, 8))
    assert (perfect.positive_cosine, perfect.negative_cosine) == (1, 0)
    assert perfect.alignment == 0 and perfect.uniformity == pytest.approx(-4)


def test_statistics_are_cosines_whatever_the_similarity() -> None:
    batch = Batch.make(6, 9, 8)
    by_cosine = gs_infonce_statistics(batch.anchors, batch.candidates)
    by_dot = gs_infonce_statistics(
        batch.anchors, 3 * batch.candidates, similarity=objective.inner_product
    )
    assert by_dot.positive_cosine == pytest.approx(by_cosine.positive_cosine, abs=1e-6)
    assert by_dot.uniformity == pytest.approx(by_cosine.uniformity, abs=1e-6)
