"""Made-up wall records with the shapes of a 7B model, for what reads records."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from goldens import GOLDEN

from pyruntime.gguf import GGUFFile
from pyruntime.measure.account import Call, account, checks, explain
from pyruntime.measure.graph import expected_work
from pyruntime.measure.inplace import InPlace
from pyruntime.measure.roofline import Roofline
from pyruntime.model.config import ModelConfig

NT = 3325
ROOF = Roofline(4.2e12, 4.5e14, "gemm_made_up", 8192, "0" * 64, "Made-up GPU", "13.0", "2026-01-01")
# Milliseconds of one launch.
EACH = {
    "embed": 0.02, "norm": 0.016, "qkv": 0.31, "rope": 0.06, "attention": 0.6, "gather": 0.004,
    "o": 0.25, "gate_up": 2.3, "down": 1.15, "head": 0.27,
}  # fmt: skip


def qwen2_7b() -> ModelConfig:
    """Qwen2.5-7B's sizes."""
    with GGUFFile.open(GOLDEN / "tiny-qwen2-q8_0.gguf") as file:
        tiny = ModelConfig.from_gguf(file)
    sizes = {"layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "head_dim": 128}
    return replace(tiny, name="qwen2.5-7b (made up)", ffn=18944, vocab=152064, **sizes)


def made_up_wall(**each: float) -> dict[str, Any]:
    """A record of 3,325 tokens; `each` replaces milliseconds of one launch of a role."""
    config = qwen2_7b()
    work = expected_work(config, NT, 2016)
    times = EACH | each
    launches = [(role, f"{role}_kernel") for role, w in work.items() for _ in range(w.launches)]
    ms = [times[role] for role, _ in launches]
    slices = account(launches, ms, work, ROOF)
    busy = sum(ms) * 1.001
    gap = explain([Call(busy + 0.5, 0.1, busy + 0.1, 0.05)], busy, busy, 0.02)
    return {
        "schema": "pyruntime.wall/1",
        "model": {"name": config.name},
        "nt": NT,
        "options": "",
        "regime": "burst",
        "commit": "0" * 40,
        "date": "2026-01-02T03:04:05+00:00",
        "device": "Made-up GPU",
        "architecture": "sm_90a",
        "cuda": "13.0",
        "kernels": {f"{role}_kernel": "0" * 64 for role in work},
        "plan": "0" * 64,
        "sm_mhz": 1980.0,
        "clocks": None,
        "roofline": asdict(ROOF),
        "busy_ms": [busy],
        "overlapped_ms": [busy],
        "wall_ms": [busy + 0.5],
        "gpu_ms": [busy + 0.1],
        "event_us": 1.2,
        "slices": slices,
        "gap": gap,
        "launches": [
            {"role": role, "kernel": kernel, "ms": t}
            for (role, kernel), t in zip(launches, ms, strict=True)
        ],
        "checks": checks(NT, slices, InPlace([busy], [busy], [ms], 0.001), gap, True),
    }
