"""A/B on a fake clock: trials of nothing, of a true effect, of drift; and what voids a result."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pyruntime.measure import gates, verdict
from pyruntime.measure.paired import pairs_needed
from pyruntime.measure.series import REGIMES, Pair, Regime, Sample, interleave
from pyruntime.measure.verdict import Verdict, clock_fault, clock_note, decide, times

TRIALS, ALPHA = 200, 0.01
REGIME = Regime(rest=0.03, warm_up=1.0)


class FakeClock:
    """Time passes only in `sleep` and in runs."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.seconds += seconds


class FakeArm:
    """A prefill of 70 ms, `gain` percent faster, in noise, on a GPU that slows down by `drift`."""

    def __init__(
        self, clock: FakeClock, rng: np.random.Generator, *, gain: float, sigma: float, drift: float
    ) -> None:
        self.clock, self.rng = clock, rng
        self.base = 70.0 / (1 + gain / 100)
        self.sigma, self.drift = sigma / 100 / math.sqrt(2), drift / 100
        self.runs = 0

    def run(self) -> Sample:
        self.runs += 1
        slow = 1 + self.drift * self.clock.seconds
        gpu = self.base * slow * math.exp(self.rng.normal(0, self.sigma))
        self.clock.seconds += gpu / 1e3
        return Sample(wall=gpu + 0.3, gpu=gpu, clock=1980 / slow)


def trial(
    seed: int, *, gain: float, sigma: float, pairs: int = 9, drift: float = 0.0, bar: float = 1.5
) -> Verdict:
    clock, noise = FakeClock(), np.random.default_rng(seed)
    coin = random.Random(seed)

    def series(gain_b: float) -> list[Pair]:
        a, b = (FakeArm(clock, noise, gain=g, sigma=sigma, drift=drift) for g in (0.0, gain_b))
        return interleave(a, b, pairs=pairs, regime=REGIME, rng=coin, clock=clock)

    floor, found = (times(series(g), ALPHA) for g in (0.0, gain))
    return decide(floor, found, bar=bar, gates=[], faults=[])


def outcomes(**options: float) -> dict[str, int]:
    seen = [trial(seed, **options).outcome for seed in range(TRIALS)]  # type: ignore[arg-type]
    return {outcome: seen.count(outcome) for outcome in seen}


