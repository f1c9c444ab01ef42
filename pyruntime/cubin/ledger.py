"""The shared-memory ledger: what each plane of a block's dynamic shared memory costs."""

from __future__ import annotations

from dataclasses import dataclass

from pyruntime.cubin.spec import KernelSpec, Plane


@dataclass(frozen=True)
class Ledger:
    """Planes and the bytes that a launch asks for (`total`): the furthest end of any plane.

    A plane that reuses another's memory costs only what reaches further: max, not sum.
    """

    planes: tuple[Plane, ...]
    total: int

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of what no plane uses: alignment."""
        holes = []
        end = 0
        for start, size in sorted((p.offset, p.bytes) for p in self.planes):
            if start > end:
                holes.append((end, start - end))
            end = max(end, start + size)
        return (*holes, (end, self.total - end)) if self.total > end else tuple(holes)

    @property
    def reused(self) -> int:
        """Bytes that laying planes over one another saves."""
        return sum(p.bytes for p in self.planes) + sum(h[1] for h in self.holes) - self.total


def ledger_of(spec: KernelSpec) -> Ledger:
    """The ledger of a built kernel, from the contract that it carries."""
    return Ledger(spec.planes, spec.smem_bytes)
