"""The geometry of a space.

- Each number equals a double loop over all pairs, written from its equation in float64.
- The extremes are known on paper: a collapsed encoder, an orthonormal one, directions uniform on the sphere.
- Tiles change nothing, lengths change nothing.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from st_gsinfonce import (
    alignment,
    anisotropy,
    effective_rank,
    expected_log_noise_mass,
    geometry,
    uniformity,
)
from st_gsinfonce.geometry import Geometry


@pytest.fixture
def vectors() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((37, 6)) + 0.5


def loop(vectors: np.ndarray) -> list[float]:
    """Return the cosines of all pairs i < j."""
    units = [row / math.sqrt(sum(x * x for x in row)) for row in vectors]
    return [float(units[i] @ units[j]) for i in range(len(units)) for j in range(i + 1, len(units))]


@pytest.mark.parametrize("tiles", [(512, 4096), (5, 7), (8, 8), (1, 1)])
def test_they_equal_a_double_loop(
    vectors: np.ndarray, tiles: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "_TILE_ROWS", tiles[0])
    monkeypatch.setattr(geometry, "_TILE_COLUMNS", tiles[1])
    cosines = loop(vectors)
    for t in (2.0, 0.5):
        wanted = math.log(sum(math.exp(-t * (2 - 2 * c)) for c in cosines) / len(cosines))
        assert uniformity(vectors, t) == pytest.approx(wanted, abs=1e-6)
    assert anisotropy(vectors) == pytest.approx(sum(cosines) / len(cosines), abs=1e-12)
    other = vectors[::-1].copy()
    units = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (vectors, other)]
    apart = [math.dist(a, b) for a, b in zip(*units, strict=True)]
    assert alignment(vectors, other) == pytest.approx(sum(d**2 for d in apart) / 37, abs=1e-12)
    assert alignment(vectors, other, alpha=1) == pytest.approx(sum(apart) / 37, abs=1e-12)
    shares = np.linalg.svd(units[0], compute_uv=False)
    shares = shares / shares.sum()
    wanted = math.exp(-sum(p * math.log(p) for p in shares))
    assert effective_rank(vectors) == pytest.approx(wanted, rel=1e-9)


def test_a_collapsed_encoder() -> None:
    same = np.tile(np.random.default_rng(1).standard_normal(16).astype(np.float32), (50, 1))
    assert alignment(same, same) == 0
    assert uniformity(same) == pytest.approx(0, abs=1e-6)
    assert anisotropy(same) == pytest.approx(1)
    assert effective_rank(same) == pytest.approx(1)


def test_an_orthonormal_encoder() -> None:
    assert uniformity(torch.eye(8)) == pytest.approx(-4)
    assert anisotropy(torch.eye(8)) == 0
    assert effective_rank(torch.eye(8)) == pytest.approx(8)
    assert alignment(torch.eye(8), -torch.eye(8)) == pytest.approx(4)  # as far apart as can be


def test_directions_uniform_on_the_sphere_have_the_closed_form_s_uniformity() -> None:
    dim = 32
    gaussian = np.random.default_rng(2).standard_normal((3000, dim))
    closed = expected_log_noise_mass(dim, 4.0, 1) - 4
    assert uniformity(gaussian) == pytest.approx(closed, abs=2e-3)
    assert abs(closed + 4) > 0.1  # and that is not the orthonormal one's
    assert f"{expected_log_noise_mass(384, 4, 1) - 4:.2f}" in (uniformity.__doc__ or "")
    assert effective_rank(gaussian) > 0.98 * dim


def test_lengths_do_not_count(vectors: np.ndarray) -> None:
    longer = vectors * np.random.default_rng(3).uniform(0.1, 10, (37, 1))
    assert uniformity(longer * 1e30) == uniformity(longer)  # whose squares no float32 holds
    assert uniformity(longer) == pytest.approx(uniformity(vectors), abs=1e-6)
    assert anisotropy(longer) == pytest.approx(anisotropy(vectors), abs=1e-12)
    assert effective_rank(longer) == pytest.approx(effective_rank(vectors), rel=1e-9)
    assert alignment(longer, vectors) == pytest.approx(0, abs=1e-12)


def test_a_zero_vector_is_no_catastrophe(vectors: np.ndarray) -> None:
    vectors[3] = 0
    assert math.isfinite(uniformity(vectors)) and math.isfinite(effective_rank(vectors))
    cosines = loop(np.delete(vectors, 3, axis=0))
    assert anisotropy(vectors) == pytest.approx(sum(cosines) / (37 * 36 / 2), abs=1e-12)


def test_zero_vectors_fill_no_space() -> None:
    assert Geometry.of(np.zeros((3, 4))) == Geometry(4, 0.0, pytest.approx(-4), 0.0)


def test_what_is_no_matrix_of_vectors_is_refused(vectors: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"embeddings must be .* at least 2, got .*\(1, 6\)"):
        uniformity(vectors[:1])
    with pytest.raises(ValueError, match=r"got .*\(6,\)"):
        anisotropy(vectors[0])
    with pytest.raises(ValueError, match="int64"):
        effective_rank(torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"one shape, got \(37, 6\) and \(36, 6\)"):
        alignment(vectors, vectors[1:])
    for t in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="t must be a positive number"):
            uniformity(vectors, t)
        with pytest.raises(ValueError, match="alpha must be a positive number"):
            alignment(vectors, vectors, t)
    vectors[4] = np.nan
    for measure in (uniformity, anisotropy, effective_rank):
        with pytest.raises(ValueError, match="embeddings must be finite, but row 5 is not"):
            measure(vectors)
