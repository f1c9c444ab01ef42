"""Device and pinned host memory. Every allocation is its own, of exactly the size asked for."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pyruntime.driver import api, dlpack
from pyruntime.driver.allocation import allocate, free
from pyruntime.driver.device import Device


class DeviceArray:
    """A C-contiguous array in device memory; it owns its allocation unless it is a view of another.

    Attributes:
        ptr: device address, 0 once closed. shape, dtype: as in NumPy. device: where it lies.

    Args:
        spare: whether its memory may be that of an earlier such array, and a later one's when this
            one is gone, see `Spare`; not once it has been shared, as work on other streams may then
            outlive the array, nor if it is closed. Whoever lets a kernel of their own work at `ptr`
            keeps the array until that has ended.

    `np.asarray(a)` copies to the host, after all work of the device's default and blocking streams.
    Array libraries share the memory through `__dlpack__`, which keeps it allocated for them, or
    `__cuda_array_interface__`, with which they must keep the array and nobody may close it.

    Neither waits for anything: a prefill returns when its work is done, as do `upload` and `fill`,
    so a result is complete on every stream. K/V of a cache are, too, unless another thread has a
    prefill with that cache under way, or one whose time ran out was the last call: who reads them
    then may find old and new values mixed, and no stream to wait for would help. Let the prefill
    return first, or make another call.
    """

    _base: DeviceArray | None = None
    _leases = _allocated = 0

    def __init__(
        self,
        device: Device,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        *,
        what: str = "array",
        base: DeviceArray | None = None,
        offset: int = 0,
        spare: bool = False,
    ) -> None:
        self.device = device
        self.shape = shape
        self.dtype = dtype = np.dtype(dtype)
        self.nbytes = dtype.itemsize
        for extent in shape:
            self.nbytes *= extent
        self._spare = spare
        self.ptr: int
        if base is None:
            self._what = what
            found = device.spare.take(self.nbytes) if spare else 0
            self.ptr = self._allocated = found or allocate(device, self.nbytes, what)
        else:
            self._base, self._what = base._base or base, base._what
            base._check_open()
            if offset + self.nbytes > base.nbytes:
                raise ValueError(
                    f"a view of {self.nbytes} bytes at {offset} in {base.nbytes} bytes"
                )
            self.ptr = base.ptr + offset

    def close(self) -> None:
        """Frees the memory (not that of a view's base). Idempotent.

        What `__dlpack__` has shared is freed when its last consumer is done with it, too.
        """
        self._spare = False
        self.ptr = 0
        self._free_unused()

    def _free_unused(self) -> None:
        """Frees what was allocated here, once nobody uses it."""
        if not self._allocated or api.forked:  # where a thread that is not there may have a lock
            return  # a view, or it has been freed, or it is the parent's
        with self.device.lock:
            if self.ptr or self._leases:
                return
            address, self._allocated = self._allocated, 0
        if address and not (self._spare and self.device.spare.put(address, self.nbytes)):
            free(self.device, address, self.nbytes)

    def __del__(self) -> None:
        # At interpreter exit the driver may be gone already: the process frees the memory.
        try:
            self.ptr = 0
            self._free_unused()
        except Exception:
            pass

    def _check_open(self) -> None:
        if not self.ptr or (self._base is not None and not self._base.ptr):
            raise ValueError(f"{self._what}: this {self} has been closed")

    def view(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """A view of `shape` and `dtype`, `offset` bytes in. It keeps the memory's owner alive.

        Raises:
            ValueError: it does not fit, or this array has been closed.
        """
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
        self._check_open()
        host = np.empty(self.shape, self.dtype)
        if host.nbytes:
            with self.device.current():
                api.call("cuMemcpyDtoH", host.ctypes.data, self.ptr, host.nbytes, what=str(self))
        return host if dtype is None else host.astype(dtype)

    def __str__(self) -> str:
        return f"array {list(self.shape)} of {self.dtype}, {self.nbytes:,} bytes"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the CUDA Array Interface; writable, and with no stream to wait for.

        Raises:
            ValueError: the array, or the one that it is a view of, has been closed.
            EngineError: this is a forked child.
        """
        api.bindings()
        self._check_open()
        (self._base or self)._spare = False
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.ptr if self.nbytes else 0, False),
            "strides": None,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """(kDLCUDA, ordinal); ordinals are those of the driver, as everywhere in CUDA."""
        return dlpack.CUDA, self.device.ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule that shares the memory, writable, and keeps it for the consumer.

        Args:
            stream: the consumer's stream: None or 1 (the legacy default stream), 2 (that of each
                thread), an address, or -1. Nothing is enqueued on it: see the class.
            max_version: the newest DLPack version that the consumer knows; from (1, 0) on the
                capsule is a versioned one (with NumPy 2.1 or newer), else a legacy one.
            dl_device: None or the array's own device. copy: None or False.

        Raises:
            ValueError: another stream; the array, or the one that it is a view of, has been closed.
            BufferError: another device, or a copy, is asked for.
            EngineError: this is a forked child.
        """
        if stream is not None and (not isinstance(stream, int) or stream < -1 or stream == 0):
            raise ValueError(f"stream={stream!r} is no CUDA stream: None, -1, 1, 2 or an address")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(
                f"{self._what}: this {self} lies on cuda:{self.device.ordinal}, not on the DLPack "
                f"device {tuple(dl_device)}; np.asarray copies it to the host"
            )
        if copy:
            raise BufferError(f"{self._what}: this {self} is shared, not copied")
        address = self.ptr  # another thread may close the array once there is a lease
        return dlpack.capsule(
            self._lend(), address, self.shape, self.dtype, self.device.ordinal,
            versioned=max_version is not None and max_version[0] >= 1,
        )  # fmt: skip

    def _lend(self) -> _Lease:
        api.bindings()
        owner = self._base or self
        with owner.device.lock:
            self._check_open()
            owner._leases += 1
            owner._spare = False
        return _Lease(owner)


class _Lease:
    """A consumer's use of the memory of `owner`. It ends with this object, in any thread."""

    def __init__(self, owner: DeviceArray) -> None:
        self._owner = owner

    def __del__(self) -> None:
        # At interpreter exit the driver may be gone already: the process frees the memory.
        try:
            if not api.forked:
                with self._owner.device.lock:
                    self._owner._leases -= 1
                self._owner._free_unused()
        except Exception:
            pass


