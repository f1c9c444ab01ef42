"""The table of tensors in the header of a GGUF file, and where it puts their data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pyruntime.gguf.cursor import Cursor
from pyruntime.gguf.source import shown
from pyruntime.gguf.types import TYPES, QuantType

MAX_NAME_BYTES = 64  # the format's own limit
MAX_DIMENSIONS = 4  # ggml's GGML_MAX_DIMS


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in NumPy order (outermost first), the reverse of ggml's."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    type: QuantType | None  # None: not one of TYPES, so that the size is unknown
    offset: int  # of the first byte in its file
    nbytes: int  # 0 where the type is None
    shard: int  # index of its file
    entry: int = 0  # offset of its entry in the header, for messages


def tensor_item(name: str) -> str:
    """How messages call the tensor `name`."""
    return f"tensor '{shown(name)}'"


def read_tensors(cursor: Cursor, count: int, alignment: int, shard: int) -> dict[str, TensorInfo]:
    """The `count` entries at the cursor, checked against each other and the size of the file."""
    tensors: dict[str, TensorInfo] = {}
    for index in range(count):
        cursor.item = f"tensor {index} of {count}"
        start = cursor.pos
        name = cursor.name(MAX_NAME_BYTES)
        cursor.item = tensor_item(name)
        if name in tensors:
            raise cursor.error("occurs twice", start)
        tensors[name] = _entry(cursor, name, start, shard)
    data_start = -(-cursor.pos // alignment) * alignment
    for tensor in tensors.values():
        cursor.item = tensor_item(tensor.name)
        if tensor.offset % alignment:
            problem = f"its offset {tensor.offset} is no multiple of the alignment {alignment}"
            raise cursor.error(problem, tensor.entry)
        tensors[tensor.name] = replace(tensor, offset=data_start + tensor.offset)
    _check_placement(cursor, tensors)
    return tensors


def _entry(cursor: Cursor, name: str, start: int, shard: int) -> TensorInfo:
    """The rest of one entry. The offset in the result counts from the start of the data."""
    dimensions_at = cursor.pos
    dimensions = cursor.u32()
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(
            f"has {dimensions} dimensions, allowed are 1 to {MAX_DIMENSIONS}", dimensions_at
        )
    shape = tuple(cursor.u64() for _ in range(dimensions))[::-1]
    elements = math.prod(shape)
    if not 1 <= elements < 1 << 63:
        raise cursor.error(f"has the impossible shape {shape}", dimensions_at + 4)
    type_id = cursor.u32()
    quant = TYPES.get(type_id)
    if quant and shape[-1] % quant.block:
        problem = f"rows of {shape[-1]} elements are not whole {quant.name} blocks of {quant.block}"
        raise cursor.error(problem, dimensions_at + 4)
    nbytes = quant.nbytes(elements) if quant else 0
    return TensorInfo(name, shape, type_id, quant, cursor.u64(), nbytes, shard, start)


def _check_placement(cursor: Cursor, tensors: dict[str, TensorInfo]) -> None:
    """No tensor past the end of the file, no two on the same bytes. Gaps and any order are fine."""
    size = cursor.source.size
    before: TensorInfo | None = None
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        cursor.item = tensor_item(tensor.name)
        end = tensor.offset + tensor.nbytes
        if end > size:
            problem = f"its data, bytes {tensor.offset} to {end}, runs past the file's {size} bytes"
            raise cursor.error(problem, tensor.entry)
        if tensor.type is None:
            continue
        if before and tensor.offset < before.offset + before.nbytes:
            problem = f"its data at byte {tensor.offset} overlaps {tensor_item(before.name)}"
            raise cursor.error(problem, tensor.entry)
        before = tensor
