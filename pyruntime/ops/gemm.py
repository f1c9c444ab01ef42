"""Matrix products on tensor cores: C = A · Wᵀ with what follows it fused in."""

from __future__ import annotations

from pyruntime.driver.device import Device
from pyruntime.driver.library import Kernel, Library, kept
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.tensormap import TensorMap, tensor_map
from pyruntime.ops import gemm_choice
from pyruntime.ops.gemm_choice import at_once, choose, units

ALIGNMENT = 16  # bytes; of rows that are read or written 16 bytes at a time
GATED = ("swiglu", "geglu")
OUTPUTS = {
    "f32": "float32", "f16": "float16", "add": "float32", **dict.fromkeys(GATED, "float16"),
}  # fmt: skip


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
    invariant: bool = False,
    kernel: Kernel | None = None,
) -> None:
    """Records the product of the live rows of `a` with `w`, and what `epilogue` does with it.

    "f32", "f16": c = scale · a wᵀ. "add": c += scale · a wᵀ.
    "swiglu": c[:, i] = scale · silu(a wᵀ[:, 2i]) · a wᵀ[:, 2i + 1], gate and up rows alternating.
    "geglu": the same with gelu (approximated by tanh) instead of silu.

    Args:
        a: float16 [at least max_rows, k], k a multiple of 8.
        w: float16 [n, k]; nothing in the same run of the program may write it (`Program.run`).
        c: float32 [at least max_rows, n], "f16": float16; gated: float16 [at least max_rows,
            n / 2]. Rows past the live ones are neither read nor written. Columns: any number for
            "f32", otherwise rows of a whole number of 16-byte units.
        rows: device int32 (or its address): how many rows are live when this runs.
        max_rows: the most that `rows` will hold; sizes the grid.
        overflow, site: where results are float16, `site` is left there if it is lower and a result
            is not finite.
        invariant: whether a row of c must have the same bits whatever `max_rows` is, see
            `gemm_choice.invariant`.
        kernel: a row of the table, instead of the one that `choose` picks.

    Raises:
        ValueError: arrays whose types, shapes or alignment do not fit.
        CudaError: the driver refuses a tensor map.
    """
    _check(a, w, c, max_rows, epilogue)
    if OUTPUTS[epilogue] == "float16" and not overflow:
        raise ValueError(f"gemm: {epilogue} needs an overflow word")
    (n, k), device = w.shape, library.device
    if kernel is None:
        kernel = choice(library, epilogue, max_rows, n, k, invariant)
    program.add(
        kernel,
        grid=blocks(kernel, max_rows, n, device),
        **operands(kernel, a, w),
        rows=rows,
        c=c,
        overflow=overflow,
        n=n,
        k=k,
        site=site,
        scale=scale,
    )


@kept  # all layers of a model ask the same
def choice(library: Library, epilogue: str, m: int, n: int, k: int, invariant: bool) -> Kernel:
    """The row of the table for `epilogue` of an [m, n] product over k; see `choose`, `gemm`."""
    return choose(rows_for(library, epilogue, invariant), m, n, k, library.device)


def rows_for(library: Library, epilogue: str, invariant: bool) -> list[Kernel]:
    """The rows of the table that may be chosen. Raises CubinError: there are none at all."""
    rows = library.family("gemm")
    if invariant:
        rows = gemm_choice.invariant(rows)
    return [row for row in rows if row.spec.tile["epilogue"] == epilogue]


def blocks(kernel: Kernel, max_rows: int, n: int, device: Device) -> int:
    """Blocks; a row with TMA that does not split k is persistent: what fits at a time will do."""
    count, tile = units(kernel.spec, max_rows, n), kernel.spec.tile
    if tile.get("split") == 1:
        count = min(count, at_once(kernel, device))
    return count * kernel.spec.cluster


def operands(kernel: Kernel, a: DeviceArray, w: DeviceArray) -> dict[str, DeviceArray | TensorMap]:
    """The two matrices as the row's engine reads them."""
    tile = kernel.spec.tile
    if tile["engine"] == "mma":
        return {"a": a, "w": w}
    bm, bn, bk = (int(tile[name]) for name in ("bm", "bn", "bk"))
    share = int(tile.get("share", 1))
    return {"a": tensor_map(a, (bm, bk)), "w": tensor_map(w, (bn // share, bk))}


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
    gated = epilogue in GATED
    width = n // 2 if gated else n
    if not (n and k) or a.shape[1] != k or c.shape[1] != width or (gated and n % 2):
        raise ValueError(f"gemm: {epilogue} of a {a.shape} and w {w.shape} into c {c.shape}")
    if not 1 <= max_rows <= min(a.shape[0], c.shape[0]):
        raise ValueError(f"gemm: {max_rows} rows of a {a.shape} into c {c.shape}")
