"""The standard ways in which kernels access a plane of rows in shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pyruntime.cubin.banks import (
    ACCESSES,
    SWIZZLES,
    WARP,
    WORD,
    Access,
    Served,
    in_rows,
    smallest_pad,
)
from pyruntime.cubin.spec import Plane


@dataclass(frozen=True)
class Use:
    """One access pattern of a plane: `lanes_per_row` lanes side by side in rows of `stride` B."""

    text: str
    access: Access
    stride: int
    lanes_per_row: int = 1

    def served(self, swizzle: int = 0) -> Served:
        """The access as it is served, at plain addresses or under a TMA swizzle."""
        return in_rows(self.access, self.stride, lanes_per_row=self.lanes_per_row, swizzle=swizzle)

    @property
    def swizzle(self) -> int | None:
        """The narrowest TMA swizzle with which no lane waits; None if there is none.

        Rows must be a power of two: padded ones are no boxes of a tensor map.
        """
        if self.stride & (self.stride - 1):
            return None
        frees = (w for w in SWIZZLES if self.served(w).wavefronts == self.served(w).ideal)
        return next(frees, None)

    @property
    def pad(self) -> int | None:
        """The fewest bytes more per row with which no lane waits; None if there are none."""
        return smallest_pad(self.access, self.stride, self.lanes_per_row)


def shapes(planes: Iterable[Plane]) -> dict[Plane, tuple[str, ...]]:
    """One plane of each shape (rows, stride, element), and the names of all that have it."""
    found: dict[tuple[int, int, int], list[Plane]] = {}
    for plane in planes:
        found.setdefault((plane.bytes, plane.row_stride, plane.element), []).append(plane)
    return {alike[0]: tuple(p.name for p in alike) for alike in found.values()}


def uses(plane: Plane) -> Iterator[Use]:
    """What a plane with at least eight rows is likely to see, by its stride and element alone.

    How a kernel does address it is not in its contract: it may leave some of these out, and permute
    addresses itself.
    """
    stride, element = plane.row_stride, plane.element
    rows = plane.bytes // stride if stride else 0
    if rows < 8:
        return
    if stride % 16 == 0:
        if element == 2 and rows >= 16 and stride >= 32:
            yield Use("16x16 operand", ACCESSES["ldmatrix.x4"], stride)
        side_by_side = 1 << min(stride // 16, WARP).bit_length() - 1
        yield Use("rows copied by 16 B", ACCESSES["st16"], stride, side_by_side)
    pair = ACCESSES.get(f"st{2 * element}")
    if element in (2, 4) and pair and stride >= 8 * element and stride % pair.bytes == 0:
        yield Use("accumulator fragment", pair, stride, 4)
    single = ACCESSES.get(f"ld{element}")
    if single and element >= WORD and rows >= WARP and stride % element == 0:
        yield Use("a row per lane", single, stride)
