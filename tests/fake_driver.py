"""A CUDA driver that computes nothing: memory is the host's, a launch only moves a clock.

Kernels are those of the installed cubins. It lets commands that time kernels run without a GPU; the
times are made up, so nothing here tests a kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from pyruntime.cubin.installed import manifest
from pyruntime.driver import api

ATTRIBUTES = {
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "PCI_DOMAIN_ID": 0,
    "PCI_BUS_ID": 27,
    "PCI_DEVICE_ID": 0,
}
FUNCTION = {"SHARED_SIZE_BYTES": 0, "MAX_THREADS_PER_BLOCK": 1024, "NUM_REGS": 64}
ANYWHERE = ("cuInit", "cuDriver", "cuDevice", "cuCtx")  # calls that need no context
EVENT_MS = 0.0012
COPY_MS = 0.05
MHZ = 1500


class FakeDriver:
    """Stands in for the module `cuda.bindings.driver`.

    Attributes:
        now: milliseconds that the GPU has worked.
        launched: names of all launched kernels.
        kernel_ms: how long a kernel takes, by name.
    """

    def __init__(self, kernel_ms: Callable[[str], float]) -> None:
        from cuda.bindings import driver

        self._enums = driver
        self._contexts = 0
        self.kernel_ms = kernel_ms
        self.now = 0.0
        self.launched: list[str] = []
        self._memory: dict[int, Any] = {}

    def __getattribute__(self, name: str) -> Any:
        """A call that needs a context fails without one, as it does in a driver."""
        call = super().__getattribute__(name)
        if name.startswith(ANYWHERE) or not name.startswith("cu") or self._contexts:
            return call
        return lambda *_: (self._enums.CUresult.CUDA_ERROR_INVALID_CONTEXT,)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(self._enums, name)
        return lambda *_: (0,)  # whatever needs no answer

    def cuCtxPushCurrent(self, context: Any) -> Any:  # noqa: N802
        self._contexts += 1
        return (0,)

    def cuCtxPopCurrent(self) -> Any:  # noqa: N802
        self._contexts -= 1
        return 0, "context"

    def cuDeviceGetCount(self) -> Any:  # noqa: N802
        return 0, 1

    def cuDriverGetVersion(self) -> Any:  # noqa: N802
        return 0, 13000

    def cuDeviceGet(self, ordinal: int) -> Any:  # noqa: N802
        return 0, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:  # noqa: N802
        return 0, "context"

    def cuDeviceGetName(self, length: int, device: int) -> Any:  # noqa: N802
        return 0, b"Made-up GPU\0"

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> Any:  # noqa: N802
        name = attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        built = manifest()["architectures"]
        number = 90 if "90a" in built else int("".join(filter(str.isdigit, built[-1])))
        computed = {
            "COMPUTE_CAPABILITY_MAJOR": number // 10,
            "COMPUTE_CAPABILITY_MINOR": number % 10,
        }
        return 0, (ATTRIBUTES | computed)[name]

    def cuMemGetInfo(self) -> Any:  # noqa: N802
        return 0, 16 << 30, 16 << 30

    def cuMemAlloc(self, nbytes: int) -> Any:  # noqa: N802
        memory = ctypes.create_string_buffer(nbytes)
        self._memory[ctypes.addressof(memory)] = memory
        return 0, ctypes.addressof(memory)

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:  # noqa: N802
        return self.cuMemAlloc(nbytes)

    def cuMemFree(self, address: int) -> Any:  # noqa: N802
        del self._memory[address]
        return (0,)

    cuMemFreeHost = cuMemFree  # noqa: N815

    def cuMemcpyHtoD(self, dst: int, src: int, nbytes: int, stream: Any = None) -> Any:  # noqa: N802
        ctypes.memmove(dst, src, nbytes)
        return (0,)

    cuMemcpyDtoH = cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = cuMemcpyHtoD  # noqa: N815

    def cuMemcpyDtoDAsync(self, dst: int, src: int, nbytes: int, stream: Any) -> Any:  # noqa: N802
        self.now += COPY_MS  # what it holds is never looked at
        return (0,)

    def cuMemsetD8(self, dst: int, byte: int, nbytes: int) -> Any:  # noqa: N802
        ctypes.memset(dst, byte, nbytes)
        return (0,)

    def cuModuleLoadData(self, data: bytes) -> Any:  # noqa: N802
        return 0, "module"

    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:  # noqa: N802
        return 0, name.decode()

    def cuFuncGetAttribute(self, attribute: Any, function: Any) -> Any:  # noqa: N802
        return 0, FUNCTION[attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_")]

    def cuOccupancyMaxActiveClusters(self, function: Any, config: Any) -> Any:  # noqa: N802
        return 0, 60

    def cuTensorMapEncodeTiled(self, *shape: Any) -> Any:  # noqa: N802
        return 0, self._enums.CUtensorMap()

    def cuStreamCreate(self, flags: Any) -> Any:  # noqa: N802
        return 0, 1

    def cuEventCreate(self, flags: int) -> Any:  # noqa: N802
        return 0, [0.0]

    def cuEventRecord(self, event: list[float], stream: Any) -> Any:  # noqa: N802
        self.now += EVENT_MS
        event[0] = self.now
        return (0,)

    def cuEventElapsedTime(self, earlier: list[float], later: list[float]) -> Any:  # noqa: N802
        return 0, later[0] - earlier[0]

    def cuLaunchKernelEx(self, config: Any, function: str, *rest: Any) -> Any:  # noqa: N802
        return self.cuLaunchKernel(function, *rest)

    def cuLaunchKernel(self, function: str, *rest: Any) -> Any:  # noqa: N802
        self.launched.append(function)
        self.now += self.kernel_ms(function)
        if function.startswith("clock"):
            block = ctypes.c_uint64.from_address(rest[-2]).value
            out = ctypes.c_uint64.from_address(block).value
            (ctypes.c_int64 * 2).from_address(out)[:] = [200 * MHZ, 200_000]
        return (0,)


def install(
    monkeypatch: pytest.MonkeyPatch, kernel_ms: Callable[[str], float] = lambda _: 0.01
) -> FakeDriver:
    """Replaces the driver for a test."""
    driver = FakeDriver(kernel_ms)
    monkeypatch.setattr(api, "bindings", lambda: driver)
    return driver
