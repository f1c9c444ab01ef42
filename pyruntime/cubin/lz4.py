"""Decompression of one LZ4 block (LZ4 block format description, lz4_Block_format.md)."""

from __future__ import annotations

from pyruntime.errors import CubinError


def decompress(data: memoryview, size: int, what: str) -> bytes:
    """The `size` bytes that an LZ4 block holds.

    Args:
        data: the block; bytes after its last sequence are an error.
        what: names the block in errors.

    Raises:
        CubinError: the block is cut short, refers to bytes before its start, or has another size.
    """
    out = bytearray()
    at, end = 0, len(data)
    try:
        while at < end:
            token = data[at]
            literals, at = _length(data, at + 1, token >> 4)
            if at + literals > end or len(out) + literals > size:
                break
            out += data[at : at + literals]
            at += literals
            if at == end:  # the last sequence has literals only
                break
            distance = data[at] | data[at + 1] << 8
            match, at = _length(data, at + 2, token & 15)
            match += 4
            if not 0 < distance <= len(out) or len(out) + match > size:
                break
            start = len(out) - distance
            while match > 0:  # a match may overlap what it writes
                piece = out[start : start + match]
                out += piece
                match -= len(piece)
    except IndexError:
        pass
    if at != end or len(out) != size:
        raise CubinError(f"{what}: a damaged LZ4 block ({len(out)} of {size} bytes read)")
    return bytes(out)


def _length(data: memoryview, at: int, nibble: int) -> tuple[int, int]:
    """A length that starts in a token's nibble, and where reading goes on."""
    length = nibble
    if nibble == 15:
        while True:
            length += data[at]
            at += 1
            if data[at - 1] != 255:
                break
    return length, at
