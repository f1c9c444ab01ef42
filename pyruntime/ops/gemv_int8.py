"""Products of a few quantized rows with packed weights, which they stream from memory once."""

from __future__ import annotations

from pyruntime.driver.library import Kernel, Library, kept
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import CubinError
from pyruntime.ops.quantize import Plane

MOST_ROWS = 8
EPILOGUES = {"f32": "float32", "f16": "float16", "add": "float32"}  # in the kernels' order


def gemv_int8(
    program: Program,
    library: Library,
    *,
    plane: Plane,
    w: DeviceArray,
    type_name: str,
    c: DeviceArray,
    rows: DeviceArray | int,
    max_rows: int,
    epilogue: str,
    column: int = 0,
    scale: float = 1.0,
    overflow: DeviceArray | int = 0,
    site: int = 0,
    kernel: Kernel | None = None,
) -> None:
    """Records the product of the live rows of `plane` with `w`, and what `epilogue` does with it.

    "f32", "f16": c[:, column : column + n] = scale · x wᵀ. "add": the same with +=.

    Args:
        plane: of at least max rows, k columns.
        w: uint8 [n, bytes of a row], repacked into planes (`ops.repack`); nothing in the same run
            of the program may write it (`Program.run`).
        type_name: GGUF name of its type, in any case.
        c: float32 [at least max rows, width], "f16": float16. Rows past the live ones are neither
            read nor written.
        rows: device int32 (or its address): how many rows are live when this runs.
        max_rows: the most that `rows` will hold, 8 at most.
        overflow, site: for "f16"; `site` is left there if it is lower and a result is out of range.
        kernel: a row of the table, instead of the one for so many rows.

    Raises:
        ValueError: arrays that do not belong together.
        CubinError: there is no kernel for the type.
    """
    if kernel is None:
        kernel = _kernel(library, type_name.lower(), max_rows)
    tile, (n, row_bytes), k = kernel.spec.tile, w.shape, plane.q.shape[1]
    blocks, odd = divmod(k, int(tile["block"]))
    what = f"gemv_int8: {type_name} w {w.shape} and {k} columns of q into c {c.shape}"
    if w.dtype != "uint8" or odd or row_bytes != blocks * int(tile["bytes"]):
        raise ValueError(f"{what}: no rows of whole blocks")
    if n % int(tile["n"]) or not 0 <= column <= column + n <= c.shape[1]:
        raise ValueError(f"{what}: {n} rows of w from column {column} on")
    if epilogue not in EPILOGUES or c.dtype != EPILOGUES[epilogue]:
        raise ValueError(f"{what}: epilogue {epilogue!r} into {c.dtype}")
    if epilogue == "f16" and not overflow:
        raise ValueError(f"{what}: f16 needs an overflow word")
    if not 1 <= max_rows <= min(c.shape[0], plane.q.shape[0], int(tile["tokens"])):
        raise ValueError(f"{what}: {max_rows} rows, {kernel.name}")
    if w.ptr % 16 or plane.q.ptr % 16:
        raise ValueError(f"{what}: w at {w.ptr:#x} or q at {plane.q.ptr:#x} is not 16-byte aligned")
    warps, lanes = kernel.spec.threads // 32, int(tile["lanes"])
    split = 1
    while split < warps and split * lanes < blocks * int(tile["units"]):
        split *= 2
    program.add(
        kernel,
        grid=-(-n // ((warps // split) * int(tile["rows"]))),
        q=plane.q,
        scales=plane.scales,
        sums=plane.sums,
        w=w,
        rows=rows,
        c=c,
        overflow=overflow,
        stride=plane.stride,
        n=n,
        blocks=blocks,
        split=split,
        epilogue=list(EPILOGUES).index(epilogue),
        column=column,
        width=c.shape[1],
        site=site,
        scale=scale,
    )


@kept
def _kernel(library: Library, type_name: str, max_rows: int) -> Kernel:
    """The row for the fewest tokens that are enough."""
    rows = [k for k in library.family("gemv") if k.spec.tile["type"] == type_name]
    enough = [k for k in rows if int(k.spec.tile["tokens"]) >= max_rows]
    if not enough:
        raise CubinError(f"no gemv_int8 kernel for type {type_name} and {max_rows} rows")
    return min(enough, key=lambda k: int(k.spec.tile["tokens"]))
