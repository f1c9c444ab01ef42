"""Activations as int8, alone or folded into what makes them: norms and gated products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pyruntime.driver.library import Kernel, Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import CubinError

GROUP = 32  # values of a row that share a scale
STRIDE = 64  # scales and sums have places for a multiple of so many rows
ACTIVATIONS = ("silu", "gelu")


@dataclass(frozen=True)
class Plane:
    """Quantized rows: x is about scale * q.

    Attributes:
        q: int8 [rows, k].
        scales: float32 [k / 32, stride, 2], for each row {scale, -12582912 * scale}; a scale has 16
            significant bits. The stride is the count of rows, rounded up to a multiple of 64.
        sums: float32 [k / 32, stride], scale * sum of q, rounded to tf32.

    Rows past those that were live when it was written are undefined.
    """

    q: DeviceArray
    scales: DeviceArray
    sums: DeviceArray

    @property
    def stride(self) -> int:
        """Places for rows in scales and sums."""
        return self.sums.shape[1]


def plane_layout(rows: int, k: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array of a plane.

    Raises ValueError: rows that are no whole number of groups.
    """
    if rows < 1 or k < 1 or k % GROUP:
        raise ValueError(f"a plane of {rows} rows of {k}: not whole groups of {GROUP}")
    groups, stride = k // GROUP, -(-rows // STRIDE) * STRIDE
    return {
        "q": ((rows, k), "int8"),
        "scales": ((groups, stride, 2), "float32"),
        "sums": ((groups, stride), "float32"),
    }


def quantize(
    program: Program,
    library: Library,
    *,
    x: DeviceArray,
    plane: Plane,
    rows: DeviceArray | int,
    max_rows: int,
    overflow: DeviceArray | int,
    site: int,
    kernel: Kernel | None = None,
) -> None:
    """Records the quantization of the first `rows` rows of `x`.

    A group's scale is its largest magnitude over 127. See `reference.int8.quantize_rows`.

    Args:
        x: float16 [max rows or more, k].
        plane: of at least max rows, with the same k; written.
        rows: int32, the count of live rows on the device (or its address); `max_rows` is the most
            it will be.
        overflow: int32, lowered to `site` if a value is not finite, or beyond 2^100.
        kernel: a row of the table, instead of the one for so many rows.

    Raises:
        ValueError: arrays that do not belong together.
    """
    k = _check(plane, max_rows, {"x": (x, "float16")})
    kernel = kernel or _kernel(library, max_rows, k, op="quantize")
    program.add(
        kernel,
        grid=_grid(kernel, max_rows, k),
        rows=rows,
        x=x,
        **_written(plane, overflow, site),
    )


def norm_quantize(
    program: Program,
    library: Library,
    *,
    x: DeviceArray,
    weight: DeviceArray,
    plane: Plane,
    rows: DeviceArray | int,
    max_rows: int,
    eps: float,
    overflow: DeviceArray | int,
    site: int,
    branch: DeviceArray | None = None,
    post: DeviceArray | None = None,
    y: DeviceArray | None = None,
    kernel: Kernel | None = None,
) -> None:
    """Records the quantization of norm(x, weight), as `ops.norm.norm` makes it, from float32.

    With `branch` and `post` first x += norm(branch, post), as in `ops.norm.norm_residual`.

    Args:
        x: float32 [max rows or more, k]; updated if there is a branch.
        weight, post: float32 [k].
        branch: float32, shaped like x.
        y: float16 [max rows or more, k], written too if given: then its range counts as well.
        The others: see `quantize`.

    Raises:
        ValueError: arrays that do not belong together.
    """
    if (branch is None) != (post is None):
        raise ValueError("quantize: a branch needs a post-norm, and the other way round")
    joins = {} if branch is None or post is None else {"branch": branch, "post": post}
    arrays = {"x": (x, "float32")} | ({"branch": (branch, "float32")} if branch else {})
    k = _check(plane, max_rows, arrays | _copy(y), {"weight": weight, "post": post})
    op = "residual" if joins else "norm"
    kernel = kernel or _kernel(library, max_rows, k, op=op, copy=int(y is not None))
    program.add(
        kernel,
        grid=_grid(kernel, max_rows, k),
        rows=rows,
        x=x,
        weight=weight,
        y=y or 0,
        eps=eps,
        **joins,
        **_written(plane, overflow, site),
    )


