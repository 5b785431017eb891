"""The geometry of an encoder's space: alignment, uniformity, anisotropy, effective rank.

Everything runs over tiles and never holds all pairs, so that memory grows with the number of vectors and
not with its square. A row shorter than 1e-12 has no direction and counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from st_gsinfonce.objective import unit

Vectors = Tensor | NDArray[np.floating[Any]]

_TILE_ROWS, _TILE_COLUMNS = 512, 4096


@dataclass(frozen=True)
class Geometry:
    """How a set of embeddings fills its space.

    Attributes:
        dim: D, their width.
        anisotropy: See `anisotropy`.
        uniformity: See `uniformity`.
        effective_rank: See `effective_rank`.
    """

    dim: int
    anisotropy: float
    uniformity: float
    effective_rank: float

    @classmethod
    def of(cls, embeddings: Vectors) -> Geometry:
        """Measure embeddings, (n, D), n at least 2."""
        return cls(
            dim=embeddings.shape[1],
            anisotropy=anisotropy(embeddings),
            uniformity=uniformity(embeddings),
            effective_rank=effective_rank(embeddings),
        )


def alignment(anchors: Vectors, positives: Vectors, alpha: float = 2.0) -> float:
    r"""Return how far the two of a positive pair lie apart, 0 at best.

    .. math:: \frac1n \sum_i \big\lVert x_i/|x_i| - y_i/|y_i| \big\rVert^\alpha

    Source: Wang and Isola, ICML 2020, https://arxiv.org/abs/2005.10242.

    Args:
        anchors: (n, D).
        positives: (n, D); row i belongs to anchor i.
        alpha: The power, positive.

    Raises:
        ValueError: For shapes that differ, no row, numbers that are not finite, or an alpha that is not
            positive.
    """
    _check_positive("alpha", alpha)
    first, second = _matrix("anchors", anchors, 1), _matrix("positives", positives, 1)
    if first.shape != second.shape:
        raise ValueError(
            f"anchors and positives must have one shape, got {tuple(first.shape)} and "
            f"{tuple(second.shape)}"
        )
    total = 0.0
    for start in range(0, len(first), _TILE_COLUMNS):
        rows = slice(start, start + _TILE_COLUMNS)
        apart = unit(first[rows].double()) - unit(second[rows].double())
        total += torch.linalg.vector_norm(apart, dim=1).pow(alpha).sum().item()
    return total / len(first)


def uniformity(embeddings: Vectors, t: float = 2.0) -> float:
    r"""Return how evenly the vectors cover the sphere: 0 if all are equal, and lower is more even.

    .. math:: \log \frac{2}{n (n-1)} \sum_{i<j} e^{-t \lVert x_i/|x_i| - x_j/|x_j| \rVert^2}

    Vectors uniform on the sphere have :math:`-2t + \log {}_0F_1(; D/2; t^2)` on average, which
    ``expected_log_noise_mass(D, 2 * t, 1) - 2 * t`` gives: -3.98 for D = 384 and t = 2.

    Source: Wang and Isola, ICML 2020, https://arxiv.org/abs/2005.10242.

    Args:
        embeddings: (n, D), n at least 2.
        t: The kernel's width, positive.

    Raises:
        ValueError: For fewer than two rows, numbers that are not finite, or a t that is not positive.
    """
    _check_positive("t", t)
    vectors = unit(_matrix("embeddings", embeddings, 2).double()).float()
    total = -math.inf
    for _, _, cosines in pair_tiles(vectors):
        part = torch.logsumexp((2 * t * (cosines - 1)).flatten(), dim=0)
        total = float(np.logaddexp(total, part.item()))
    return total - math.log(len(vectors) * (len(vectors) - 1) / 2)


def anisotropy(embeddings: Vectors) -> float:
    r"""Return the mean cosine of two random rows: 0 without a preferred direction, 1 if all are equal.

    It is the mean over all pairs, without drawing any:
    :math:`(\lVert \sum_i x_i/|x_i| \rVert^2 - n) / (n (n - 1))`.

    Source: Ethayarajh, EMNLP 2019, https://aclanthology.org/D19-1006.

    Args:
        embeddings: (n, D), n at least 2.

    Raises:
        ValueError: For fewer than two rows, or numbers that are not finite.
    """
    vectors = _matrix("embeddings", embeddings, 2)
    total = torch.zeros(vectors.shape[1], dtype=torch.float64, device=vectors.device)
    squares = 0.0  # n, but for rows that are 0
    for rows in _double_units(vectors):
        total += rows.sum(0)
        squares += rows.square().sum().item()
    return (total.square().sum().item() - squares) / (len(vectors) * (len(vectors) - 1))


def effective_rank(embeddings: Vectors) -> float:
    r"""Return in how many dimensions the vectors live: from 1 if all are equal to D if none is preferred.

    The exponential of the entropy of the singular values' shares, :math:`e^{-\sum_k p_k \log p_k}` with
    :math:`p_k = \sigma_k / \sum_l \sigma_l`, of the matrix of the normalised vectors, which is not centred.

    Source: Roy and Vetterli, EUSIPCO 2007, https://ieeexplore.ieee.org/document/7098875.

    Args:
        embeddings: (n, D), n at least 1.

    Returns:
        The rank; 0 if all vectors are 0, which have no direction.

    Raises:
        ValueError: For no row, or numbers that are not finite.
    """
    vectors = _matrix("embeddings", embeddings, 1)
    width = vectors.shape[1]
    gram = torch.zeros(width, width, dtype=torch.float64, device=vectors.device)
    for rows in _double_units(vectors):
        gram += rows.T @ rows
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    if not singular.sum() > 0:
        return 0.0
    # What rounding leaves of a singular value that is 0 is near 1e-8 of the largest.
    singular = singular[singular > 1e-7 * singular.max()]
    shares = singular / singular.sum()
    return math.exp(-(shares * shares.log()).sum().item())


def pair_tiles(vectors: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first row, first column, inner products) so that each pair i < j is met once, at (i, j).

    What is no such pair is -inf.
    """
    for top in range(0, len(vectors), _TILE_ROWS):
        rows = vectors[top : top + _TILE_ROWS]
        for left in range(top, len(vectors), _TILE_COLUMNS):
            tile = rows @ vectors[left : left + _TILE_COLUMNS].T
            if left == top:
                square = tile[:, : len(rows)]
                square.masked_fill_(torch.ones_like(square, dtype=torch.bool).tril_(), -math.inf)
            yield top, left, tile


def _matrix(name: str, vectors: Vectors, fewest: int) -> Tensor:
    matrix = torch.as_tensor(vectors).detach()
    if matrix.ndim != 2 or len(matrix) < fewest or not matrix.is_floating_point():
        raise ValueError(
            f"{name} must be floating point of shape (n, dim) with n at least {fewest}, got "
            f"{matrix.dtype} of shape {tuple(matrix.shape)}"
        )
    if not (finite := matrix.isfinite().all(dim=1)).all():
        raise ValueError(f"{name} must be finite, but row {int(finite.int().argmin()) + 1} is not")
    return matrix


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {value!r}")


def _double_units(vectors: Tensor) -> Iterator[Tensor]:
    """Yield the normalised rows in float64, some at a time."""
    for start in range(0, len(vectors), _TILE_COLUMNS):
        yield unit(vectors[start : start + _TILE_COLUMNS].double())
