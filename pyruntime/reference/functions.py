"""The functions that a decoder layer is made of, on float32 arrays."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pyruntime.errors import NumericalError
from pyruntime.model.rope import RopeStyle

Array = NDArray[np.float32]

# Rounds an operand to the precision under study; the text names it if it does not fit.
Rounding = Callable[[Array, str], Array]

# Query rows of one attention step: bounds the scores to heads * 256 * keys elements.
QUERY_ROWS = 256


def exact(x: Array, what: str) -> Array:
    """`x` itself: float32 throughout."""
    return x


def fp16(x: Array, what: str) -> Array:
    """`x` rounded to the nearest fp16 number (ties to even), as float32.

    Raises NumericalError naming `what` where that is not finite. Equal to a cast there and back,
    which takes some 20 times as long on the small numbers that softmax is full of.
    """
    largest = float(np.abs(x).max(initial=0))
    if not largest < 65520:  # what rounds to 2^16; also true of NaN
        raise NumericalError(f"{what} reaches {largest:.6g}, beyond the largest fp16 number, 65504")
    bits = x.view(np.uint32)
    # An fp16 number has 13 mantissa bits fewer, and below 2^-14 a fixed step of 2^-24, that
    # of float32 between 1/2 and 1.
    normal = ((bits + 0xFFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)
    small = (x + np.float32(0.75)) - np.float32(0.75)
    return np.where(np.abs(x) < 2**-14, small, normal)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv:1910.07467)."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed


def rotate(x: Array, cos: Array, sin: Array, style: RopeStyle) -> Array:
    """Turn the pairs of x [nt, heads, d] by the angles of cos and sin [nt, d/2]."""
    half = x.shape[-1] // 2
    first, second = (
        (np.s_[..., 0::2], np.s_[..., 1::2])
        if style == "interleaved"
        else (np.s_[..., :half], np.s_[..., half:])
    )
    cos, sin = cos[:, None], sin[:, None]
    out = np.empty_like(x)
    out[first] = x[first] * cos - x[second] * sin
    out[second] = x[first] * sin + x[second] * cos
    return out


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up, where silu(g) = g / (1 + exp(-g)) (arXiv:2002.05202)."""
    with np.errstate(over="ignore"):  # exp(-g) = inf gives the right limit, 0
        silu: Array = gate / (1 + np.exp(-gate))
    return silu * up


def geglu(gate: Array, up: Array) -> Array:
    """gelu(gate) * up, gelu approximated by tanh (arXiv:1606.08415, section 2)."""
    with np.errstate(over="ignore"):  # tanh(inf) = 1
        inner = np.float32(math.sqrt(2 / math.pi)) * (gate + np.float32(0.044715) * gate**3)
    gelu: Array = np.float32(0.5) * gate * (1 + np.tanh(inner))
    return gelu * up


def softcap(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap); x itself without a cap (arXiv:2408.00118, section 2)."""
    return x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))


def causal_attention(
    q: Array,
    k: Array,
    v: Array,
    rounded: Rounding,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> Array:
    """softmax(scale q k^T) v, each query seeing the keys up to its own position.

    With `window` it sees the last `window` of these alone; `cap` caps the scores.

    q [nt, heads, d] holds the last nt of the positions of k and v [kv heads, n, d]; heads
    h * group ... (h + 1) * group - 1 share kv head h. Returns [nt, heads, d].
    """
    nt, heads, d = q.shape
    kv_heads, n, _ = k.shape
    group, start = heads // kv_heads, n - nt
    by_group = q.reshape(nt, kv_heads, group, d).transpose(1, 2, 0, 3)
    out = np.empty_like(by_group)
    for first in range(0, nt, QUERY_ROWS):
        block = by_group[:, :, first : first + QUERY_ROWS]
        rows = block.shape[2]
        end = start + first + rows
        begin = max(end - rows - window + 1, 0) if window else 0
        keys = np.arange(begin, end)
        scores = block.reshape(kv_heads, group * rows, d) @ k[:, begin:end].transpose(0, 2, 1)
        scores = softcap(scores.reshape(kv_heads, group, rows, -1) * np.float32(scale), cap)
        behind = keys[-rows:, None] - keys
        scores[..., (behind < 0) | (behind >= (window or end))] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weighted = rounded(p, "P").reshape(kv_heads, group * rows, -1) @ v[:, begin:end]
        total = p.sum(axis=-1, keepdims=True)
        out[:, :, first : first + rows] = weighted.reshape(kv_heads, group, rows, d) / total
    return out.transpose(2, 0, 1, 3).reshape(nt, heads, d)
