"""The account of a wall: time by role against work by role, and whether it adds up."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyruntime.measure.graph import GEMMS, ROLES, Work
from pyruntime.measure.inplace import InPlace
from pyruntime.measure.roofline import Roofline

ENFORCED_FROM = 2048  # tokens; in shorter prefills the events weigh too much
LIMIT = 0.02  # of GPU-busy, or of the wall: what may stay unexplained


@dataclass(frozen=True)
class Call:
    """One prefill as its caller sees it, in milliseconds.

    `before` and `after`: host time before the first enqueue and after the end of the wait; `gpu`:
    between events around the pass.
    """

    wall: float
    before: float
    gpu: float
    after: float


def account(
    launches: Sequence[tuple[str, str]],
    milliseconds: Sequence[float],
    expected: Mapping[str, Work],
    roofline: Roofline,
) -> list[dict[str, Any]]:
    """One entry per role, in order of computation.

    Args:
        launches: role and kernel of each. milliseconds: of each.
        expected: what each role has to do.
    """
    total = sum(milliseconds)
    seen = Counter(role for role, _ in launches)
    order = [r for r in ROLES if r in seen or r in expected]
    slices = []
    for role in [*order, *sorted(seen.keys() - set(order))]:
        ms = sum(t for (r, _), t in zip(launches, milliseconds, strict=True) if r == role)
        work = expected.get(role, Work(0, 0, 0))
        bound = roofline.milliseconds(work)
        slices.append(
            {
                "role": role,
                "ms": ms,
                "share": ms / total,
                "launches": seen[role],
                "launches_expected": work.launches,
                "flop": work.flop,
                "bytes": work.bytes,
                "us_per_gmac": 2e12 * ms / work.flop if role in GEMMS and work.flop else None,
                "tflop_per_s": work.flop / ms / 1e9 if ms else None,
                "tb_per_s": work.bytes / ms / 1e9 if ms else None,
                "bound_ms": bound,
                "of_roofline": bound / ms if ms else None,
                "kernels": sorted({kernel for r, kernel in launches if r == role}),
            }
        )
    return slices


def explain(
    calls: Sequence[Call], busy: float, overlapped: float, copies: float
) -> list[dict[str, Any]]:
    """Where the wall time beyond GPU-busy goes, in medians; the parts add up to the gap.

    Args:
        overlapped: what `busy` comes to where launches overlap.
    """

    def part(name: str, values: list[float]) -> dict[str, Any]:
        return {"name": name, "ms": statistics.median(values)}

    return [
        part("host, before the first launch", [c.before for c in calls]),
        part("copies of ids and flags", [copies]),
        part("GPU waiting for launches", [c.gpu - copies - overlapped for c in calls]),
        part("host, after the wait", [c.after for c in calls]),
        part("driver", [c.wall - c.before - c.gpu - c.after for c in calls]),
        part("launches that overlap", [overlapped - busy]),
    ]


def checks(
    nt: int,
    slices: Sequence[Mapping[str, Any]],
    timed: InPlace,
    gap: Sequence[Mapping[str, Any]],
    finite: bool,
) -> list[dict[str, Any]]:
    """Every check with its result; those that only long prefills must pass say so."""
    enforced = nt >= ENFORCED_FROM
    note = "" if enforced else f" (enforced from {ENFORCED_FROM} tokens on)"
    wrong = [
        f"{s['role']} {s['launches']}, not {s['launches_expected']}"
        for s in slices
        if s["launches"] != s["launches_expected"]
    ]
    busy, total = statistics.median(timed.busy), sum(s["ms"] for s in slices)
    off = total / busy - 1
    waiting, driver = gap[2]["ms"] / busy, gap[4]["ms"] / (busy + sum(p["ms"] for p in gap))
    return [
        _check(
            "launches",
            not wrong,
            f"{sum(s['launches'] for s in slices)} launches, as the model's graph has"
            if not wrong
            else f"other launches than the model's graph has: {'; '.join(wrong)}",
        ),
        _check(
            "sum",
            abs(off) <= LIMIT or not enforced,
            f"slices add up to {total:.3f} ms, GPU-busy is {busy:.3f}: {100 * off:+.2f} %{note}",
        ),
        _check(
            "gap",
            (abs(waiting) <= LIMIT and -LIMIT / 10 <= driver <= LIMIT) or not enforced,
            f"GPU waiting for launches {100 * waiting:+.2f} % of GPU-busy, "
            f"driver {100 * driver:+.2f} % of the wall{note}",
        ),
        _check("finite", finite, "logits are finite" if finite else "a logit is NaN or infinite"),
    ]


def _check(name: str, passed: bool, text: str) -> dict[str, Any]:
    return {"name": name, "passed": passed, "text": text}
