r"""GS-InfoNCE without its matrix of logits: the same value and gradients, in memory for a tile of it.

Dense, N anchors against C candidates and M noise vectors need N (C + M) logits several times over. Here they
are computed tile by tile. With :math:`r_i = \log \sum_{j \neq i} e^{\ell_{ij}}` over candidates and noise,
the loss is the mean of :math:`\mathrm{softplus}(r_i - \ell_{ii})`, and with
:math:`w_i = \sigma(r_i - \ell_{ii})` its gradients are

.. math::

    \partial / \partial h_i &= \frac{s\, w_i}{N} \Big(\sum_{j \neq i} e^{\ell_{ij} - r_i} c_j - c_i\Big) \\
    \partial / \partial c_j &= \frac{s}{N} \Big(\sum_{i \neq j} w_i e^{\ell_{ij} - r_i} h_i - w_j h_j\Big)

One pass over the tiles gives :math:`r_i` and the weighted sums of the first gradient together, rescaled
whenever a larger logit comes up (the online softmax of Milakov and Gimelshein, 2018,
https://arxiv.org/abs/1805.02867, with the weighted sums that FlashAttention added to it,
https://arxiv.org/abs/2205.14135). A second pass gives the candidates' gradient; the noise has none, so each
of its blocks is drawn once, used and forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from st_gsinfonce.objective import Similarity, check_arguments, cos_sim, inner_product, unit

NoiseBlocks = Callable[[], Iterable[Tensor]]
"""Makes the noise anew, in blocks of shape (rows, D)."""

BLOCK_ROWS = 1024  # candidates or noise vectors of a tile
TILE_ROWS = 1024  # anchors of a tile


def gs_infonce_streamed(
    anchors: Tensor,
    candidates: Tensor,
    noise: Tensor | NoiseBlocks | None = None,
    *,
    scale: float = 20.0,
    noise_weight: float = 1.0,
    log_noise_mass: float | None = None,
    offset: int = 0,
    similarity: Similarity = cos_sim,
) -> Tensor:
    """Return what ``gs_infonce`` returns, with the same gradients, and never more logits than a tile.

    Args:
        anchors: As for ``gs_infonce``, (N, D).
        candidates: As for ``gs_infonce``, (C, D).
        noise: (M, D), or a function that yields it in blocks, such as
            ``lambda: noise_blocks(key, M, D)``: then it is never whole either.
        scale: As for ``gs_infonce``.
        noise_weight: As for ``gs_infonce``.
        log_noise_mass: As for ``gs_infonce``.
        offset: As for ``gs_infonce``.
        similarity: ``cos_sim`` or :func:`inner_product`, the two whose gradients are known here.

    Returns:
        A scalar, float32 or float64, in nats.

    Raises:
        ValueError: As ``gs_infonce`` does, and for another similarity.
    """
    whole = noise if isinstance(noise, Tensor) else None
    check_arguments(anchors, candidates, whole, scale, noise_weight, log_noise_mass, offset)
    if log_noise_mass is not None and noise is not None:
        raise ValueError("log_noise_mass stands for the whole noise sum: give it without noise")
    if similarity not in (cos_sim, inner_product):
        raise ValueError(
            "only cosine similarity and the inner product can be streamed: use gs_infonce for others"
        )
    cosine = similarity is cos_sim
    dtype = torch.promote_types(anchors.dtype, torch.float32)

    def blocks() -> Iterator[Tensor]:
        if noise is None or noise_weight == 0:
            return
        parts = torch.split(noise.detach(), BLOCK_ROWS) if isinstance(noise, Tensor) else noise()
        for part in parts:
            if len(part) > 0:
                yield unit(part.to(dtype)) if cosine else part.to(dtype)

    with torch.autocast(anchors.device.type, enabled=False):
        anchors, candidates = anchors.to(dtype), candidates.to(dtype)
        if cosine:
            anchors, candidates = unit(anchors), unit(candidates)
        log_weight = math.log(noise_weight) if noise_weight else -math.inf
        loss: Tensor = _Streamed.apply(  # type: ignore[no-untyped-call]
            anchors, candidates, blocks, scale, log_weight, log_noise_mass, offset
        )
    return loss


class _OnlineSoftmax:
    """Running log-sum-exp of rows of logits, and the sums of vectors under its weights."""

    def __init__(self, anchors: Tensor, log_mass: float | None, weighted_sums: bool) -> None:
        lowest = torch.finfo(anchors.dtype).min
        start = lowest if log_mass is None else max(log_mass, lowest)
        self.largest = anchors.new_full((len(anchors),), start)  # (N,)
        self.total = torch.full_like(self.largest, 1.0 if start > lowest else 0.0)  # (N,)
        self.sums = torch.zeros_like(anchors) if weighted_sums else None  # (N, D)

    def add(self, rows: slice, logits: Tensor, vectors: Tensor) -> None:
        """Add a tile, (rows, block), of the logits of ``vectors``, (block, D); the tile is used up."""
        largest = torch.maximum(self.largest[rows], logits.amax(dim=1))
        rescale = (self.largest[rows] - largest).exp_()
        weights = logits.sub_(largest[:, None]).exp_()
        self.largest[rows] = largest
        self.total[rows].mul_(rescale).add_(weights.sum(dim=1))
        if self.sums is not None:
            self.sums[rows].mul_(rescale[:, None]).addmm_(weights, vectors)

    def logsumexp(self) -> Tensor:
        """Return the logarithm of each row's sum; the lowest number, rather than -inf, for an empty one."""
        return (self.largest + self.total.log()).clamp_min(torch.finfo(self.total.dtype).min)

    def means(self) -> Tensor:
        """Return the weighted means, into which the sums are turned."""
        assert self.sums is not None
        return self.sums.div_(self.total.clamp_min(torch.finfo(self.total.dtype).tiny)[:, None])


