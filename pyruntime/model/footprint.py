"""Device memory that a model takes, worked out before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyruntime.model.cache import cache_layout, layout_bytes
from pyruntime.model.config import ModelConfig
from pyruntime.model.decoder import activation_bytes
from pyruntime.model.live import live_bytes
from pyruntime.model.placements import weight_bytes
from pyruntime.model.streamed import PASS_TOKENS, scratch_bytes

if TYPE_CHECKING:
    from pyruntime.gguf import GGUFFile


@dataclass(frozen=True)
class Plan:
    """Device memory that a loaded model with one cache takes, in our own allocations.

    Attributes:
        weights: "fp16" or "per-layer": what was asked for, or what "auto" chooses.
        max_tokens: rows of one pass.
        nbytes: bytes by category.
        memory: bytes that it may take; None: there was nothing to go by.
    """

    weights: str
    max_tokens: int
    nbytes: Mapping[str, int]
    memory: int | None

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.nbytes.values())

    @property
    def fits(self) -> bool:
        """Whether `memory` is known not to be too little."""
        return self.memory is None or self.total <= self.memory


def plan(
    file: GGUFFile,
    c: ModelConfig,
    *,
    max_tokens: int,
    kv_tokens: int,
    kv_dtype: str = "f16",
    weights: str = "auto",
    memory: int | None = None,
) -> Plan:
    """What `GpuModel` and one cache of `kv_tokens` allocate for good, and the logits of one row.

    "auto" is "fp16" if that fits `memory`, or if "per-layer" would not take less: it adds slots,
    and keeps even float32 weights as they are.
    """

    def planned(mode: str) -> Plan:
        rows = max_tokens if mode == "fp16" else min(max_tokens, PASS_TOKENS)
        needs = {"weights": weight_bytes(file, c, mode)}
        if mode == "per-layer":
            needs["scratch"] = scratch_bytes(c, rows)
        needs |= cache_bytes(c, kv_tokens, kv_dtype)
        needs |= {"activations": activation_bytes(c, rows), "logits": 4 * c.vocab}
        needs["tables"] += live_bytes(rows)
        return Plan(mode, rows, needs, memory)

    if weights != "auto":
        return planned(weights)
    wide, packed = planned("fp16"), planned("per-layer")
    return wide if wide.fits or wide.total <= packed.total else packed


def cache_bytes(c: ModelConfig, tokens: int, kv_dtype: str = "f16") -> dict[str, int]:
    """Device bytes of a cache for `tokens` positions, and of what all caches up to it share.

    That is the rotary tables, and for e4m3 the fp16 copy of the layer at work, `kv_staging`.
    """
    needs = {"kv_cache": layout_bytes(cache_layout(c, tokens, kv_dtype))}
    if kv_dtype != "f16":
        needs["kv_staging"] = layout_bytes(cache_layout(c, tokens, layers=1))
    return needs | {"tables": len(c.ropes) * 2 * 4 * tokens * (c.head_dim // 2)}
