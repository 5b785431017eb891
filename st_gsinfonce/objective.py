r"""The Gaussian-smoothed InfoNCE loss as pure tensor maths, and the closed form of its noise.

For anchors :math:`h_i`, candidates :math:`h^+_j` (in-batch positives, then any hard negatives), noise
:math:`g_k` and the scale :math:`s = 1 / \tau` (the inverse temperature)

.. math::

    \ell_i = -\log \frac{e^{s \cos(h_i, h^+_i)}}
             {\sum_j e^{s \cos(h_i, h^+_j)} + \lambda \sum_{k=1}^{M} e^{s \cos(h_i, g_k)}}

and the loss is the mean over i. Source: equation 2 and listing 1 of Wu et al., "Smoothed Contrastive
Learning for Unsupervised Sentence Embedding", COLING 2022, https://arxiv.org/abs/2109.04321.

Everything is computed as :math:`\ell_i = \mathrm{softplus}(\log N_i - s \cos(h_i, h^+_i))`, where
:math:`N_i` is the denominator without the positive. It is the same number, but it keeps its relative
precision when the positive dominates, which is where unsupervised SimCSE spends its training: at a
loss of 1e-4 the difference of two float32 logarithms near 20 has lost all but two digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Similarity = Callable[[Tensor, Tensor], Tensor]
"""Maps (N, D) and (C, D) to the (N, C) matrix of similarities."""


def unit(vectors: Tensor) -> Tensor:
    """Divide rows by their length; a row too short to have a direction gets no gradient.

    With the usual ``x / max(|x|, eps)`` a zero row receives a gradient of 1 / eps, which ends the
    training of whoever meets it.
    """
    norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)  # (N, 1)
    return vectors / torch.where(norms > 1e-12, norms, math.inf)


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine similarity of every row of ``a`` with every row of ``b``.

    Args:
        a: Vectors, (N, D).
        b: Vectors, (C, D).

    Returns:
        (N, C), each in [-1, 1] up to rounding; 0 where either vector is zero.
    """
    return unit(a) @ unit(b).T


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of every row of ``a``, (N, D), with every row of ``b``, (C, D)."""
    return a @ b.T


def _check_finite(name: str, value: float, *, positive: bool) -> None:
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        wanted = "a positive number" if positive else "0 or a positive number"
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def check_arguments(
    anchors: Tensor,
    candidates: Tensor,
    noise: Tensor | None,
    scale: float,
    noise_weight: float,
    log_noise_mass: float | None,
    offset: int,
) -> None:
    """Raise ValueError for what :func:`gs_infonce` does not take."""
    _check_finite("scale", scale, positive=True)
    _check_finite("noise_weight", noise_weight, positive=False)
    named = [("anchors", anchors), ("candidates", candidates)]
    if noise is not None:
        named.append(("noise", noise))
    for name, tensor in named:
        if tensor.ndim != 2 or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be a floating point tensor of shape (rows, dim), "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        if tensor.shape[1] != anchors.shape[1]:
            raise ValueError(
                f"{name} has dimension {tensor.shape[1]}, but the anchors have {anchors.shape[1]}"
            )
    if len(anchors) == 0:
        raise ValueError("anchors is empty: the loss of no anchor is not defined")
    if offset < 0 or offset + len(anchors) > len(candidates):
        raise ValueError(
            f"the positives of {len(anchors)} anchors at offset {offset} are the candidates "
            f"{offset} to {offset + len(anchors) - 1}, but there are {len(candidates)} candidates"
        )
    if log_noise_mass is not None:
        if noise is not None or noise_weight != 1.0:
            raise ValueError(
                "log_noise_mass stands for the whole noise sum, weight included: give it without "
                "noise and noise_weight"
            )
        if math.isnan(log_noise_mass) or log_noise_mass == math.inf:
            raise ValueError(f"log_noise_mass must be a number or -inf, got {log_noise_mass!r}")


@dataclass(frozen=True)
class _Terms:
    """What the loss of each anchor is made of; logarithms, each of shape (N,)."""

    positive: Tensor  # s cos(h_i, h+_i)
    rest: Tensor  # log of the denominator without the positive
    noise: Tensor | None  # log of the noise's part of the rest, or None without noise


def _terms(
    anchors: Tensor,
    candidates: Tensor,
    noise: Tensor | None,
    scale: float,
    noise_weight: float,
    log_noise_mass: float | None,
    offset: int,
    similarity: Similarity,
) -> _Terms:
    dtype = torch.promote_types(anchors.dtype, torch.float32)
    anchors, candidates = anchors.to(dtype), candidates.to(dtype)
    noise = None if noise is None else noise.detach().to(dtype)
    if similarity is cos_sim:  # normalise the anchors once, not once for each of the two products
        anchors, candidates = unit(anchors), unit(candidates)
        noise = None if noise is None else unit(noise)
        similarity = inner_product
    logits = similarity(anchors, candidates) * scale  # (N, C)
    positive = logits.diagonal(offset).clone()  # (N,)
    # A constant noise sum takes the positive's place in its row and costs nothing. Without one it is the
    # lowest number rather than -inf: a row of nothing else (N = C = 1) then has no NaN gradient.
    mass = -math.inf if log_noise_mass is None else log_noise_mass
    logits.diagonal(offset).fill_(max(mass, torch.finfo(dtype).min))
    rest = torch.logsumexp(logits, dim=1)  # (N,)
    noise_term = None
    if mass > -math.inf:
        noise_term = torch.full_like(positive, mass)
    elif noise is not None and len(noise) > 0 and noise_weight > 0:
        noise_logits = similarity(anchors, noise) * scale  # (N, M)
        noise_term = torch.logsumexp(noise_logits, dim=1) + math.log(noise_weight)
        rest = torch.logaddexp(rest, noise_term)
    return _Terms(positive, rest, noise_term)


def gs_infonce(
    anchors: Tensor,
    candidates: Tensor,
    noise: Tensor | None = None,
    *,
    scale: float = 20.0,
    noise_weight: float = 1.0,
    log_noise_mass: float | None = None,
    offset: int = 0,
    similarity: Similarity = cos_sim,
) -> Tensor:
    r"""Return the mean Gaussian-smoothed InfoNCE loss of the anchors.

    .. math::

        \ell_i = -\log \frac{e^{s\,\mathrm{sim}(h_i, h^+_i)}}
                 {\sum_j e^{s\,\mathrm{sim}(h_i, h^+_j)} + \lambda \sum_k e^{s\,\mathrm{sim}(h_i, g_k)}}

    Without noise this is InfoNCE with in-batch negatives. The noise is never a positive, is compared
    with the anchors alone and receives no gradient. The computation runs in float32, or float64 where
    the inputs are, also under autocast.

    Args:
        anchors: :math:`h`, (N, D), N at least 1.
        candidates: :math:`h^+`, (C, D). The positive of anchor i is the row ``offset + i``; every other
            row is its negative: the positives of other anchors, those of other devices, and hard
            negatives.
        noise: :math:`g`, (M, D), or None.
        scale: :math:`s = 1 / \tau`, positive.
        noise_weight: :math:`\lambda`, at least 0.
        log_noise_mass: Logarithm of a constant that stands for the whole noise sum of every anchor,
            :math:`\lambda` included, in place of ``noise``; see :func:`expected_log_noise_mass`.
        offset: Row of the first anchor's positive among the candidates.
        similarity: Maps (N, D) and (C, D) to (N, C).

    Returns:
        A scalar, float32 or float64, in nats.

    Raises:
        ValueError: For shapes that do not fit, an empty batch, a scale that is not positive and finite, a
            weight that is negative or not finite, a ``log_noise_mass`` that is NaN or plus infinity (minus
            infinity is no noise), or ``log_noise_mass`` together with ``noise`` or with a
            ``noise_weight``, which it already contains.

    Example:
        >>> import math, torch
        >>> views = torch.eye(4, dtype=torch.float64)
        >>> math.isclose(gs_infonce(views, views).item(), math.log1p(3 * math.exp(-20)))
        True
    """
    check_arguments(anchors, candidates, noise, scale, noise_weight, log_noise_mass, offset)
    with torch.autocast(anchors.device.type, enabled=False):  # a bfloat16 cosine has two digits
        terms = _terms(
            anchors, candidates, noise, scale, noise_weight, log_noise_mass, offset, similarity
        )
        margin = terms.rest - terms.positive  # (N,)
        # Beyond 40 the softplus is linear to the last bit of a float64; the default, 20, is not.
        return F.softplus(margin, threshold=40.0).mean()


def expected_log_noise_mass(
    dim: int, scale: float, num_noise: int, noise_weight: float = 1.0
) -> float:
    r"""Return the logarithm of the expected noise sum under cosine similarity.

    The direction of :math:`g \sim \mathcal N(0, \sigma^2 I)` is uniform on the sphere whatever
    :math:`\sigma`, so for every anchor h

    .. math::

        \log \mathbb E\Big[\lambda \sum_{k=1}^{M} e^{s \cos(h, g_k)}\Big]
            = \log(\lambda M) + \log {}_0F_1(; D/2; s^2/4).

    Two facts follow: :math:`\sigma` has no effect under cosine similarity and mean 0, and the expected
    noise is a constant b, the same as one virtual negative that has cosine b / s with every anchor.
    At the paper's setting (D = 768, s = 20, M = 192) b is 5.52, that is a virtual cosine of 0.28.

    The hypergeometric function (https://dlmf.nist.gov/16.2, the normalising constant of the
    von Mises-Fisher distribution, https://dlmf.nist.gov/10.25.E2) is summed as its power series of
    positive terms relative to the largest one: nothing cancels, overflows or underflows.

    Args:
        dim: D, the width of the embeddings, at least 1.
        scale: s, positive.
        num_noise: M, at least 0; 0 gives -inf.
        noise_weight: :math:`\lambda`, at least 0; 0 gives -inf.

    Returns:
        The logarithm, in nats.

    Raises:
        ValueError: For a dimension below 1, a scale that is not positive, or another argument that is
            negative or not finite.
    """
    if dim < 1:
        raise ValueError(f"dim must be at least 1, got {dim!r}")
    _check_finite("scale", scale, positive=True)
    _check_finite("num_noise", num_noise, positive=False)
    _check_finite("noise_weight", noise_weight, positive=False)
    if num_noise == 0 or noise_weight == 0:
        return -math.inf
    half_dim, x = dim / 2, scale * scale / 4
    # Term k + 1 is term k times x / ((k + 1) (D / 2 + k)): they rise to k near s / 2, then fall
    # faster than a geometric series.
    k = np.arange(math.ceil(scale / 2 + 12 * math.sqrt(scale)) + 64)
    log_terms = np.concatenate([[0.0], np.cumsum(np.log(x) - np.log1p(k) - np.log(half_dim + k))])
    largest = float(log_terms.max())
    log_series = largest + math.log(math.fsum(np.exp(log_terms - largest)))
    return math.log(noise_weight) + math.log(num_noise) + log_series


@dataclass(frozen=True)
class GSInfoNCEStatistics:
    r"""What a batch looked like to the loss; means over its anchors.

    Attributes:
        positive_cosine: Cosine similarity of an anchor with its positive.
        negative_cosine: Cosine similarity of an anchor with its other candidates.
        alignment: Mean squared distance of an anchor from its positive, both normalised:
            :math:`2 - 2 \cos` (https://arxiv.org/abs/2005.10242).
        uniformity: :math:`\log` of the mean of :math:`e^{-2 d^2}` over the distances d of an anchor from
            its other candidates, normalised (the same source, for a batch).
        noise_share: Share of the loss's denominator held by the noise, in [0, 1].

    What concerns other candidates is NaN where there are none.
    """

    positive_cosine: float
    negative_cosine: float
    alignment: float
    uniformity: float
    noise_share: float


@torch.no_grad()
def gs_infonce_statistics(
    anchors: Tensor,
    candidates: Tensor,
    noise: Tensor | None = None,
    *,
    scale: float = 20.0,
    noise_weight: float = 1.0,
    log_noise_mass: float | None = None,
    offset: int = 0,
    similarity: Similarity = cos_sim,
) -> GSInfoNCEStatistics:
    """Return the statistics of a batch; the arguments are those of :func:`gs_infonce`."""
    with torch.autocast(anchors.device.type, enabled=False):
        terms = _terms(
            anchors, candidates, noise, scale, noise_weight, log_noise_mass, offset, similarity
        )
        share = torch.zeros(())
        if terms.noise is not None:
            log_denominator = torch.logaddexp(terms.rest, terms.positive)
            share = (terms.noise - log_denominator).exp().mean()
        cosines = cos_sim(anchors.float(), candidates.float())  # (N, C)
    positive = cosines.diagonal(offset).mean().item()
    others = cosines.numel() - len(anchors)
    negative = uniformity = math.nan
    if others:
        negative = (cosines.sum().item() - positive * len(anchors)) / others
        cosines.diagonal(offset).fill_(-math.inf)
        # The squared distance of unit vectors is 2 - 2 cos.
        uniformity = torch.logsumexp(4 * cosines - 4, dim=(0, 1)).item() - math.log(others)
    return GSInfoNCEStatistics(
        positive_cosine=positive,
        negative_cosine=negative,
        alignment=2 - 2 * positive,
        uniformity=uniformity,
        noise_share=share.item(),
    )
