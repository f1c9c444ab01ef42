"""Weights in device memory, in the arrays that model/placements.py names.

Rows of q/k/v lie as in the file, one tensor after the other, or paired (`pyruntime.ops.qkv`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.errors import CudaError
from pyruntime.model.config import ModelConfig
from pyruntime.model.loader import MatrixPart, load_matrices
from pyruntime.model.placements import Placement, layer_placements, placements
from pyruntime.ops.qkv import paired_rows
from pyruntime.ops.rows import gather

if TYPE_CHECKING:
    from pyruntime.gguf import GGUFFile


class Weights:
    """All weights on `library.device`: `outer` and, per layer, `layers[i]`, by array name.

    `planes` are the types of those that are planes, by array name, in the same order.

    Args:
        progress: called with the number of file bytes of each piece that has arrived.
        alike: how the rows of q/k/v shall lie, see `pyruntime.ops.qkv`; 0: as in the file.
        mode: see `placements`.

    Raises:
        OutOfMemoryError: device memory does not suffice.
        GGUFError: the file cannot be read (any more).
        NumericalError: a weight is out of fp16's range; the text names the tensor.
    """

    def __init__(
        self,
        file: GGUFFile,
        config: ModelConfig,
        library: Library,
        progress: Callable[[int], object],
        alike: int = 0,
        mode: str = "fp16",
    ) -> None:
        self.alike = alike
        embedding = file.tensors["token_embd.weight"]
        assert embedding.type is not None  # unknown types were refused with the config
        self.embedding_type = embedding.type.name
        placed = placements(file, config, mode)
        self.planes = [_types(file, group) for group in placed]
        groups: list[dict[str, DeviceArray]] = [{} for _ in placed]
        self.outer, self.layers = groups[0], groups[1:]
        try:
            load_matrices(file, _parts(file, library.device, placed, groups), library, progress)
            if alike:
                self._pair(config, library, mode)
        except BaseException:
            with suppress(CudaError):  # the first failure is the one to report
                self.close()
            raise

    def _pair(self, c: ModelConfig, library: Library, mode: str) -> None:
        """Moves the rows of q/k/v from the file's order to the paired one."""
        index = paired_rows(
            heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim,
            interleaved=c.rope.style == "interleaved", alike=self.alike,
        )  # fmt: skip
        if mode == "per-layer":
            self._pair_packed(c, index)
        else:
            self._pair_fused(c, library, index)

    def _pair_packed(self, c: ModelConfig, index: NDArray[np.int32]) -> None:
        """Each row stays in its tensor."""
        for layer, arrays in enumerate(self.layers):
            for source in layer_placements(c, layer)["qkv"].sources:
                array, first = arrays[source.tensor], source.row0
                array.upload(np.asarray(array)[index[first : first + array.shape[0]] - first])

    def _pair_fused(self, c: ModelConfig, library: Library, index: NDArray[np.int32]) -> None:
        """Each layer's rows go to where those of the layer before were; the first needs room of its
        own, which the last leaves behind."""
        device = library.device
        count = np.array([len(index)], np.int32)
        spare = DeviceArray(device, (len(index), c.hidden), np.float16, what="room to pair q, k, v")
        try:
            with (
                closing(Stream(device)) as stream,
                closing(DeviceArray(device, index.shape, np.int32)) as order,
                closing(DeviceArray(device, count.shape, np.int32)) as rows,
                closing(DeviceArray(device, (len(index), 0), np.float32)) as nothing,
                device.current(),
            ):
                rows.upload(count)
                order.upload(index)
                program = Program()
                for layer in self.layers:
                    gather(
                        program, library, wanted=rows, max_wanted=len(index), index=order,
                        x=nothing, x_out=nothing, a=layer["qkv"], a_out=spare,
                    )  # fmt: skip
                    layer["qkv"], spare = spare, layer["qkv"]
                program.run(stream)
                stream.synchronize()
        finally:
            spare.close()

    def arrays(self) -> Iterator[DeviceArray]:
        """Every array."""
        for group in (self.outer, *self.layers):
            yield from group.values()

    def close(self) -> None:
        """Frees all weights. Idempotent."""
        for array in self.arrays():
            array.close()


def _types(file: GGUFFile, group: dict[str, Placement]) -> dict[str, str]:
    """Of the arrays of a group that are planes, the types of their tensors."""
    tensors = {n: file.tensors[p.sources[0].tensor] for n, p in group.items() if p.planes}
    return {name: tensor.type.name for name, tensor in tensors.items() if tensor.type}


def _parts(
    file: GGUFFile,
    device: Device,
    placed: list[dict[str, Placement]],
    groups: list[dict[str, DeviceArray]],
) -> Iterator[MatrixPart]:
    """Allocates the arrays of one group after the other, fills its vectors, yields its matrices."""
    for arrays, group in zip(groups, placed, strict=True):
        for name, placement in group.items():
            what = f"weight {placement.sources[0].tensor}"
            arrays[name] = DeviceArray(device, placement.shape, placement.dtype, what=what)
            if len(placement.shape) == 1:
                vectors = [file.dequantize(source.tensor) for source in placement.sources]
                arrays[name].upload(np.concatenate(vectors))
                continue
            for s in placement.sources:
                yield MatrixPart(
                    file.tensors[s.tensor], arrays[name], s.row0, s.row_step, placement.planes
                )
