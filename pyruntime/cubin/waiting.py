"""Whether a kernel waits for the one before it on every path, as cuda/core/spec.cuh demands.

griddepcontrol.wait is ACQBULK in machine code, griddepcontrol.launch_dependents PREEXIT (nvdisasm
of CUDA 13, sm_90a to sm_120).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyruntime.cubin.loops import INDIRECT, blocks
from pyruntime.cubin.sass import Instruction

WAIT = "ACQBULK"
# What may not come before the wait: the end, and what other kernels see.
_STORES = """STG ST ATOM ATOMG RED REDG UREDGR USTGR SUST SUATOM SURED UTMASTG UTMAREDG UBLKRED
    UBLKCP"""
_AFTER = INDIRECT | {"EXIT", *_STORES.split()}


def unwaited(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Ends of a kernel, and stores to global memory, that some path reaches without a wait."""
    starts, successors = blocks(instructions)
    ends = [*starts[1:], len(instructions)]
    found: list[Instruction] = []
    seen, left = {0}, [0]
    while left:
        block = left.pop()
        for instruction in instructions[starts[block] : ends[block]]:
            if instruction.name == WAIT and not instruction.conditional:
                break
            if instruction.name in _AFTER and instruction.predicate != "@!PT":
                found.append(instruction)
        else:
            new = [b for b in successors[block] if b not in seen]
            seen.update(new)
            left += new
    return sorted(found, key=lambda instruction: instruction.offset)
