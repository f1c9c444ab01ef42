"""What a prefill has to do, from the model's configuration alone: launches, FLOP and bytes by role.

This is the other side of a measurement's checks, so nothing here looks at recorded launches. FLOP
counts a multiply-add as two; bytes count every input once and every output once, as they lie in
memory. Softmax, SwiGLU, caps, biases and rounding to int8 are left out of the FLOP, and what
kernels hand to one another (the list of a schedule, sums of split keys) out of the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyruntime.model.config import ModelConfig
from pyruntime.model.live import PASS_BYTES
from pyruntime.model.placements import layer_placements
from pyruntime.ops.extents import SUMMED, plane_extents

GEMMS = ("qkv", "q", "k", "v", "o", "gate_up", "gate", "up", "down", "head")
# In order of computation.
ROLES = (
    "schedule", "embed", "norm", "quantize", "qkv", "q", "k", "v", "rope", "widen", "attention",
    "gather", "o", "gate_up", "gate", "up", "gated", "down", "head", "softcap",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What all launches of a role do together."""

    launches: int
    flop: int
    bytes: int

    def __add__(self, other: Work) -> Work:
        return Work(
            self.launches + other.launches, self.flop + other.flop, self.bytes + other.bytes
        )

    def __mul__(self, times: int) -> Work:
        return Work(self.launches * times, self.flop * times, self.bytes * times)


class Packed(NamedTuple):
    """A matrix that is multiplied with int8 activations: its GGUF type, and bytes."""

    type_name: str
    nbytes: int


Planes = Sequence[Mapping[str, Packed]]  # by name: those outside the layers, then of each layer


