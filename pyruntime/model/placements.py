"""Which device arrays hold a model's weights, and what tensors of the file they are made of.

In mode "fp16" matrices are float16, q/k/v fused, gate and up interleaved row by row. The embedding
stays packed: its rows are looked up and unpacked exactly. In mode "per-layer" so does every matrix
(model/streamed.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pyruntime.model.config import ModelConfig

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
