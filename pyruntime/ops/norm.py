"""RMS normalisation."""

from __future__ import annotations

import numpy as np

from pyruntime.driver.library import Library
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
    (kernel,) = library.family("norm")
    (columns,) = weight.shape
    if x.shape[1:] != (columns,) or y.shape[1:] != (columns,) or columns % 4:
        raise ValueError(f"norm: x {x.shape}, y {y.shape}, weight {weight.shape}")
    dtypes = [array.dtype for array in (x, weight, y)]
    if dtypes != [np.float32, np.float32, np.float16]:
        raise ValueError(f"norm: x, weight, y are {dtypes}")
    if max_rows > min(x.shape[0], y.shape[0]):
        raise ValueError(f"norm: {max_rows} rows of x {x.shape}, y {y.shape}")
    program.add(
        kernel,
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
