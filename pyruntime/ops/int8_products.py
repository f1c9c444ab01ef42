"""What products of int8 activations with packed weights have in common: arguments, and checks."""

from __future__ import annotations

from typing import Any

from pyruntime.driver.library import Kernel
from pyruntime.driver.memory import DeviceArray
from pyruntime.ops.extents import product_extents, require
from pyruntime.ops.quantize import Plane

EPILOGUES = {"f32": "float32", "f16": "float16", "add": "float32"}  # in the kernels' order


def arguments(
    who: str,
    kernel: Kernel,
    *,
    plane: Plane,
    w: DeviceArray,
    type_name: str,
    c: DeviceArray,
    rows: DeviceArray | int,
    max_rows: int,
    epilogue: str,
    column: int,
    scale: float,
    overflow: DeviceArray | int,
    site: int,
    most: int,
    run: int,
    together: int,
) -> dict[str, Any]:
    """The parameters that all kernels of such products have; `gemm_int8` says what they mean.

    Args:
        who: names the operation in errors.
        most: rows that the kernel takes.
        run: results of a row that it writes at a time: column and width are multiples of it.
        together: rows whose scales it reads at a time.

    Raises:
        ValueError: arrays whose types, shapes, bytes or alignment do not fit, or not this kernel.
    """
    tile, (n, row_bytes), k = kernel.spec.tile, w.shape, plane.q.shape[1]
    blocks, odd = divmod(k, int(tile["block"]))
    what = f"{who}: {type_name} w {w.shape} and {k} columns of q into c {c.shape}"
    if w.dtype != "uint8" or odd or row_bytes != blocks * int(tile["bytes"]):
        raise ValueError(f"{what}: no rows of whole blocks")
    if tile["type"] != type_name.lower():
        raise ValueError(f"{what}: {kernel.name}")
    width = c.shape[1] if len(c.shape) == 2 else 0
    if n % int(tile["n"]) or not 0 <= column <= column + n <= width:
        raise ValueError(f"{what}: {n} rows of w from column {column} on")
    if column % run or width % run:
        raise ValueError(f"{what}: column {column} of {width}, not multiples of {run}")
    if epilogue not in EPILOGUES or c.dtype != EPILOGUES[epilogue]:
        raise ValueError(f"{what}: epilogue {epilogue!r} into {c.dtype}")
    if epilogue == "f16" and not overflow:
        raise ValueError(f"{what}: f16 needs an overflow word")
    most = min(most, c.shape[0], plane.q.shape[0])
    if not 1 <= max_rows <= most:
        raise ValueError(f"{what}: {max_rows} rows of {most}, {kernel.name}")
    aligned = {"w": w, "q": plane.q, "scales": plane.scales, "sums": plane.sums}
    for name, array, least in (*((name, x, 16) for name, x in aligned.items()),
                               ("c", c, run * c.dtype.itemsize)):  # fmt: skip
        if array.ptr % least:
            raise ValueError(f"{what}: {name} at {array.ptr:#x} is not {least}-byte aligned")
    extents = product_extents(
        type_name=type_name.lower(), rows=max_rows, n=n, k=k, row_bytes=row_bytes,
        stride=plane.stride, width=width, column=column, itemsize=c.dtype.itemsize,
        together=together,
    )  # fmt: skip
    require(what, extents, {**aligned, "c": c, "rows": rows, "overflow": overflow})
    return {
        "rows": rows, "scales": plane.scales, "sums": plane.sums, "w": w, "c": c,
        "overflow": overflow, "n": n, "stride": plane.stride, "width": width, "column": column,
        "epilogue": list(EPILOGUES).index(epilogue), "site": site, "scale": scale,
    }  # fmt: skip
