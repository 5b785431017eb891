"""Whether a difference between two ways to train is more than chance: paired statistics over seeds.

Two arms that share a seed share its batches and its initial head, so that what the seed does to both
cancels in their difference. Everything here looks at these differences alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVEL = 0.05
POWER = 0.8
_RESAMPLES = 99_999  # a permutation test of up to 16 seeds is exact below that
_FEWEST_SEEDS, _MAX_SEEDS = 6, 10_000


@dataclass(frozen=True)
class PairedDifference:
    """The difference of two arms over the seeds that both have.

    Attributes:
        differences: Treated minus baseline, a number a seed.
        mean: Their mean.
        sd: Their standard deviation (n - 1); NaN for one seed.
        low: Lower end of the 95% bootstrap interval of the mean; NaN for one seed.
        high: Upper end.
        p_value: Two-sided paired permutation p value; NaN for one seed.
        seeds_needed: Seeds for a power of 80% at the level 5%, were the true difference and spread those
            seen; None where more than 10,000, or where it cannot be said (one seed, no difference).
    """

    differences: tuple[float, ...]
    mean: float
    sd: float
    low: float
    high: float
    p_value: float
    seeds_needed: int | None

    @property
    def seeds(self) -> int:
        """The number of pairs."""
        return len(self.differences)

    @property
    def more_seeds(self) -> int | None:
        """Seeds to add to those run, 0 if they are enough; None where ``seeds_needed`` is."""
        return None if self.seeds_needed is None else max(0, self.seeds_needed - self.seeds)

    @property
    def is_settled(self) -> bool:
        """Whether the p value is below 5% and the interval leaves out 0."""
        return self.p_value < LEVEL and not self.low <= 0 <= self.high

    def verdict(self, treated: str, baseline: str, metric: str) -> str:
        """Return what the numbers allow to say, in one sentence."""
        size = f"{self.mean:+.2f} points of {metric}"
        if self.seeds < 2:
            return f"{treated} against {baseline}: {size} with one seed, which says nothing about chance."
        numbers = (
            f"{size} (95% interval {self.low:+.2f} to {self.high:+.2f}, p = {self.p_value:.3f}, "
            f"{self.seeds} paired seeds)"
        )
        if self.is_settled:
            word = "better" if self.mean > 0 else "worse"
            return f"{treated} is {word} than {baseline}: {numbers}."
        if self.more_seeds is None:
            more = "no feasible number of seeds would settle a difference that small"
        elif self.more_seeds == 0:
            more = "as many seeds would do in 4 of 5 cases"
        else:
            more = f"to settle a difference of that size takes about {self.more_seeds} more"
        return f"{treated} and {baseline} cannot be told apart: {numbers}; {more}."


def paired_difference(treated: Sequence[float], baseline: Sequence[float]) -> PairedDifference:
    """Compare two arms seed by seed.

    Args:
        treated: A score a seed.
        baseline: Scores of the same seeds in the same order.

    Raises:
        ValueError: If the numbers of scores differ or are 0, or one is not finite.
    """
    if len(treated) != len(baseline) or len(treated) == 0:
        raise ValueError(
            f"a paired comparison needs as many scores of both arms, got {len(treated)} and "
            f"{len(baseline)}"
        )
    differences = np.subtract(treated, baseline)
    if not np.isfinite(differences).all():
        raise ValueError(f"the scores must be finite, got {list(treated)} and {list(baseline)}")
    alone = len(differences) == 1
    sd = math.nan if alone else float(differences.std(ddof=1))
    low, high = (math.nan, math.nan) if alone else bootstrap_interval(differences)
    return PairedDifference(
        differences=tuple(differences.tolist()),
        mean=float(differences.mean()),
        sd=sd,
        low=low,
        high=high,
        p_value=math.nan if alone else permutation_p_value(differences),
        seeds_needed=None if alone else seeds_needed(float(differences.mean()), sd),
    )


def bootstrap_interval(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of the mean, always the same for the same values.

    With few values it is too narrow: from 3, of which it is the range, it holds a normal mean in 75 of 100
    cases, from 5 in 84, from 10 in 90, from 20 in 93. `PairedDifference.is_settled` therefore asks for the
    p value as well.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13; computed by
    ``scipy.stats.bootstrap``.

    Args:
        values: At least two.
    """
    values = np.asarray(values, dtype=np.float64)
    interval = stats.bootstrap(
        (values,), np.mean, n_resamples=9999, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return float(interval.low), float(interval.high)


def permutation_p_value(differences: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the two-sided p value of the mean under flips of the differences' signs.

    If the arms do not differ, either sign of each difference is as likely. The p value is the share of
    all 2^n patterns of signs whose mean is at least as far from 0 as the one seen; beyond 16 differences
    99,999 random patterns stand for all. It cannot be below 2 / 2^n: five seeds never reach 0.05
    (0.0625), six can (0.031).

    Source: Fisher's randomisation test for pairs (The Design of Experiments, 1935, section 21); computed
    by ``scipy.stats.permutation_test``.
    """
    differences = np.asarray(differences, dtype=np.float64)
    result = stats.permutation_test(
        (differences, np.zeros_like(differences)),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=_RESAMPLES,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def paired_power(mean: float, sd: float, seeds: int) -> float:
    r"""Return the power of the two-sided paired t test at the level 5%.

    .. math::

        P(|T| > t_{0.975,\,n-1}), \qquad
        T \sim t_{n-1}\big(\text{noncentrality } \sqrt n\,|\bar d| / s_d\big)

    Source: Cohen, Statistical Power Analysis for the Behavioral Sciences, 1988, chapter 2.

    Args:
        mean: :math:`\bar d`, the mean difference.
        sd: :math:`s_d`, the standard deviation of the differences, positive.
        seeds: n, at least 2.
    """
    critical = stats.t.ppf(1 - LEVEL / 2, seeds - 1)
    noncentrality = math.sqrt(seeds) * abs(mean) / sd
    upper = float(stats.nct.sf(critical, seeds - 1, noncentrality))
    if noncentrality > 7:  # the other tail holds less than 1e-9, and scipy gives NaN for it
        return upper
    return upper + float(stats.nct.cdf(-critical, seeds - 1, noncentrality))


def seeds_needed(mean: float, sd: float) -> int | None:
    """Return the fewest seeds with which `paired_power` reaches 80%.

    At least 6, since fewer can never reach p < 0.05 in the permutation test. None if 10,000 are too few.

    Args:
        mean: The mean difference.
        sd: The standard deviation of the differences.
    """
    if mean == 0:
        return None
    if sd == 0 or paired_power(mean, sd, _FEWEST_SEEDS) >= POWER:
        return _FEWEST_SEEDS
    low, high = _FEWEST_SEEDS, 2 * _FEWEST_SEEDS  # power grows with n: low is always too few
    while paired_power(mean, sd, high) < POWER:
        if high >= _MAX_SEEDS:
            return None
        low, high = high, min(2 * high, _MAX_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if paired_power(mean, sd, middle) >= POWER else (middle, high)
    return high
