"""The header of one GGUF file: magic, version, metadata, table of tensors.

Format: docs/gguf.md of ggml. Versions 2 and 3 differ only in the byte orders that they allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from pyruntime.gguf.cursor import MAX_ARRAY_LENGTH, Cursor, StringArray
from pyruntime.gguf.source import Source, shown
from pyruntime.gguf.tensors import TensorInfo, read_tensors

Value: TypeAlias = bool | int | float | str | NDArray[Any] | StringArray

MAX_KEY_BYTES = 65535  # the format's own limit
MAX_ENTRIES = 1 << 16  # of keys, and of tensors; the largest models have a few thousand
DEFAULT_ALIGNMENT = 32

# Value types by number: the little-endian NumPy type of those that are numbers.
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# What people take for a GGUF file, by how it begins (in lower case, after white space).
_BIG_ENDIAN = "a big-endian GGUF file; only little-endian ones are read"
_OLDER = "file, a format older than GGUF; convert the model again"
_OTHER_FILES = {
    b"fugg": _BIG_ENDIAN,
    # These four were written as little-endian numbers, so the letters are turned round.
    b"lmgg": f"a GGML {_OLDER}",
    b"fmgg": f"a GGMF {_OLDER}",
    b"tjgg": f"a GGJT {_OLDER}",
    b"algg": f"a GGLA adapter {_OLDER}",
    b"ggml": f"a GGML {_OLDER}",
    b"ggjt": f"a GGJT {_OLDER}",
    b"pk\3\4": "a zip archive, perhaps a PyTorch checkpoint",
    b"version https://git-lfs": "a Git LFS pointer; fetch the file itself with 'git lfs pull'",
    b"<": "an HTML or XML page; the download did not give the file itself",
}


@dataclass(frozen=True)
class Header:
    """What one file says of itself. `data` are all its bytes, up to the padding before tensors."""

    version: int
    metadata: dict[str, Value]
    key_offsets: dict[str, int]  # of each value, for messages
    tensors: dict[str, TensorInfo]
    data: bytearray


def key_item(key: str) -> str:
    """How messages call the key `key`."""
    return f"key '{shown(key)}'"


def read_header(source: Source, shard: int) -> Header:
    """Read and check the header of `source`, file `shard` of its model. Raises GGUFError."""
    cursor = Cursor(source)
    version = _version(cursor)
    tensor_count = _count(cursor, "number of tensors")
    metadata, offsets = _metadata(cursor, _count(cursor, "number of keys"))
    if metadata.get("general.type") == "adapter":
        cursor.item = key_item("general.type")
        raise cursor.error("this is a LoRA adapter, not a model", offsets["general.type"])
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    # A power of two has one bit set; type() because a bool is an int.
    if type(alignment) is not int or not 8 <= alignment <= 65536 or alignment.bit_count() != 1:
        cursor.item = key_item("general.alignment")
        problem = "is no power of two from 8 to 65536"
        raise cursor.error(problem, offsets["general.alignment"])
    tensors = read_tensors(cursor, tensor_count, alignment, shard)
    del cursor.data[cursor.pos :]  # read ahead, but no part of the header
    return Header(version, metadata, offsets, tensors, cursor.data)


def _version(cursor: Cursor) -> int:
    cursor.item = "magic"
    if cursor.source.size == 0:
        raise cursor.error("the file is empty")
    if cursor.take(4) != b"GGUF":
        start = bytes(cursor.data[:64]).lstrip().lower()
        what = next((text for magic, text in _OTHER_FILES.items() if start.startswith(magic)), "")
        raise cursor.error(f"not a GGUF file{what and f' but {what}'}", 0)
    cursor.item = "version"
    version = cursor.u32()
    if version not in (2, 3):
        swapped = version and version & 0xFFFF == 0
        why = f"this is {_BIG_ENDIAN}" if swapped else "only 2 and 3 are supported"
        raise cursor.error(f"is {version}; {why}", 4)
    return version


def _count(cursor: Cursor, item: str) -> int:
    cursor.item = item
    start = cursor.pos
    count = cursor.u64()
    if count > MAX_ENTRIES:
        raise cursor.error(f"{count} is more than the {MAX_ENTRIES} allowed", start)
    return count


def _metadata(cursor: Cursor, count: int) -> tuple[dict[str, Value], dict[str, int]]:
    metadata: dict[str, Value] = {}
    offsets: dict[str, int] = {}
    for index in range(count):
        cursor.item = f"key {index} of {count}"
        start = cursor.pos
        key = cursor.name(MAX_KEY_BYTES)
        cursor.item = key_item(key)
        if key in metadata:
            raise cursor.error("occurs twice", start)
        type_id = cursor.u32()
        offsets[key] = cursor.pos
        metadata[key] = _value(cursor, type_id)
    return metadata, offsets


def _value(cursor: Cursor, type_id: int) -> Value:
    if type_id == _STRING:
        return cursor.string()
    if type_id == _ARRAY:
        return _array(cursor)
    scalar: bool | int | float = _numbers(cursor, type_id, 1).item()
    return scalar


def _array(cursor: Cursor) -> Value:
    start = cursor.pos
    type_id = cursor.u32()
    if type_id == _ARRAY:
        raise cursor.error("arrays of arrays are not supported", start)
    count = cursor.u64()
    if count > MAX_ARRAY_LENGTH:
        problem = f"{count} elements are more than the {MAX_ARRAY_LENGTH} allowed"
        raise cursor.error(problem, start + 4)
    return cursor.strings(count) if type_id == _STRING else _numbers(cursor, type_id, count)


def _numbers(cursor: Cursor, type_id: int, count: int) -> NDArray[Any]:
    start = cursor.pos
    if type_id == _BOOL:
        values = cursor.numbers("u1", count)
        if count and values.max() > 1:
            problem = f"a bool is {values.max()}, neither 0 nor 1"
            raise cursor.error(problem, start + int(values.argmax()))
        return values.view("?")
    if type_id not in _NUMBERS:
        raise cursor.error(f"value type {type_id} is none of the format's 0 to 12")
    return cursor.numbers(_NUMBERS[type_id], count)