def expected_work(
    c: ModelConfig,
    nt: int,
    embedding_row_bytes: int,
    kv_dtype: str = "f16",
    scheduled: bool = False,
    rotates: bool = False,
    packed_head: bool = False,
    planes: Planes = (),
) -> dict[str, Work]:
    """The work of a prefill of `nt` tokens from an empty cache, logits of the last row.

    After the last layer's attention only one row is still wanted (`gather`, unless nt is 1).

    Args:
        embedding_row_bytes: of one packed row of the embedding.
        kv_dtype: what the cache holds; an e4m3 one is widened before attention.
        scheduled: attention is by a kernel for which a schedule is made, once for each window.
        rotates: q and k are rotated, and K and V stored, by the product that makes them.
        packed_head: the output matrix is the packed embedding, and its row is normalised with it.
        planes: with weights "int8"; other matrices are fp16.
    """
    h, q, kv = c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {name: placement.shape for name, placement in layer_placements(c, 0).items()}

    def product(weight: str, rows: int, written: int) -> Work:
        """A product with one layer's `weight`; `written`: bytes per row of what is added to."""
        n, k = shapes[weight]
        return Work(1, 2 * rows * n * k, 2 * n * k + rows * (2 * k + written))

    def int8_product(w: Packed, n: int, k: int, rows: int, written: int) -> Work:
        """The same of a plane with packed weights [n, k]; sums are read for types with mins."""
        read = _plane(rows, k, sums=w.type_name.lower() in SUMMED)
        return Work(1, 2 * rows * n * k, w.nbytes + read + rows * written)

    def norm(rows: int, joins: bool = False, plane: bool = False) -> Work:
        """To fp16 or a plane. `joins`: what a block adds has a norm of its own, and is added."""
        done = Work(1, 4 * rows * h, 4 * rows * h + 4 * h)
        done += Work(0, 0, _plane(rows, h) if plane else 2 * rows * h)
        return done + Work(0, 5 * rows * h, rows * (4 + 4) * h + 4 * h) if joins else done

    def quantized(rows: int, k: int, read: int) -> Work:
        """A plane made of `read` fp16 values for each of its own."""
        return Work(1, 0, 2 * rows * k * read + _plane(rows, k))

    def visible(window: int | None) -> int:
        """Pairs of a row and a key that it sees: row i sees keys 0..i, or the last of these."""
        hidden = max(nt - window, 0) if window else 0
        return nt * (nt + 1) // 2 - hidden * (hidden + 1) // 2

    def attention(window: int | None) -> Work:
        return Work(1, 4 * q * visible(window), 2 * nt * (2 * q + 2 * kv))

    # The f32 residual stream, read and written, or what its norm reads.
    added = 4 * h if c.post_norms else (4 + 4) * h
    stored = 2 * kv if kv_dtype == "f16" else kv + 4 * c.kv_heads  # bytes of a row of K, and of V
    # fp16 q and what is stored out, cosines and sines.
    rotated = 2 * q + 2 * stored + 4 * c.head_dim
    rotation, summed = 3 * nt * (q + kv), 4 * (q + 2 * kv)
    rope = Work(1, rotation, nt * (summed + rotated))
    qkv = {"qkv": product("qkv", nt, summed), "rope": rope}
    if rotates:
        qkv = {"qkv": product("qkv", nt, rotated) + Work(0, rotation, 0)}
    outer, *layers = planes or [{}] * (1 + c.layers)

    work: dict[str, Work] = {}

    def add(**more: Work) -> None:
        for role, one in more.items():
            work[role] = work.get(role, Work(0, 0, 0)) + one

    add(embed=Work(1, 0, nt * (4 + embedding_row_bytes + 4 * h)))
    for layer, packed in enumerate(layers):
        rows = 1 if layer == c.layers - 1 else nt  # behind its attention
        add(norm=norm(nt, joins=layer > 0 and c.post_norms, plane="q" in packed))
        if "q" in packed:
            widths = {"q": q, "k": kv, "v": kv}
            add(**{x: int8_product(packed[x], n, h, nt, 4 * n) for x, n in widths.items()})
            add(rope=rope)
        else:
            add(**qkv)
        add(attention=attention(c.window_of(layer)))
        if "attn_output" in packed:
            add(quantize=quantized(rows, q, 1))
            add(o=int8_product(packed["attn_output"], h, q, rows, added))
        else:
            add(o=product("attn_output", rows, added))
        add(norm=norm(rows, joins=c.post_norms, plane="gate" in packed))
        if "gate" in packed:
            add(
                **{x: int8_product(packed[x], c.ffn, h, rows, 2 * c.ffn) for x in ("gate", "up")},
                gated=quantized(rows, c.ffn, 2),
                down=int8_product(packed["down"], h, c.ffn, rows, added),
            )
        else:
            add(gate_up=product("gate_up", rows, 2 * c.ffn), down=product("down", rows, added))
    add(norm=norm(1, joins=c.post_norms))
    if "output" in outer and not packed_head:
        add(quantize=quantized(1, h, 1))
        add(head=int8_product(outer["output"], c.vocab, h, 1, 4 * c.vocab))
    else:
        add(head=Work(1, 2 * c.vocab * h, 2 * c.vocab * h + 2 * h + 4 * c.vocab))
    if packed_head:
        read = c.vocab * embedding_row_bytes + (4 + 4) * h
        work["head"] = Work(1, 2 * c.vocab * h + 4 * h, read + 4 * c.vocab)
    if scheduled:
        work["schedule"] = Work(1, 0, PASS_BYTES) * len(c.windows)
    if kv_dtype != "f16":
        work["widen"] = Work(1, 2 * nt * kv, 2 * nt * (stored + 2 * kv)) * c.layers
    if c.logit_cap is not None:
        work["softcap"] = Work(1, 0, 8 * c.vocab)
    if nt > 1:
        work["gather"] = Work(1, 0, 2 * (4 * h + 2 * q))
    return {role: work[role] for role in ROLES if role in work}


def _plane(rows: int, k: int, sums: bool = True) -> int:
    """Bytes of quantized rows with their scales, and the `sums`."""
    parts = plane_extents(rows, k, rows)
    return sum(parts.values()) - (0 if sums else parts["sums"])
