"""The streamed loss.

- Value and gradients are those of the dense one, for every remainder of tiles, with hard negatives, offsets,
  weights, masses, one anchor alone, zero vectors and large scales.
- Noise drawn in blocks is the noise drawn at once, and each block is drawn once.
- No matrix of logits is ever whole: memory stays below what half of one would take.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from st_gsinfonce import streamed
from st_gsinfonce.noise import NoiseKey, draw_noise, noise_blocks
from st_gsinfonce.objective import gs_infonce
from st_gsinfonce.streamed import gs_infonce_streamed, inner_product

KEY = NoiseKey(1, 2, 3)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of odd sizes, so that small tensors have many, and remainders."""
    monkeypatch.setattr(streamed, "BLOCK_ROWS", 7)
    monkeypatch.setattr(streamed, "TILE_ROWS", 5)


def vectors(rows: int, dim: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, dim, generator=generator, dtype=dtype)


def both(anchors: Tensor, candidates: Tensor, dense: dict, stream: dict | None = None) -> None:
    """Compare value and gradients, the gradients first against zero, so that they can differ."""
    results = []
    for function, arguments in ((gs_infonce, dense), (gs_infonce_streamed, stream or dense)):
        a, c = anchors.clone().requires_grad_(), candidates.clone().requires_grad_()
        loss = function(a, c, **arguments)
        (3 * loss).backward()
        results.append((loss.detach(), a.grad, c.grad))
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if anchors.dtype == torch.float64 else {}
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 12, 33])
@pytest.mark.parametrize("extra", [0, 1, 40])
@pytest.mark.parametrize("noise", [0, 1, 23])
def test_equals_dense(count: int, extra: int, noise: int) -> None:
    anchors, candidates = vectors(count, 16, 0), vectors(count + extra, 16, 1)
    arguments = {"noise": vectors(noise, 16, 2), "noise_weight": 0.3, "scale": 8.0}
    both(anchors, candidates, {**arguments, "offset": extra})
    both(anchors, candidates, arguments)


@pytest.mark.parametrize("mass", [-float("inf"), -3.0, 5.5, 80.0])
@pytest.mark.parametrize("scale", [1.0, 20.0, 1000.0])
def test_equals_dense_with_a_mass(mass: float, scale: float) -> None:
    both(vectors(13, 8, 0), vectors(19, 8, 1), {"log_noise_mass": mass, "scale": scale})


def test_equals_dense_under_the_inner_product() -> None:
    arguments = {"noise": vectors(11, 8, 2), "scale": 0.7}
    both(
        vectors(13, 8, 0),
        vectors(13, 8, 1),
        {**arguments, "similarity": lambda a, b: a @ b.T},
        {**arguments, "similarity": inner_product},
    )


def test_a_zero_vector_and_float32() -> None:
    anchors = vectors(13, 8, 0, torch.float32)
    anchors[4] = 0
    both(anchors, vectors(13, 8, 1, torch.float32), {"noise": vectors(9, 8, 2, torch.float32)})


def test_noise_in_blocks_is_noise_at_once() -> None:
    anchors, candidates = vectors(9, 8, 0), vectors(9, 8, 1)
    drawn = []

    def blocks() -> Iterator[Tensor]:
        for block in noise_blocks(KEY, 2500, 8, mean=0.2, std=0.5):
            drawn.append(len(block))
            yield block

    whole = draw_noise(KEY, 2500, 8, mean=0.2, std=0.5).double()
    both(anchors, candidates, {"noise": whole}, {"noise": blocks})
    assert drawn == [1024, 1024, 452]


def test_gradients_by_finite_differences() -> None:
    anchors, candidates = vectors(6, 4, 0).requires_grad_(), vectors(9, 4, 1).requires_grad_()
    noise = vectors(8, 4, 2)

    def loss(a: Tensor, c: Tensor) -> Tensor:
        return gs_infonce_streamed(a, c, noise, scale=3.0, offset=2)

    assert torch.autograd.gradcheck(loss, (anchors, candidates))


@pytest.mark.parametrize("side", [0, 1])
def test_one_side_may_be_frozen(side: int) -> None:
    pair = [vectors(6, 4, 0), vectors(6, 4, 1)]
    pair[side].requires_grad_()
    gradients = [
        torch.autograd.grad(f(*pair), pair[side])[0] for f in (gs_infonce, gs_infonce_streamed)
    ]
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(gs_infonce(*pair), gs_infonce_streamed(*pair))


def test_autocast_changes_nothing() -> None:
    pair = [vectors(6, 4, i, torch.float32) for i in (0, 1)]
    expected = gs_infonce_streamed(*pair)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gs_infonce_streamed(*pair), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"similarity": lambda a, b: -torch.cdist(a, b)}, "cannot|can be streamed"),
        ({"scale": 0.0}, "scale"),
        ({"offset": 1}, "offset 1"),
        ({"log_noise_mass": 1.0, "noise": lambda: iter(())}, "without noise"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gs_infonce_streamed(vectors(3, 4, 0), vectors(3, 4, 1), **arguments)


MEASURE = """
import resource, sys, torch
from functools import partial
from st_gsinfonce.noise import NoiseKey, noise_blocks
from st_gsinfonce.streamed import gs_infonce_streamed
count, noise, dim = 8192, 24576, 768
a = torch.randn(count, dim, requires_grad=True)
c = torch.randn(count, dim, requires_grad=True)
gs_infonce_streamed(a[:64], c[:64], partial(noise_blocks, NoiseKey(0, 0, 0), 64, dim)).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
gs_infonce_streamed(a, c, partial(noise_blocks, NoiseKey(0, 0, 0), noise, dim)).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_memory_stays_bounded() -> None:
    """Slow: 8,192 anchors against 32,768 vectors, 600 billion multiplications; 1 GiB of logits."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=300
    )
    assert float(done.stdout) < 600  # MiB above the inputs
