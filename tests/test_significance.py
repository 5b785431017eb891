"""The statistics of paired seeds.

- The permutation p value is exact: it equals the count of all patterns of signs, made by hand or by force.
- The bootstrap interval equals the percentiles of all resamples, where these can be listed.
- What the docstrings say of few seeds is true: coverage, the smallest p value.
- The number of seeds that a difference needs is the textbook's.
- A verdict never claims what the numbers do not allow.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from st_gsinfonce.significance import (
    PairedDifference,
    bootstrap_interval,
    paired_difference,
    paired_power,
    permutation_p_value,
    seeds_needed,
)


def normal(count: int, seed: int = 0, mean: float = 0.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, 1, count)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1, 1, 1, 1, 1], 2 / 32),
        ([1, 2, 3], 2 / 8),
        ([-1, -2, -3], 2 / 8),
        ([1, -1], 1.0),
        ([3, 1, -1], 6 / 8),  # the sums are 5, 3, 3, 1 and their negatives; 3 was seen
        ([0, 0, 0], 1.0),
        ([0.4] * 6, 2 / 64),
    ],
)
def test_permutation_by_hand(differences: list[float], p: float) -> None:
    assert permutation_p_value(differences) == pytest.approx(p)


@pytest.mark.parametrize("seed", range(4))
def test_permutation_by_force(seed: int) -> None:
    differences = normal(10, seed, mean=0.4)
    seen = abs(differences.mean()) - 1e-12
    signs = np.array(list(itertools.product([-1, 1], repeat=10)))
    expected = (abs((signs * differences).mean(axis=1)) >= seen).mean()
    assert permutation_p_value(differences) == pytest.approx(expected)


@pytest.mark.slow
def test_permutation_of_many_is_close_to_the_t_test() -> None:
    """Slow: a hundred thousand permutations."""
    differences = normal(40, mean=0.3)
    expected = stats.ttest_1samp(differences, 0).pvalue
    assert permutation_p_value(differences) == pytest.approx(expected, abs=0.01)
    assert permutation_p_value(differences) == permutation_p_value(differences)


def test_five_seeds_cannot_reach_the_level_and_six_can() -> None:
    assert permutation_p_value([1e6, 2e6, 3e6, 1e6, 2e6]) > 0.05
    assert permutation_p_value([0.1] * 5 + [0.2]) < 0.05


def test_bootstrap_by_hand() -> None:
    # Of two values 1/4 of the resamples are twice the lower one, 1/4 twice the higher one.
    assert bootstrap_interval([1.0, 3.0]) == (1.0, 3.0)
    assert bootstrap_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)


@pytest.mark.parametrize("seed", range(4))
def test_bootstrap_by_force(seed: int) -> None:
    values = normal(5, seed)
    means = [np.mean(sample) for sample in itertools.product(values, repeat=5)]
    expected = np.percentile(means, [2.5, 97.5])
    np.testing.assert_allclose(bootstrap_interval(values), expected, atol=0.03)
    assert bootstrap_interval(values) == bootstrap_interval(values)


def test_bootstrap_of_many_is_close_to_the_normal_interval() -> None:
    values = normal(400)
    half = 1.96 * values.std(ddof=1) / 20
    expected = values.mean() - half, values.mean() + half
    np.testing.assert_allclose(bootstrap_interval(values), expected, atol=0.01)


@pytest.mark.parametrize(("seeds", "coverage"), [(5, 0.84), (10, 0.90), (20, 0.93)])
def test_coverage_is_as_documented(seeds: int, coverage: float) -> None:
    generator = np.random.default_rng(1)
    values = generator.normal(size=(3000, seeds))
    draws = generator.integers(seeds, size=(400, seeds))  # resamples shared by all trials
    means = values[:, draws].mean(axis=2)
    low, high = np.percentile(means, [2.5, 97.5], axis=1)
    assert np.mean((low <= 0) & (high >= 0)) == pytest.approx(coverage, abs=0.02)


# Dz, and the n of published tables for the two-sided paired t test at 5% with a power of 80%.
@pytest.mark.parametrize(("effect", "n"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_seeds_needed_are_the_textbooks(effect: float, n: int) -> None:
    assert seeds_needed(effect, 1.0) == seeds_needed(-3 * effect, 3.0) == n
    assert paired_power(effect, 1.0, n) >= 0.8 > paired_power(effect, 1.0, n - 1)


def test_power_by_simulation() -> None:
    samples = np.random.default_rng(0).normal(0.7, 1, size=(20_000, 12))
    rejected = (stats.ttest_1samp(samples, 0, axis=1).pvalue < 0.05).mean()
    assert paired_power(0.7, 1.0, 12) == pytest.approx(rejected, abs=0.01)


def test_seeds_needed_at_the_edges() -> None:
    assert seeds_needed(0.0, 1.0) is None
    assert seeds_needed(1e-4, 1.0) is None
    assert seeds_needed(9.0, 1.0) == 6  # fewer cannot reach 0.05 by permutation
    assert seeds_needed(1.0, 0.0) == 6


def test_a_paired_difference() -> None:
    result = paired_difference([3.0, 5.0, 4.0], [1.0, 4.0, 4.0])
    assert result.differences == (2.0, 1.0, 0.0)
    assert result.mean == 1.0 and result.sd == 1.0 and result.seeds == 3
    assert result.p_value == 0.5  # 3 seen; the sums are 3, 3, 1, 1 and their negatives
    assert result.low <= 1.0 <= result.high
    assert result.seeds_needed == seeds_needed(1.0, 1.0) and result.more_seeds == 7
    mirrored = paired_difference([1.0, 4.0, 4.0], [3.0, 5.0, 4.0])
    assert mirrored.mean == -1.0 and mirrored.p_value == result.p_value
    assert mirrored.seeds_needed == result.seeds_needed


def test_pairing_cancels_what_a_seed_does_to_both() -> None:
    seeds = 100 * normal(8)
    result = paired_difference(seeds + 0.5 + normal(8, 1) / 100, seeds)
    assert result.mean == pytest.approx(0.5, abs=0.01) and result.is_settled


def test_one_seed_says_nothing() -> None:
    result = paired_difference([3.0], [1.0])
    assert result.mean == 2.0 and not result.is_settled
    assert all(math.isnan(x) for x in (result.sd, result.low, result.high, result.p_value))
    assert result.seeds_needed is result.more_seeds is None
    assert "says nothing about chance" in result.verdict("A", "B", "Avg.")


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [
        ([1.0, 1.1, 0.9, 1.0, 1.2, 1.0], "A is better than B: +1.03 points of Avg. (95% interval"),
        ([-1.0, -1.1, -0.9, -1.0, -1.2, -1.0], "A is worse than B: -1.03 points of Avg."),
        ([1.0, 1.1, 0.9, 1.0, 1.2], "cannot be told apart: +1.04 points of Avg."),
        ([1.0, 1.1, 0.9, 1.0, 1.2], "to settle a difference of that size takes about 1 more."),
        ([1.0, -1.0, 0.5, -0.4, 0.1, 0.2], "A and B cannot be told apart"),
        ([1.0, -1.0, 0.0, 0.0, 0.0, 0.0], "no feasible number of seeds"),
    ],
)
def test_verdicts(differences: list[float], sentence: str) -> None:
    verdict = paired_difference(differences, [0.0] * len(differences)).verdict("A", "B", "Avg.")
    assert sentence in verdict and verdict.endswith(".") and "\n" not in verdict
    assert f"{len(differences)} paired seeds" in verdict


def test_an_interval_without_zero_does_not_settle_alone() -> None:
    shaky = PairedDifference((1.0,) * 5, 1.0, 0.1, 0.9, 1.1, 0.0625, 6)
    assert not shaky.is_settled and "cannot be told apart" in shaky.verdict("A", "B", "Avg.")
    assert PairedDifference((1.0,) * 6, 1.0, 0.1, 0.9, 1.1, 0.031, 6).is_settled
    assert not PairedDifference((1.0,) * 6, 1.0, 0.1, -0.1, 1.1, 0.031, 6).is_settled


@pytest.mark.parametrize(
    ("treated", "baseline", "message"),
    [
        ([1.0], [1.0, 2.0], "got 1 and 2"),
        ([], [], "got 0 and 0"),
        ([math.nan, 1.0], [1.0, 2.0], "must be finite"),
    ],
)
def test_wrong_input(treated: list[float], baseline: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_difference(treated, baseline)
