"""From measured pairs to an outcome, and the rule that decided it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pyruntime.measure.gates import Gate
from pyruntime.measure.paired import Comparison, compare, pairs_needed
from pyruntime.measure.series import Pair

Outcome = Literal["better", "worse", "equal", "no verdict"]

CLOCK_LIMIT = 2.0  # percent that the SM clocks of A and B may differ by
ALONE = 1.0  # percent; a smaller gain of the wall time needs the GPU time's support


@dataclass(frozen=True)
class Verdict:
    """The outcome for B, the rule that decided, and whether the bar was cleared."""

    outcome: Outcome
    rule: str
    clears_bar: bool

    def record(self) -> dict[str, Any]:
        """JSON values."""
        return dict(vars(self))


@dataclass(frozen=True)
class Times:
    """Both kinds of time of a series, compared; `gpu` is None where an arm cannot tell it."""

    wall: Comparison
    gpu: Comparison | None

    def record(self) -> dict[str, Any]:
        """JSON values."""
        return {"wall": self.wall.record(), "gpu": self.gpu.record() if self.gpu else None}


def times(pairs: Sequence[Pair], alpha: float) -> Times:
    """Compares a series. Raises ValueError as `compare` does."""
    wall = compare([p.a.wall for p in pairs], [p.b.wall for p in pairs], alpha=alpha)
    gpu_a = [p.a.gpu for p in pairs if p.a.gpu is not None]
    gpu_b = [p.b.gpu for p in pairs if p.b.gpu is not None]
    whole = len(gpu_a) == len(gpu_b) == len(pairs)
    return Times(wall, compare(gpu_a, gpu_b, alpha=alpha) if whole else None)


def clock_fault(pairs: Sequence[Pair]) -> str | None:
    """Says so if A and B began at different SM clocks: then they did not meet the same device."""
    found = _clocks([p.a.clock for p in pairs], [p.b.clock for p in pairs])
    return found and f"A began at {found}"


def clock_note(pairs: Sequence[Pair]) -> str | None:
    """Says so if A and B ended at different SM clocks: one draws more power than the other.

    That is an effect of the arm itself, paid in its time, so it voids nothing.
    """
    found = _clocks([p.a.clock_after for p in pairs], [p.b.clock_after for p in pairs])
    return found and f"A ended at {found}: the power limit acts on them differently"


def _clocks(a: Sequence[float | None], b: Sequence[float | None]) -> str | None:
    """How medians that are too far apart differ; None if they are close, or unknown."""
    known_a, known_b = ([x for x in clocks if x is not None] for clocks in (a, b))
    if not (known_a and known_b):
        return None
    median_a, median_b = statistics.median(known_a), statistics.median(known_b)
    apart = 100 * abs(median_a - median_b) / min(median_a, median_b)
    if apart <= CLOCK_LIMIT:
        return None
    return f"{median_a:.0f} MHz and B at {median_b:.0f}, {apart:.1f} % apart"


def decide(
    noise: Times, found: Times, *, bar: float, gates: Sequence[Gate], faults: Sequence[str]
) -> Verdict:
    """The outcome for B.

    Args:
        noise: A against itself.
        found: A against B.
        bar: the gain in percent that was asked for beforehand.
        faults: whatever makes the times worthless.
    """
    wall, gpu = found.wall, found.gpu
    void = [*faults, *(f"{g.name} gate: {g.text}" for g in gates if not g.passed)]
    if void:
        return Verdict("no verdict", f"void: {'; '.join(void)}", False)
    if noise.wall.significant:
        rule = f"A differs from itself by {noise.wall.gain:+.2f} % (p = {noise.wall.p:.2g})"
        return Verdict("no verdict", rule, False)
    if not wall.significant:
        return _unproven(wall, bar)
    sign = 1 if wall.gain > 0 else -1
    supported = gpu is not None and gpu.significant and gpu.gain * sign > 0
    if gpu is not None and gpu.significant and gpu.gain * sign < 0:
        rule = f"wall time says {wall.gain:+.2f} %, GPU time {gpu.gain:+.2f} %"
        return Verdict("no verdict", rule, False)
    if abs(wall.gain) < ALONE and not supported:
        rule = f"{wall.gain:+.2f} % of wall time alone: below {ALONE:g} % GPU time must agree"
        return Verdict("no verdict", rule, False)
    rule = f"p = {wall.p:.2g} <= {wall.alpha:g} in the sign-flip test of {wall.pairs} pairs"
    if wall.separated:
        rule += ", and the ranges do not overlap"
    return Verdict("better" if sign > 0 else "worse", rule, wall.gain >= bar)


def _unproven(wall: Comparison, bar: float) -> Verdict:
    within = f"p = {wall.p:.2g} > {wall.alpha:g}"
    if -bar < wall.low and wall.high < bar:
        rule = f"{within}, and every gain in {wall.low:+.2f} … {wall.high:+.2f} % is within the bar"
        return Verdict("equal", rule, False)
    needed = pairs_needed(wall.sigma, bar, wall.alpha) if bar > 0 else None
    more = (
        f"{needed} pairs would see the bar"
        if needed
        else "no number of pairs here would see the bar"
    )
    return Verdict(
        "no verdict", f"{within}, but {wall.low:+.2f} … {wall.high:+.2f} % is open; {more}", False
    )
