"""Matrix products on tensor cores: C = A · Wᵀ with what follows it fused in."""

from __future__ import annotations

from collections.abc import Sequence

from pyruntime.cubin.spec import KernelSpec
from pyruntime.driver.device import Device
from pyruntime.driver.library import Kernel, Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import CubinError

# What a multiprocessor does in a cycle. Only their ratios decide between rows of the table.
MACS = 1200.0  # fp16 multiply-adds through mma.sync with enough warps at work
L2_BYTES = 40.0  # what L2 delivers to one multiprocessor
LATENCY = 1200.0  # cycles until a copy from device memory arrives
START = 3000.0  # cycles of a tile outside its main loop: first copies, stores
IDLE_WARPS = 2.0  # w warps keep the tensor cores busy w / (w + this) of the time

ALIGNMENT = 16  # bytes; of rows that are read or written 16 bytes at a time
OUTPUTS = {"f32": "float32", "add": "float32", "swiglu": "float16"}


def choose(kernels: Sequence[Kernel], m: int, n: int, k: int, device: Device) -> Kernel:
    """The row of the table that should be fastest for C [m, n] = A [m, k] · W [n, k]ᵀ.

    A cost model, no timing, so the choice is the same in every process. Every row computes the
    same bits. The time that W takes to come from device memory is the same for all rows and left
    out.

    Raises:
        CubinError: no row fits the device.
    """
    costs = {
        kernel: _cycles(kernel.spec, m, n, k, device.sm_count, blocks)
        for kernel in kernels
        if (blocks := _resident(kernel.spec, device))
    }
    if not costs:
        raise CubinError(f"no gemm row fits {device.smem_per_sm:,} B of shared memory")
    return min(costs, key=lambda kernel: (costs[kernel], kernel.name))


def _resident(spec: KernelSpec, device: Device) -> int:
    """Blocks that share a multiprocessor."""
    return min(spec.min_blocks, device.smem_per_sm // (spec.smem_bytes + device.smem_reserved))


def _cycles(spec: KernelSpec, m: int, n: int, k: int, sm_count: int, resident: int) -> float:
    """Cycles of the multiprocessor that has the most to do."""
    bm, bn, bk, stages = (int(spec.tile[name]) for name in ("bm", "bn", "bk", "stages"))
    tiles = -(-_tiles(spec, m, n) // sm_count)
    together = min(tiles, resident)
    warps = together * spec.threads // 32
    column_bytes = 2 * (min(bm, m) + bn)  # copied per column of k; rows past m are not
    on_their_way = together * (stages - 1) * bk * column_bytes
    copying = column_bytes / min(L2_BYTES, on_their_way / LATENCY)
    computing = bm * bn / MACS * (warps + IDLE_WARPS) / warps
    # A second resident block computes while the first starts and stores.
    return tiles * k * max(copying, computing) + START * (tiles if resident == 1 else 1)


def _tiles(spec: KernelSpec, m: int, n: int) -> int:
    return -(-m // int(spec.tile["bm"])) * -(-n // int(spec.tile["bn"]))


def gemm(
    program: Program,
    library: Library,
    *,
    a: DeviceArray,
    w: DeviceArray,
    c: DeviceArray,
    rows: DeviceArray | int,
    max_rows: int,
    epilogue: str,
    scale: float = 1.0,
    overflow: DeviceArray | int = 0,
    site: int = 0,
    kernel: Kernel | None = None,
) -> None:
    """Records the product of the live rows of `a` with `w`, and what `epilogue` does with it.

    "f32": c = scale · a wᵀ. "add": c += scale · a wᵀ.
    "swiglu": c[:, i] = scale · silu(a wᵀ[:, 2i]) · a wᵀ[:, 2i + 1], gate and up rows alternating.

    Args:
        a: float16 [at least max_rows, k], k a multiple of 8.
        w: float16 [n, k].
        c: float32 [at least max_rows, n]; "swiglu": float16 [at least max_rows, n / 2]. Rows past
            the live ones are neither read nor written. Columns: any number for "f32", otherwise
            rows of a whole number of 16-byte units.
        rows: device int32 (or its address): how many rows are live when this runs.
        max_rows: the most that `rows` will hold; sizes the grid.
        overflow, site: "swiglu" leaves `site` there if it is lower and a result is no finite fp16.
        kernel: a row of the table, instead of the one that `choose` picks.

    Raises:
        ValueError: arrays whose types, shapes or alignment do not fit.
    """
    _check(a, w, c, max_rows, epilogue)
    if epilogue == "swiglu" and not overflow:
        raise ValueError("gemm: swiglu needs an overflow word")
    (n, k), device = w.shape, library.device
    if kernel is None:
        found = [x for x in library.family("gemm") if x.spec.tile["epilogue"] == epilogue]
        kernel = choose(found, max_rows, n, k, device)
    program.add(
        kernel,
        grid=_tiles(kernel.spec, max_rows, n),
        rows=rows,
        a=a,
        w=w,
        c=c,
        overflow=overflow,
        n=n,
        k=k,
        site=site,
        scale=scale,
    )


def _check(a: DeviceArray, w: DeviceArray, c: DeviceArray, max_rows: int, epilogue: str) -> None:
    if epilogue not in OUTPUTS:
        raise ValueError(f"gemm: epilogue {epilogue!r} is none of {', '.join(OUTPUTS)}")
    arrays = {"a": (a, "float16"), "w": (w, "float16"), "c": (c, OUTPUTS[epilogue])}
    for name, (array, dtype) in arrays.items():
        if len(array.shape) != 2 or array.dtype != dtype:
            raise ValueError(
                f"gemm: {name} is {array.dtype} {array.shape}, not {dtype} with 2 dimensions"
            )
        odd = array.shape[1] * array.dtype.itemsize % ALIGNMENT
        if odd and not (name == "c" and epilogue == "f32"):
            raise ValueError(f"gemm: rows of {name} {array.shape} are not whole 16-byte units")
        if not odd and array.ptr % ALIGNMENT:
            raise ValueError(f"gemm: {name} at {array.ptr:#x} is not 16-byte aligned")
    n, k = w.shape
    width = n // 2 if epilogue == "swiglu" else n
    if not (n and k) or a.shape[1] != k or c.shape[1] != width or (epilogue == "swiglu" and n % 2):
        raise ValueError(f"gemm: {epilogue} of a {a.shape} and w {w.shape} into c {c.shape}")
    if not 1 <= max_rows <= min(a.shape[0], c.shape[0]):
        raise ValueError(f"gemm: {max_rows} rows of a {a.shape} into c {c.shape}")
