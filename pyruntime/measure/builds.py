"""What two arms run, compared: machine code, launches, resources; and whether it ran at all."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pyruntime.cubin.difference import FIELDS
from pyruntime.measure.arms import WorkerArm

Facts = dict[str, Any]  # of a `Worker`


def plan_of(facts: Facts) -> str | None:
    """sha256 over role, machine code and grid of every launch; None where a build cannot tell."""
    if facts["launches"] is None:
        return None
    code = {name: figures["code_sha256"] for name, figures in facts["kernels"].items()}
    plan = [(role, code[kernel], grid) for role, kernel, grid in facts["launches"]]
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()


def identical_code(a: Facts, b: Facts) -> bool | None:
    """Whether both launch the same machine code on the same grids; None if that is not known."""
    plans = plan_of(a), plan_of(b)
    return None if None in plans else plans[0] == plans[1]


def kernels_by_role(facts: Facts) -> dict[str, list[str]]:
    """The kernels that each role launches, in the order of their first launch."""
    found: dict[str, list[str]] = {}
    for role, kernel, _ in facts["launches"] or ():
        names = found.setdefault(role, [])
        if kernel not in names:
            names.append(kernel)
    return found


def resources(a: Facts, b: Facts) -> list[dict[str, Any]]:
    """Kernels that differ, role by role: `fields` holds (A's, B's) figure where they differ.

    Where a role launches several kernels, they are paired in order; a missing partner is None.
    """
    of_a, of_b = kernels_by_role(a), kernels_by_role(b)
    found = []
    for role in [*of_a, *(r for r in of_b if r not in of_a)]:
        names_a, names_b = of_a.get(role, []), of_b.get(role, [])
        for i in range(max(len(names_a), len(names_b))):
            name_a, name_b = (n[i] if i < len(n) else None for n in (names_a, names_b))
            x, y = a["kernels"].get(name_a, {}), b["kernels"].get(name_b, {})
            if x and y and x["code_sha256"] == y["code_sha256"]:
                continue
            both = [f for f in FIELDS if f in x and f in y]
            fields = {f: [x[f], y[f]] for f in both if x[f] != y[f]}
            found.append({"role": role, "a": name_a, "b": name_b, "fields": fields})
    return found


def same_attention(a: Facts, b: Facts, options_a: Facts, options_b: Facts) -> list[str]:
    """A fault if the arms ask for different attention and launch the same."""
    asked = options_a.get("attention"), options_b.get("attention")
    if asked[0] == asked[1] or a["launches"] is None or b["launches"] is None:
        return []
    ran = [kernels_by_role(facts).get("attention") for facts in (a, b)]
    if ran[0] != ran[1]:
        return []
    return [f"attention {asked[0] or 'auto'} and {asked[1] or 'auto'} both launched {ran[0]}"]


def never_launched(label: str, arm: WorkerArm) -> list[str]:
    """A fault for each kernel of the arm's plan whose launch counter is at zero."""
    counts = arm.launched()
    if counts is None or arm.facts["launches"] is None:
        return []
    names = {kernel for _, kernel, _ in arm.facts["launches"]}
    return [f"{label}: {name} was never launched" for name in sorted(names) if not counts.get(name)]
