"""Device memory that a model takes, worked out before anything is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyruntime.model.cache import cache_layout, layout_bytes
from pyruntime.model.config import ModelConfig
from pyruntime.model.decoder import activation_bytes
from pyruntime.model.live import live_bytes
from pyruntime.model.weights import weight_bytes

if TYPE_CHECKING:
    from pyruntime.gguf import GGUFFile


def device_bytes(
    file: GGUFFile, c: ModelConfig, max_tokens: int, kv_tokens: int, kv_dtype: str = "f16"
) -> dict[str, int]:
    """Device bytes by category that `GpuModel` and one cache of `kv_tokens` allocate for good."""
    needs = {
        "weights": weight_bytes(c, file.tensors["token_embd.weight"]),
        **cache_bytes(c, kv_tokens, kv_dtype),
        "activations": activation_bytes(c, max_tokens),
    }
    needs["tables"] += live_bytes(max_tokens)
    return needs


def cache_bytes(c: ModelConfig, tokens: int, kv_dtype: str = "f16") -> dict[str, int]:
    """Device bytes of a cache for `tokens` positions, and of what all caches up to it share.

    That is the rotary tables, and for e4m3 the fp16 copy of the layer at work, `kv_staging`.
    """
    needs = {"kv_cache": layout_bytes(cache_layout(c, tokens, kv_dtype))}
    if kv_dtype != "f16":
        needs["kv_staging"] = layout_bytes(cache_layout(c, tokens, layers=1))
    return needs | {"tables": len(c.ropes) * 2 * 4 * tokens * (c.head_dim // 2)}