def rectangle(
    to: tuple[int, int],
    source: tuple[int, int],
    width: int,
    rows: int,
    *,
    kinds: tuple[str, str] = ("Device", "Device"),
) -> Any:
    """The driver's description of a copy of `rows` rows of `width` bytes.

    Args:
        to, source: an address, and the bytes from one row to the next.
        kinds: of memory, "Device" or "Host", of `to` and `source`.
    """
    copy = api.bindings().CUDA_MEMCPY2D()
    copy.WidthInBytes, copy.Height = width, rows
    for end, (address, pitch), kind in zip(("dst", "src"), (to, source), kinds, strict=True):
        memory = api.constant("CUmemorytype", f"CU_MEMORYTYPE_{kind.upper()}")
        setattr(copy, f"{end}MemoryType", memory)
        setattr(copy, f"{end}{kind}", address)
        setattr(copy, f"{end}Pitch", pitch)
    return copy


Plane = DeviceArray | NDArray[Any]


def copy_starts(to: Plane, source: Plane, width: int, rows: int) -> None:
    """Copies the first `width` bytes of each of `rows` equal rows, and waits.

    Both are C-contiguous, and one at least lies on a device.
    """
    if not width * rows:
        return
    device = next(array.device for array in (to, source) if isinstance(array, DeviceArray))
    ends = [
        (array.ptr, "Device") if isinstance(array, DeviceArray) else (array.ctypes.data, "Host")
        for array in (to, source)
    ]
    (to_at, to_kind), (source_at, source_kind) = ends
    copy = rectangle(
        (to_at, to.nbytes // rows), (source_at, source.nbytes // rows), width, rows,
        kinds=(to_kind, source_kind),
    )  # fmt: skip
    with device.current():
        api.call("cuMemcpy2DAsync", copy, 0, what=f"{rows} rows of {width:,} bytes")
        api.call("cuStreamSynchronize", 0)


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
