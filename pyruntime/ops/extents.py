"""How far int8 products reach into their arrays: bytes from the start to the last that is touched.

Kernels read the last row in place of those that a tile lacks, and copy nothing from past the end of
k. So an extent depends on no tile, but for one thing: what copies scales to shared memory reads 16
bytes at a time, of two rows, and sums of as many rows as a stride is rounded to. Fewer live rows
than `rows` reach no further.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyruntime.driver.memory import DeviceArray
from pyruntime.ops.quantize import GROUP, STRIDE

WORD = 4  # bytes of the count of rows, and of the word for overflows
SUMMED = frozenset({"q4_1", "q5_1", "q4_k", "q5_k"})  # types with a min for each group of k


def plane_extents(rows: int, k: int, stride: int, *, together: int = 1) -> dict[str, int]:
    """Of the arrays of a plane (`quantize.Plane`).

    Args:
        together: rows whose scales are read at a time; if several, sums are of `STRIDE` rows.
    """
    summed = STRIDE if together > 1 else 1
    before = (k // GROUP - 1) * stride  # places of the groups before the last
    return {
        "q": rows * k,
        "scales": (before + -(-rows // together) * together) * 8,
        "sums": (before + -(-rows // summed) * summed) * 4,
    }


def product_extents(
    *,
    type_name: str,
    rows: int,
    n: int,
    k: int,
    row_bytes: int,
    stride: int,
    width: int,
    column: int,
    itemsize: int,
    together: int,
) -> dict[str, int]:
    """Of the arrays of a product of `rows` rows of a plane with w [n, row_bytes].

    Args:
        type_name: of w, in lower case.
        width, column: of c, whose columns [column, column + n) are written.
        itemsize: of c; results of two bytes may overflow.
        stride, together: see `plane_extents`.
    """
    plane = plane_extents(rows, k, stride, together=together)
    return plane | {
        "sums": plane["sums"] if type_name in SUMMED else 0,
        "w": n * row_bytes,
        "c": ((rows - 1) * width + column + n) * itemsize,
        "rows": WORD,
        "overflow": WORD if itemsize == 2 else 0,
    }


def require(what: str, extents: Mapping[str, int], arrays: Mapping[str, DeviceArray | int]) -> None:
    """That arrays are as long as is touched of them; mere addresses are believed.

    Raises:
        ValueError: one is not; the text names it.
    """
    for name, extent in extents.items():
        array = arrays[name]
        if isinstance(array, DeviceArray) and array.nbytes < extent:
            raise ValueError(f"{what}: {name} of {array.nbytes:,} bytes, {extent:,} are touched")
