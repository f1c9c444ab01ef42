"""The SM clock before or after a run, as the GPU itself counts it."""

from __future__ import annotations

import numpy as np

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.ops.clock import clock

NANOSECONDS = 200_000  # so short that clocks do not change meanwhile


class ClockProbe:
    """Reads the SM clock of a device, on a stream of its own."""

    def __init__(self, library: Library) -> None:
        self._stream = Stream(library.device)
        self._out = DeviceArray(library.device, (2,), np.int64, what="clock reading")
        self._program = Program()
        clock(self._program, library, out=self._out, nanoseconds=NANOSECONDS)

    def mhz(self) -> float:
        """The clock now; takes as long as it measures."""
        with self._stream.device.current():
            self._program.run(self._stream)
            self._stream.synchronize()
        cycles, nanoseconds = np.asarray(self._out)
        return float(1e3 * cycles / nanoseconds)

    def close(self) -> None:
        """Frees what it holds. Idempotent."""
        self._stream.close()
        self._out.close()
