"""Fat binaries: the container in which nvcc stores cubins and PTX for several architectures.

NVIDIA documents no layout; this one was read off files of CUDA 11.8 to 13.5. A fat binary is a
16-byte header (magic, version, header bytes, payload bytes) and entries of a header and a payload.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from pyruntime.cubin import lz4
from pyruntime.errors import CubinError

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, CUBIN, LTO_IR = 1, 2, 8
_HEAD = struct.Struct("<4sHHQ")
# kind, version, header bytes, padded bytes, stored bytes, -, minor, major, arch, name offset, name
# bytes, flags, -, uncompressed bytes
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_LZ4, _ZSTD = 0x2000, 0x8000
_LARGEST = 1 << 30


@dataclass(frozen=True)
class Entry:
    """One member of a fat binary.

    Attributes:
        kind: `PTX`, `CUBIN`, `LTO_IR` or a number not known here.
        arch: the SM number, such as 90; the suffix `a` is only in the cubin.
        compression: "", "LZ4" or "zstd".
        size: uncompressed bytes.
        data: the bytes as stored.
    """

    kind: int
    arch: int
    compression: str
    size: int
    data: memoryview

    def unpack(self, what: str) -> bytes:
        """The member's uncompressed bytes.

        Raises:
            CubinError: damaged, or compressed in a way that cannot be undone on this machine.
        """
        if not self.compression:
            return bytes(self.data)
        if self.size > _LARGEST:
            raise CubinError(f"{what}: claims {self.size:,} uncompressed bytes")
        if self.compression == "LZ4":
            return lz4.decompress(self.data, self.size, what)
        return _zstd(bytes(self.data), self.size, what)


def entries(data: memoryview, what: str) -> Iterator[Entry]:
    """The members of all fat binaries that lie one after the other in `data`.

    Raises:
        CubinError: a header is damaged or runs past the end.
    """
    raw = bytes(data)
    at = 0
    while (at := raw.find(MAGIC, at)) >= 0:
        if at + _HEAD.size > len(raw):
            raise CubinError(f"{what}: a fat binary header is cut off at offset {at}")
        _, version, header, payload = _HEAD.unpack_from(raw, at)
        end = at + header + payload
        if version != 1 or header < _HEAD.size or end > len(raw):
            raise CubinError(f"{what}: a damaged fat binary header at offset {at}")
        at += header
        while at < end:
            entry, at = _entry(data, at, end, what)
            yield entry


def _entry(data: memoryview, at: int, end: int, what: str) -> tuple[Entry, int]:
    if at + _ENTRY.size <= end:
        kind, _, header, padded, stored, _, _, _, arch, _, _, flags, _, size = _ENTRY.unpack_from(
            data, at
        )
        start, after = at + header, at + header + padded
        if header >= _ENTRY.size and padded and stored <= padded and after <= end:
            compression = "LZ4" if flags & _LZ4 else "zstd" if flags & _ZSTD else ""
            used = stored if compression else padded
            return (
                Entry(kind, arch, compression, size or padded, data[start : start + used]),
                after,
            )
    raise CubinError(f"{what}: a damaged fat binary entry at offset {at}")


def _zstd(data: bytes, size: int, what: str) -> bytes:
    """One Zstandard frame (RFC 8878), decoded by the system's libzstd."""
    import ctypes
    import ctypes.util

    library = ctypes.util.find_library("zstd")
    if library is None:
        raise CubinError(f"{what}: compressed with zstd, not read: this machine has no libzstd")
    call = ctypes.CDLL(library).ZSTD_decompress
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    out = ctypes.create_string_buffer(size)
    if call(out, size, data, len(data)) != size:
        raise CubinError(f"{what}: a damaged zstd frame")
    return out.raw
