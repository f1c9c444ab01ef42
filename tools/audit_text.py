"""An audit as text for a terminal, and as JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pyruntime.cubin.audit import Audit
from pyruntime.cubin.behaviour import COUNTERS, is_fraction
from pyruntime.cubin.ledger import ledger_of

from . import devices
from .ledger import PLANES, ledger_record, plane_rows, total_line
from .tables import table

STAGES = ("stage", "unit", "main loop", "whole", "most often")


def text(found: Audit) -> str:
    """The page for a terminal."""
    return "\n".join(_lines(found))


def _lines(found: Audit) -> Iterator[str]:
    kernel = found.kernel
    yield f"{kernel.name} ({kernel.arch}) on {found.limits.device} ({found.limits.products})"
    yield f"verdict: {found.verdict.word}: {found.verdict.rule}"
    yield f"\ncontract: {contract(found)}"
    yield from (f"  FAIL {breach}" for breach in found.breaches)
    yield f"\nstructure: {structure(found)}"
    if found.structure:
        yield table(STAGES, stage_rows(found))
    yield from _seen(found, "structure")
    yield "\nresources:"
    if kernel.spec and kernel.spec.planes:
        ledger = ledger_of(kernel.spec)
        yield table(PLANES, plane_rows(ledger))
        yield f"  {total_line(ledger, kernel.static_shared)}"
    if found.demand:
        yield table(devices.HEADERS, [devices.row(found.demand, found.limits)])
    else:
        yield "  blocks per SM unknown: give --threads and --dynamic"
    yield from _seen(found, "resources")
    yield f"\nbehaviour: {behaviour(found)}"
    yield from (f"  {name}: {value}" for name, value in counters(found))
    yield from _seen(found, "behaviour")
    yield f"\ncontradictions: {len(found.contradictions) or 'none'}"
    yield from (f"  ! {told}" for told in found.contradictions)
    yield f"\ncost: {cost(found)}"


def _seen(found: Audit, line: str) -> Iterator[str]:
    for finding in found.findings:
        if finding.line == line:
            yield f"  - {finding.text}" + (f"  [{finding.lever.value}]" if finding.lever else "")


def contract(found: Audit) -> str:
    """Whether the kernel is what its contract says, in words."""
    spec = found.kernel.spec
    if spec is None:
        return "none inside (not a kernel of this package)"
    if found.breaches:
        return f"broken in {len(found.breaches)} points"
    return (
        f"kept: {spec.threads} threads, {spec.param_bytes} B of parameters, no stack, no static "
        f"shared memory, registers for {spec.min_blocks} blocks/SM or more"
    )


def structure(found: Audit) -> str:
    """What the code was read from, in words."""
    built = found.structure
    if built is None:
        return f"unknown: {found.no_structure}"
    main = built.main
    loop = (
        f"main loop {main.name} at {main.header:#x}, {len(main.body)} instructions"
        if main
        else "no main loop"
    )
    loops = f"{len(built.loops)} loop{'s' * (len(built.loops) != 1)}"
    return f"{len(built.instructions):,} instructions, {loops}; {loop}"


def stage_rows(found: Audit) -> list[tuple[object, ...]]:
    """Table rows under `STAGES`."""
    stages = found.structure.stages if found.structure else ()
    return [(s.name, s.unit, s.inside, s.whole, s.most) for s in stages]


def behaviour(found: Audit) -> str:
    """What was measured, in words."""
    seen = found.behaviour
    if seen is None:
        return "unknown (--record)"
    told = f"{seen.device}, {seen.source}"
    if seen.median is None:
        return told
    low, high, count = min(seen.milliseconds), max(seen.milliseconds), len(seen.milliseconds)
    return f"{told}: median {seen.median:.4g} ms of {count} ({low:.4g} to {high:.4g})"


def counters(found: Audit) -> Iterable[tuple[str, str]]:
    """Counters by name and what is known about them, and their values."""
    for name, value in (found.behaviour.counters if found.behaviour else {}).items():
        known = f" ({COUNTERS[name]})" if name in COUNTERS else ""
        yield f"{name}{known}", f"{value:.1%}" if is_fraction(name) else f"{value:,.6g}"


def cost(found: Audit) -> str:
    """What is at stake, in words."""
    at = found.cost
    share = "unknown (--share)" if at.share is None else f"{at.share:.1%}"
    gain = "unknown (--gain)" if at.gain is None else f"{at.gain:.2f}x ({at.gain_from})"
    value = "unknown" if at.value is None else f"{at.value:.2%} of the whole"
    return f"share {share}, possible gain {gain}: worth {value}; the bar is {at.bar:.1%}"


def record(found: Audit) -> dict[str, Any]:
    """The audit as JSON values; None is "not known"."""
    kernel, built, seen = found.kernel, found.structure, found.behaviour
    return {
        "kernel": kernel.name,
        "arch": kernel.arch,
        "device": found.limits.device,
        "code_sha256": kernel.code_sha256,
        "verdict": vars(found.verdict),
        "contract": {
            "present": kernel.spec is not None,
            "breaches": [vars(breach) for breach in found.breaches],
        },
        "structure": built
        and {
            "instructions": len(built.instructions),
            "main_loop": built.main and {"name": built.main.name, "header": built.main.header},
            "stages": [vars(stage) for stage in built.stages],
        },
        "structure_unknown": found.no_structure or None,
        "ledger": ledger_record(ledger_of(kernel.spec)) if kernel.spec else None,
        "resources": devices.record(found.demand, found.limits) if found.demand else None,
        "behaviour": seen and {**vars(seen), "median": seen.median, "floors": seen.floors},
        "findings": [
            {"line": f.line, "text": f.text, "lever": f.lever and f.lever.value}
            for f in found.findings
        ],
        "contradictions": list(found.contradictions),
        "cost": {**vars(found.cost), "value": found.cost.value},
    }
