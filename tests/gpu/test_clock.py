"""The clock that the GPU measures is one that the device can have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyruntime.driver.program import Program
from pyruntime.ops.clock import clock


@pytest.mark.smoke
def test_clock_is_within_the_device_s(gpu: Any) -> None:
    out, program = gpu.empty((2,), np.int64), Program()
    clock(program, gpu.library, out=out, nanoseconds=200_000)
    for _ in range(3):
        gpu.run(program)
        cycles, nanoseconds = gpu.download(out)
        assert 200_000 <= nanoseconds < 10_000_000
        highest = gpu.device.attribute("CLOCK_RATE") / 1e3  # kHz to MHz
        assert 100 < 1e3 * cycles / nanoseconds < 1.02 * highest


def test_bad_arguments_are_refused(gpu: Any) -> None:
    with pytest.raises(ValueError, match="clock"):
        clock(Program(), gpu.library, out=gpu.empty((2,), np.float32), nanoseconds=1)
