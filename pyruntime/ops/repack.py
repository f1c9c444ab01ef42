"""Packed GGUF weights to the planes that products with int8 activations read."""

from __future__ import annotations

import numpy as np

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program


def repack(
    program: Program,
    library: Library,
    *,
    type_name: str,
    source: DeviceArray,
    first: int,
    rows: int,
    out: DeviceArray,
) -> None:
    """Records the repacking of rows [first, first + rows) of a tensor (cuda/quant/planes.cuh).

    Args:
        type_name: GGUF name of the packed type, such as "Q4_K", in any case.
        source: uint8, at least the packed rows as a file has them; starts 16-byte aligned.
        out: uint8 [n, bytes of a row]: the whole tensor, 16-byte aligned; n a multiple of 16. Its
            bytes are those of all rows together, not row after row.

    Raises:
        CubinError: there is no kernel for the type.
        ValueError: rows that are no whole number of blocks, or arrays that do not fit what is
            asked.
    """
    kernel = library[f"repack_{type_name.lower()}"]
    tile = {k: int(v) for k, v in kernel.spec.tile.items() if k != "type"}
    what = f"repack {type_name} rows {first} to {first + rows} of {out.shape}"
    if out.dtype != np.uint8 or len(out.shape) != 2 or out.ptr % 16:
        raise ValueError(f"{what}: {out.dtype} at {out.ptr:#x}, needs aligned bytes of rows")
    n, row_bytes = out.shape
    if n % tile["n"] or not row_bytes or row_bytes % tile["bytes"]:
        raise ValueError(
            f"{what}: needs a multiple of {tile['n']} rows of whole {tile['bytes']}-byte blocks"
        )
    if first < 0 or rows < 1 or first + rows > n:
        raise ValueError(f"{what}: no such rows")
    if source.dtype != np.uint8 or source.nbytes < rows * row_bytes or source.ptr % 16:
        raise ValueError(
            f"{what}: source of {source.nbytes:,} bytes ({source.dtype}) at {source.ptr:#x}, "
            f"needs {rows * row_bytes:,} bytes, 16-byte aligned"
        )
    row_blocks = row_bytes // tile["bytes"]
    program.add(
        kernel,
        grid=-(-rows * row_blocks // tile["blocks"]),
        source=source,
        out=out,
        rows=rows,
        row_blocks=row_blocks,
        first=first,
        n=n,
    )
