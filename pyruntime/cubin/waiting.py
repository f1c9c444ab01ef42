"""Whether a kernel waits for the one before and holds the next back, as cuda/core/spec.cuh demands.

griddepcontrol.wait is ACQBULK in machine code, griddepcontrol.launch_dependents PREEXIT (nvdisasm
of CUDA 13, sm_90a to sm_120).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

from pyruntime.cubin.loops import INDIRECT, blocks
from pyruntime.cubin.sass import Instruction

WAIT, RELEASE = "ACQBULK", "PREEXIT"
# What other kernels see: it may not come before the wait, and neither may the end.
_STORES = """STG ST ATOM ATOMG RED REDG UREDGR USTGR SUST SUATOM SURED UTMASTG UTMAREDG UBLKRED
    UBLKCP"""
_SEEN = INDIRECT.union(_STORES.split())  # stores, and jumps to where there may be some
_AFTER = _SEEN | {"EXIT"}


def unwaited(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Ends of a kernel, and stores to global memory, that some path reaches without a wait."""
    return _reached(instructions, [0], _AFTER, until=WAIT)


def late_stores(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Stores to global memory that some path reaches after it has let the next kernel start.

    There are none in a kernel whose results are read before a wait (`kHoldsNext`).
    """
    releases = [i + 1 for i, instruction in enumerate(instructions) if instruction.name == RELEASE]
    return _reached(instructions, releases, _SEEN)


def _reached(
    instructions: Sequence[Instruction],
    first: Sequence[int],
    names: frozenset[str],
    until: str = "",
) -> list[Instruction]:
    """Those of these names that some path from the `first` indices reaches before an `until`."""
    starts, successors = blocks(instructions)
    ends = [*starts[1:], len(instructions)]
    found: set[Instruction] = set()
    seen: set[int] = set()
    left = [(bisect(starts, i) - 1, i) for i in first if i < len(instructions)]
    while left:
        block, begin = left.pop()
        for instruction in instructions[begin : ends[block]]:
            if instruction.name == until and not instruction.conditional:
                break
            if instruction.name in names and instruction.predicate != "@!PT":
                found.add(instruction)
        else:
            new = [b for b in successors[block] if b not in seen]
            seen.update(new)
            left += [(b, starts[b]) for b in new]
    return sorted(found, key=lambda instruction: instruction.offset)
