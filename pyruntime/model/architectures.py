"""The architectures: what their names fix, in one row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pyruntime.model.rope import RopeStyle

Activation = Literal["silu", "gelu"]


@dataclass(frozen=True)
class Architecture:
    """What the name of an architecture fixes and no key of the file states.

    Attributes:
        gemma: the embedding is scaled by the root of its width, the feed-forward block is GeGLU,
            and what a block adds to the residual stream is normalised first.
        windows: where the file gives a sliding window, layer i has it unless i + 1 is a multiple
            of this; 0: every layer has it. None: a file that gives one is refused.
        window: the sliding window where the file gives none.
        local_base: RoPE's base in layers with a window, without any scaling; None: as elsewhere.
        caps: of attention's scores and of logits where the file states none; None: the scores are
            not capped, and logits are where the file says so.
        wide: the number of layers of the one size whose attention is scaled by the root of
            hidden / heads instead of the head dimension: no key says so (llama.cpp, `src/models`).
        rope_scaling: whether RoPE may be scaled.
    """

    rope: RopeStyle
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False
    windows: int | None = None
    window: int | None = None
    local_base: float | None = None
    caps: tuple[float, float] | None = None
    wide: int | None = None
    rope_scaling: bool = True


# Mistral's older files are "llama". llama.cpp scales its RoPE in "mistral3" by other rules.
ARCHITECTURES = {
    "llama": Architecture(rope="interleaved", windows=0),
    "mistral3": Architecture(rope="interleaved", windows=0, rope_scaling=False),
    "qwen2": Architecture(rope="neox", qkv_bias=True),
    "qwen3": Architecture(rope="neox", qk_norm=True),
    "gemma2": Architecture(
        rope="neox", gemma=True, windows=2, window=4096, caps=(50.0, 30.0), wide=46
    ),
    "gemma3": Architecture(
        rope="neox", gemma=True, qk_norm=True, windows=6, local_base=10000.0, wide=62
    ),
}
