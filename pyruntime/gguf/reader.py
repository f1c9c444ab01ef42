"""GGUF models: metadata and tensors, whether in one file or in shards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np
from numpy.typing import NDArray

from pyruntime.errors import GGUFError
from pyruntime.gguf.header import Value, key_item
from pyruntime.gguf.shards import open_shards
from pyruntime.gguf.tensors import TensorInfo, tensor_item
from pyruntime.gguf.types import type_name

_EDGE_BYTES = 4096  # of a tensor's data, at its start and at its end, that the fingerprint sees


class GGUFFile:
    """An open model. Any number of threads may read from it at once.

    `metadata` is that of the first shard; `tensors` are those of all, in the order of the files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sources, headers = open_shards(path)
        self.version = headers[0].version
        self.metadata: Mapping[str, Value] = MappingProxyType(headers[0].metadata)
        self.tensors: dict[str, TensorInfo] = {}
        for header in headers:
            self.tensors |= header.tensors
        self.size_bytes = sum(source.size for source in self._sources)
        self._key_offsets = headers[0].key_offsets
        self._headers = [header.data for header in headers]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Open the model at `path` (with one shard, all of them) and read its header.

        Raises GGUFError with file, byte offset and key or tensor, also for a path that is missing
        or is no regular file. No tensor data is read.
        """
        return cls(Path(path))

    @cached_property
    def fingerprint(self) -> str:
        """A sha256, in hexadecimal, by which to tell models apart without reading all of them.

        It is over the headers of all shards (metadata, tensor infos) and the first and the last
        4 KiB of each tensor's data. So it misses weights that differ only further inside of a
        tensor, and it does tell files apart that hold the same weights with other metadata, such as
        another chat template, or cut into other shards. It is no protection against forgery.

        Raises GGUFError if the file is closed, or has become too short, before it is first asked.
        """
        digest = hashlib.sha256()
        for header in self._headers:
            digest.update(header)
        for tensor in self.tensors.values():
            edge = memoryview(bytearray(min(tensor.nbytes, _EDGE_BYTES)))
            for offset in (0, tensor.nbytes - len(edge)):
                self.read_into(tensor, offset, edge)
                digest.update(edge)
        return digest.hexdigest()

    def where(self, *, key: str = "", tensor: str = "") -> str:
        """`file: byte offset: key or tensor`, to begin a message about that with."""
        if key:
            return self._sources[0].where(self._key_offsets.get(key), key_item(key))
        info = self.tensors.get(tensor)
        source = self._sources[info.shard if info else 0]
        return source.where(info.entry if info else None, tensor_item(tensor) if tensor else "")

    def read(self, name: str) -> NDArray[np.uint8]:
        """The packed bytes of a tensor: uint8 [nbytes]."""
        tensor = self._known(name)
        packed = np.empty(tensor.nbytes, np.uint8)
        self.read_into(tensor, 0, packed.data)
        return packed

    def read_into(self, tensor: TensorInfo, offset: int, out: memoryview) -> None:
        """Fill `out` with the packed bytes of `tensor` from `offset` on, waiting without the GIL.

        Raises GGUFError if the file is closed or has become too short, ValueError if the range is
        not inside the tensor.
        """
        if not 0 <= offset <= tensor.nbytes - out.nbytes:
            raise ValueError(f"{out.nbytes} bytes at {offset} are not inside {tensor}")
        source = self._sources[tensor.shard]
        source.read_into(tensor.offset + offset, out.cast("B"), tensor_item(tensor.name))

    def dequantize(self, name: str) -> NDArray[np.float32]:
        """A tensor's values: float32 of the tensor's shape (by gguf-py's NumPy code)."""
        tensor = self._known(name)
        rows = self.read(name).reshape(*tensor.shape[:-1], -1)
        if tensor.type is not None and tensor.type.name == "F32":
            return rows.view("<f4")  # gguf-py takes long to import
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        values: NDArray[np.float32] = dequantize(rows, GGMLQuantizationType(tensor.type_id))
        return values

    def _known(self, name: str) -> TensorInfo:
        """The entry of a tensor that can be read. Raises GGUFError."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.type is None:
            problem = f"is stored as {type_name(tensor.type_id)}" if tensor else "is missing"
            raise GGUFError(f"{self.where(tensor=name)}: {problem}")
        return tensor

    def close(self) -> None:
        """Close all files; closing twice is allowed. Metadata stays usable."""
        for source in self._sources:
            source.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
