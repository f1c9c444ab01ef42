"""Matrices from a GGUF file into device memory as fp16.

Threaded reads into a ring of pinned buffers, asynchronous copies and dequantization on the GPU run
at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray, PinnedBuffer
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Event, Stream
from pyruntime.errors import CudaError, NumericalError
from pyruntime.model.live import NO_OVERFLOW
from pyruntime.ops.dequant import dequantize

if TYPE_CHECKING:
    from pyruntime.gguf import GGUFFile, TensorInfo

SLOT_BYTES = 8 << 20
SLOTS = 8
READERS = 4


@dataclass(frozen=True)
class MatrixPart:
    """A tensor of the file whose row r becomes row row0 + r * row_step of `out`.

    An `out` of float16 gets the dequantized row, one of uint8 its packed bytes as they are.
    """

    tensor: TensorInfo
    out: DeviceArray
    row0: int
    row_step: int


@dataclass(frozen=True)
class _Chunk:
    part: MatrixPart
    site: int  # index of the part
    first: int  # rows [first, first + rows) of the tensor
    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class _Slot:
    """A pinned buffer, its device twin, and the event after which both are free again.

    `resources` closes them.
    """

    def __init__(self, device: Device, nbytes: int, resources: ExitStack) -> None:
        own = resources.enter_context
        self.pinned = own(closing(PinnedBuffer(device, nbytes)))
        self.staging = own(closing(DeviceArray(device, (nbytes,), np.uint8, what="staging buffer")))
        self.free = own(closing(Event(device)))


def load_matrices(
    file: GGUFFile,
    parts: list[MatrixPart],
    library: Library,
    progress: Callable[[int], object],
) -> None:
    """Fills the `out` arrays of `parts` and waits for it.

    Args:
        progress: called with the bytes of each piece that has been handed to the GPU.

    Raises:
        GGUFError: a read failed. NumericalError: a weight is out of fp16's range.
    """
    device = library.device
    slot_bytes = max([SLOT_BYTES, *(_row_bytes(part) for part in parts)])
    resources = ExitStack()
    stream = resources.enter_context(closing(Stream(device)))
    slots: list[_Slot] = []
    reads: deque[tuple[Future[None], _Slot, _Chunk]] = deque()

    def finish() -> None:
        """Hands the oldest read to the GPU."""
        read, slot, chunk = reads.popleft()
        read.result()
        part = chunk.part
        if part.out.dtype == np.uint8:
            target = part.out.ptr + chunk.first * chunk.row_bytes
            stream.copy_to_device(target, slot.pinned.ptr, chunk.nbytes)
        else:
            stream.copy_to_device(slot.staging.ptr, slot.pinned.ptr, chunk.nbytes)
            unpack(slot, chunk)
        slot.free.record(stream)
        progress(chunk.nbytes)

    def unpack(slot: _Slot, chunk: _Chunk) -> None:
        """Dequantizes what is on its way to the slot's staging buffer."""
        program = Program()
        part = chunk.part
        assert part.tensor.type is not None  # unknown types were refused with the config
        dequantize(
            program,
            library,
            type_name=part.tensor.type.name,
            source=slot.staging,
            rows=chunk.rows,
            columns=part.tensor.shape[1],
            out=part.out,
            row0=part.row0 + chunk.first * part.row_step,
            row_step=part.row_step,
            overflow=overflow,
            site=chunk.site,
        )
        program.run(stream)

    def release() -> None:
        for read, _, _ in reads:
            read.cancel()
        pool.shutdown(wait=True)  # nobody writes into the buffers any more
        with resources:
            stream.synchronize()

    with ThreadPoolExecutor(READERS, "pyruntime-read") as pool, device.current():
        try:
            word = DeviceArray(device, (1,), np.int32, what="overflow word")
            overflow = resources.enter_context(closing(word))
            overflow.upload(np.array([NO_OVERFLOW]))
            for index, chunk in enumerate(_chunks(parts, slot_bytes)):
                if len(reads) == SLOTS:
                    finish()
                if len(slots) < SLOTS:
                    slots.append(_Slot(device, slot_bytes, resources))
                slot = slots[index % SLOTS]
                slot.free.synchronize()
                out = slot.pinned.array[: chunk.nbytes].data
                offset = chunk.first * chunk.row_bytes
                reads.append(
                    (pool.submit(file.read_into, chunk.part.tensor, offset, out), slot, chunk)
                )
            while reads:
                finish()
            stream.synchronize()
            site = int(np.asarray(overflow)[0])
        except BaseException:
            with suppress(CudaError):  # the first failure is the one to report
                release()
            raise
        release()
    if site != NO_OVERFLOW:
        name = parts[site].tensor.name
        raise NumericalError(f"{file.path}: tensor '{name}' holds a weight beyond fp16's ±65504")


def _row_bytes(part: MatrixPart) -> int:
    return part.tensor.nbytes // part.tensor.shape[0]


def _chunks(parts: list[MatrixPart], slot_bytes: int) -> Iterator[_Chunk]:
    for site, part in enumerate(parts):
        row_bytes = _row_bytes(part)
        step = slot_bytes // row_bytes
        for first in range(0, part.tensor.shape[0], step):
            rows = min(step, part.tensor.shape[0] - first)
            yield _Chunk(part, site, first, rows, row_bytes)
