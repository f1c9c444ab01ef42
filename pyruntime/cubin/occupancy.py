"""How many blocks of a kernel fit on one SM, which resource binds, and what one more would take.

The rules are those of `cuda_occupancy.h` (CUDA 13.0) and were compared with it on random points:
registers go to warps in units and warps to the four partitions of an SM; a block's shared memory is
static + dynamic + the driver's reserve, rounded up to a unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyruntime.cubin.limits import (
    PARTITIONS,
    REGISTER_UNIT,
    REGISTERS_PER_THREAD,
    SHARED_UNIT,
    THREADS_PER_BLOCK,
    WARP,
    Limits,
)


@dataclass(frozen=True)
class Demand:
    """What one block asks for.

    Attributes:
        threads: per block.
        registers: per thread; None if not known yet, which leaves them out.
        shared: static and dynamic bytes, without the driver's reserve.
        barriers: named barriers.
    """

    threads: int
    registers: int | None
    shared: int
    barriers: int = 0


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps on one SM. `allowed`: the blocks that each resource alone would allow."""

    limits: Limits
    warps_per_block: int
    allowed: dict[str, int]

    @property
    def blocks(self) -> int:
        """Blocks per SM."""
        return min(self.allowed.values())

    @property
    def binding(self) -> tuple[str, ...]:
        """The resources that allow no more blocks; keys of `allowed`."""
        return tuple(name for name, count in self.allowed.items() if count == self.blocks)

    @property
    def warps(self) -> int:
        """Warps per SM."""
        return self.blocks * self.warps_per_block

    @property
    def fraction(self) -> float:
        """Warps per SM of the most that the SM can hold."""
        return self.warps / self.limits.warps

    def clusters_at_most(self, size: int) -> int | None:
        """Clusters of `size` blocks on the whole GPU, at most; None if its SMs are not counted.

        A cluster must fit into one group of SMs, and only the driver knows those groups
        (cuOccupancyMaxActiveClusters): fewer may fit.
        """
        sms = self.limits.sms
        return None if sms is None else self.blocks * sms // size


def occupancy(demand: Demand, limits: Limits) -> Occupancy:
    """Blocks of `demand` that one SM holds at once; 0 if not even one fits."""
    warps = -(-demand.threads // WARP)
    allowed = {}
    if demand.registers:
        allowed["registers"] = _by_registers(demand.registers, warps, limits)
    used = _round_up(demand.shared + limits.reserve, SHARED_UNIT)
    fits = used <= limits.shared_per_block + limits.reserve
    allowed["shared"] = limits.shared // used if fits else 0
    allowed["warps"] = limits.warps // warps if demand.threads <= THREADS_PER_BLOCK else 0
    if demand.barriers and limits.barriers:
        allowed["barriers"] = limits.barriers // demand.barriers
    allowed["blocks"] = limits.blocks
    return Occupancy(limits, warps, allowed)


@dataclass(frozen=True)
class Step:
    """What must go for `blocks` blocks per SM: all amounts of `less` together, or nothing can.

    Attributes:
        less: bytes of "shared", "registers" per thread, "threads" or "barriers" to give up.
        never: the hardware holds no more blocks, however small.
    """

    blocks: int
    less: dict[str, int]
    never: bool = False


def next_step(demand: Demand, limits: Limits) -> Step:
    """What must go from `demand` for one block more per SM."""
    target = occupancy(demand, limits).blocks + 1
    if target > limits.blocks:
        return Step(target, {}, never=True)
    less = {}
    # Threads first: fewer warps also ease the registers.
    for field, resource in (
        ("threads", "warps"),
        ("registers", "registers"),
        ("shared", "shared"),
        ("barriers", "barriers"),
    ):
        value = getattr(demand, field) or 0
        kept = _most(demand, field, value, resource, target, limits)
        demand = replace(demand, **{field: kept})
        if kept < value:
            less[field] = value - kept
    return Step(target, less)


def _most(
    demand: Demand, field: str, value: int, resource: str, target: int, limits: Limits
) -> int:
    """The largest amount up to `value` with which `resource` allows `target` blocks."""
    low, high = min(1, value), value
    while low < high:
        middle = (low + high + 1) // 2
        allowed = occupancy(replace(demand, **{field: middle}), limits).allowed
        low, high = (middle, high) if allowed.get(resource, target) >= target else (low, middle - 1)
    return low


def _by_registers(registers: int, warps: int, limits: Limits) -> int:
    if registers > REGISTERS_PER_THREAD:
        return 0
    per_warp = _round_up(registers * WARP, REGISTER_UNIT)
    return limits.registers // PARTITIONS // per_warp * PARTITIONS // warps


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
