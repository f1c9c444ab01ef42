"""Which device arrays hold a model's weights, and what tensors of the file they are made of.

In mode "fp16" matrices are float16, q/k/v fused, gate and up interleaved row by row. The embedding
stays packed: its rows are looked up and unpacked exactly. In mode "per-layer" so does every matrix
(model/streamed.py). In mode "int8" so does every one that products with int8 activations take, as
planes (cuda/quant/planes.cuh) and each tensor apart; the others are as in "fp16".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pyruntime.errors import UnsupportedModelError
from pyruntime.model.config import ModelConfig
from pyruntime.ops.int8_types import installed_types

if TYPE_CHECKING:
    from pyruntime.gguf import GGUFFile, TensorInfo

Shape = tuple[int, ...]
PLANE_ROWS = 16  # rows of a tensor that has planes are a multiple of this


@dataclass(frozen=True)
class Source:
    """A tensor of the file: its rows go to rows row0, row0 + row_step, … of the array."""

    tensor: str
    row0: int = 0
    row_step: int = 1


@dataclass(frozen=True)
class Placement:
    """One device array and the tensors it is made of.

    Matrices are float16, vectors float32, packed rows uint8, and so are the planes of a tensor.
    """

    shape: Shape
    sources: tuple[Source, ...]
    packed: bool = False
    planes: bool = False

    @property
    def dtype(self) -> str:
        if self.packed or self.planes:
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


# What the tensors of fused matrices are called where each has an array of its own.
APART = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
# Matrices that have planes all together or not at all: others' activations are float16.
TOGETHER = (("qkv",), ("attn_output",), ("gate_up", "down"), ("output",))


def plane_placements(file: GGUFFile, group: Mapping[str, Placement]) -> dict[str, Placement]:
    """`group` with planes instead of fp16 matrices where there are int8 products of them."""
    found = dict(group)
    for together in TOGETHER:
        names = [name for name in together if name in group]
        tensors = [file.tensors[s.tensor] for name in names for s in group[name].sources]
        if any(why_no_planes(tensor) for tensor in tensors):
            continue
        for name in names:
            sources = found.pop(name).sources
            for part, source in zip(APART.get(name, (name,)), sources, strict=True):
                rows = file.tensors[source.tensor].shape[0]
                row_bytes = file.tensors[source.tensor].nbytes // rows
                found[part] = Placement((rows, row_bytes), (Source(source.tensor),), planes=True)
    return found


def why_no_planes(tensor: TensorInfo) -> str:
    """What keeps a tensor from having planes, such as "is F16"; "" if nothing does."""
    assert tensor.type is not None  # unknown types were refused with the config
    if tensor.type.name not in installed_types():
        return f"is {tensor.type.name}"
    if tensor.shape[0] % PLANE_ROWS:
        return f"has {tensor.shape[0]} rows, no multiple of {PLANE_ROWS}"
    return ""


def without_planes(file: GGUFFile, c: ModelConfig) -> dict[str, str]:
    """The matrices that mode "int8" holds as fp16: why, by the tensor's name.

    Raises UnsupportedModelError: all those of the layers.
    """
    kept: dict[str, str] = {}
    outer, *layers = placements(file, c, "int8")
    for group in (outer, *layers):
        wide = [p for p in group.values() if p.dtype == "float16"]
        names = [source.tensor for placement in wide for source in placement.sources]
        kept |= {name: why_no_planes(file.tensors[name]) for name in names}
    if not any(p.planes for group in layers for p in group.values()):
        name, reason = next((n, why) for n, why in kept.items() if why and n.startswith("blk."))
        raise UnsupportedModelError(
            f"{file.path}: weights='int8' multiplies packed matrices, and of no layer there are "
            f"any: tensor '{name}' {reason}"
        )
    return {name: why or "goes with one of those" for name, why in kept.items()}


def placements(file: GGUFFile, c: ModelConfig, mode: str = "fp16") -> list[dict[str, Placement]]:
    """The arrays outside the layers, then those of each layer.

    `mode`: "fp16", "per-layer" or "int8".
    """
    embedding = file.tensors["token_embd.weight"]
    groups = [outer_placements(c, embedding)]
    groups += (layer_placements(c, layer) for layer in range(c.layers))
    form = {"per-layer": packed_placements, "int8": plane_placements}.get(mode)
    return [form(file, group) for group in groups] if form else groups


def plane_tensors(file: GGUFFile, c: ModelConfig) -> frozenset[str]:
    """The tensors that mode "int8" multiplies with int8 activations."""
    groups = placements(file, c, "int8")
    return frozenset(p.sources[0].tensor for g in groups for p in g.values() if p.planes)


def layer_arrays(placed: list[dict[str, Placement]]) -> frozenset[str]:
    """The names of the arrays that layers have, of what `placements` gave."""
    return frozenset().union(*placed[1:])


def weight_bytes(file: GGUFFile, c: ModelConfig, mode: str = "fp16") -> int:
    """Device bytes of all weights."""
    return sum(p.nbytes for group in placements(file, c, mode) for p in group.values())
