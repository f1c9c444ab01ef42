"""Device and pinned host memory. Every allocation is its own, of exactly the size asked for."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pyruntime.driver import api
from pyruntime.driver.device import Device
from pyruntime.errors import OutOfMemoryError


class DeviceArray:
    """A C-contiguous array in device memory; it owns its allocation unless it is a view of another.

    Attributes:
        ptr: device address. shape, dtype: as in NumPy. device: where it lies.

    `np.asarray(a)` copies to the host, after all work of the device's default and blocking streams.
    """

    def __init__(
        self,
        device: Device,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        *,
        what: str = "array",
        base: DeviceArray | None = None,
        offset: int = 0,
    ) -> None:
        self.device = device
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.nbytes = math.prod(shape) * self.dtype.itemsize
        self._base = base
        self.ptr: int
        if base is not None:
            if offset + self.nbytes > base.nbytes:
                raise ValueError(
                    f"a view of {self.nbytes} bytes at {offset} in {base.nbytes} bytes"
                )
            self.ptr = base.ptr + offset
        else:
            self.ptr = _allocate(device, max(self.nbytes, 1), what)
            device.count(self.nbytes)

    def close(self) -> None:
        """Frees the memory (not that of a view's base). Idempotent."""
        ptr, self.ptr = self.ptr, 0
        if ptr and self._base is None:
            try:
                with self.device.current():
                    api.call("cuMemFree", ptr)
                self.device.count(-self.nbytes)
            finally:
                self.device.drop()

    def __del__(self) -> None:
        # At interpreter exit the driver may be gone already: the process frees the memory.
        try:
            self.close()
        except Exception:
            self.ptr = 0

    def view(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """A view of `shape` and `dtype`, `offset` bytes in. It keeps this array alive."""
        return DeviceArray(self.device, shape, dtype, base=self, offset=offset)

    def rows(self, start: int, stop: int) -> DeviceArray:
        """A view of rows [start, stop) of the first axis."""
        stride = self.nbytes // max(self.shape[0], 1)
        return self.view(start * stride, (stop - start, *self.shape[1:]), self.dtype)

    def upload(self, values: NDArray[Any]) -> DeviceArray:
        """Copies `values` (same shape, converted to this dtype) here and waits; returns self."""
        host = np.ascontiguousarray(values, self.dtype)
        if host.shape != self.shape:
            raise ValueError(f"values of shape {host.shape} for an array of shape {self.shape}")
        if host.nbytes:
            with self.device.current():
                api.call("cuMemcpyHtoD", self.ptr, host.ctypes.data, host.nbytes, what=str(self))
                api.call("cuStreamSynchronize", 0)  # other streams do not wait for this one
        return self

    def fill(self, byte: int) -> DeviceArray:
        """Sets every byte and waits; returns self."""
        if self.nbytes:
            with self.device.current():
                api.call("cuMemsetD8", self.ptr, byte, self.nbytes, what=str(self))
                api.call("cuStreamSynchronize", 0)
        return self

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a device array cannot be shared with the host without a copy")
        host = np.empty(self.shape, self.dtype)
        if host.nbytes:
            with self.device.current():
                api.call("cuMemcpyDtoH", host.ctypes.data, self.ptr, host.nbytes, what=str(self))
        return host if dtype is None else host.astype(dtype)

    def __str__(self) -> str:
        return f"array {list(self.shape)} of {self.dtype}, {self.nbytes:,} bytes"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.ptr, False),
            "strides": None,
            "stream": 1,
        }


class PinnedBuffer:
    """Page-locked host memory of `nbytes`; `array` is its bytes as uint8."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        with device.current():
            self.ptr: int = int(
                api.call("cuMemHostAlloc", nbytes, 0, what=f"{nbytes} bytes of pinned host memory")
            )
        raw = (ctypes.c_uint8 * nbytes).from_address(self.ptr)
        self.array: NDArray[np.uint8] = np.ctypeslib.as_array(raw)

    def close(self) -> None:
        """Frees the memory; `array` must not be used afterwards. Idempotent."""
        ptr, self.ptr = self.ptr, 0
        if ptr:
            self.array = np.empty(0, np.uint8)
            with self._device.current():
                api.call("cuMemFreeHost", ptr)

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:
            self.ptr = 0


def _allocate(device: Device, nbytes: int, what: str) -> int:
    device.hold()
    try:
        with device.current():
            return int(api.call("cuMemAlloc", nbytes))
    except BaseException as error:
        device.drop()
        if not isinstance(error, OutOfMemoryError):
            raise
        free, total = device.memory()
        raise OutOfMemoryError(
            f"{what}: {nbytes:,} bytes asked for, {free:,} of {total:,} free on {device.name}"
        ) from error
