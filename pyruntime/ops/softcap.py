"""Capped logits."""

from __future__ import annotations

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program


def softcap(
    program: Program,
    library: Library,
    *,
    rows: DeviceArray,
    max_rows: int,
    x: DeviceArray,
    cap: float,
) -> None:
    """Records x = cap tanh(x / cap) in each of the first `rows` rows.

    Source: Gemma 2, arXiv:2408.00118, section 2.

    Args:
        rows: int32, the count of live rows on the device; `max_rows` is the most it will be.
        x: float32 [max rows or more, columns], updated.
        cap: positive.

    Raises:
        ValueError: an array or number that is none of these.
    """
    if x.dtype != "float32" or len(x.shape) != 2 or not 1 <= max_rows <= x.shape[0]:
        raise ValueError(f"softcap: {max_rows} rows of x {x.dtype} {x.shape}")
    if not cap > 0:
        raise ValueError(f"softcap: a cap of {cap} is not positive")
    (kernel,) = library.family("softcap")
    columns = x.shape[1]
    program.add(
        kernel,
        grid=(max_rows, -(-columns // int(kernel.spec.tile["columns"]))),
        rows=rows,
        x=x,
        columns=columns,
        cap=cap,
    )
