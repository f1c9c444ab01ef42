"""The small device block that holds everything that changes from call to call.

Layout (cuda/core/live.cuh): Live {rows, sequences, wanted, overflow}, then what `ops.scores` reads
and writes for the likeliest token of a single row, then one Sequence per prompt, one
e4m3::Sequence (cuda/core/e4m3.cuh) per prompt, then int32 arrays: token ids, positions, sequence of
each row, wanted rows. Launches only ever see its address, so a recorded program serves
any prompts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from pyruntime.driver.device import Device
from pyruntime.driver.memory import DeviceArray, PinnedBuffer
from pyruntime.driver.stream import Stream
from pyruntime.model.batch import Prompt, Rows, ascending
from pyruntime.model.cache import Positions
from pyruntime.model.scores import GREEDY

NO_OVERFLOW = 2**31 - 1
MAX_SEQUENCES = 256  # prompts of a pass
RESULT_BYTES = 8  # that a pass brings to the host: overflow, and the likeliest token next to it
_LIVE = struct.Struct("<4i")
_COUNTS = struct.Struct("<3i")  # those of Live
_GREEDY = struct.Struct("<i2f3i8x")  # best, value, log_probs; tokens; first [2]
_HEADER_BYTES = _LIVE.size + _GREEDY.size
_SEQUENCE = struct.Struct("<4i3Q")
_STORED = struct.Struct("<4i4Q")
PASS_BYTES = _LIVE.size + _SEQUENCE.size  # that say what a pass of one sequence works on


def max_sequences(max_tokens: int) -> int:
    """The most prompts of a pass: each has a row at least."""
    return min(max_tokens, MAX_SEQUENCES)


class LiveBlock:
    """Sequences of up to `max_tokens` rows in all.

    Attributes (device views): live, rows, wanted, overflow (int32 words of the header), sequences,
    stored (of e4m3 caches), ids, positions, sequence_of, wanted_rows (int32 [max_tokens]).
    greedy: the arrays of `ops.scores`, by name, for the likeliest token of one row.
    """

    def __init__(self, device: Device, max_tokens: int) -> None:
        nbytes, most = live_bytes(max_tokens), max_sequences(max_tokens)
        self._stored_at = _HEADER_BYTES + most * _SEQUENCE.size
        self._ids_at = head = self._stored_at + most * _STORED.size
        # In one statement: no frame of a failure's traceback keeps the first without the second.
        self._block, self._host = (
            DeviceArray(device, (nbytes,), np.uint8, what="live block"),
            PinnedBuffer(device, nbytes),
        )
        self.live = self._block.view(0, (4,), np.int32)
        self.rows = self._block.view(0, (1,), np.int32)
        self.wanted = self._block.view(8, (1,), np.int32)
        self.overflow = self._block.view(12, (1,), np.int32)
        self.greedy = {
            name: self._block.view(_LIVE.size + at, shape, dtype)
            for name, at, shape, dtype in (
                ("best", 0, (1, 1), np.int32), ("values", 4, (1, 1), np.float32),
                ("log_probs", 8, (1,), np.float32), ("tokens", 12, (1,), np.int32),
                ("first", 16, (2,), np.int32),
            )
        }  # fmt: skip
        self.sequences = self._block.view(_HEADER_BYTES, (most, _SEQUENCE.size), np.uint8)
        self.stored = self._block.view(self._stored_at, (most, _STORED.size), np.uint8)
        self.ids, self.positions, self.sequence_of, self.wanted_rows = (
            self._block.view(head + 4 * max_tokens * i, (max_tokens,), np.int32) for i in range(4)
        )
        self._bytes = self._host.array.data
        self._words = self._host.array[:_HEADER_BYTES].data.cast("i")  # Live, then the likeliest
        _GREEDY.pack_into(self._bytes, _LIVE.size, 0, 0, 0, GREEDY, 0, 1)  # of row 0 one target
        arrays = self._host.array[head:].view(np.int32).reshape(4, max_tokens)
        _, self._positions, self._sequence_of, self._wanted_rows = arrays
        self._said: tuple[object, ...] | None = None  # of the pass before, if a single prompt's
        # Of how many rows the host's positions and sequences are those of one fresh prompt.
        self._single = max_tokens
        self._wanted: Rows | None = None
        self._positions[:], self._sequence_of[:] = ascending(0, max_tokens), 0

    def fill(
        self,
        prompts: Sequence[Prompt],
        starts: Sequence[int],
        wanted: Rows,
        staged: Sequence[Positions] | None = None,
    ) -> None:
        """Writes the host's block for a pass. It is reused: the last upload must be over.

        Args:
            starts: what is cached before each prompt.
            wanted: the rows that the pass gathers.
            staged: for e4m3 caches what attention reads of each: one layer, widened.
        """
        host, at, said = self._bytes, self._ids_at, None
        if len(prompts) == 1 and staged is None:
            cache = prompts[0].cache
            said = len(prompts[0].ids), starts[0], len(wanted), cache.stride, cache.addresses
        if said is None or said != self._said:
            self._describe(prompts, starts, len(wanted), staged)
            self._said = said
        self._words[3] = NO_OVERFLOW
        for prompt in prompts:
            ids = prompt.ids.tobytes()
            host[at : at + len(ids)] = ids
            at += len(ids)
        if wanted is not self._wanted:  # the same array is often given again, and never changed
            self._wanted_rows[: len(wanted)] = wanted
            self._wanted = wanted

    def _describe(
        self,
        prompts: Sequence[Prompt],
        starts: Sequence[int],
        wanted: int,
        staged: Sequence[Positions] | None,
    ) -> None:
        """Writes all but ids, the rows that are wanted and the overflow."""
        host, last, self._said = self._bytes, 0, None
        for i, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            first, rows, cache = last, len(prompt.ids), prompt.cache
            last += rows
            if staged is not None:
                at = self._stored_at + i * _STORED.size
                _STORED.pack_into(host, at, first, rows, start, cache.stride, *cache.addresses)
                cache = staged[i]
            at = _HEADER_BYTES + i * _SEQUENCE.size
            _SEQUENCE.pack_into(host, at, first, rows, start, cache.stride, *cache.addresses)
        _COUNTS.pack_into(host, 0, last, len(prompts), wanted)
        if last > self._single or len(prompts) > 1 or starts[0]:
            self._place(prompts, starts)

    def _place(self, prompts: Sequence[Prompt], starts: Sequence[int]) -> None:
        """Writes the position of each row, and whose it is."""
        self._single = last = 0
        for i, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            first, last = last, last + len(prompt.ids)
            self._positions[first:last] = ascending(start, start + last - first)
            self._sequence_of[first:last] = i
        if len(prompts) == 1 and not starts[0]:
            self._single = last

    def upload(self, stream: Stream) -> None:
        """Enqueues the upload of what `fill` wrote."""
        stream.copy_to_device(self._block.ptr, self._host.ptr, self._block.nbytes)

    def download(self, stream: Stream) -> None:
        """Enqueues the copy of what a pass leaves here back to the host."""
        stream.copy_to_host(self._host.ptr + 12, self.overflow.ptr, RESULT_BYTES)

    @property
    def overflow_site(self) -> int:
        """What `download` brought, once the stream has been waited for."""
        return self._words[3]

    @property
    def likeliest(self) -> int:
        """The token that `download` brought, likewise, of a pass that finds one."""
        return self._words[4]

    def close(self) -> None:
        """Frees the block. Idempotent."""
        self._block.close()
        self._host.close()


def live_bytes(max_tokens: int) -> int:
    """Device bytes of a block."""
    return (
        _HEADER_BYTES
        + max_sequences(max_tokens) * (_SEQUENCE.size + _STORED.size)
        + 4 * 4 * max_tokens
    )
