"""Device memory from the driver, and spare memory that need not be asked for again.

The driver may take long to allocate, and to free it waits for the device. So the memory of an array
that each call makes anew is kept for the next one.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING

from pyruntime.driver import api
from pyruntime.errors import OutOfMemoryError

if TYPE_CHECKING:
    from pyruntime.driver.device import Device


class Spare:
    """Memory of arrays that are gone, for new ones of the same size. It counts as allocated.

    Nothing waits: so work may be under way on it only where all that the next array is used for
    comes after that.

    Args:
        lock: the device's.

    Attributes:
        most: bytes that are kept at most, 0 at first. nbytes: those that are kept now.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.most = self.nbytes = 0
        self._kept: defaultdict[int, list[int]] = defaultdict(list)  # addresses by bytes
        self._lock = lock

    def put(self, address: int, nbytes: int) -> bool:
        """Keeps memory that `allocate` gave, if there is room; whether there is."""
        with self._lock:
            if self.nbytes + nbytes > self.most:
                return False
            self.nbytes += nbytes
            self._kept[nbytes].append(address)
            return True

    def take(self, nbytes: int) -> int:
        """The address of memory of that size, of what was kept last: the caller's from now on.

        0 if there is none.
        """
        with self._lock:
            kept = self._kept.get(nbytes)
            if not kept:
                return 0
            self.nbytes -= nbytes
            return kept.pop()

    def take_any(self) -> tuple[int, int]:
        """Address and bytes of memory of any size, likewise; (0, 0) if there is none."""
        with self._lock:
            for nbytes, kept in self._kept.items():
                if kept:
                    return self.take(nbytes), nbytes
        return 0, 0

    def close(self) -> None:
        """Keeps nothing more; what it has is left to be taken."""
        with self._lock:
            self.most = 0


def allocate(device: Device, nbytes: int, what: str) -> int:
    """The address of new memory, which keeps the device's context.

    Raises:
        OutOfMemoryError: also without what the device had to spare; the text says for `what`.
    """
    device.hold()
    try:
        address = _allocate(device, max(nbytes, 1))
    except BaseException as error:
        device.drop()
        if not isinstance(error, OutOfMemoryError):
            raise
        left, total = device.memory()
        raise OutOfMemoryError(
            f"{what}: {nbytes:,} bytes asked for, {left:,} of {total:,} free on {device.name}"
        ) from error
    device.count(nbytes)
    return address


def _allocate(device: Device, nbytes: int) -> int:
    with device.current():
        try:
            return int(api.make("cuMemAlloc", "cuMemFree", nbytes))
        except OutOfMemoryError:
            if not device.free_spare():
                raise
        return int(api.make("cuMemAlloc", "cuMemFree", nbytes))


def free(device: Device, address: int, nbytes: int) -> None:
    """Frees what `allocate` gave."""
    try:
        with device.current():
            api.call("cuMemFree", address)
        device.count(-nbytes)
    finally:
        device.drop()
