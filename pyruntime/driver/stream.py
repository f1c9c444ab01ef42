"""Streams and events."""

from __future__ import annotations

import time
from typing import Any

from pyruntime.driver import api
from pyruntime.driver.device import Device
from pyruntime.driver.memory import rectangle
from pyruntime.errors import CudaError


class Stream:
    """A non-blocking stream of our own on `device`, or a wrapper around a foreign handle.

    Blocks of an `urgent` one are placed before those of others that wait for a multiprocessor, too.
    One that is `beside` another has that one's priority.
    """

    def __init__(
        self,
        device: Device,
        handle: int | None = None,
        *,
        urgent: bool = False,
        beside: Stream | None = None,
    ) -> None:
        self.device = device
        self._owned = handle is None
        self.handle: Any = handle
        if handle is None:
            flag = api.constant("CUstream_flags", "CU_STREAM_NON_BLOCKING")
            with device.current():
                priority = 0
                if beside is not None:
                    priority = api.call("cuStreamGetPriority", beside.handle)
                elif urgent:  # from the least to the greatest priority, which is the lowest number
                    priority = api.call("cuCtxGetStreamPriorityRange")[1]
                self.handle = api.call("cuStreamCreateWithPriority", flag, priority)

    def synchronize(self, seconds: float | None = None) -> bool:
        """Waits for all work of the stream; whether it is over. The GIL is free meanwhile.

        Args:
            seconds: to wait at most. The driver has no such wait: it is asked again and again, with
                pauses that grow with the time that has passed, from 20 us to 1 ms.
        """
        with self.device.current():
            return self.finish(seconds)

    def finish(self, seconds: float | None = None) -> bool:
        """What `synchronize` does; the device's context must be current."""
        if seconds is None:
            api.call("cuStreamSynchronize", self.handle)
            return True
        began = time.monotonic()
        while not self._is_done():
            passed = time.monotonic() - began
            if passed >= seconds:
                return False
            time.sleep(min(max(passed / 8, 20e-6), 1e-3, seconds - passed))
        return True

    def _is_done(self) -> bool:
        try:
            api.call("cuStreamQuery", self.handle)
        except CudaError as error:
            if error.code != api.NOT_READY:
                raise
            return False
        return True

    def wait(self, event: Event) -> None:
        """Enqueues a wait for what `event` was last recorded after; the host does not wait."""
        with self.device.current():
            api.call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def record(self, event: Event) -> None:
        """Enqueues an event; the device's context must be current, as for all that follow."""
        api.call("cuEventRecord", event.handle, self.handle)

    def record_in_graph(self, event: Event) -> None:
        """Captures an event that each replay of the graph records, where `record` would make one
        that is there to bind streams to one another. The stream must be captured."""
        flag = api.constant("CUevent_record_flags", "CU_EVENT_RECORD_EXTERNAL")
        api.call("cuEventRecordWithFlags", event.handle, self.handle, flag)

    def captured(self) -> Any:
        """The node of what was captured last. The stream must be captured."""
        *_, nodes, _, _ = api.call("cuStreamGetCaptureInfo", self.handle)
        return nodes[0]

    def copy_to_device(self, dst: int, src: int, nbytes: int) -> None:
        """Enqueues a host-to-device copy; the host memory must stay as it is until it has run."""
        api.call("cuMemcpyHtoDAsync", dst, src, nbytes, self.handle)

    def copy_to_host(self, dst: int, src: int, nbytes: int) -> None:
        """Enqueues a device-to-host copy."""
        api.call("cuMemcpyDtoHAsync", dst, src, nbytes, self.handle)

    def copy_on_device(self, dst: int, src: int, nbytes: int) -> None:
        """Enqueues a copy from device memory to device memory."""
        api.call("cuMemcpyDtoDAsync", dst, src, nbytes, self.handle)

    def copy_columns(self, dst: int, pitch: int, src: int, width: int, rows: int) -> None:
        """Enqueues a copy on the device of `rows` rows of `width` bytes, dense at `src`.

        At `dst` a row begins every `pitch` bytes.
        """
        copy = rectangle((dst, pitch), (src, width), width, rows)
        api.call("cuMemcpy2DAsync", copy, self.handle)

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
    """A point in a stream; `timed` ones have a time."""

    def __init__(self, device: Device, *, timed: bool = True) -> None:
        self._device = device
        flag = api.constant("CUevent_flags", "CU_EVENT_DISABLE_TIMING")
        with device.current():
            self.handle = api.call("cuEventCreate", 0 if timed else flag)

    def record(self, stream: Stream) -> None:
        """Enqueues the event."""
        with self._device.current():
            stream.record(self)

    def synchronize(self) -> None:
        """Waits until the event has been reached."""
        with self._device.current():
            api.call("cuEventSynchronize", self.handle)

    def milliseconds_since(self, earlier: Event) -> float:
        """Milliseconds between two reached events, to about 0.5 us."""
        with self._device.current():
            return self.elapsed(earlier)

    def elapsed(self, earlier: Event) -> float:
        """What `milliseconds_since` gives; the device's context must be current."""
        return float(api.call("cuEventElapsedTime", earlier.handle, self.handle))

    def close(self) -> None:
        """Destroys the event. Idempotent."""
        if self.handle is not None:
            with self._device.current():
                api.call("cuEventDestroy", self.handle)
            self.handle = None
