"""GGUF files put together byte by byte, so that every field can be wrong."""

from __future__ import annotations

import struct

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
Q4_0, Q4_K = 2, 12


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return u64(len(text)) + text


def pair(key: str | bytes, type_id: int, value: bytes) -> bytes:
    return string(key) + u32(type_id) + value


def tensor(name: str, dims: list[int], type_id: int, offset: int) -> bytes:
    shape = b"".join(map(u64, dims))
    return string(name) + u32(len(dims)) + shape + u32(type_id) + u64(offset)


def gguf(
    *pairs: bytes,
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    version: int = 3,
    n_tensors: int | None = None,
    n_keys: int | None = None,
) -> bytes:
    """A file of these parts, padded to 32 bytes if it has tensors, then `data` zero bytes."""
    counts = u64(len(tensors) if n_tensors is None else n_tensors)
    counts += u64(len(pairs) if n_keys is None else n_keys)
    header = b"GGUF" + u32(version) + counts + b"".join(pairs) + b"".join(tensors)
    return header + (bytes(-len(header) % 32) + bytes(data) if tensors else b"")


ARCH = pair("general.architecture", STRING, string("llama"))
