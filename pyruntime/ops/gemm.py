"""Matrix products on tensor cores: C = A · Wᵀ with what follows it fused in."""

from __future__ import annotations

from typing import Any

from pyruntime.driver.device import Device
from pyruntime.driver.library import Kernel, Library, kept
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.tensormap import TensorMap, tensor_map
from pyruntime.ops import gemm_choice
from pyruntime.ops.gemm_choice import at_once, choose, units
from pyruntime.ops.gemm_workspace import GemmWorkspace

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
    workspace: GemmWorkspace | None = None,
    parts: int | None = None,
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
        workspace: for launches whose blocks share units, which none do without: then a row that
            does not split k gives the same bits whatever max_rows and the live rows are.
        parts: how many clusters share a unit at most, instead of what `gemm_choice.parts` says.

    Raises:
        ValueError: arrays whose types, shapes or alignment do not fit, or too small a workspace.
        CudaError: the driver refuses a tensor map.
    """
    _check(a, w, c, max_rows, epilogue)
    if OUTPUTS[epilogue] == "float16" and not overflow:
        raise ValueError(f"gemm: {epilogue} needs an overflow word")
    (n, k), device = w.shape, library.device
    stream_k = workspace is not None and not invariant
    if kernel is None:
        kernel = choice(library, epilogue, max_rows, n, k, invariant, stream_k)
    if parts is None:
        parts = divided(library, kernel, max_rows, n, k) if stream_k else 1
    program.add(
        kernel,
        grid=blocks(kernel, max_rows, n, device, parts),
        **operands(kernel, a, w),
        **sharing(kernel, device, workspace, parts),
        rows=rows,
        c=c,
        overflow=overflow,
        n=n,
        k=k,
        site=site,
        scale=scale,
    )


@kept  # all layers of a model ask the same
def choice(
    library: Library, epilogue: str, m: int, n: int, k: int, invariant: bool, stream_k: bool = False
) -> Kernel:
    """The row of the table for `epilogue` of an [m, n] product over k; see `choose`, `gemm`."""
    return choose(rows_for(library, epilogue, invariant), m, n, k, library.device, stream_k)


def rows_for(library: Library, epilogue: str, invariant: bool) -> list[Kernel]:
    """The rows of the table that may be chosen. Raises CubinError: there are none at all."""
    rows = library.family("gemm")
    if invariant:
        rows = gemm_choice.invariant(rows)
    return [row for row in rows if row.spec.tile["epilogue"] == epilogue]


@kept
def divided(library: Library, kernel: Kernel, m: int, n: int, k: int) -> int:
    """How many clusters share a unit, on average; see `gemm_choice.parts`."""
    return gemm_choice.parts(kernel, m, n, k, library.device)


def blocks(kernel: Kernel, max_rows: int, n: int, device: Device, parts: int = 1) -> int:
    """Blocks; a row with TMA that does not split k is persistent: what fits at a time will do."""
    count, tile = units(kernel.spec, max_rows, n), kernel.spec.tile
    if tile.get("split") == 1:
        count = min(count * parts, at_once(kernel, device))
    return count * kernel.spec.cluster


def sharing(
    kernel: Kernel, device: Device, workspace: GemmWorkspace | None, parts: int
) -> dict[str, Any]:
    """Of a wgmma row, where blocks leave sums for one another, if `parts` is not 1.

    Raises:
        ValueError: another row, or nowhere to leave them.
    """
    tile = kernel.spec.tile
    if parts == 1:
        return {"sums": 0, "raised": 0, "parts": 1} if tile["engine"] == "wgmma" else {}
    if tile["engine"] != "wgmma" or tile["split"] != 1:
        raise ValueError(f"gemm: units of {kernel.name} in {parts} parts")
    most = at_once(kernel, device) * kernel.spec.cluster
    if workspace is None or workspace.sums.shape[0] < most:
        room = workspace.sums.shape[0] if workspace else 0
        raise ValueError(f"gemm: {most} blocks leave sums in a workspace for {room}")
    return {"sums": workspace.sums, "raised": workspace.raised, "parts": parts}


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