def _tiles(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _without_positives(logits: Tensor, rows: slice, block: slice, offset: int) -> Tensor:
    """Take the positives out of a tile of logits, (rows, block), in place."""
    diagonal = rows.start + offset - block.start
    if -logits.shape[0] < diagonal < logits.shape[1]:
        logits.diagonal(diagonal).fill_(-math.inf)
    return logits


class _Streamed(torch.autograd.Function):
    """The loss of vectors under the inner product; see the module's docstring for the equations."""

    @staticmethod
    def forward(
        ctx: Any,
        anchors: Tensor,
        candidates: Tensor,
        blocks: NoiseBlocks,
        scale: float,
        log_weight: float,
        log_mass: float | None,
        offset: int,
    ) -> Tensor:
        count = len(anchors)
        positives = candidates[offset : offset + count]  # (N, D)
        scaled = anchors * scale  # (N, D)
        softmax = _OnlineSoftmax(anchors, log_mass, weighted_sums=ctx.needs_input_grad[0])
        for block in _tiles(len(candidates), BLOCK_ROWS):
            vectors = candidates[block]
            for rows in _tiles(count, TILE_ROWS):
                logits = torch.mm(scaled[rows], vectors.T)
                softmax.add(rows, _without_positives(logits, rows, block, offset), vectors)
        for noise in blocks():
            for rows in _tiles(count, TILE_ROWS):
                softmax.add(rows, torch.mm(scaled[rows], noise.T).add_(log_weight), noise)
        rest = softmax.logsumexp()  # (N,)
        margin = rest - scale * (anchors * positives).sum(dim=1)  # (N,)
        weights = margin.sigmoid() * (scale / count)  # (N,)
        anchor_gradient = None
        if ctx.needs_input_grad[0]:
            anchor_gradient = softmax.means().sub_(positives).mul_(weights[:, None])
        ctx.save_for_backward(anchors, candidates, rest, weights, anchor_gradient)
        ctx.scale, ctx.offset = scale, offset
        return F.softplus(margin, threshold=40.0).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (outer,) = gradients
        anchors, candidates, rest, weights, anchor_gradient = ctx.saved_tensors
        if anchor_gradient is not None:
            anchor_gradient = anchor_gradient * outer
        candidate_gradient = None
        if ctx.needs_input_grad[1]:
            candidate_gradient = torch.zeros_like(candidates)
            scaled = anchors * ctx.scale
            shift = (weights.log() - rest)[:, None]  # (N, 1)
            with torch.autocast(anchors.device.type, enabled=False):
                for block in _tiles(len(candidates), BLOCK_ROWS):
                    for rows in _tiles(len(anchors), TILE_ROWS):
                        logits = torch.addmm(shift[rows], scaled[rows], candidates[block].T)
                        shares = _without_positives(logits, rows, block, ctx.offset).exp_()
                        candidate_gradient[block].addmm_(shares.T, anchors[rows])
            own = slice(ctx.offset, ctx.offset + len(anchors))
            candidate_gradient[own].addcmul_(anchors, weights[:, None], value=-1)
            candidate_gradient *= outer
        return anchor_gradient, candidate_gradient, None, None, None, None, None
