"""Streams and events."""

from __future__ import annotations

from typing import Any

from pyruntime.driver import api
from pyruntime.driver.device import Device


class Stream:
    """A non-blocking stream of our own on `device`, or a wrapper around a foreign handle."""

    def __init__(self, device: Device, handle: int | None = None) -> None:
        self.device = device
        self._owned = handle is None
        self.handle: Any = handle
        if handle is None:
            flag = api.constant("CUstream_flags", "CU_STREAM_NON_BLOCKING")
            with device.current():
                self.handle = api.call("cuStreamCreate", flag)

    def synchronize(self) -> None:
        """Waits for all work of the stream. The GIL is free meanwhile."""
        with self.device.current():
            api.call("cuStreamSynchronize", self.handle)

    def copy_to_device(self, dst: int, src: int, nbytes: int) -> None:
        """Enqueues a host-to-device copy; the host memory must stay as it is until it has run."""
        api.call("cuMemcpyHtoDAsync", dst, src, nbytes, self.handle)

    def copy_to_host(self, dst: int, src: int, nbytes: int) -> None:
        """Enqueues a device-to-host copy."""
        api.call("cuMemcpyDtoHAsync", dst, src, nbytes, self.handle)

    def copy_on_device(self, dst: int, src: int, nbytes: int) -> None:
        """Enqueues a copy from device memory to device memory."""
        api.call("cuMemcpyDtoDAsync", dst, src, nbytes, self.handle)

    def fill(self, dst: int, byte: int, nbytes: int) -> None:
        """Enqueues a byte fill."""
        api.call("cuMemsetD8Async", dst, byte, nbytes, self.handle)

    def close(self) -> None:
        """Destroys an own stream. Idempotent."""
        if self._owned and self.handle is not None:
            with self.device.current():
                api.call("cuStreamDestroy", self.handle)
        self.handle = None


class Event:
    """A timing event."""

    def __init__(self, device: Device) -> None:
        self._device = device
        with device.current():
            self.handle = api.call("cuEventCreate", 0)

    def record(self, stream: Stream) -> None:
        """Enqueues the event."""
        with self._device.current():
            api.call("cuEventRecord", self.handle, stream.handle)

    def synchronize(self) -> None:
        """Waits until the event has been reached."""
        with self._device.current():
            api.call("cuEventSynchronize", self.handle)

    def milliseconds_since(self, earlier: Event) -> float:
        """Milliseconds between two reached events, to about 0.5 us."""
        with self._device.current():
            return float(api.call("cuEventElapsedTime", earlier.handle, self.handle))

    def close(self) -> None:
        """Destroys the event. Idempotent."""
        if self.handle is not None:
            with self._device.current():
                api.call("cuEventDestroy", self.handle)
            self.handle = None
