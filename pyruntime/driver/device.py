"""A CUDA device and its primary context."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

from pyruntime.driver import api
from pyruntime.driver.allocation import Spare, free
from pyruntime.errors import DriverNotFoundError, EngineError


def device_count() -> int:
    """Devices that the driver shows.

    Raises:
        DriverNotFoundError: no usable driver.
    """
    return int(api.call("cuDeviceGetCount"))


def driver_version() -> str:
    """The newest CUDA version that the driver supports, such as "13.0"."""
    version = int(api.call("cuDriverGetVersion"))
    return f"{version // 1000}.{version % 1000 // 10}"


class Device:
    """Device `ordinal`, with its primary context retained until `close` or longer.

    The primary context is the one that the CUDA runtime (and so torch) uses: pointers and streams
    can be shared. `current()` pushes it for a block of code, then restores what was current.
    Memory that outlives `close` (a result, a cache) keeps the context until it is freed (`hold`).

    Attributes:
        allocated: bytes that arrays of this object hold now. peak: the most that they ever held.
        spare: memory of arrays that are gone, which `close` frees.
        lock: around all that threads change of the device's bookkeeping, that of arrays included.

    Raises:
        DriverNotFoundError: no driver, or no such device.
    """

    def __init__(self, ordinal: int = 0) -> None:
        count = device_count()
        if not 0 <= ordinal < count:
            raise DriverNotFoundError(
                f"no device cuda:{ordinal}: the driver shows {count} device(s)"
            )
        self.ordinal = ordinal
        self.handle = api.call("cuDeviceGet", ordinal)
        self.allocated = self.peak = 0
        self.lock = threading.RLock()  # a finalizer may come in the middle
        self.spare = Spare(self.lock)
        self._holders = 1
        self._closed = False
        self._context = api.call(
            "cuDevicePrimaryCtxRetain", self.handle, what=f"device cuda:{ordinal}"
        )
        self._current = _Current(self._context)

    def close(self) -> None:
        """Lets go of the primary context. Idempotent."""
        if not self._closed:
            self._closed = True
            self.spare.close()
            try:
                self.free_spare()
            finally:
                self.drop()

    def free_spare(self) -> bool:
        """Frees what there is to spare; whether that was anything. Raises CudaError."""
        found = False
        while (memory := self.spare.take_any())[0]:
            found = True
            free(self, *memory)
        return found

    def hold(self) -> None:
        """Keeps the context until a matching `drop`."""
        with self.lock:
            if self._holders == 0:
                raise EngineError(f"cuda:{self.ordinal} has been closed")
            self._holders += 1

    def drop(self) -> None:
        """Ends a `hold`; the last one releases the context."""
        with self.lock:
            self._holders -= 1
            if self._holders == 0:
                api.call("cuDevicePrimaryCtxRelease", self.handle)

    def count(self, nbytes: int) -> None:
        """Adds `nbytes`, negative where memory was freed, to `allocated`."""
        with self.lock:
            self.allocated += nbytes
            self.peak = max(self.peak, self.allocated)

    def current(self) -> _Current:
        """Makes the primary context current for a `with` block."""
        return self._current

    def attribute(self, name: str) -> int:
        """A device attribute by its name after CU_DEVICE_ATTRIBUTE_."""
        member = api.constant("CUdevice_attribute", f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(api.call("cuDeviceGetAttribute", member, self.handle))

    @cached_property
    def name(self) -> str:
        """Product name, such as "NVIDIA H200"."""
        raw: bytes = api.call("cuDeviceGetName", 100, self.handle)
        return raw.split(b"\0", 1)[0].decode()

    @cached_property
    def compute_capability(self) -> tuple[int, int]:
        """(major, minor)."""
        return (
            self.attribute("COMPUTE_CAPABILITY_MAJOR"),
            self.attribute("COMPUTE_CAPABILITY_MINOR"),
        )

    @cached_property
    def sm_count(self) -> int:
        """Multiprocessors."""
        return self.attribute("MULTIPROCESSOR_COUNT")

    @cached_property
    def smem_per_block(self) -> int:
        """The most shared memory that a block can opt in to, static part included, in bytes."""
        # One driver reported the value with bit 32 set; the attribute is an int of at most 31 bits.
        return self.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") & 0x7FFFFFFF

    @cached_property
    def smem_per_sm(self) -> int:
        """Shared memory of a multiprocessor in bytes."""
        return self.attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")

    @cached_property
    def smem_reserved(self) -> int:
        """Shared memory that the driver keeps per block, in bytes."""
        return self.attribute("RESERVED_SHARED_MEMORY_PER_BLOCK")

    def memory(self) -> tuple[int, int]:
        """(free, total) device memory in bytes."""
        with self.current():
            free, total = api.call("cuMemGetInfo")
        return int(free), int(total)


class _Entered(threading.local):
    """What the blocks that this thread is in have changed.

    Attributes:
        contexts: those of the blocks. mode: the thread's capture mode before the outermost one.
    """

    mode: Any

    def __init__(self) -> None:
        self.contexts: list[Any] = []


_entered = _Entered()


class _Current:
    """Pushes a context, unless the block around it has, and pops it.

    A thread may capture a graph in a mode (CUstreamCaptureMode "global", the default of torch) that
    forbids all threads what we do: the call fails, and so does the capture. What is done here has
    nothing to do with it, and by `cuThreadExchangeStreamCaptureMode` the thread says so meanwhile.

    Blocks may nest, and threads share one object. Every call to the driver stands in such a block.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._relaxed = api.constant("CUstreamCaptureMode", "CU_STREAM_CAPTURE_MODE_RELAXED")

    def __enter__(self) -> None:
        entered, context = _entered, self._context
        around = entered.contexts
        if not around:
            entered.mode = api.call("cuThreadExchangeStreamCaptureMode", self._relaxed)
        if not around or around[-1] is not context:
            api.call("cuCtxPushCurrent", context)
        around.append(context)

    def __exit__(self, *raised: object) -> None:
        entered = _entered
        around = entered.contexts
        around.pop()
        if not around or around[-1] is not self._context:
            api.call("cuCtxPopCurrent")
        if not around:
            api.call("cuThreadExchangeStreamCaptureMode", entered.mode)
