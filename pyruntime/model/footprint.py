"""Device memory that a model takes, worked out before anything is allocated."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyruntime.errors import UnsupportedModelError
from pyruntime.model.cache import cache_layout, layout_bytes
from pyruntime.model.config import ModelConfig
from pyruntime.model.decoder import activation_bytes
from pyruntime.model.live import live_bytes
from pyruntime.model.placements import layer_arrays, placements, weight_bytes, without_planes
from pyruntime.model.streamed import scratch_bytes

if TYPE_CHECKING:
    from pyruntime.gguf import GGUFFile
log = logging.getLogger("pyruntime")

# Rows of a pass at most. "int8" keeps the outputs of gate and up apart, and int8 copies of what its
# products read, where it is to be small.
PASS_TOKENS = {"per-layer": 8192, "int8": 2048}
INT8_FIRST = (8, 12)  # major compute capabilities, see `modes`


@dataclass(frozen=True)
class Plan:
    """Device memory that a loaded model with one cache takes, in our own allocations.

    Attributes:
        weights: "fp16", "per-layer" or "int8": what was asked for, or what "auto" chooses.
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
    capability: tuple[int, int] | None = None,
    invariant: bool = False,
) -> Plan:
    """What `GpuModel` and one cache of `kv_tokens` allocate for good, and the logits of one row.

    "auto" is the first of `modes` that fits `memory`, and the smallest if none does.

    Args:
        capability, invariant: see `modes`.

    Raises UnsupportedModelError: weights "int8" of a file without packed matrices.
    """

    def planned(mode: str) -> Plan:
        rows = min(max_tokens, PASS_TOKENS.get(mode, max_tokens))
        needs = {"weights": weight_bytes(file, c, mode)}
        if mode == "per-layer":
            needs["scratch"] = scratch_bytes(c, rows)
        names = layer_arrays(placements(file, c, mode)) if mode == "int8" else None
        needs |= cache_bytes(c, kv_tokens, kv_dtype)
        needs |= {"activations": activation_bytes(c, rows, names), "logits": 4 * c.vocab}
        needs["tables"] += live_bytes(rows)
        return Plan(mode, rows, needs, memory)

    if weights == "int8":
        without_planes(file, c)
    if weights != "auto":
        return planned(weights)
    plans = [planned(mode) for mode in modes(file, c, capability, invariant)]
    return next((p for p in plans if p.fits), None) or min(plans, key=lambda p: p.total)


def modes(
    file: GGUFFile,
    c: ModelConfig,
    capability: tuple[int, int] | None = None,
    invariant: bool = False,
) -> list[str]:
    """What weights "auto" chooses from, the best first, on a device of a compute capability.

    "int8" rounds activations to 8 bits. It comes before "per-layer" where products are mma.sync's,
    which is twice as fast on int8 as on fp16: compute capabilities 8.x and 12.x. It is left out
    where it does not give what is asked for: `exact="invariant"`, files without packed matrices.
    """
    order = ["fp16", "per-layer", "int8"]
    if capability is not None and capability[0] in INT8_FIRST:
        order = ["fp16", "int8", "per-layer"]
    try:
        without_planes(file, c)
    except UnsupportedModelError:
        order.remove("int8")
    else:
        if invariant:
            order.remove("int8")
    return order


def tell_choice(chosen: Plan, device: str) -> None:
    """Logs what "auto" came to; where results are less exact for it, as a warning."""
    level = logging.WARNING if chosen.weights == "int8" else logging.INFO
    rounded = "; activations are rounded to 8 bits" if chosen.weights == "int8" else ""
    free = "" if chosen.memory is None else f" of {chosen.memory:,}"
    log.log(
        level, "weights 'auto' on %s: %s, which takes %s bytes%s%s", device, chosen.weights,
        f"{chosen.total:,}", free, rounded,
    )  # fmt: skip


def tell_fp16(file: GGUFFile, c: ModelConfig) -> None:
    """Logs which matrices are held as fp16 although weights are "int8", and why."""
    if kept := without_planes(file, c):
        log.info(
            "%s of weights 'int8' stay fp16: %s",
            len(kept),
            "; ".join(f"{name} {reason}" for name, reason in kept.items()),
        )


def cache_bytes(c: ModelConfig, tokens: int, kv_dtype: str = "f16") -> dict[str, int]:
    """Device bytes of a cache for `tokens` positions, and of what all caches up to it share.

    That is the rotary tables, and for e4m3 the fp16 copy of the layer at work, `kv_staging`.
    """
    needs = {"kv_cache": layout_bytes(cache_layout(c, tokens, kv_dtype))}
    if kv_dtype != "f16":
        needs["kv_staging"] = layout_bytes(cache_layout(c, tokens, layers=1))
    return needs | {"tables": len(c.ropes) * 2 * 4 * tokens * (c.head_dim // 2)}
