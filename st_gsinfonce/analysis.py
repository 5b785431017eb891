"""How large a batch a corpus bears: the false-negative probe, and beside it the encoder's geometry."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from st_gsinfonce.geometry import (
    Geometry,
    alignment,
    anisotropy,
    effective_rank,
    pair_tiles,
    uniformity,
)
from st_gsinfonce.objective import unit

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from sentence_transformers import SentenceTransformer

__all__ = [
    "BATCH_SIZES",
    "BatchProbe",
    "FalseNegativeProbe",
    "Geometry",
    "NegativePair",
    "alignment",
    "anisotropy",
    "effective_rank",
    "probe_false_negatives",
    "uniformity",
]

BATCH_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
PAIRS_KEPT = 20  # a batch size, for a reader to judge
_GEOMETRY_ROWS = 10_000
_SPARE = 12  # pairs looked at beyond the top ones: float32 may order near ties wrongly


@dataclass(frozen=True)
class NegativePair:
    """Two sentences that stood in a batch as negatives of each other, and hardly differ.

    Attributes:
        first: One sentence.
        second: The other.
        cosine: Cosine similarity of their embeddings.
        batches: In how many of the drawn batches the pair was among the top ones.
    """

    first: str
    second: str
    cosine: float
    batches: int


@dataclass(frozen=True)
class BatchProbe:
    """What random batches of one size hold.

    Attributes:
        batch_size: N, sentences in a batch.
        values: The mean of the top cosine similarities, a number for each drawn batch.
        gaussian_values: The same for batches of Gaussian vectors.
        pairs: The most similar pairs met, most similar first, at most 20.
    """

    batch_size: int
    values: tuple[float, ...]
    gaussian_values: tuple[float, ...]
    pairs: tuple[NegativePair, ...]

    @property
    def mean(self) -> float:
        """Mean over the batches."""
        return float(np.mean(self.values))

    @property
    def sd(self) -> float:
        """Standard deviation over the batches (n - 1), NaN for one."""
        return _sd(self.values)

    @property
    def gaussian_mean(self) -> float:
        """Mean over the Gaussian batches."""
        return float(np.mean(self.gaussian_values))

    @property
    def gaussian_sd(self) -> float:
        """Standard deviation over the Gaussian batches (n - 1), NaN for one."""
        return _sd(self.gaussian_values)


@dataclass(frozen=True)
class FalseNegativeProbe:
    """How similar the most similar negatives of a batch are, by the size of the batch.

    Attributes:
        points: One for each batch size, rising.
        top_k: Pairs of a batch whose cosine similarities are averaged.
        repeats: Batches drawn for each size.
        seed: Of the draws.
        sentences: Distinct sentences in the corpus.
        duplicates: Sentences left out because an equal one came before.
        geometry: Of the embeddings; of 10,000 drawn ones where there are more.
    """

    points: tuple[BatchProbe, ...]
    top_k: int
    repeats: int
    seed: int
    sentences: int
    duplicates: int
    geometry: Geometry

    def largest_batch_below(self, threshold: float) -> int | None:
        """Return the largest probed batch size whose mean is at most ``threshold``, as all before it.

        None if that of the smallest is above it.
        """
        below = None
        for point in self.points:
            if point.mean > threshold:
                break
            below = point.batch_size
        return below

    def verdict(self, threshold: float) -> str:
        """Say in one sentence at which batch size the top pairs pass a threshold."""
        what = f"the {self.top_k} most similar negatives of a batch have a mean cosine"
        below, largest = self.largest_batch_below(threshold), self.points[-1]
        if below is None:
            point = self.points[0]
            return (
                f"Already at a batch of {point.batch_size:,} {what} of {point.mean:.2f}, above "
                f"{threshold:g}."
            )
        if below == largest.batch_size:
            return (
                f"Up to a batch of {below:,}, the largest probed, {what} of at most {largest.mean:.2f}, "
                f"which does not pass {threshold:g}."
            )
        above = next(point for point in self.points if point.batch_size > below)
        return (
            f"Up to a batch of {below:,} {what} of at most {threshold:g}; at {above.batch_size:,} it is "
            f"{above.mean:.2f}."
        )


def probe_false_negatives(
    model: SentenceTransformer,
    sentences: Sequence[str],
    batch_sizes: Sequence[int] = BATCH_SIZES,
    top_k: int = 4,
    repeats: int = 100,
    seed: int = 0,
    *,
    encode_batch_size: int = 64,
    show_progress_bar: bool = False,
) -> FalseNegativeProbe:
    r"""Ask how large a batch the corpus bears before its in-batch negatives are false.

    For each batch size N, ``repeats`` batches of N distinct sentences are drawn. All N (N - 1) / 2 pairs of
    a batch are negatives of each other in training; the mean of the ``top_k`` largest cosine similarities
    says how near the nearest of them are. Gaussian vectors of the same width, a new batch for each
    repeat, show what it would be for directions that have nothing to do with each other.

    Each sentence is embedded once, without dropout. A smaller batch is the beginning of the larger one of
    the same repeat, so that the values of a repeat never fall with N. The similarities are those of the
    model's float32 embeddings, computed in float64 for the pairs that count.

    Source: figure 1 of Wu et al., COLING 2022, https://arxiv.org/abs/2109.04321.

    Args:
        model: The encoder to judge by; it is left in eval mode, as ``encode`` leaves it.
        sentences: The corpus; repeated sentences are left out, and counted.
        batch_sizes: Each at least 2 and large enough for ``top_k`` pairs.
        top_k: Pairs of a batch that are averaged, at least 1.
        repeats: Batches drawn for each size, at least 1.
        seed: Of the draws, at least 0.
        encode_batch_size: Sentences embedded at once.
        show_progress_bar: While embedding.

    Raises:
        ValueError: For a setting out of its range, a sentence that is no string (names the row), or if
            every batch size is larger than the corpus.

    Warns:
        UserWarning: If sentences are repeated, or batch sizes left out as larger than the corpus.
    """
    sizes = _check_sizes(batch_sizes, top_k, repeats, seed)
    distinct = _distinct(sentences)
    fitting = [size for size in sizes if size <= len(distinct)]
    if not fitting:
        raise ValueError(
            f"batch_sizes must hold one of at most {len(distinct)}, the number of distinct sentences, got "
            f"{sizes}: give smaller ones or more sentences"
        )
    if left_out := sizes[len(fitting) :]:
        warnings.warn(
            f"the batch sizes {', '.join(map(str, left_out))} are left out: there are "
            f"{len(distinct)} distinct sentences",
            stacklevel=2,
        )
    vectors = np.asarray(
        model.encode(distinct, batch_size=encode_batch_size, show_progress_bar=show_progress_bar),
        dtype=np.float32,
    )  # (n, D)
    values: dict[int, list[float]] = {size: [] for size in fitting}
    gaussian_values: dict[int, list[float]] = {size: [] for size in fitting}
    met: dict[int, dict[tuple[int, int], list[float]]] = {size: {} for size in fitting}
    for repeat in range(repeats):
        generator = np.random.default_rng([seed, repeat])
        rows = generator.permutation(len(distinct))[: fitting[-1]]
        gaussian = generator.standard_normal((len(rows), vectors.shape[1]), dtype=np.float32)
        for size, pairs, cosines in _top_pairs(vectors[rows], fitting, top_k, model.device):
            values[size].append(float(cosines.mean()))
            for pair, cosine in zip(rows[pairs].tolist(), cosines.tolist(), strict=True):
                met[size].setdefault((min(pair), max(pair)), []).append(cosine)
        for size, _, cosines in _top_pairs(gaussian, fitting, top_k, model.device):
            gaussian_values[size].append(float(cosines.mean()))
    points = []
    for size in fitting:
        nearest = sorted(met[size].items(), key=lambda item: (-item[1][0], item[0]))[:PAIRS_KEPT]
        pairs_kept = tuple(
            NegativePair(distinct[a], distinct[b], cosines[0], len(cosines))
            for (a, b), cosines in nearest
        )
        points.append(
            BatchProbe(size, tuple(values[size]), tuple(gaussian_values[size]), pairs_kept)
        )
    return FalseNegativeProbe(
        points=tuple(points),
        top_k=top_k,
        repeats=repeats,
        seed=seed,
        sentences=len(distinct),
        duplicates=len(sentences) - len(distinct),
        geometry=_geometry(vectors, seed),
    )


def _geometry(vectors: NDArray[np.float32], seed: int) -> Geometry:
    if len(vectors) > _GEOMETRY_ROWS:  # uniformity looks at all pairs
        vectors = np.random.default_rng(seed).choice(vectors, _GEOMETRY_ROWS, replace=False)
    return Geometry.of(vectors)


def _top_pairs(
    vectors: NDArray[np.float32], sizes: Sequence[int], top_k: int, device: torch.device
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
    """Yield (N, pairs, their cosines), most similar first, for the first N rows of a batch."""
    units = unit(torch.from_numpy(vectors).to(device))
    for size in sizes:
        values, pairs = torch.empty(0, device=device), torch.empty(0, 2, dtype=torch.int64)
        for top, left, tile in pair_tiles(units[:size]):
            wanted = top_k + _SPARE
            # The largest entries of a tile lie in the rows with the largest maxima.
            rows = tile.amax(1).topk(min(wanted, len(tile))).indices
            best, flat = tile[rows].flatten().topk(min(wanted, rows.numel() * tile.shape[1]))
            found = torch.stack(
                [top + rows[flat // tile.shape[1]], left + flat % tile.shape[1]], dim=1
            )
            is_pair = torch.isfinite(best)
            values = torch.cat([values, best[is_pair]])
            pairs = torch.cat([pairs.to(device), found[is_pair]])
            keep = values.topk(min(wanted, len(values))).indices
            values, pairs = values[keep], pairs[keep]
        chosen = pairs.cpu().numpy()
        cosines = _cosines(vectors[chosen[:, 0]], vectors[chosen[:, 1]])
        order = np.lexsort((chosen[:, 1], chosen[:, 0], -cosines))[:top_k]
        yield size, chosen[order], cosines[order]


def _cosines(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the cosine of each row with the row beside it, in float64; 0 for a zero vector."""
    first, second = a.astype(np.float64), b.astype(np.float64)
    lengths = np.sqrt((first * first).sum(1) * (second * second).sum(1))
    products = (first * second).sum(1)
    lengths[lengths == 0] = math.inf
    cosines: NDArray[np.float64] = products / lengths
    return cosines


