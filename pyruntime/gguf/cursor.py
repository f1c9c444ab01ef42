"""A bounds-checked walk over the header of a GGUF file.

The length of a header stands nowhere in the file, so bytes are fetched as the walk needs them.
Nothing is allocated for a count or length that exceeds the rest of the file or the limits here.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from pyruntime.errors import GGUFError
from pyruntime.gguf.source import Source

# The longest header published has about 15 MB (202k tokens, 440k merges).
MAX_HEADER_BYTES = 32 << 20
# The longest lists published: 262,144 tokens and 514,906 merges.
MAX_ARRAY_LENGTH = 1 << 20

_CHUNK = 1 << 20
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """The next unread byte of a header (`pos`), and what is being read there (`item`)."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.pos = 0
        self.item = ""
        # Bytes [0, len) of the file. It only grows, so string arrays can refer to it.
        self.data = bytearray()

    def error(self, problem: str, at: int | None = None) -> GGUFError:
        """An error at offset `at` (default: here) in the current item."""
        return self.source.error(problem, at=self.pos if at is None else at, item=self.item)

    def _reach(self, end: int) -> None:
        """Have the bytes from here to `end` in `data`."""
        have = len(self.data)
        if end <= have:
            return
        size = self.source.size
        if end > size:
            raise self.error(f"needs {end - self.pos} bytes, the file ends after {size - self.pos}")
        if end > MAX_HEADER_BYTES:
            raise self.error(f"the header would be longer than {MAX_HEADER_BYTES} bytes")
        chunk = bytearray(min(max(end - have, _CHUNK), size - have))
        self.source.read_into(have, memoryview(chunk), self.item)
        self.data += chunk

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        self._reach(self.pos + count)
        start, self.pos = self.pos, self.pos + count
        return bytes(self.data[start : self.pos])

    def u32(self) -> int:
        value: int = _U32.unpack(self.take(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack(self.take(8))[0]
        return value

    def string(self) -> str:
        """A string value: u64 length, UTF-8 bytes."""
        start = self.pos
        length = self.u64()
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"is not UTF-8: {error.reason}", start + 8 + error.start) from None

    def name(self, limit: int) -> str:
        """The name of a key or tensor: a string of 1 to `limit` bytes without NUL."""
        start = self.pos
        length = self.u64()
        if not 1 <= length <= limit:
            raise self.error(f"its name has {length} bytes, allowed are 1 to {limit}", start)
        self.pos = start
        name = self.string()
        if "\0" in name:
            raise self.error("its name contains a NUL", start)
        return name

    def numbers(self, dtype: str, count: int) -> NDArray[Any]:
        """`count` little-endian numbers of a NumPy dtype, as a read-only array."""
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)

    def strings(self, count: int) -> StringArray:
        """`count` strings; only their lengths are looked at."""
        starts, data, unpack = array("Q"), self.data, _U64.unpack_from
        pos, last, item = self.pos, -1, self.item
        for _ in range(count):
            if pos > last:
                self._walked(starts, pos, item)
                self._reach(pos + 8)
                last = len(data) - 8
            starts.append(pos)
            pos += 8 + unpack(data, pos)[0]
        self._walked(starts, pos, item)
        starts.append(pos)
        self.item = item
        return StringArray(self, starts)

    def _walked(self, starts: array[int], pos: int, item: str) -> None:
        """Check that the last of the strings that start at `starts` does end, at `pos`."""
        if starts:
            self.pos, self.item = starts[-1], f"{item}, string {len(starts) - 1}"
            self._reach(pos)
        self.pos, self.item = pos, f"{item}, string {len(starts)}"


class StringArray(Sequence[str]):
    """Strings of a header, decoded when asked for. Raises GGUFError for one that is not UTF-8."""

    def __init__(self, cursor: Cursor, starts: array[int]) -> None:
        """`starts`: offset of each string's length field in the file, and the end of the last."""
        self._source = cursor.source
        self._data = cursor.data
        self._item = cursor.item
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._decode(i) for i in range(*index.indices(len(self)))]
        return self._decode(range(len(self))[index])

    def __iter__(self) -> Iterator[str]:
        data = self._data
        for index, (start, end) in enumerate(pairwise(self._starts)):
            try:
                text = data[start + 8 : end].decode()
            except UnicodeDecodeError:
                text = self._decode(index)  # raises what names the string
            yield text

    def _decode(self, index: int) -> str:
        start = self._starts[index] + 8
        try:
            return self._data[start : self._starts[index + 1]].decode()
        except UnicodeDecodeError as error:
            item = f"{self._item}, string {index}"
            problem = f"is not UTF-8: {error.reason}"
            raise self._source.error(problem, at=start + error.start, item=item) from None

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)}>"
