"""Device memory that a model takes, worked out before anything is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyruntime.model.config import ModelConfig
from pyruntime.model.decoder import activation_bytes
from pyruntime.model.live import live_bytes
from pyruntime.model.weights import weight_bytes

if TYPE_CHECKING:
    from pyruntime.gguf import GGUFFile


def device_bytes(file: GGUFFile, c: ModelConfig, max_tokens: int, kv_tokens: int) -> dict[str, int]:
    """Device bytes by category that `GpuModel` and one cache of `kv_tokens` allocate for good."""
    cache = cache_bytes(c, kv_tokens)
    return {
        "weights": weight_bytes(c, file.tensors["token_embd.weight"]),
        "kv_cache": cache["kv_cache"],
        "activations": activation_bytes(c, max_tokens),
        "tables": cache["tables"] + live_bytes(max_tokens),
    }


def cache_bytes(c: ModelConfig, tokens: int) -> dict[str, int]:
    """Device bytes of a cache for `tokens` positions, and of the rotary tables that cover it."""
    return {
        "kv_cache": 2 * 2 * c.layers * c.kv_heads * tokens * c.head_dim,
        "tables": 2 * 4 * tokens * (c.head_dim // 2),
    }
