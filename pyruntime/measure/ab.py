"""A against B: noise floor, interleaved pairs, gates, resources and the outcome."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pyruntime.errors import PyruntimeError
from pyruntime.measure import gates, verdict
from pyruntime.measure.arms import WorkerArm
from pyruntime.measure.builds import identical_code, never_launched, resources, same_attention
from pyruntime.measure.series import REGIMES, Clock, Pair, interleave

ROLE_ROUNDS = 5  # of timing each arm's launches in place

Open = Callable[[], WorkerArm]


@dataclass(frozen=True)
class Plan:
    """What is settled before anything is measured.

    Attributes:
        pairs: of each series. alpha: level of the test. bar: the gain asked for, in percent.
        regime: a key of `REGIMES`. seed: of the coin that orders each pair.
        tolerance: that logits may differ by; 0 for bit for bit. tokens: of the greedy gate.
    """

    pairs: int = 9
    alpha: float = 0.01
    bar: float = 1.5
    regime: str = "burst"
    seed: int = 0
    tolerance: float = 0.08
    tokens: int = 32


@dataclass
class Measured:
    """What was seen, and in `faults` what makes it worthless. `facts` and `roles` are of (A, B)."""

    noise: list[Pair] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    gates: list[gates.Gate] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    roles: list[dict[str, float] | None] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def measure(open_a: Open, open_b: Open, plan: Plan, clock: Clock) -> Measured:
    """Runs everything. A is loaded twice for the noise floor, so that its memory's place counts.

    Raises:
        PyruntimeError: an arm could not be loaded. What fails later is a fault.
    """
    seen = Measured()
    rng = random.Random(plan.seed)

    def series(a: WorkerArm, b: WorkerArm) -> list[Pair]:
        return interleave(a, b, pairs=plan.pairs, regime=REGIMES[plan.regime], rng=rng, clock=clock)

    a = open_a()
    try:
        again = open_a()
        try:
            seen.noise = series(a, again)
        except PyruntimeError as error:
            seen.faults.append(f"A failed: {error}")
        finally:
            again.close()
        b = open_b()
        try:
            seen.facts = [a.facts, b.facts]
            if not seen.faults:
                seen.gates = _gates(a, b, plan)
                seen.pairs = series(a, b)
                seen.roles = [arm.slices(ROLE_ROUNDS) for arm in (a, b)]
                seen.faults += never_launched("A", a) + never_launched("B", b)
        except PyruntimeError as error:
            seen.faults.append(f"a run failed: {error}")
        finally:
            b.close()
    finally:
        a.close()
    return seen


def judge(seen: Measured, plan: Plan, options: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A record (schema pyruntime.ab/1) without labels and surroundings.

    Args:
        options: of A and of B.
    """
    faults = [*seen.faults, *filter(None, [verdict.clock_fault(seen.pairs)])]
    if seen.facts:
        faults += same_attention(*seen.facts, *options)
    noise, found = None, None
    if seen.noise and seen.pairs:
        noise = verdict.times(seen.noise, plan.alpha)
        found = verdict.times(seen.pairs, plan.alpha)
        outcome = verdict.decide(noise, found, bar=plan.bar, gates=seen.gates, faults=faults)
    else:
        outcome = verdict.Verdict("no verdict", f"void: {'; '.join(faults)}", False)
    return {
        "plan": asdict(plan),
        "noise": {
            "times": noise.record() if noise else None,
            "pairs": [asdict(p) for p in seen.noise],
        },
        "times": found.record() if found else None,
        "pairs": [asdict(p) for p in seen.pairs],
        "roles_ms": dict(zip("ab", seen.roles, strict=False)),
        "gates": [g.record() for g in seen.gates],
        "identical_code": identical_code(*seen.facts),
        "resources": resources(*seen.facts),
        "faults": faults,
        "notes": [note for note in [verdict.clock_note(seen.pairs)] if note],
        "verdict": outcome.record(),
    }


def _gates(a: WorkerArm, b: WorkerArm, plan: Plan) -> list[gates.Gate]:
    tokens_a, gaps = a.greedy(plan.tokens)
    tokens_b, _ = b.greedy(plan.tokens)
    return [
        gates.parity(a.logits(), b.logits(), plan.tolerance),
        gates.greedy(tokens_a, tokens_b, gaps, plan.tolerance),
    ]
