"""The false-negative probe.

- It equals a brute-force double loop over the pairs of each batch, to the last digit.
- A batch is a draw of distinct rows, the smaller one the beginning of the larger one.
- Repeated sentences and batches larger than the corpus are said, and handled.
- Each sentence is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_sentences
from sentence_transformers import SentenceTransformer

from st_gsinfonce import analysis, geometry, load_sentences, probe_false_negatives
from st_gsinfonce.analysis import BatchProbe, FalseNegativeProbe, Geometry

SPACE = Geometry(8, 0.0, -4.0, 8.0)


class Vectors:
    """Stands in for an encoder: sentence "i" has the row i."""

    device = torch.device("cpu")

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.encoded: list[str] = []

    def encode(self, texts: list[str], **settings: Any) -> np.ndarray:
        self.encoded += texts
        return self.rows[[int(text) for text in texts]]


def by_hand(rows: np.ndarray, top_k: int) -> list[tuple[float, int, int]]:
    """Return the top pairs of a batch by a double loop in float64."""
    pairs = []
    for i in range(len(rows)):
        for j in range(i + 1, len(rows)):
            a, b = rows[i].astype(np.float64), rows[j].astype(np.float64)
            pairs.append((float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())), i, j))
    return sorted(pairs, key=lambda pair: (-pair[0], pair[1:]))[:top_k]


@pytest.mark.parametrize("tiles", [(512, 4096), (7, 16), (3, 3)])
def test_it_equals_a_double_loop(tiles: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "_TILE_ROWS", tiles[0])
    monkeypatch.setattr(geometry, "_TILE_COLUMNS", tiles[1])
    rows = np.random.default_rng(5).standard_normal((60, 8)).astype(np.float32)
    texts = [str(i) for i in range(60)]
    probe = probe_false_negatives(Vectors(rows), texts, [8, 40], top_k=4, repeats=6, seed=3)
    for point in probe.points:
        met: dict[frozenset[str], list[float]] = {}
        for repeat in range(6):
            generator = np.random.default_rng([3, repeat])
            drawn = generator.permutation(60)[:40]
            gaussian = generator.standard_normal((40, 8), dtype=np.float32)
            top = by_hand(rows[drawn[: point.batch_size]], 4)
            assert point.values[repeat] == np.mean([cosine for cosine, _, _ in top])
            of_gaussian = by_hand(gaussian[: point.batch_size], 4)
            assert point.gaussian_values[repeat] == np.mean(
                [cosine for cosine, _, _ in of_gaussian]
            )
            for cosine, i, j in top:
                met.setdefault(frozenset({texts[drawn[i]], texts[drawn[j]]}), []).append(cosine)
        found = {frozenset({p.first, p.second}): (p.cosine, p.batches) for p in point.pairs}
        assert len(found) == min(len(met), analysis.PAIRS_KEPT) == len(point.pairs)
        assert all(found[pair] == (met[pair][0], len(met[pair])) for pair in found)
        least = min(cosine for cosine, _ in found.values())
        assert all(cosines[0] <= least for pair, cosines in met.items() if pair not in found)
        assert [p.cosine for p in point.pairs] == sorted(p.cosine for p in point.pairs)[::-1]
        assert point.mean == np.mean(point.values) and point.sd == np.std(point.values, ddof=1)


def test_near_ties_are_told_apart_in_float64() -> None:
    # Cosines that differ by less than float32 can say: 40 pairs within 1e-8 of each other.
    angles = np.linspace(0, 1, 41)
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    probe = probe_false_negatives(
        Vectors(rows), [str(i) for i in range(41)], [41], top_k=1, repeats=1
    )
    assert probe.points[0].values[0] == pytest.approx(by_hand(rows, 1)[0][0], abs=1e-7)


def test_values_never_fall_with_the_batch_and_depend_on_the_seed_alone() -> None:
    rows = np.random.default_rng(0).standard_normal((200, 16)).astype(np.float32)
    texts = [str(i) for i in range(200)]
    sizes = [16, 150, 50]
    probe = probe_false_negatives(Vectors(rows), texts, sizes, repeats=5)
    assert [point.batch_size for point in probe.points] == [16, 50, 150]
    by_size = np.array([point.values for point in probe.points])
    assert (np.diff(by_size, axis=0) >= 0).all() and (by_size[2] > by_size[0]).all()
    again = probe_false_negatives(Vectors(rows), texts, sizes, repeats=5)
    other = probe_false_negatives(Vectors(rows), texts, sizes, repeats=5, seed=1)
    assert again == probe and other.points[0].values != probe.points[0].values
    first = probe_false_negatives(Vectors(rows), texts, [16, 150], repeats=2)
    assert first.points[0].values == probe.points[0].values[:2]


def test_each_sentence_is_encoded_once() -> None:
    rows = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    encoder = Vectors(rows)
    probe_false_negatives(encoder, [str(i) for i in range(30)], [8, 16], repeats=9)
    assert sorted(encoder.encoded, key=int) == [str(i) for i in range(30)]


def test_repeated_sentences_are_said_and_left_out() -> None:
    rows = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    texts = [str(i) for i in range(30)]
    with pytest.warns(UserWarning, match="3 of 33 sentences repeat an earlier one"):
        probe = probe_false_negatives(Vectors(rows), [*texts, "0", "7", "7"], [20], repeats=3)
    assert probe.duplicates == 3 and probe.sentences == 30
    clean = probe_false_negatives(Vectors(rows), texts, [20], repeats=3)
    assert probe.points == clean.points


def test_a_corpus_smaller_than_a_batch() -> None:
    rows = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    texts = [str(i) for i in range(30)]
    with pytest.warns(UserWarning, match="sizes 64, 128 are left out: there are 30 distinct"):
        probe = probe_false_negatives(Vectors(rows), texts, [128, 30, 64], repeats=2)
    assert [point.batch_size for point in probe.points] == [30]
    with pytest.raises(ValueError, match=r"at most 30, .* got \[64\]"):
        probe_false_negatives(Vectors(rows), texts, [64])


def test_a_whole_corpus_as_one_batch_has_no_spread() -> None:
    rows = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    probe = probe_false_negatives(Vectors(rows), [str(i) for i in range(30)], [30], repeats=3)
    assert len(set(probe.points[0].values)) == 1 and probe.points[0].gaussian_sd > 0
    assert probe.points[0].values[0] == by_hand_mean(rows)


def by_hand_mean(rows: np.ndarray) -> float:
    return float(np.mean([cosine for cosine, _, _ in by_hand(rows, 4)]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_sizes": [3]}, "integers of at least 4, for 4 pairs, got 3"),
        ({"batch_sizes": []}, "batch_sizes is empty"),
        ({"batch_sizes": [8.0]}, "got 8.0"),
        ({"top_k": 0}, "top_k must be an integer of at least 1, got 0"),
        ({"repeats": 0}, "repeats must be"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    rows = np.ones((8, 2), dtype=np.float32)
    arguments = {"batch_sizes": [8]} | settings
    with pytest.raises(ValueError, match=message):
        probe_false_negatives(Vectors(rows), [str(i) for i in range(8)], **arguments)


def test_sentences_must_be_text() -> None:
    with pytest.raises(ValueError, match="sentence 2 is ' ', not a text"):
        probe_false_negatives(Vectors(np.ones((2, 2))), ["0", " "], [4])
    with pytest.raises(ValueError, match="got a Corpus: .* give .sentences"):
        probe_false_negatives(Vectors(np.ones((2, 2))), load_sentences(["a", "b"]), [4])
    with pytest.raises(ValueError, match="sentence 2 is None, not a text"):
        probe_false_negatives(Vectors(np.ones((2, 2))), ["0", None], [4])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="got a str"):
        probe_false_negatives(Vectors(np.ones((2, 2))), "01", [4])


def test_numpy_s_integers_and_iterators_are_taken() -> None:
    rows = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    texts = [str(i) for i in range(30)]
    plain = probe_false_negatives(Vectors(rows), texts, [8, 16], 2, 3, 1)
    sizes = np.array([8, 16])
    ours = probe_false_negatives(Vectors(rows), iter(texts), sizes, np.int64(2), 3, np.int64(1))
    assert ours == plain and type(ours.points[0].batch_size) is int


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_embeddings_that_are_not_finite_are_refused(bad: float) -> None:
    rows = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    rows[[17, 20]] = bad
    with pytest.raises(
        ValueError, match="not finite for 2 of 30 sentences, the first of them '17'"
    ):
        probe_false_negatives(Vectors(rows), [str(i) for i in range(30)], [8])


def test_a_collapsed_and_an_orthonormal_encoder() -> None:
    texts = [str(i) for i in range(20)]
    same = probe_false_negatives(Vectors(np.ones((20, 4), np.float32)), texts, [20], repeats=2)
    assert same.points[0].mean == pytest.approx(1)
    eye = probe_false_negatives(Vectors(np.eye(20, dtype=np.float32)), texts, [20], repeats=2)
    assert eye.points[0].mean == 0
    zero = probe_false_negatives(Vectors(np.zeros((20, 4), np.float32)), texts, [20], repeats=2)
    assert zero.points[0].mean == 0


def probe_of(*means: float) -> FalseNegativeProbe:
    points = [BatchProbe(2**i, (mean, mean), (0.1, 0.1), ()) for i, mean in enumerate(means, 6)]
    return FalseNegativeProbe(tuple(points), 4, 2, 0, 1000, 0, SPACE)


def test_the_threshold() -> None:
    probe = probe_of(0.5, 0.7, 0.9)
    assert probe.largest_batch_below(0.6) == 64
    assert probe.largest_batch_below(0.7) == 128
    assert probe.largest_batch_below(0.4) is None
    assert probe.verdict(0.6).startswith("Up to a batch of 64 the 4 most similar")
    assert probe.verdict(0.6).endswith("at most 0.6; at 128 it is 0.70.")
    assert "Already at a batch of 64" in probe.verdict(0.4)
    assert "256, the largest probed" in probe.verdict(0.95)
    for probe, threshold in ((probe_of(0.9004), 0.9), (probe_of(0.5, 0.9004), 0.9)):
        assert "0.9004" in probe.verdict(threshold) or "0.900" in probe.verdict(threshold)
        assert not probe.verdict(threshold).endswith("it is 0.90.")
    assert probe_of(0.5, 0.7, 0.6).largest_batch_below(0.65) == 64  # not beyond the first above it


def test_the_geometry_is_that_of_the_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    texts = [str(i) for i in range(30)]
    probe = probe_false_negatives(Vectors(rows), texts, [8], repeats=2)
    assert probe.geometry == Geometry.of(rows)
    monkeypatch.setattr(analysis, "_GEOMETRY_ROWS", 10)
    of_some = probe_false_negatives(Vectors(rows), texts, [8], repeats=2)
    assert of_some.geometry != probe.geometry and of_some.points == probe.points


def test_a_real_encoder(make_encoder: Callable[..., SentenceTransformer]) -> None:
    texts = make_sentences(40)
    model = make_encoder()
    probe = probe_false_negatives(model, texts, [8, 32], repeats=4)
    vectors = model.encode(texts)
    drawn = np.random.default_rng([0, 2]).permutation(40)[:32]
    top = by_hand(vectors[drawn], 4)
    assert probe.points[1].values[2] == pytest.approx(np.mean([pair[0] for pair in top]), abs=1e-6)
    assert probe.geometry.dim == 32 and {probe.points[0].pairs[0].first} <= set(texts)
