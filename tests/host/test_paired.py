"""The statistics of A/B: exact where they say so, and as sharp as they predict."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from pyruntime.measure.paired import (
    GRID,
    MOST_PAIRS,
    compare,
    interval,
    p_value,
    pairs_needed,
    refusing,
    visible_gain,
)


def by_enumeration(differences: np.ndarray) -> float:
    signs = np.array(list(itertools.product([-1, 1], repeat=len(differences))))
    sums = np.abs(signs @ differences)
    return float((sums >= abs(differences.sum()) * (1 - 1e-12)).mean())


@pytest.mark.parametrize("n", [1, 2, 3, 6, 9, 12])
def test_p_is_the_share_of_all_signings(n: int) -> None:
    rng = np.random.default_rng(n)
    for _ in range(5):
        differences = rng.integers(-GRID, GRID + 1, n) / GRID
        differences[0] = 1.0
        assert p_value(differences) == pytest.approx(by_enumeration(differences), abs=1e-12)


def test_extremes() -> None:
    assert p_value(np.ones(9)) == 2 / 2**9
    assert p_value(np.zeros(9)) == 1
    assert p_value(np.array([1.0, -1.0])) == 1
    assert p_value(np.ones(MOST_PAIRS)) == 2 / 2**MOST_PAIRS


def test_the_interval_holds_what_the_test_does_not_refuse() -> None:
    rng = np.random.default_rng(4)
    differences = rng.normal(0.01, 0.01, 12)
    low, high = interval(differences, 0.05)
    assert low < differences.mean() < high
    for inside in np.linspace(low, high, 9):
        assert p_value(differences - inside) > 0.05
    assert p_value(differences - (low - 1e-4)) <= 0.05 >= p_value(differences - (high + 1e-4))
    assert interval(differences[:7], 0.01) == (-math.inf, math.inf)


@pytest.mark.parametrize(("pairs", "alpha", "count"), [(7, 0.01, 0), (8, 0.01, 1), (6, 0.05, 1)])
def test_few_pairs_can_refuse_nothing(pairs: int, alpha: float, count: int) -> None:
    assert refusing(pairs, alpha) == count
    assert (visible_gain(1.0, pairs, alpha) is None) == (count == 0)


def test_a_comparison_of_known_times() -> None:
    a, b = [10.0, 10.2, 9.9, 10.1, 10.0, 10.0, 9.8, 10.3, 10.1], [9.0] * 9
    found = compare(a, b, alpha=0.01)
    assert found.significant and found.separated and found.p == 2 / 2**9
    assert found.gain == pytest.approx(100 * (math.exp(np.log(np.array(a) / 9).mean()) - 1))
    assert found.low < found.gain < found.high
    assert (found.median_a, found.median_b) == (10.0, 9.0)
    assert not compare(b, b, alpha=0.01).significant


@pytest.mark.parametrize(
    ("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([math.nan], [1.0])]
)
def test_bad_times_are_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pairs|finite"):
        compare(a, b, alpha=0.01)


@pytest.mark.parametrize("sigma", [0.3, 0.5, 0.9, 1.4])
def test_a_true_effect_is_found_as_often_as_predicted(sigma: float) -> None:
    """1 % at the number of pairs that is said to see it: 0.9 of the time, within 3 deviations."""
    pairs = pairs_needed(sigma, 1.0, 0.01)
    assert pairs is not None
    rng = np.random.default_rng(7)
    found = sum(p_value(rng.normal(math.log(1.01), sigma / 100, pairs)) <= 0.01 for _ in range(400))
    assert found >= 400 * (0.9 - 3 * math.sqrt(0.9 * 0.1 / 400))


def test_too_much_noise_has_no_answer() -> None:
    assert pairs_needed(5.0, 0.5, 0.01) is None
