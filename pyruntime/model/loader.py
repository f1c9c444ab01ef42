"""Matrices from a GGUF file into device memory, as fp16 or packed.

Each reader thread takes piece after piece: it reads one into a pinned buffer, and puts its copy and
its dequantization, or repacking, on that buffer's stream. So reads, copies and kernels run at the
same time, and the interpreter is held for none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray, PinnedBuffer
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.errors import CudaError, NumericalError
from pyruntime.model.live import NO_OVERFLOW
from pyruntime.ops.dequant import dequantize
from pyruntime.ops.repack import repack

if TYPE_CHECKING:
    from pyruntime.gguf import GGUFFile, TensorInfo

SLOT_BYTES = 8 << 20
# The fastest of what bench/results/load.json has.
READERS = min(max(len(os.sched_getaffinity(0)), 4), 8)  # on few cores to wait for a disk
SLOTS = READERS + 8  # to be copied from while others are read into


@dataclass(frozen=True)
class MatrixPart:
    """A tensor of the file whose row r becomes row row0 + r * row_step of `out`.

    An `out` of float16 gets the dequantized row, one of uint8 its packed bytes as they are; but the
    planes of the whole tensor if `planes` says so (`ops.repack`).
    """

    tensor: TensorInfo
    out: DeviceArray
    row0: int
    row_step: int
    planes: bool = False


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
    """A pinned buffer, its device twin, and the stream that ends with their last use.

    `resources` waits for it and closes all three.
    """

    def __init__(self, device: Device, nbytes: int, resources: ExitStack) -> None:
        own = resources.enter_context
        self.pinned = own(closing(PinnedBuffer(device, nbytes)))
        self.staging = own(closing(DeviceArray(device, (nbytes,), np.uint8, what="staging buffer")))
        self.stream = own(closing(Stream(device)))
        resources.callback(self.stream.synchronize)


def load_matrices(
    file: GGUFFile,
    parts: Iterable[MatrixPart],
    library: Library,
    progress: Callable[[int], object],
) -> None:
    """Fills the `out` arrays of `parts` and waits for it.

    Args:
        parts: each is asked for while those before it are being read: time to allocate its `out`.
        progress: called with the bytes of each piece that has been handed to the GPU, in order.

    Raises:
        GGUFError: a read failed. NumericalError: a weight is out of fp16's range.
    """
    device = library.device
    resources = ExitStack()
    slots: list[_Slot] = []
    free: SimpleQueue[_Slot | None] = SimpleQueue()  # None: one that is still to be made
    for _ in range(SLOTS):
        free.put(None)
    counting = Lock()  # kernels count their launches
    failures: list[Exception] = []

    def load(chunk: _Chunk) -> int:
        """Reads a piece, hands it to the GPU and returns its bytes."""
        slot = free.get()
        try:
            with device.current():
                if slot is not None:
                    slot.stream.synchronize()
                if slot is None or slot.staging.nbytes < chunk.nbytes:
                    slot = _Slot(device, max(SLOT_BYTES, chunk.nbytes), resources)
                    slots.append(slot)
                out = slot.pinned.array[: chunk.nbytes].data
                file.read_into(chunk.part.tensor, chunk.first * chunk.row_bytes, out)
                hand_over(chunk, slot)
        except Exception as error:
            failures.append(error)
            raise
        finally:
            free.put(slot)
        return chunk.nbytes

    def hand_over(chunk: _Chunk, slot: _Slot) -> None:
        part, source = chunk.part, slot.pinned.ptr
        if part.out.dtype == np.uint8 and not part.planes:
            target = part.out.ptr + chunk.first * chunk.row_bytes
            slot.stream.copy_to_device(target, source, chunk.nbytes)
            return
        assert part.tensor.type is not None  # unknown types were refused with the config
        slot.stream.copy_to_device(slot.staging.ptr, source, chunk.nbytes)
        program, type_name = Program(), part.tensor.type.name
        if part.planes:
            repack(
                program, library, type_name=type_name, source=slot.staging, first=chunk.first,
                rows=chunk.rows, out=part.out,
            )  # fmt: skip
        else:
            dequantize(
                program,
                library,
                type_name=type_name,
                source=slot.staging,
                rows=chunk.rows,
                columns=part.tensor.shape[1],
                out=part.out,
                row0=part.row0 + chunk.first * part.row_step,
                row_step=part.row_step,
                overflow=overflow,
                site=chunk.site,
            )
        with counting:
            program.run(slot.stream)

    with ThreadPoolExecutor(READERS, "pyruntime-read") as pool, device.current():
        try:
            word = DeviceArray(device, (1,), np.int32, what="overflow word")
            overflow = resources.enter_context(closing(word))
            overflow.upload(np.array([NO_OVERFLOW]))
            chunks, loads = [], []
            for chunk in _chunks(parts):
                chunks.append(chunk)
                loads.append(pool.submit(load, chunk))
            for done in loads:
                progress(done.result())
            for slot in slots:
                slot.stream.synchronize()
            site = int(np.asarray(overflow)[0])
        except BaseException as error:
            pool.shutdown(cancel_futures=True)  # nobody writes into the buffers any more
            with suppress(CudaError):  # the first failure is the one to report
                resources.close()
            if failures and isinstance(error, Exception):
                raise failures[0] from None
            raise
        resources.close()
    if site != NO_OVERFLOW:
        raise beyond_fp16(file, next(c.part.tensor.name for c in chunks if c.site == site))


def beyond_fp16(file: GGUFFile, tensor: str) -> NumericalError:
    """The error for a weight of the tensor of that name that dequantization found out of range."""
    return NumericalError(f"{file.path}: tensor '{tensor}' holds a weight beyond fp16's ±65504")


def _chunks(parts: Iterable[MatrixPart]) -> Iterator[_Chunk]:
    for site, part in enumerate(parts):
        rows = part.tensor.shape[0]
        row_bytes = part.tensor.nbytes // rows
        step = max(SLOT_BYTES // row_bytes, 1)
        for first in range(0, rows, step):
            yield _Chunk(part, site, first, min(step, rows - first), row_bytes)