def _check_sizes(batch_sizes: Sequence[int], top_k: int, repeats: int, seed: int) -> list[int]:
    for name, value, least in (("top_k", top_k, 1), ("repeats", repeats, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    smallest = math.ceil((1 + math.sqrt(1 + 8 * top_k)) / 2)  # N (N - 1) / 2 >= top_k
    for size in batch_sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < smallest:
            raise ValueError(
                f"batch_sizes must be integers of at least {smallest}, for {top_k} pairs, got {size!r}"
            )
    if len(batch_sizes) == 0:
        raise ValueError("batch_sizes is empty: give at least one")
    return sorted(set(batch_sizes))


def _distinct(sentences: Sequence[str]) -> list[str]:
    if isinstance(sentences, str):
        raise ValueError("sentences must be a list of strings, got one string")
    for row, sentence in enumerate(sentences, start=1):
        if not isinstance(sentence, str):
            raise ValueError(f"sentence {row} is {sentence!r}, not a string: see load_sentences")
    distinct = list(dict.fromkeys(sentences))
    if repeated := len(sentences) - len(distinct):
        warnings.warn(
            f"{repeated} of {len(sentences)} sentences repeat an earlier one and are left out; in training "
            "a batch that draws both has a false negative for certain: load_sentences drops them",
            stacklevel=3,
        )
    return distinct


def _sd(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