def gated_quantize(
    program: Program,
    library: Library,
    *,
    gate: DeviceArray,
    up: DeviceArray,
    plane: Plane,
    activation: str,
    rows: DeviceArray | int,
    max_rows: int,
    overflow: DeviceArray | int,
    site: int,
    y: DeviceArray | None = None,
    kernel: Kernel | None = None,
) -> None:
    """Records the quantization of activation(gate) * up, computed in float32.

    Args:
        gate, up: float16 [max rows or more, k].
        activation: "silu", or "gelu", the one approximated by tanh.
        y: float16 [max rows or more, k], written too if given: then its range counts as well.
        The others: see `quantize`.

    Raises:
        ValueError: arrays that do not belong together, or another activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"quantize: {activation!r} is none of {', '.join(ACTIVATIONS)}")
    k = _check(plane, max_rows, {"gate": (gate, "float16"), "up": (up, "float16")} | _copy(y))
    copy = int(y is not None)
    kernel = kernel or _kernel(library, max_rows, k, op="gated", activation=activation, copy=copy)
    program.add(
        kernel,
        grid=_grid(kernel, max_rows, k),
        rows=rows,
        gate=gate,
        up=up,
        y=y or 0,
        **_written(plane, overflow, site),
    )


def _kernel(library: Library, max_rows: int, k: int, **wanted: str | int) -> Kernel:
    """The row for the most rows per block that leave two blocks for every multiprocessor.

    Where rows are no more than multiprocessors, the smallest block that can hold one of them.
    """
    found = [
        kernel
        for kernel in library.family("quantize")
        if wanted.items() <= kernel.spec.tile.items()
    ]
    if max_rows <= library.device.sm_count:
        holding = [kernel for kernel in found if _held(kernel) >= k]
        if holding:
            return min(holding, key=_held)
    found = [kernel for kernel in found if not _held(kernel)]
    if not found:
        raise CubinError(f"no quantize kernel with {wanted}")
    found.sort(key=_rows)
    enough = 2 * library.device.sm_count
    many = [kernel for kernel in found if math.prod(_grid(kernel, max_rows, k)) >= enough]
    return many[-1] if many else found[0]


def _rows(kernel: Kernel) -> int:
    return int(kernel.spec.tile["rows"])


def _held(kernel: Kernel) -> int:
    """The most columns of a kernel whose blocks hold a whole row; 0: of others."""
    return int(kernel.spec.tile.get("held", 0))


def _grid(kernel: Kernel, max_rows: int, k: int) -> tuple[int, int]:
    """Blocks of some rows; and of some columns, unless a block has whole rows."""
    columns = int(kernel.spec.tile.get("columns", k))
    return -(-max_rows // _rows(kernel)), -(-k // columns)


def _written(plane: Plane, overflow: DeviceArray | int, site: int) -> dict[str, Any]:
    return {
        "q": plane.q, "scales": plane.scales, "sums": plane.sums, "columns": plane.q.shape[1],
        "stride": plane.stride, "overflow": overflow, "site": site,
    }  # fmt: skip


def _copy(y: DeviceArray | None) -> dict[str, tuple[DeviceArray, str]]:
    return {} if y is None else {"y": (y, "float16")}


def _check(
    plane: Plane,
    max_rows: int,
    matrices: dict[str, tuple[DeviceArray, str]],
    vectors: dict[str, DeviceArray | None] | None = None,
) -> int:
    """The columns of all of them."""
    rows, k = plane.q.shape
    parts = {"q": plane.q, "scales": plane.scales, "sums": plane.sums}
    layout = {name: (array.shape, str(array.dtype)) for name, array in parts.items()}
    if layout != plane_layout(rows, k):
        raise ValueError(f"quantize: a plane of {layout}")
    for name, (array, dtype) in matrices.items():
        if array.dtype != dtype or array.shape[1:] != (k,):
            raise ValueError(
                f"quantize: {name} {array.dtype} {array.shape}, not {dtype} [..., {k}]"
            )
        if not 1 <= max_rows <= min(rows, array.shape[0]):
            raise ValueError(f"quantize: {max_rows} rows of {name} {array.shape} to {rows}")
    for name, vector in (vectors or {}).items():
        if vector is not None and (vector.dtype != "float32" or vector.shape != (k,)):
            raise ValueError(f"quantize: {name} {vector.dtype} {vector.shape}, not float32 [{k}]")
    aligned = [*parts.values(), *(array for array, _ in matrices.values())]
    if any(array.ptr % 16 for array in aligned):
        raise ValueError("quantize: an array does not start 16-byte aligned")
    return k
