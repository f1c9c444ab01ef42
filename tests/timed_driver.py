"""A fake driver that keeps time, so that commands that time kernels run without a GPU.

Each launch, copy and event moves a clock. The times are made up: nothing here tests a kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from fake_driver import FakeDriver

from pyruntime.driver import api

EVENT_MS = 0.0012
COPY_MS = 0.05
MHZ = 1500
ATTRIBUTES = {
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "PCI_DOMAIN_ID": 0,
    "PCI_BUS_ID": 27,
    "PCI_DEVICE_ID": 0,
}


class TimedDriver(FakeDriver):
    """A device with 16 GiB of memory and a clock.

    Attributes:
        now: milliseconds that the GPU has worked.
        launched: names of all launched kernels.
        kernel_ms: how long a kernel takes, by name.
    """

    total = 16 << 30

    def __init__(self, kernel_ms: Callable[[str], float]) -> None:
        super().__init__()
        self.attributes |= ATTRIBUTES
        self.kernel_ms = kernel_ms
        self.now = 0.0
        self.launched: list[str] = []
        self._recorded: dict[int, float] = {}

    def _result(self, name: str, *arguments: Any) -> Any:
        match name, arguments:
            case "cuLaunchKernelEx", (_, kernel, parameters, _):
                self._launch(kernel, parameters)
            case "cuMemcpyDtoDAsync", _:
                self.now += COPY_MS
                return None  # what it copies is never looked at
            case "cuEventRecord" | "cuEventRecordWithFlags", (event, *_):
                self.now += EVENT_MS
                self._recorded[event] = self.now
            case "cuEventElapsedTime", (earlier, later):
                return self._recorded[later] - self._recorded[earlier]
        return super()._result(name, *arguments)

    def _launch(self, kernel: str, parameters: int) -> None:
        self.launched.append(kernel)
        self.now += self.kernel_ms(kernel)
        if kernel.startswith("clock"):
            block = ctypes.c_uint64.from_address(parameters).value
            out = ctypes.c_uint64.from_address(block).value
            (ctypes.c_int64 * 2).from_address(out)[:] = [200 * MHZ, 200_000]


def install(
    monkeypatch: pytest.MonkeyPatch, kernel_ms: Callable[[str], float] = lambda _: 0.01
) -> TimedDriver:
    """Replaces the driver for a test."""
    driver = TimedDriver(kernel_ms)
    monkeypatch.setattr(api, "_driver", driver)
    return driver
