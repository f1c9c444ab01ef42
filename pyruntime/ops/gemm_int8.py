"""Products of quantized rows with packed weights: C = X · Wᵀ with what follows it fused in."""

from __future__ import annotations

from collections.abc import Sequence

from pyruntime.driver.library import Kernel, Library, kept
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import CubinError
from pyruntime.ops.gemm_choice import Limits
from pyruntime.ops.gemv_int8 import MOST_ROWS, gemv_int8
from pyruntime.ops.int8_products import arguments
from pyruntime.ops.quantize import Plane

FAMILY = "int8"
STEP = 128  # columns of k in a step of a warp
RUN = 4  # results of a row that are written at a time
TOGETHER = 2  # rows whose scales are read at a time

# Cycles of an H200 at 1.98 GHz, fitted to what all rows took on one (tests/host/
# test_gemm_int8_choice.py has the figures). LAUNCH is of a launch. The rest by weights per scale
# and by tile: of a step of a block that has a multiprocessor for itself; what each further block
# adds to it (a guess where an H200 does not hold two); and of a tile, whatever k is.
LAUNCH = 2500.0
CYCLES = {
    32: {
        "m64_n128_k1": (2265.0, 1300.0, 8883.0),
        "m64_n32_k4": (2962.0, 2700.0, 4038.0),
        "m32_n32_k4": (1767.0, 977.0, 3678.0),
        "m16_n32_k4": (1328.0, 476.0, 3308.0),
    },
    16: {
        "m64_n128_k1": (4614.0, 1175.0, 6220.0),
        "m64_n32_k4": (3814.0, 3400.0, 5403.0),
        "m32_n32_k4": (2311.0, 1500.0, 3129.0),
        "m16_n32_k4": (1897.0, 534.0, 2780.0),
    },
}
MEMORY_BYTES = 18.0  # a cycle, of weights from device memory, for each multiprocessor


def gemm_int8(
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

    "f32", "f16": c[:, column : column + n] = scale · x wᵀ. "add": the same with +=. For up to
    `gemv_int8.MOST_ROWS` rows by its kernels. Values are those of `reference.int8.product`.

    Args:
        plane: of at least max rows, k columns.
        w: uint8 [n, bytes of a row], repacked into planes (`ops.repack`), n a multiple of 16;
            nothing in the same run of the program may write it (`Program.run`).
        type_name: GGUF name of its type, in any case.
        c: float32 [at least max rows, width], "f16": float16; column and width multiples of 4 for
            more than those few rows. Rows past the live ones are neither read nor written.
        rows: device int32 (or its address): how many rows are live when this runs.
        max_rows: the most that `rows` will hold; sizes the grid.
        overflow, site: for "f16"; `site` is left there if it is lower and a result is out of range.
        kernel: a row of the table, instead of the one that `choose` picks.

    Raises:
        ValueError: arrays whose types, shapes or alignment do not fit.
        CubinError: there is no kernel for the type.
    """
    if kernel is None and max_rows <= MOST_ROWS:
        gemv_int8(
            program, library, plane=plane, w=w, type_name=type_name, c=c, rows=rows,
            max_rows=max_rows, epilogue=epilogue, column=column, scale=scale, overflow=overflow,
            site=site,
        )  # fmt: skip
        return
    n, k = w.shape[0], plane.q.shape[1]
    if kernel is None:
        kernel = choice(library, type_name.lower(), max_rows, n, k)
    shared = arguments(
        "gemm_int8", kernel, plane=plane, w=w, type_name=type_name, c=c, rows=rows,
        max_rows=max_rows, epilogue=epilogue, column=column, scale=scale, overflow=overflow,
        site=site, most=max_rows, run=RUN, together=TOGETHER,
    )  # fmt: skip
    program.add(kernel, grid=units(kernel, max_rows, n), x=plane.q, k=k, **shared)


@kept  # all layers of a model ask the same
def choice(library: Library, type_name: str, m: int, n: int, k: int) -> Kernel:
    """The row of the table for an [m, n] product over k; see `choose`."""
    return choose(rows_for(library, type_name), m, n, k, library.device)


def rows_for(library: Library, type_name: str, levers: bool = False) -> list[Kernel]:
    """The rows of the table for a type, in lower case.

    Args:
        levers: with those that are there to be compared, and are never chosen.

    Raises:
        CubinError: there is no kernel for the type.
    """
    found = [
        row
        for row in library.family(FAMILY)
        if row.spec.tile["type"] == type_name and (levers or not row.spec.tile["lever"])
    ]
    if not found:
        raise CubinError(f"no gemm_int8 kernel for type {type_name}")
    return found


def choose(kernels: Sequence[Kernel], m: int, n: int, k: int, device: Limits) -> Kernel:
    """The row that should be fastest for C [m, n] = X [m, k] · W [n, k]ᵀ.

    Rows that do not split k compute the same bits, and so do those with the same split.

    Raises:
        CubinError: no row fits the device.
    """
    found = {row: _cost(row, m, n, k, device) for row in kernels if _resident(row, device)}
    if not found:
        raise CubinError(f"no gemm_int8 row fits {device.smem_per_sm:,} B of shared memory")
    return min(found, key=lambda row: (found[row], -row.spec.min_blocks, row.name))


def units(kernel: Kernel, m: int, n: int) -> int:
    """Blocks for an [m, n] product."""
    tile = kernel.spec.tile
    return -(-m // int(tile["bm"])) * -(-n // int(tile["bn"]))


def _resident(kernel: Kernel, device: Limits) -> int:
    """Blocks of a multiprocessor."""
    spec = kernel.spec
    return min(spec.min_blocks, device.smem_per_sm // (spec.smem_bytes + device.smem_reserved))


def _cost(kernel: Kernel, m: int, n: int, k: int, device: Limits) -> float:
    """Cycles that it should take: of one wave of blocks after the other."""
    tile = kernel.spec.tile
    shape = f"m{tile['bm']}_n{tile['bn']}_k{tile['split']}"
    alone, further, once = CYCLES[int(tile["sub"])][shape]
    steps = -(-k // (STEP * int(tile["split"])))
    resident = _resident(kernel, device)
    full, rest = divmod(units(kernel, m, n), resident * device.sm_count)
    cycles = 0.0
    # Blocks go to a multiprocessor that has room: some are full where not every one is.
    last = resident if rest > device.sm_count else 1
    for count, together in ((full, resident), (int(rest > 0), last)):
        cycles += count * (steps * (alone + further * (together - 1)) + once)
    memory = n * k / int(tile["block"]) * int(tile["bytes"]) / (MEMORY_BYTES * device.sm_count)
    return LAUNCH + max(cycles, memory)
