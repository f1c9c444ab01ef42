"""Runs of two arms in turn. The clock can be replaced: tests run hours of it in no time."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sample:
    """One prefill: milliseconds for its caller and on the GPU, SM clock in MHz before and after it.

    The clock before is the condition that the run met; the one after shows what the run's own power
    did to it. What an arm cannot tell is None.
    """

    wall: float
    gpu: float | None
    clock: float | None
    clock_after: float | None = None


class Arm(Protocol):
    """Something that can be timed."""

    def run(self) -> Sample: ...


class Clock(Protocol):
    """Seconds, and a way to let some pass."""

    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True)
class Regime:
    """Seconds of rest before each run, and of runs before the first that counts."""

    rest: float
    warm_up: float


# burst: clocks as high as for a single prompt. sustained: as the power limit holds them. After
# 0.03 s of rest an H200 that had worked for 0.08 s began at 1,680 to 1,830 MHz of its 1,980.
REGIMES = {"burst": Regime(rest=0.3, warm_up=1.0), "sustained": Regime(rest=0.0, warm_up=5.0)}


@dataclass(frozen=True)
class Pair:
    """A run of each arm, one right after the other."""

    a: Sample
    b: Sample
    b_first: bool


def interleave(
    a: Arm, b: Arm, *, pairs: int, regime: Regime, rng: random.Random, clock: Clock
) -> list[Pair]:
    """Warms both arms up, then runs `pairs` pairs, each in an order that a coin decides."""

    def rested(arm: Arm) -> Sample:
        clock.sleep(regime.rest)
        return arm.run()

    started = clock.now()
    while True:  # at least once each: the first run of an arm records its launches
        rested(a)
        rested(b)
        if clock.now() - started >= regime.warm_up:
            break
    taken = []
    for _ in range(pairs):
        b_first = rng.random() < 0.5
        first, second = (rested(arm) for arm in ((b, a) if b_first else (a, b)))
        taken.append(Pair(second, first, True) if b_first else Pair(first, second, False))
    return taken
