"""RMS normalisation, alone and where a branch joins the residual stream."""

from __future__ import annotations

from pyruntime.driver.library import Kernel, Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program


def norm(
    program: Program,
    library: Library,
    *,
    rows: DeviceArray,
    max_rows: int,
    x: DeviceArray,
    weight: DeviceArray,
    y: DeviceArray,
    overflow: DeviceArray,
    site: int,
    eps: float,
) -> None:
    """Records y = x / sqrt(mean(x^2) + eps) * weight for each of the first `rows` rows.

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization, eq. 4.

    Args:
        rows: int32, the count of live rows on the device; `max_rows` is the most it will be.
        x: float32 [max rows or more, columns].
        weight: float32 [columns].
        y: float16, shaped like x, written.
        overflow: int32, lowered to `site` if a result is out of fp16's range.

    Raises:
        ValueError: arrays that do not belong together, or columns that are no multiple of 4.
    """
    columns = _columns(max_rows, {"x": x, "y": y}, {"weight": weight})
    program.add(
        _kernel(library, "norm"),
        grid=max_rows,
        rows=rows,
        x=x,
        weight=weight,
        y=y,
        overflow=overflow,
        columns=columns,
        site=site,
        eps=eps,
    )


def norm_residual(
    program: Program,
    library: Library,
    *,
    rows: DeviceArray,
    max_rows: int,
    branch: DeviceArray,
    post: DeviceArray,
    x: DeviceArray,
    weight: DeviceArray,
    y: DeviceArray,
    overflow: DeviceArray,
    site: int,
    eps: float,
) -> None:
    """Records x += norm(branch, post), then y = norm(x, weight), as `norm` does it.

    Args:
        branch: float32, shaped like x: what a block of the network adds once it is normalised.
        post, weight: float32 [columns].
        x: float32 [max rows or more, columns], updated.
        The others: see `norm`.

    Raises:
        ValueError: arrays that do not belong together, or columns that are no multiple of 4.
    """
    columns = _columns(
        max_rows, {"x": x, "y": y, "branch": branch}, {"weight": weight, "post": post}
    )
    program.add(
        _kernel(library, "residual"),
        grid=max_rows,
        rows=rows,
        branch=branch,
        post=post,
        x=x,
        weight=weight,
        y=y,
        overflow=overflow,
        columns=columns,
        site=site,
        eps=eps,
    )


def _kernel(library: Library, op: str) -> Kernel:
    (kernel,) = (k for k in library.family("norm") if k.spec.tile.get("op", "norm") == op)
    return kernel


def _columns(
    max_rows: int, matrices: dict[str, DeviceArray], vectors: dict[str, DeviceArray]
) -> int:
    """The columns of all of them; y is fp16, the others are float32."""
    arrays = matrices | vectors
    told = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
    columns = vectors["weight"].shape[-1]
    shapes = {array.shape[1:] for array in matrices.values()}
    shapes |= {array.shape for array in vectors.values()}
    types = {name: "float16" if name == "y" else "float32" for name in arrays}
    if shapes != {(columns,)} or columns % 4 or any(arrays[n].dtype != types[n] for n in arrays):
        raise ValueError(f"norm: {told}")
    if max_rows > min(array.shape[0] for array in matrices.values()):
        raise ValueError(f"norm: {max_rows} rows of {told}")
    return columns