@pytest.mark.parametrize("sigma", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_nothing_is_called_nothing(sigma: float, drift: float) -> None:
    """`drift`: 1 % slower per second, so 4 % over a trial."""
    seen = outcomes(gain=0.0, sigma=sigma, drift=drift)
    assert seen.get("equal", 0) + seen.get("no verdict", 0) >= 192


def test_before_and_after_would_have_been_fooled() -> None:
    """The same drift, A's runs first and B's after: almost always "worse"."""
    worse = 0
    for seed in range(TRIALS):
        clock, noise = FakeClock(), np.random.default_rng(seed)
        arm = FakeArm(clock, noise, gain=0.0, sigma=0.3, drift=1.0)
        first, second = ([arm.run() for _ in range(9)] for _ in range(2))
        pairs = [Pair(a, b, False) for a, b in zip(first, second, strict=True)]
        found = times(pairs, ALPHA).wall
        worse += found.significant and found.gain < 0
    assert worse > 0.9 * TRIALS


@pytest.mark.parametrize("drift", [0.0, 0.5])
@pytest.mark.parametrize(("gain", "outcome"), [(1.0, "better"), (-1.0, "worse")])
def test_one_percent_is_found_at_the_predicted_number(
    drift: float, gain: float, outcome: str
) -> None:
    sigma = 0.8
    pairs = pairs_needed(sigma, 1.0, ALPHA)
    assert pairs is not None
    seen = outcomes(gain=gain, sigma=sigma, pairs=pairs, drift=drift)
    # 0.9 of the trials are to find it, and 0.01 fail on their noise floor: minus 3 deviations.
    assert seen[outcome] >= 165
    assert not seen.get("worse" if outcome == "better" else "better")


def test_a_quiet_clock_calls_equal_equal() -> None:
    assert outcomes(gain=0.0, sigma=0.2)["equal"] >= 190


def sample(wall: float, gpu: float | None = None, clock: float | None = 1900.0) -> Sample:
    return Sample(wall, gpu, clock)


def pairs_of(a: Callable[[int], Sample], b: Callable[[int], Sample]) -> list[Pair]:
    return [Pair(a(i), b(i), i % 2 == 0) for i in range(9)]


def jitter(i: int) -> float:
    return 1 + 0.001 * ((i * 7) % 5 - 2)


STILL = pairs_of(lambda i: sample(70 * jitter(i), 69.0), lambda i: sample(70 * jitter(8 - i), 69.0))
FASTER = pairs_of(
    lambda i: sample(70 * jitter(i), 69 * jitter(i)),
    lambda i: sample(66 * jitter(i), 65 * jitter(i)),
)


def judged(pairs: list[Pair], *faults: str, checked: tuple[gates.Gate, ...] = ()) -> Verdict:
    return decide(times(STILL, 0.01), times(pairs, 0.01), bar=1.5, gates=checked, faults=faults)


def test_the_rule_is_told() -> None:
    found = judged(FASTER)
    assert found.outcome == "better" and found.clears_bar
    assert "p = 0.0039 <= 0.01" in found.rule and "do not overlap" in found.rule


def test_a_fault_voids_the_fastest_result() -> None:
    found = judged(FASTER, "the GPU slowed down for heat")
    assert found.outcome == "no verdict" and found.rule.startswith("void: the GPU slowed down")
    assert not found.clears_bar


def test_a_failed_gate_voids() -> None:
    nan = gates.parity(np.array([1.0, np.nan], "f4"), np.array([1.0, 2.0], "f4"), 0.08)
    assert not nan.passed
    assert "NaN" in judged(FASTER, checked=(nan,)).rule


def test_clocks_apart_are_a_fault() -> None:
    slow = [replace(p, b=replace(p.b, clock=1850.0)) for p in FASTER]
    assert clock_fault(FASTER) is None
    assert clock_fault(slow) == "A began at 1900 MHz and B at 1850, 2.7 % apart"
    hot = [
        replace(p, a=replace(p.a, clock_after=1660.0), b=replace(p.b, clock_after=1500.0))
        for p in FASTER
    ]
    assert clock_fault(hot) is None
    assert clock_note(hot) == (
        "A ended at 1660 MHz and B at 1500, 10.7 % apart: the power limit acts on them differently"
    )
    assert clock_note(FASTER) is None
    assert clock_fault([replace(p, a=replace(p.a, clock=None)) for p in slow]) is None


def test_an_unsteady_floor_decides_nothing() -> None:
    found = decide(times(FASTER, 0.01), times(FASTER, 0.01), bar=1.5, gates=[], faults=[])
    assert found.outcome == "no verdict" and "A differs from itself by +6.06" in found.rule


def test_little_wall_time_needs_gpu_time() -> None:
    little = pairs_of(lambda i: sample(70 * jitter(i)), lambda i: sample(69.6 * jitter(i)))
    assert judged(little).outcome == "no verdict"
    borne_out = [replace(p, a=replace(p.a, gpu=69.0), b=replace(p.b, gpu=68.6)) for p in little]
    assert judged(borne_out).outcome == "better" and not judged(borne_out).clears_bar
    against = [replace(p, b=replace(p.b, gpu=70.0)) for p in borne_out]
    assert "GPU time -1.4" in judged(against).rule


def test_what_is_open_names_the_pairs_that_would_do() -> None:
    noisy = pairs_of(lambda i: sample(70 * jitter(3 * i) ** 9), lambda i: sample(70 * jitter(i)))
    found = judged(noisy)
    assert found.outcome == "no verdict" and "pairs would see the bar" in found.rule


def test_order_and_rest() -> None:
    clock, noise = FakeClock(), np.random.default_rng(0)
    a, b = (FakeArm(clock, noise, gain=0.0, sigma=0.1, drift=0.0) for _ in range(2))
    pairs = interleave(a, b, pairs=40, regime=REGIME, rng=random.Random(1), clock=clock)
    assert 10 < sum(p.b_first for p in pairs) < 30
    assert a.runs == b.runs and a.runs > 40
    assert set(clock.slept) == {REGIME.rest} and len(clock.slept) == 2 * a.runs
    warm_ups = (a.runs - 40) * 2
    assert warm_ups * 0.1 >= REGIME.warm_up  # a run and its rest take 0.1 s
    assert REGIMES["sustained"].rest == 0 < REGIMES["burst"].rest


@pytest.mark.parametrize(
    ("b", "passed", "step"),
    [([1, 2, 3], True, None), ([1, 9, 9], False, 1), ([1, 2, 9], True, 2), ([1, 2], False, 2)],
)
def test_greedy_may_part_at_a_tie_only(b: list[int], passed: bool, step: int | None) -> None:
    gaps = [1.0, 0.9, 0.1] if len(b) == 3 else [1.0, 1.0, 1.0]
    found = gates.greedy([1, 2, 3], b, gaps, 0.08)
    assert (found.passed, found.figures["step"]) == (passed, step)


def test_parity_has_a_tolerance() -> None:
    a = np.linspace(-1, 1, 9).astype("f4")
    assert gates.parity(a, a, 0.0).figures["bitwise"]
    assert gates.parity(a, a + np.float32(0.05), 0.08).passed
    assert not gates.parity(a, a + np.float32(0.05), 0.0).passed
    assert gates.parity(a, a, 0.0).figures["kl"] == pytest.approx(0)
    assert not gates.parity(a, a[:5], 1.0).passed
    assert verdict.CLOCK_LIMIT == 2.0
