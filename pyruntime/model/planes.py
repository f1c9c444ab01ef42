"""Which planes of int8 activations a pass makes, and which it has already."""

from __future__ import annotations

from typing import NamedTuple

from pyruntime.ops.quantize import Plane


class Source(NamedTuple):
    """What a plane is made from: `tensor` of a layer, `rows` of it at most, `columns` wide."""

    layer: int
    tensor: str
    rows: int
    columns: int


class PlaneMemo:
    """The sources of the planes of a pass while it is recorded.

    A plane is memory that one source after the other is quantized to, so what it holds is what was
    made last.

    Attributes:
        made: the sources that were quantized, in order. read: those that products read.
    """

    def __init__(self) -> None:
        self.made: list[Source] = []
        self.read: list[Source] = []
        self._held: dict[int, Source] = {}  # by address

    def forget(self) -> None:
        """That no plane holds anything."""
        self._held.clear()

    def holds(self, plane: Plane, source: Source) -> bool:
        """Whether a plane holds a source."""
        return self._held.get(plane.q.ptr) == source

    def note(self, plane: Plane, source: Source) -> None:
        """That `plane` is made from `source` from here on."""
        self._held[plane.q.ptr] = source
        self.made.append(source)

    def use(self, plane: Plane, source: Source) -> None:
        """That a product reads it. Raises RuntimeError: it holds another source."""
        if not self.holds(plane, source):
            raise RuntimeError(f"a product of {source} reads {self._held.get(plane.q.ptr)}")
        self.read.append(source)
