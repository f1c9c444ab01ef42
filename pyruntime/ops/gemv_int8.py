"""Products of a few quantized rows with packed weights, which they stream from memory once."""

from __future__ import annotations

from pyruntime.driver.library import Kernel, Library, kept
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import CubinError
from pyruntime.ops.int8_products import arguments
from pyruntime.ops.quantize import Plane

MOST_ROWS = 8

# Where blocks of few warps are faster, on an H200: there are tiles enough to fill it, and rows are
# long enough for each lane to have a second unit, but no more than some.
MANY_TILES = 6.5  # for each multiprocessor
UNITS_OF_FEW = range(65, 513)


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
        kernel = _kernel(library, type_name.lower(), max_rows, w.shape[0], plane.q.shape[1])
    tile, n, k = kernel.spec.tile, w.shape[0], plane.q.shape[1]
    shared = arguments(
        "gemv_int8", kernel, plane=plane, w=w, type_name=type_name, c=c, rows=rows,
        max_rows=max_rows, epilogue=epilogue, column=column, scale=scale, overflow=overflow,
        site=site, most=int(tile["tokens"]), run=1, together=1,
    )  # fmt: skip
    blocks, warps, lanes = k // int(tile["block"]), kernel.spec.threads // 32, int(tile["lanes"])
    split = 1
    while split < warps and split * lanes < blocks * int(tile["units"]):
        split *= 2
    grid = -(-n // ((warps // split) * int(tile["rows"])))
    program.add(kernel, grid=grid, q=plane.q, blocks=blocks, split=split, **shared)


@kept
def _kernel(library: Library, type_name: str, max_rows: int, n: int, k: int) -> Kernel:
    """The row for the fewest tokens that are enough, in blocks of fewer warps where those pay."""
    rows = [kernel for kernel in library.family("gemv") if kernel.spec.tile["type"] == type_name]
    enough = [int(t) for kernel in rows if int(t := kernel.spec.tile["tokens"]) >= max_rows]
    if not enough:
        raise CubinError(f"no gemv_int8 kernel for type {type_name} and {max_rows} rows")
    rows = [kernel for kernel in rows if kernel.spec.tile["tokens"] == min(enough)]
    tile = rows[0].spec.tile
    tiles, units = n // int(tile["rows"]), k // int(tile["block"]) * int(tile["units"])
    pay = tiles >= MANY_TILES * library.device.sm_count and units in UNITS_OF_FEW
    return (min if pay else max)(rows, key=lambda kernel: kernel.spec.threads)
