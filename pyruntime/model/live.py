"""The small device block that holds everything that changes from call to call.

Layout (cuda/core/live.cuh): Live {rows, sequences, wanted, overflow}, then one Sequence per prompt,
one e4m3::Sequence (cuda/core/e4m3.cuh), then int32 arrays: token ids, positions, sequence of each
row, wanted rows. Launches only ever see its address, so a recorded program serves any prompt.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from pyruntime.driver.device import Device
from pyruntime.driver.memory import DeviceArray, PinnedBuffer
from pyruntime.driver.stream import Stream
from pyruntime.model.cache import Cache

NO_OVERFLOW = 2**31 - 1
_LIVE = struct.Struct("<4i")
_SEQUENCE = struct.Struct("<4i3Q")
_STORED = struct.Struct("<4i4Q")
PASS_BYTES = _LIVE.size + _SEQUENCE.size  # that say what a pass of one sequence works on
_HEAD = PASS_BYTES + _STORED.size


class LiveBlock:
    """One sequence of up to `max_tokens` rows.

    Attributes (device views): live, rows, wanted, overflow (int32 words of the header), sequences,
    stored (of an e4m3 cache), ids, positions, sequence_of, wanted_rows (int32 [max_tokens]).
    """

    def __init__(self, device: Device, max_tokens: int) -> None:
        nbytes = live_bytes(max_tokens)
        # In one statement: no frame of a failure's traceback keeps the first without the second.
        self._block, self._host = (
            DeviceArray(device, (nbytes,), np.uint8, what="live block"),
            PinnedBuffer(device, nbytes),
        )
        self.live = self._block.view(0, (4,), np.int32)
        self.rows = self._block.view(0, (1,), np.int32)
        self.wanted = self._block.view(8, (1,), np.int32)
        self.overflow = self._block.view(12, (1,), np.int32)
        self.sequences = self._block.view(_LIVE.size, (_SEQUENCE.size,), np.uint8)
        self.stored = self._block.view(_HEAD - _STORED.size, (_STORED.size,), np.uint8)
        self.ids, self.positions, self.sequence_of, self.wanted_rows = (
            self._block.view(_HEAD + 4 * max_tokens * i, (max_tokens,), np.int32) for i in range(4)
        )
        self._arrays = self._host.array[_HEAD:].view(np.int32).reshape(4, max_tokens)

    def upload(
        self,
        stream: Stream,
        ids: NDArray[np.int32],
        *,
        start: int,
        cache: Cache,
        wanted: NDArray[np.int32],
        stored: Cache | None = None,
    ) -> None:
        """Enqueues the upload of one sequence. The block is reused: wait before the next call.

        Args:
            ids: int32 [nt], the tokens at positions start … start + nt - 1.
            cache: what attention reads.
            wanted: int32 [n], the rows whose logits are wanted.
            stored: the e4m3 cache, of which `cache` is then one layer, widened.
        """
        rows = len(ids)
        _LIVE.pack_into(self._host.array.data, 0, rows, 1, len(wanted), NO_OVERFLOW)
        for layout, at, source in (
            (_SEQUENCE, _LIVE.size, cache),
            (_STORED, _HEAD - _STORED.size, stored),
        ):
            if source is not None:
                pointers = (array.ptr for array in source.arrays)
                head = (0, rows, start, source.capacity)
                layout.pack_into(self._host.array.data, at, *head, *pointers)
        self._arrays[0, :rows] = ids
        self._arrays[1, :rows] = np.arange(start, start + rows)
        self._arrays[2, :rows] = 0
        self._arrays[3, : len(wanted)] = wanted
        stream.copy_to_device(self._block.ptr, self._host.ptr, self._block.nbytes)

    def download_overflow(self, stream: Stream) -> None:
        """Enqueues the copy of the overflow word back to the host."""
        stream.copy_to_host(self._host.ptr + 12, self.overflow.ptr, 4)

    @property
    def overflow_site(self) -> int:
        """The word that `download_overflow` brought, once the stream has been waited for."""
        site: int = _LIVE.unpack_from(self._host.array.data)[3]
        return site

    def close(self) -> None:
        """Frees the block. Idempotent."""
        self._block.close()
        self._host.close()


def live_bytes(max_tokens: int) -> int:
    """Device bytes of a block."""
    return _HEAD + 4 * 4 * max_tokens
