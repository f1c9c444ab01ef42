"""An audit: three lines of evidence about a kernel, where they contradict, and what follows.

Structure is what the machine code is, resources are what a block takes of an SM, behaviour is what
was measured. What is not known stays unknown; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyruntime.cubin.behaviour import Behaviour
from pyruntime.cubin.contract import Breach, breaches
from pyruntime.cubin.facts import KernelFacts
from pyruntime.cubin.layouts import shapes, uses
from pyruntime.cubin.limits import Limits
from pyruntime.cubin.occupancy import Demand, Occupancy, occupancy
from pyruntime.cubin.sass import Instruction
from pyruntime.cubin.structure import Structure, structure
from pyruntime.cubin.verdict import Cost, Finding, Lever, Verdict, decide
from pyruntime.cubin.waiting import unwaited

_STARVED = 0.25  # of an SM's warps, in one block: too few to fill each other's waits
_ROLES = ("USETMAXREG", "SYNCS", "UTMALDG")  # what kernels with producer warps are told by
_SHORT = 0.5  # achieved of possible occupancy: blocks are missing or uneven
_ABOVE = 0.02  # by which achieved occupancy may exceed the possible


@dataclass(frozen=True)
class Audit:
    """All that is known of a kernel on one device.

    Attributes:
        structure: None if the code could not be disassembled; `no_structure` says why.
        occupancy: None while threads or dynamic shared memory are unknown.
        breaches: where the kernel is not what its contract says.
    """

    kernel: KernelFacts
    limits: Limits
    demand: Demand | None
    structure: Structure | None
    no_structure: str
    behaviour: Behaviour | None
    findings: tuple[Finding, ...]
    contradictions: tuple[str, ...]
    breaches: tuple[Breach, ...]
    cost: Cost
    verdict: Verdict

    @property
    def occupancy(self) -> Occupancy | None:
        """Blocks and warps on an SM."""
        return occupancy(self.demand, self.limits) if self.demand else None


def audit(
    kernel: KernelFacts,
    limits: Limits,
    *,
    demand: Demand | None,
    instructions: tuple[Instruction, ...] | None,
    no_structure: str = "",
    behaviour: Behaviour | None = None,
    share: float | None = None,
    gain: float | None = None,
    bar: float = 0.015,
) -> Audit:
    """Weighs the evidence.

    Args:
        limits: of the device that is meant.
        demand: what a block asks for, as far as it is known.
        instructions: None, with the reason in `no_structure`, if there are none.
        share, gain, bar: see `Cost`; without `gain` a record with times, work and peaks gives it.
    """
    built = structure(instructions, kernel.spec) if instructions is not None else None
    has = occupancy(demand, limits) if demand else None
    trusted = (
        behaviour if behaviour and behaviour.code_sha256 in (None, kernel.code_sha256) else None
    )
    findings = (
        *(built.findings if built else ()),
        *_resources(kernel, has, built),
        *(_behaviour(trusted) if trusted else ()),
    )
    contradictions = tuple(_contradictions(kernel, has, built, behaviour))
    gain_from = "given"
    if gain is None and trusted:
        gain, gain_from = trusted.headroom, "measured time over the floor"
    cost = Cost(share, gain, gain_from if gain else "", bar)
    lines = {"structure": built, "resources": has, "behaviour": trusted}
    unknown = [name for name, line in lines.items() if line is None]
    return Audit(
        kernel=kernel,
        limits=limits,
        demand=demand,
        structure=built,
        no_structure=no_structure,
        behaviour=behaviour,
        findings=findings,
        contradictions=contradictions,
        breaches=tuple(breaches(kernel)),
        cost=cost,
        verdict=decide(cost, findings, contradictions, unknown),
    )


def _resources(
    kernel: KernelFacts, has: Occupancy | None, built: Structure | None
) -> Iterable[Finding]:
    spills = kernel.spills
    if spills and (spills.stores or spills.loads):
        text = f"spills: {spills.stores:,} B stored, {spills.loads:,} B loaded"
        yield Finding("resources", text, Lever.SMALL)
    if has is not None:
        blocks = f"{has.blocks} block{'s' * (has.blocks != 1)}/SM"
        told = f"{blocks}, {has.warps} of {has.limits.warps} warps, bound by "
        told += " and ".join(has.binding)
        # A block whose warps have roles of their own fills its waits itself.
        roles = (
            built is not None
            and built.count("control")
            and any(i.name in _ROLES for i in built.instructions)
        )
        starved = has.blocks == 1 and has.fraction <= _STARVED and not roles
        yield Finding("resources", told, Lever.SMALL if starved else None)
    for plane, names in shapes(kernel.spec.planes if kernel.spec else ()).items():
        bad = [use for use in uses(plane) if use.served().wavefronts > use.served().ideal]
        if bad:
            listed = ", ".join(f"{use.text} {max(use.served().ways)}-way" for use in bad)
            text = f"rows of {plane.row_stride:,} B in {', '.join(names)} would conflict"
            yield Finding("resources", f"{text} at plain addresses: {listed}")


def _behaviour(record: Behaviour) -> Iterable[Finding]:
    headroom, counters = record.headroom, record.counters
    if headroom is not None:
        floors = ", ".join(f"{ms:.4g} ms by {what}" for what, ms in record.floors.items())
        yield Finding("behaviour", f"{headroom:.2f} times the floor ({floors})")
    if conflicts := counters.get("bank_conflicts"):
        yield Finding("behaviour", f"{conflicts:,.0f} wavefronts of bank conflicts", Lever.SMALL)
    if local := counters.get("local_bytes"):
        yield Finding("behaviour", f"{local:,.0f} B through local memory", Lever.SMALL)
    stalls = {n: v for n, v in counters.items() if n.startswith("stall_")}
    if stalls:
        worst = max(stalls, key=lambda name: stalls[name])
        text = f"most stalls: {worst.removeprefix('stall_')}, {stalls[worst]:.0%}"
        yield Finding("behaviour", text)


def _contradictions(
    kernel: KernelFacts, has: Occupancy | None, built: Structure | None, record: Behaviour | None
) -> Iterable[str]:
    spills = kernel.spills
    if built and spills and spills.stores + spills.loads and not built.count("local"):
        yield "the compiler notes spills, but no instruction accesses local memory"
    if built and kernel.spec and not kernel.spec.smem_bytes and not kernel.static_shared:
        used = built.count("shared") + built.count("ldmatrix")
        if used:
            yield f"no shared memory is asked for, but {used} instructions access it"
    if built and kernel.spec and kernel.spec.dependent and (early := unwaited(built.instructions)):
        where = ", ".join(f"{i.name} at {i.offset:#x}" for i in early)
        yield f"it may start before the kernel before has ended, but does not wait before {where}"
    if record is None:
        return
    if record.kernel != kernel.name:
        yield f"the record is of another kernel, {record.kernel}"
    if record.code_sha256 not in (None, kernel.code_sha256):
        yield "the record is of other machine code"
        return
    counters = record.counters
    achieved = counters.get("achieved_occupancy")
    if achieved is not None and has is not None:
        if achieved > has.fraction + _ABOVE:
            yield f"achieved occupancy {achieved:.0%} is above the possible {has.fraction:.0%}"
        elif achieved < has.fraction * _SHORT:
            yield (
                f"achieved occupancy {achieved:.0%} is far below the possible {has.fraction:.0%}: "
                "a short grid, uneven blocks, or a launch that asks for more than the kernel needs"
            )
    if built and counters.get("tensor_active") is not None:
        runs, has_tensor = counters["tensor_active"] > 0, built.count("tensor") > 0
        if runs != has_tensor:
            words = "work" if runs else "are idle", "has" if has_tensor else "has no"
            yield f"tensor cores {words[0]}, but the code {words[1]} instructions for them"
    if built and counters.get("local_bytes") and not built.count("local"):
        yield "local memory is used, but no instruction accesses it"
    if record.headroom is not None and record.headroom < 1:
        yield "faster than the floor: wrong work or peaks, or launches that failed"
