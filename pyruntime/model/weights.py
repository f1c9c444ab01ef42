"""Weights in device memory: fp16 matrices, q/k/v fused, gate and up interleaved row by row.

Rows of q/k/v lie as in the file, one tensor after the other, or paired (`pyruntime.ops.qkv`).

The embedding stays packed: its rows are looked up and unpacked exactly. With weights "per-layer" so
does every matrix (model/streamed.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
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
from pyruntime.ops.qkv import paired_rows
from pyruntime.ops.rows import gather

if TYPE_CHECKING:
    from pyruntime.gguf import GGUFFile, TensorInfo

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A tensor of the file: its rows go to rows row0, row0 + row_step, … of the array."""

    tensor: str
    row0: int = 0
    row_step: int = 1


@dataclass(frozen=True)
class Placement:
    """One device array and the tensors it is made of.

    Matrices are float16, vectors float32, packed rows uint8.
    """

    shape: Shape
    sources: tuple[Source, ...]
    packed: bool = False

    @property
    def dtype(self) -> str:
        if self.packed:
            return "uint8"
        return "float16" if len(self.shape) == 2 else "float32"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def layer_placements(c: ModelConfig, layer: int) -> dict[str, Placement]:
    """The arrays of one layer by name."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    blk = f"blk.{layer}."

    def one(shape: Shape, tensor: str) -> Placement:
        return Placement(shape, (Source(f"{blk}{tensor}.weight"),))

    def fused(columns: Shape, kind: str) -> Placement:
        parts = (("attn_q", 0), ("attn_k", q), ("attn_v", q + kv))
        return Placement(
            (q + 2 * kv, *columns), tuple(Source(f"{blk}{t}.{kind}", row0) for t, row0 in parts)
        )

    gate_up = (Source(f"{blk}ffn_gate.weight", 0, 2), Source(f"{blk}ffn_up.weight", 1, 2))
    placements = {
        "attn_norm": one((c.hidden,), "attn_norm"),
        "qkv": fused((c.hidden,), "weight"),
        "attn_output": one((c.hidden, q), "attn_output"),
        "ffn_norm": one((c.hidden,), "ffn_norm"),
        "gate_up": Placement((2 * c.ffn, c.hidden), gate_up),
        "down": one((c.hidden, c.ffn), "ffn_down"),
    }
    if c.qkv_bias:
        placements["qkv_bias"] = fused((), "bias")
    if c.qk_norm:
        placements["q_norm"] = one((c.head_dim,), "attn_q_norm")
        placements["k_norm"] = one((c.head_dim,), "attn_k_norm")
    if c.post_norms:
        placements["post_attention_norm"] = one((c.hidden,), "post_attention_norm")
        placements["post_ffw_norm"] = one((c.hidden,), "post_ffw_norm")
    return placements


def outer_placements(c: ModelConfig, embedding: TensorInfo) -> dict[str, Placement]:
    """The arrays outside the layers; `embedding` is the file's entry of `token_embd.weight`."""
    packed = (c.vocab, embedding.nbytes // c.vocab)
    output = embedding.name if c.tied else "output.weight"
    return {
        "embedding": Placement(packed, (Source(embedding.name),), packed=True),
        "output_norm": Placement((c.hidden,), (Source("output_norm.weight"),)),
        "output": Placement((c.vocab, c.hidden), (Source(output),)),
    }


def packed_placements(file: GGUFFile, group: Mapping[str, Placement]) -> dict[str, Placement]:
    """`group` with each fp16 matrix as what it is made of: tensors as the file has them, by name.

    A tied output matrix is the embedding, which is there already.
    """
    packed = {n: p for n, p in group.items() if p.packed or len(p.shape) == 1}
    held = {p.sources[0].tensor for p in packed.values() if p.packed}
    for placement in group.values():
        for source in placement.sources if placement.dtype == "float16" else ():
            tensor = file.tensors[source.tensor]
            if tensor.name not in held:
                rows = tensor.shape[0]
                packed[tensor.name] = Placement(
                    (rows, tensor.nbytes // rows), (Source(tensor.name),), packed=True
                )
    return packed


def placements(file: GGUFFile, c: ModelConfig, mode: str = "fp16") -> list[dict[str, Placement]]:
    """The arrays outside the layers, then those of each layer. `mode`: "fp16" or "per-layer"."""
    embedding = file.tensors["token_embd.weight"]
    groups = [outer_placements(c, embedding)]
    groups += (layer_placements(c, layer) for layer in range(c.layers))
    return groups if mode == "fp16" else [packed_placements(file, group) for group in groups]


def weight_bytes(file: GGUFFile, c: ModelConfig, mode: str = "fp16") -> int:
    """Device bytes of all weights."""
    return sum(p.nbytes for group in placements(file, c, mode) for p in group.values())


class Weights:
    """All weights on `library.device`: `outer` and, per layer, `layers[i]`, by array name.

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
                yield MatrixPart(file.tensors[s.tensor], arrays[name], s.row0, s.row_step)
