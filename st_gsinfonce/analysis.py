"""How large a batch a corpus bears: the false-negative probe, and beside it the encoder's geometry."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
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
    "check_draws",
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
        if self.top_k == 1:
            what = "the two most similar negatives of a batch have a mean cosine"
        below, largest = self.largest_batch_below(threshold), self.points[-1]
        if below is None:
            point = self.points[0]
            mean = _shown(point.mean, threshold)
            return (
                f"Already at a batch of {point.batch_size:,} {what} of {mean}, above {threshold:g}."
            )
        if below == largest.batch_size:
            mean = _shown(largest.mean, threshold)
            return (
                f"Up to a batch of {below:,}, the largest probed, {what} of at most {mean}, which does not "
                f"pass {threshold:g}."
            )
        above = next(point for point in self.points if point.batch_size > below)
        mean = _shown(above.mean, threshold)
        return (
            f"Up to a batch of {below:,} {what} of at most {threshold:g}; at {above.batch_size:,} it is "
            f"{mean}."
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

    Batches that hold most of a corpus are nearly the same batch, and their spread is near 0 for that reason
    alone.

    Each sentence is embedded once, without dropout. A smaller batch is the beginning of the larger one of
    the same repeat, so that the values of a repeat never fall with N. The similarities are those of the
    model's float32 embeddings, computed in float64 for the pairs that count.

    Source: figure 1 of Wu et al., COLING 2022, https://arxiv.org/abs/2109.04321.

    Args:
        model: The encoder to judge by; it is left in eval mode, as ``encode`` leaves it.
        sentences: The corpus; repeated sentences are left out, and counted.
        batch_sizes: Each large enough for ``top_k`` pairs.
        top_k: Pairs of a batch that are averaged, at least 1.
        repeats: Batches drawn for each size, at least 1.
        seed: Of the draws, at least 0.
        encode_batch_size: Sentences embedded at once.
        show_progress_bar: While embedding.

    Returns:
        A `FalseNegativeProbe`: ``points``, one for each batch size, with ``mean``, ``sd`` and the most
        similar ``pairs``; ``verdict(threshold)``; the ``geometry`` of the embeddings.

    Raises:
        ValueError: For a setting out of its range, a sentence that is blank or no string (names the row),
            embeddings that are not finite, or if every batch size is larger than the corpus.

    Warns:
        UserWarning: If sentences are repeated, or batch sizes left out as larger than the corpus.
    """
    sizes = check_draws(batch_sizes, top_k, repeats, seed)
    distinct, duplicates = _distinct(sentences)
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
    if not (finite := np.isfinite(vectors).all(axis=1)).all():
        first = distinct[int(finite.argmin())]
        raise ValueError(
            f"the encoder gives embeddings that are not finite for {(~finite).sum()} of {len(distinct)} "
            f"sentences, the first of them {first[:80]!r}: its weights may have diverged in training"
        )
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
        top_k=int(top_k),
        repeats=int(repeats),
        seed=int(seed),
        sentences=len(distinct),
        duplicates=duplicates,
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


def check_draws(batch_sizes: Sequence[int], top_k: int, repeats: int, seed: int) -> list[int]:
    """Return the batch sizes, rising, each once.

    Raises:
        ValueError: For what `probe_false_negatives` does not take.
    """
    for name, value, least in (("top_k", top_k, 1), ("repeats", repeats, 1), ("seed", seed, 0)):
        if not _is_integer(value) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if not isinstance(batch_sizes, Iterable):
        raise ValueError(f"batch_sizes must be a list of integers, got {batch_sizes!r}")
    sizes = list(batch_sizes)
    smallest = math.ceil((1 + math.sqrt(1 + 8 * top_k)) / 2)  # N (N - 1) / 2 >= top_k
    for size in sizes:
        if not _is_integer(size) or size < smallest:
            raise ValueError(
                f"batch_sizes must be integers of at least {smallest}, for {top_k} pairs, got {size!r}"
            )
    if not sizes:
        raise ValueError("batch_sizes is empty: give at least one")
    return sorted({int(size) for size in sizes})


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _distinct(sentences: Iterable[str]) -> tuple[list[str], int]:
    if isinstance(sentences, str) or not isinstance(sentences, Iterable):
        raise ValueError(
            f"sentences must be a list of strings, got a {type(sentences).__name__}: of what "
            "load_sentences returns give .sentences"
        )
    given = list(sentences)
    for row, sentence in enumerate(given, start=1):
        if not isinstance(sentence, str) or not sentence.strip():
            raise ValueError(
                f"sentence {row} is {sentence!r}, not a text: load_sentences drops such rows"
            )
    distinct = list(dict.fromkeys(given))
    if repeated := len(given) - len(distinct):
        warnings.warn(
            f"{repeated} of {len(given)} sentences repeat an earlier one and are left out; in training "
            "a batch that draws both has a false negative for certain: load_sentences drops them",
            stacklevel=3,
        )
    return distinct, repeated


def _shown(value: float, threshold: float) -> str:
    """Return a value with as many digits, two at least, as tell on which side of the threshold it is."""
    for digits in range(2, 17):
        text = f"{value:.{digits}f}"
        if (float(text) > threshold) == (value > threshold):
            break
    return text


def _sd(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
