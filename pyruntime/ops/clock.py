"""The SM clock, measured by the GPU itself."""

from __future__ import annotations

import numpy as np

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program


def clock(program: Program, library: Library, *, out: DeviceArray, nanoseconds: int) -> None:
    """Records a measurement of about `nanoseconds`: cycles to out[0], nanoseconds to out[1].

    Args:
        out: int64 [2], written.
        nanoseconds: much more than the global timer's tick (at most 1,000).

    Raises:
        ValueError: another array, or no time.
    """
    if out.shape != (2,) or out.dtype != np.int64 or nanoseconds < 1:
        raise ValueError(f"clock: out {out.dtype} {out.shape}, {nanoseconds} ns")
    (kernel,) = library.family("clock")
    program.add(kernel, grid=1, out=out, nanoseconds=nanoseconds)
