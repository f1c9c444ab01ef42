"""Kernels as plain records: the fields of `inspect --json`, of gate rules and of diffs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pyruntime.cubin.containers import members
from pyruntime.cubin.facts import CubinFacts, KernelFacts, read_cubin
from pyruntime.cubin.installed import manifest, root
from pyruntime.cubin.limits import limits_of
from pyruntime.cubin.occupancy import Demand, occupancy
from pyruntime.cubin.sass import Instruction
from pyruntime.cubin.spec import KernelSpec
from pyruntime.cubin.structure import structure
from pyruntime.errors import CubinError


def read_all(paths: Iterable[Path]) -> tuple[list[CubinFacts], list[str]]:
    """The cubins in files and folders (none given: those installed), and why others were not read.

    Raises:
        CubinError: a path holds no device code at all, or is missing.
    """
    chosen = list(paths)
    if not chosen:
        manifest()
        chosen = [root()]
    cubins, unread = [], []
    for member in (m for path in chosen for m in members(path)):
        try:
            cubins.append(read_cubin(member.data(), member.label))
        except CubinError as error:
            unread.append(str(error))
    return cubins, unread


def kernels_of(cubins: Iterable[CubinFacts]) -> Iterator[tuple[CubinFacts, KernelFacts]]:
    """Every kernel with the cubin that holds it."""
    return ((cubin, kernel) for cubin in cubins for kernel in cubin.kernels)


def demand_of(
    kernel: KernelFacts, threads: int | None = None, dynamic: int | None = None
) -> Demand | None:
    """What a block of a kernel asks for; None while threads or dynamic shared memory are unknown.

    Args:
        threads, dynamic: what a launch will give, where the file does not fix it.
    """
    known = kernel.threads or threads
    bytes_asked = kernel.dynamic_shared if kernel.dynamic_shared is not None else dynamic
    if known is None or bytes_asked is None or kernel.static_shared is None:
        return None
    return Demand(known, kernel.registers, kernel.static_shared + bytes_asked, kernel.barriers)


def blocks_of(kernel: KernelFacts) -> int | None:
    """Blocks per SM on the kernel's own architecture; None while anything needed is unknown."""
    demand = demand_of(kernel)
    if demand is None or demand.registers is None:
        return None
    try:
        return occupancy(demand, limits_of(kernel.arch)).blocks
    except CubinError:  # an architecture that the table lacks
        return None


def cubin_record(cubin: CubinFacts) -> dict[str, Any]:
    """A cubin with its kernels as JSON values."""
    return {
        "label": cubin.label,
        "arch": cubin.arch,
        "abi": cubin.abi,
        "toolkit": cubin.toolkit,
        "tool": cubin.tool,
        "options": cubin.options,
        "global_bytes": cubin.global_bytes,
        "constant_bytes": cubin.constant_bytes,
        "remarks": list(cubin.remarks),
        "kernels": [kernel_record(kernel) for kernel in cubin.kernels],
    }


def kernel_record(kernel: KernelFacts) -> dict[str, Any]:
    """A kernel as JSON values. Sizes are bytes; None is "not known from the file"."""
    spills, spec = kernel.spills, kernel.spec
    return {
        "name": kernel.name,
        "arch": kernel.arch,
        "registers": kernel.registers,
        "static_shared": kernel.static_shared,
        "dynamic_shared": kernel.dynamic_shared,
        "stack": kernel.stack,
        "spill_stores": spills.stores if spills else None,
        "spill_loads": spills.loads if spills else None,
        "spill_bytes": spills.stores + spills.loads if spills else None,
        "spill_shared": spills.shared if spills else None,
        "barriers": kernel.barriers,
        "constant_bytes": kernel.constant_bytes,
        "param_bytes": kernel.param_bytes,
        "params": [
            {"ordinal": p.ordinal, "offset": p.offset, "size": p.size} for p in kernel.params
        ],
        "threads": kernel.threads,
        "max_threads": kernel.max_threads,
        "required_threads": list(kernel.required_threads) if kernel.required_threads else None,
        "min_blocks": spec.min_blocks if spec else None,
        "register_cap": kernel.register_cap,
        "cluster": list(kernel.cluster) if kernel.cluster else None,
        "calls": list(kernel.calls),
        "uses": list(kernel.uses),
        "blocks": blocks_of(kernel),
        "code_bytes": len(kernel.code),
        "code_sha256": kernel.code_sha256,
        "attributes": [{"name": a.name, "value": a.text} for a in kernel.attributes],
        "spec": _spec_record(spec) if spec else None,
    }


def code_record(instructions: Sequence[Instruction]) -> dict[str, Any]:
    """Figures of a kernel's machine code, see `structure.Structure`."""
    built = structure(instructions, None)
    return {"mma": built.mma, "slots_per_mma": built.slots_per_mma}


CODE_FIELDS = tuple(code_record(()))


def _spec_record(spec: KernelSpec) -> dict[str, Any]:
    return {
        "tile": spec.tile,
        "threads": spec.threads,
        "min_blocks": spec.min_blocks,
        "smem_bytes": spec.smem_bytes,
        "param_bytes": spec.param_bytes,
        "params": [{"name": p.name, "type": p.letter, "offset": p.offset} for p in spec.params],
        "planes": [
            {
                "name": p.name,
                "offset": p.offset,
                "bytes": p.bytes,
                "row_stride": p.row_stride,
                "element": p.element,
                "on": p.on,
            }
            for p in spec.planes
        ],
    }
