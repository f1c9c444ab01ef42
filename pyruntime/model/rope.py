"""Rotary position embedding: one configuration, one table of cosines and sines for every backend.

RoPE turns pair i of a head's d elements by the angle position * base^(-2i/d) (RoFormer,
arXiv:2104.09864, eq. 15). Scaling stretches the angles for contexts beyond the trained one:

linear          every angle divided by the factor (position interpolation, arXiv:2306.15595).
yarn            NTK by parts (YaRN, arXiv:2309.00071, section 3.2): pairs that turn more than
                `beta_fast` times within the original context keep their angle, those that turn
                less than `beta_slow` times are interpolated, with a linear ramp between; cosine
                and sine are then multiplied by 0.1 ln(factor) + 1 (section 3.4, eq. 22).
frequency       Llama 3 ships its own divisor for each pair, as the tensor `rope_freqs.weight`.
factors

The ramp is over pair numbers and its ends are rounded outwards, as the YaRN authors' code and
ggml's `rope_yarn` do: models are converted and checked against those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

RopeStyle = Literal["interleaved", "neox"]
RopeScaling = Literal["none", "linear", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Position encoding of one model.

    `style` says which elements form pair i of `dim`: "interleaved" (2i, 2i+1) or "neox"
    (i, i + dim/2). `factors` are the dim/2 divisors of `rope_freqs.weight`; empty means none.
    """

    style: RopeStyle
    dim: int
    base: float
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_context: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors: tuple[float, ...] = ()


def rope_frequencies(rope: RopeConfig) -> NDArray[np.float64]:
    """Angle per position of each pair: float64 [dim/2], in radians."""
    pair = np.arange(rope.dim // 2)
    frequency = rope.base ** (-2.0 * pair / rope.dim)
    if rope.factors:
        frequency /= np.asarray(rope.factors)
    if rope.scaling == "linear":
        frequency /= rope.factor
    elif rope.scaling == "yarn":
        low = max(math.floor(_pair_that_turns(rope, rope.beta_fast)), 0)
        high = min(math.ceil(_pair_that_turns(rope, rope.beta_slow)), rope.dim - 1)
        interpolated = np.clip((pair - low) / max(high - low, 0.001), 0.0, 1.0)
        frequency *= (1.0 - interpolated) + interpolated / rope.factor
    return frequency


def rope_magnitude(rope: RopeConfig) -> float:
    """What cosine and sine are multiplied by; it enters the attention scores squared."""
    if rope.scaling == "yarn" and rope.factor > 1.0:
        return rope.attn_factor * (0.1 * math.log(rope.factor) + 1.0)
    return rope.attn_factor


def rope_table(
    rope: RopeConfig, positions: ArrayLike
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, float32 [n, dim/2] each, of n integer positions; computed in float64."""
    angle = np.asarray(positions, np.float64)[:, None] * rope_frequencies(rope)
    magnitude = rope_magnitude(rope)
    cos, sin = magnitude * np.cos(angle), magnitude * np.sin(angle)
    return cos.astype(np.float32), sin.astype(np.float32)


def _pair_that_turns(rope: RopeConfig, turns: float) -> float:
    """The (fractional) pair that makes `turns` full turns within the original context."""
    wavelengths = rope.original_context / (2.0 * math.pi * turns)
    return rope.dim * math.log(wavelengths) / (2.0 * math.log(rope.base))
