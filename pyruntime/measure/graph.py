"""What a prefill has to do, from the model's configuration alone: launches, FLOP and bytes by role.

This is the other side of a measurement's checks, so nothing here looks at recorded launches. FLOP
counts a multiply-add as two; bytes count every input once and every output once, as they lie in
memory (fp16 weights). Softmax, SwiGLU, caps and biases are left out of the FLOP, and what kernels
hand to one another (the list of a schedule, sums of split keys) out of the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyruntime.model.config import ModelConfig
from pyruntime.model.live import PASS_BYTES
from pyruntime.model.placements import layer_placements

GEMMS = ("qkv", "o", "gate_up", "down", "head")
# In order of computation.
ROLES = (
    "schedule", "embed", "norm", "qkv", "rope", "widen", "attention", "gather", "o", "gate_up",
    "down", "head", "softcap",
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
    c: ModelConfig,
    nt: int,
    embedding_row_bytes: int,
    kv_dtype: str = "f16",
    scheduled: bool = False,
    rotates: bool = False,
    packed_head: bool = False,
) -> dict[str, Work]:
    """The work of a prefill of `nt` tokens from an empty cache, logits of the last row.

    After the last layer's attention only one row is still wanted (`gather`, unless nt is 1).

    Args:
        embedding_row_bytes: of one packed row of the embedding.
        kv_dtype: what the cache holds; an e4m3 one is widened before attention.
        scheduled: attention is by a kernel for which a schedule is made, once for each window.
        rotates: q and k are rotated, and K and V stored, by the product that makes them.
        packed_head: the output matrix is the packed embedding, and its row is normalised with it.
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

    def joining_norm(rows: int) -> Work:
        """The norm after a block; where the block has one of its own, that and the sum as well."""
        if not c.post_norms:
            return norm(rows)
        return norm(rows) + Work(0, 5 * rows * h, rows * (4 + 4) * h + 4 * h)

    def visible(window: int | None) -> int:
        """Pairs of a row and a key that it sees: row i sees keys 0..i, or the last of these."""
        hidden = max(nt - window, 0) if window else 0
        return nt * (nt + 1) // 2 - hidden * (hidden + 1) // 2

    def attention(window: int | None) -> Work:
        return Work(1, 4 * q * visible(window), 2 * nt * (2 * q + 2 * kv))

    local = sum(map(c.is_local, range(c.layers)))
    # The f32 residual stream, read and written, or what its norm reads.
    added = 4 * h if c.post_norms else (4 + 4) * h
    stored = 2 * kv if kv_dtype == "f16" else kv + 4 * c.kv_heads  # bytes of a row of K, and of V
    # fp16 q and what is stored out, cosines and sines.
    rotated = 2 * q + 2 * stored + 4 * c.head_dim
    rotation, summed = 3 * nt * (q + kv), 4 * (q + 2 * kv)
    work = {
        "embed": Work(1, 0, nt * (4 + embedding_row_bytes + 4 * h)),
        "norm": norm(nt) + joining_norm(nt) * (2 * c.layers - 2) + joining_norm(1) * 2,
        "qkv": product("qkv", nt, summed) * c.layers,
        "rope": Work(1, rotation, nt * (summed + rotated)) * c.layers,
        "attention": attention(c.window) * local + attention(None) * (c.layers - local),
        "o": second_half("attn_output", added),
        "gate_up": second_half("gate_up", 2 * c.ffn),
        "down": second_half("down", added),
        "head": Work(1, 2 * c.vocab * h, 2 * c.vocab * h + 2 * h + 4 * c.vocab),
    }
    if packed_head:
        read = c.vocab * embedding_row_bytes + (4 + 4) * h
        work["head"] = Work(1, 2 * c.vocab * h + 4 * h, read + 4 * c.vocab)
    if rotates:
        del work["rope"]
        work["qkv"] = (product("qkv", nt, rotated) + Work(0, rotation, 0)) * c.layers
    if scheduled:
        work["schedule"] = Work(1, 0, PASS_BYTES) * len(c.windows)
    if kv_dtype != "f16":
        work["widen"] = Work(1, 2 * nt * kv, 2 * nt * (stored + 2 * kv)) * c.layers
    if c.logit_cap is not None:
        work["softcap"] = Work(1, 0, 8 * c.vocab)
    if nt > 1:
        work["gather"] = Work(1, 0, 2 * (4 * h + 2 * q))
    return {role: work[role] for role in ROLES if role in work}
