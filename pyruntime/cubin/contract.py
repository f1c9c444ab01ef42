"""Whether a kernel is what its contract promises, by what the compiler wrote about it."""

from __future__ import annotations

from dataclasses import dataclass

from pyruntime.cubin.facts import KernelFacts
from pyruntime.cubin.limits import limits_of
from pyruntime.cubin.occupancy import occupancy
from pyruntime.cubin.records import demand_of


@dataclass(frozen=True)
class Breach:
    """A promise that is not kept: `fact` by name, promised and found (None: not known)."""

    fact: str
    promised: int
    found: int | None

    def __str__(self) -> str:
        found = "unknown" if self.found is None else f"{self.found:,}"
        return f"{self.fact}: the contract says {self.promised:,}, the compiler {found}"


def breaches(kernel: KernelFacts) -> list[Breach]:
    """Where contract and compiler differ; empty if nowhere, or if the kernel has no contract.

    Besides what a contract states, no kernel of this package has a stack or static shared memory,
    and its parameters are one struct.
    """
    spec = kernel.spec
    if spec is None:
        return []
    end = max((plane.offset + plane.bytes for plane in spec.planes), default=0)
    pairs = [
        Breach("threads per block", spec.threads, kernel.max_threads),
        # Not the compiler's total, which counts what aligns a tensor map to 64 bytes.
        Breach("parameter bytes", spec.param_bytes, sum(p.size for p in kernel.params)),
        Breach("parameters (one struct)", 1, len(kernel.params)),
        Breach("stack bytes", 0, kernel.stack),
        Breach("static shared bytes", 0, kernel.static_shared),
        Breach("end of the last plane", spec.smem_bytes, end),
        Breach("waits for the kernel before", int(spec.dependent), int(kernel.waits)),
    ]
    broken = [pair for pair in pairs if pair.promised != pair.found]
    blocks = _blocks_by_registers(kernel)
    if blocks is None or blocks < spec.min_blocks:
        broken.append(Breach("blocks/SM that the registers allow", spec.min_blocks, blocks))
    return broken


def _blocks_by_registers(kernel: KernelFacts) -> int | None:
    demand = demand_of(kernel)
    if demand is None or demand.registers is None:
        return None
    return occupancy(demand, limits_of(kernel.arch)).allowed["registers"]
