"""Packed GGUF weights to fp16."""

from __future__ import annotations

import numpy as np

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program

_INDEX_LIMIT = 1 << 34  # weights; the kernel numbers groups of eight in 32 bits


def dequantize(
    program: Program,
    library: Library,
    *,
    type_name: str,
    source: DeviceArray,
    rows: int,
    columns: int,
    out: DeviceArray,
    overflow: DeviceArray,
    site: int,
    row0: int = 0,
    row_step: int = 1,
) -> None:
    """Records out[row0 + r * row_step] = dequantized row r, for every r in [0, rows).

    A step of 2 interleaves two tensors, a `row0` sets one below another. Values are those of ggml's
    float32 arithmetic, rounded once.

    Args:
        type_name: GGUF name of the packed type, such as "Q4_K" or "F32", in any case.
        source: uint8, at least the packed rows, one after another; starts 16-byte aligned.
        out: float16 [more rows, columns].
        overflow: int32, lowered to `site` if a weight is not finite or beyond fp16's range.

    Raises:
        CubinError: there is no kernel for the type.
        ValueError: rows that are no whole number of blocks (F32, F16, BF16: of eight weights),
            or arrays that do not fit what is asked.
    """
    kernel = library[f"dequant_{type_name.lower()}"]
    tile = {k: int(v) for k, v in kernel.spec.tile.items() if k != "type"}
    weights = rows * columns
    what = f"dequantize {type_name} [{rows}, {columns}]"
    if rows < 1 or columns < 1 or columns % tile["block"]:
        raise ValueError(f"{what}: a row must be a whole number of {tile['block']}-weight blocks")
    if weights >= _INDEX_LIMIT:
        raise ValueError(f"{what}: more than {_INDEX_LIMIT:,} weights")
    packed = weights // tile["block"] * tile["bytes"]
    if source.dtype != np.uint8 or source.nbytes < packed or source.ptr % 16:
        raise ValueError(
            f"{what}: source of {source.nbytes:,} bytes ({source.dtype}) at {source.ptr:#x}, "
            f"needs {packed:,} bytes, 16-byte aligned"
        )
    last = row0 + (rows - 1) * row_step
    if out.dtype != np.float16 or out.shape[1:] != (columns,) or out.ptr % 16:
        raise ValueError(f"{what}: out {out.shape} ({out.dtype}) at {out.ptr:#x}")
    if row0 < 0 or row_step < 1 or last >= out.shape[0]:
        raise ValueError(f"{what}: rows {row0}, step {row_step} to {last} of {out.shape[0]}")
    program.add(
        kernel,
        grid=-(-weights // tile["elements"]),
        source=source,
        out=out,
        overflow=overflow,
        rows=rows,
        columns=columns,
        row0=row0,
        row_step=row_step,
        site=site,
    )
