"""What a prefill has to do, from the model's configuration alone: launches, FLOP and bytes by role.

This is the other side of a measurement's checks, so nothing here looks at recorded launches. FLOP
counts a multiply-add as two; bytes count every input once and every output once, as they lie in
memory (fp16 weights). Softmax, SwiGLU and biases are left out of the FLOP.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyruntime.model.config import ModelConfig
from pyruntime.model.weights import layer_placements

GEMMS = ("qkv", "o", "gate_up", "down", "head")
# In order of computation.
ROLES = (
    "embed", "norm", "qkv", "rope", "widen", "attention", "gather", "o", "gate_up", "down", "head",
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


def expected_work(
    c: ModelConfig, nt: int, embedding_row_bytes: int, kv_dtype: str = "f16"
) -> dict[str, Work]:
    """The work of a prefill of `nt` tokens from an empty cache, logits of the last row.

    After the last layer's attention only one row is still wanted (`gather`, unless nt is 1).

    Args:
        embedding_row_bytes: of one packed row of the embedding.
        kv_dtype: what the cache holds; an e4m3 one is widened before attention.
    """
    h, q, kv = c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {name: placement.shape for name, placement in layer_placements(c, 0).items()}

    def product(weight: str, rows: int, written: int) -> Work:
        """A product with one layer's `weight`; `written`: bytes per row of what is added to."""
        n, k = shapes[weight]
        return Work(1, 2 * rows * n * k, 2 * n * k + rows * (2 * k + written))

    def second_half(weight: str, written: int) -> Work:
        return product(weight, nt, written) * (c.layers - 1) + product(weight, 1, written)

    def norm(rows: int) -> Work:
        return Work(1, 4 * rows * h, rows * (4 + 2) * h + 4 * h)

    added = (4 + 4) * h  # the f32 residual stream, read and written
    stored = 2 * kv if kv_dtype == "f16" else kv + 4 * c.kv_heads  # bytes of a row of K, and of V
    # f32 in, fp16 q and what is stored out, cosines and sines.
    rotated = 4 * (q + 2 * kv) + 2 * q + 2 * stored + 4 * c.head_dim
    visible = nt * (nt + 1) // 2  # row i sees keys 0..i
    work = {
        "embed": Work(1, 0, nt * (4 + embedding_row_bytes + 4 * h)),
        "norm": norm(nt) * (2 * c.layers - 1) + norm(1) * 2,
        "qkv": product("qkv", nt, 4 * (q + 2 * kv)) * c.layers,
        "rope": Work(1, 3 * nt * (q + kv), nt * rotated) * c.layers,
        "attention": Work(1, 4 * q * visible, 2 * nt * (2 * q + 2 * kv)) * c.layers,
        "o": second_half("attn_output", added),
        "gate_up": second_half("gate_up", 2 * c.ffn),
        "down": second_half("down", added),
        "head": Work(1, 2 * c.vocab * h, 2 * c.vocab * h + 2 * h + 4 * c.vocab),
    }
    if kv_dtype != "f16":
        work["widen"] = Work(1, 2 * nt * kv, 2 * nt * (stored + 2 * kv)) * c.layers
    if nt > 1:
        work["gather"] = Work(1, 0, 2 * (4 * h + 2 * q))
    return {role: work[role] for role in ROLES if role in work}
