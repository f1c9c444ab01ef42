"""Statistics of paired timings: effect, an exact test, its interval, and what it is able to see.

Each pair holds one time of A and one of B, taken in an order that a coin decided. If A and B do
not differ, that coin is the sign of the pair's difference, whatever else moves the times (a
drifting clock, say): so the test compares the sum of the differences with all 2^n ways to sign
them (Fisher's randomisation test; E. S. Edgington, Randomization Tests, ch. 5). No distribution is
assumed.

Differences are ln(A / B): positive where B is faster. A gain of g percent is A / B = 1 + g / 100,
as in tokens per second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_PAIRS = 64
GRID = 500  # differences are rounded to this fraction of the largest; the test stays exact
POWER = 0.9  # how often an effect of the size that "can be seen" is found


@dataclass(frozen=True)
class Comparison:
    """B against A.

    Attributes:
        gain: percent, the mean over the pairs; positive where B is faster.
        low, high: the gains that the test does not refuse at `alpha` (infinite with few pairs).
        p: of the two-sided test for no difference.
        sigma: standard deviation of one pair's difference, in percent.
        visible: the smallest gain that this many pairs find with a probability of `POWER`; None if
            no gain could be.
        separated: whether the two ranges of times do not overlap.
    """

    pairs: int
    alpha: float
    median_a: float
    median_b: float
    gain: float
    low: float
    high: float
    p: float
    sigma: float
    visible: float | None
    separated: bool

    @property
    def significant(self) -> bool:
        """Whether the test refuses "no difference"."""
        return self.p <= self.alpha

    def record(self) -> dict[str, Any]:
        """JSON values; an infinite end of the interval is None."""
        fields = dict(vars(self))
        for name in ("low", "high"):
            fields[name] = fields[name] if math.isfinite(fields[name]) else None
        return {**fields, "significant": self.significant}


def compare(a: Sequence[float], b: Sequence[float], *, alpha: float) -> Comparison:
    """Compares paired times; a[i] and b[i] are one pair.

    Raises:
        ValueError: no pairs, more than `MOST_PAIRS`, lists of different lengths, or a time that is
            not positive and finite.
    """
    if len(a) != len(b) or not 1 <= len(a) <= MOST_PAIRS:
        raise ValueError(f"{len(a)} and {len(b)} times: 1 to {MOST_PAIRS} pairs are needed")
    for index, pair in enumerate(zip(a, b, strict=True)):
        if not all(math.isfinite(t) and t > 0 for t in pair):
            raise ValueError(f"pair {index}: times {pair} must be positive and finite")
    differences = np.log(np.array(a) / np.array(b))
    low, high = interval(differences, alpha)
    sigma = float(differences.std(ddof=1)) if len(a) > 1 else math.inf
    return Comparison(
        pairs=len(a),
        alpha=alpha,
        median_a=float(statistics.median(a)),
        median_b=float(statistics.median(b)),
        gain=percent(float(differences.mean())),
        low=percent(low),
        high=percent(high),
        p=p_value(differences),
        sigma=100 * sigma,
        visible=visible_gain(100 * sigma, len(a), alpha),
        separated=bool(max(a) < min(b) or max(b) < min(a)),
    )


def percent(log_ratio: float) -> float:
    """The gain in percent of a logarithmic difference."""
    return 100 * math.expm1(log_ratio) if log_ratio < 700 else math.inf


def p_value(differences: NDArray[np.float64]) -> float:
    """The share of the 2^n signings whose sum is at least as far from 0 as the observed one.

    Rounded to a grid, the sums are few, and how often each occurs is counted term by term.
    """
    largest = float(np.abs(differences).max())
    if largest == 0:
        return 1.0
    steps = np.rint(differences * (GRID / largest)).astype(np.int64)
    seen, sizes = abs(int(steps.sum())), np.abs(steps).tolist()
    if seen == 0:
        return 1.0
    total, ends = sum(sizes), 1
    share = np.zeros(total + 1)  # share[i]: of the signings whose positive terms add up to i
    share[0] = 0.5 ** len(sizes)
    for size in sizes:
        ends += size
        share[size:ends] = share[size:ends] + share[: ends - size]
    return 2 * float(share[(total + seen) // 2 :].sum())  # a signing's opposite is as far from 0


def interval(differences: NDArray[np.float64], alpha: float) -> tuple[float, float]:
    """All shifts of the differences that the test does not refuse at `alpha`, by bisection."""
    if not refusing(len(differences), alpha):
        return -math.inf, math.inf  # not even the most extreme signing would be refused
    mean = float(differences.mean())
    reach = 2 * float(np.abs(differences - mean).max())

    def end(outside: float) -> float:
        inside = mean
        for _ in range(20):
            middle = (inside + outside) / 2
            if p_value(differences - middle) > alpha:
                inside = middle
            else:
                outside = middle
        return inside

    return end(mean - reach), end(mean + reach)


def refusing(pairs: int, alpha: float) -> int:
    """How many of the p values that so many pairs can give, the multiples of 2 / 2^n, refuse."""
    return math.floor(alpha * 2.0 ** (pairs - 1))


def visible_gain(sigma: float, pairs: int, alpha: float) -> float | None:
    """The smallest gain found with a probability of `POWER`, for noise `sigma` (both in percent).

    The size formula of the paired t test with W. Guenther's correction for few pairs (The American
    Statistician 35, 1981), and a factor for the coarse steps of p. That factor was fitted to
    simulations of normal noise: with it 0.88 to 0.92 of them find the gain, for 5 to 20 pairs.
    """
    steps = refusing(pairs, alpha)
    if not steps:
        return None
    quantile = statistics.NormalDist().inv_cdf
    z = quantile(1 - steps / 2.0**pairs)
    rest = pairs - z * z / 2
    if rest <= 0:
        return None
    return float((1 + 0.2 / steps**0.7) * (z + quantile(POWER)) * sigma / math.sqrt(rest))


def pairs_needed(sigma: float, gain: float, alpha: float) -> int | None:
    """The fewest pairs with which `gain` can be seen; None if `MOST_PAIRS` do not suffice."""
    for pairs in range(2, MOST_PAIRS + 1):
        seen = visible_gain(sigma, pairs, alpha)
        if seen is not None and seen <= abs(gain):
            return pairs
    return None
