"""Sums over rows, from which means are made."""

from __future__ import annotations

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program


def pool(
    program: Program,
    library: Library,
    *,
    count: DeviceArray,
    max_count: int,
    spans: DeviceArray,
    x: DeviceArray,
    sums: DeviceArray,
) -> None:
    """Records sums[i] = the sum of the rows of x in spans[i], for each i below `count`.

    In float32; the order, and so the bits, depend on nothing but the number of rows.

    Args:
        count: int32, the count of spans on the device; `max_count` is the most it will be.
        spans: int32 [max count or more, 2], of each its first row and how many there are, all of
            them rows of x (checked by the caller).
        x: float16 [..., columns].
        sums: float32 [max count or more, columns], written.

    Raises:
        ValueError: arrays that do not belong together, or columns that are no multiple of 8.
    """
    columns = x.shape[-1]
    types = [array.dtype.name for array in (spans, x, sums)]
    shapes = spans.shape[1:], x.shape[1:], sums.shape[1:]
    if types != ["int32", "float16", "float32"] or shapes != ((2,), (columns,), (columns,)):
        told = ", ".join(f"{array.dtype} {array.shape}" for array in (spans, x, sums))
        raise ValueError(f"pool: spans, x, sums are {told}")
    if columns % 8:
        raise ValueError(f"pool: {columns} columns are no multiple of 8")
    if not 1 <= max_count <= min(spans.shape[0], sums.shape[0]):
        raise ValueError(f"pool: {max_count} of spans {spans.shape}, to {sums.shape}")
    (kernel,) = library.family("pool")
    program.add(
        kernel,
        grid=(max_count, -(-columns // int(kernel.spec.tile["columns"]))),
        count=count,
        spans=spans,
        x=x,
        sums=sums,
        columns=columns,
    )
