"""What bench/attention_peers.py measures, what it should come to, and its record as a table.

Needs no GPU and no library.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from regimes import (
    LEAD_MS,
    REGIMES,
    REST,
    ROUNDS,
    SUSTAINED_MS,
    SUSTAINED_ROUNDS,
    WORK_MS,
)

PEERS = ("fa3", "cudnn")
LONGEST = 32768
_LONG = (4096, 8192, 16384, LONGEST)
_EQUAL = {"burst": 1.0, "sustained": 1.0}
_AHEAD = {"burst": 1.05, "sustained": 1.0}
_WIDE = {"burst": 0.75, "sustained": 0.75}
# Heads, K/V heads, head dim; prompt lengths; how many times as fast as the faster peer, at least.
_PROMPTS: tuple[tuple[tuple[int, int, int], tuple[int, ...], dict[str, float]], ...] = (
    ((28, 4, 128), (64, 128, 256, 512), {"burst": 1.2}),
    ((28, 4, 128), (1024, 2048, 3325, *_LONG), _AHEAD),
    ((32, 8, 128), (64, 128, 256, 512), {}),
    ((32, 8, 128), (1024, 2048, 3325, *_LONG), _AHEAD),
    ((32, 8, 64), (512,), {"burst": 1.0}),
    ((32, 8, 64), (2048, 3325, *_LONG), _EQUAL),
    ((14, 2, 64), (512,), {"burst": 1.0}),
    ((14, 2, 64), (2048, 3325, *_LONG), _EQUAL),
    ((16, 8, 256), (2048, 3325, *_LONG), _WIDE),
)
QUICK = (
    "28/4/128 prompt 512", "28/4/128 prompt 2048", "28/4/128 prompt 16384", "32/8/64 prompt 3325",
    "14/2/64 prompt 8192", "16/8/256 prompt 4096", "28/4/128 continued 512", "28/4/128 packed 64",
)  # fmt: skip

SUSTAINED_KEYS = 1024  # rows or keys; what is shorter than this never meets the power limit
_SET_UP, _OVERHEAD = 0.25, 0.003  # seconds for a contestant of a case, and for one timing


@dataclass(frozen=True)
class Case:
    """Causal attention of one model's heads over some sequences.

    Attributes:
        sequences: of each, the rows and how many keys a cache holds before them.
        floors: by regime, how many times as fast as the faster peer ours should be.
    """

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    sequences: tuple[tuple[int, int], ...]
    floors: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.heads}/{self.kv_heads}/{self.head_dim} {self.kind}"

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.sequences)

    @property
    def keys(self) -> list[int]:
        """Keys of each sequence, its own rows' among them."""
        return [rows + before for rows, before in self.sequences]

    @property
    def flop(self) -> int:
        """Two products over the pairs of row and key that the causal mask leaves."""
        pairs = sum(rows * before + rows * (rows + 1) // 2 for rows, before in self.sequences)
        return 4 * self.heads * self.head_dim * pairs

    @property
    def regimes(self) -> tuple[str, ...]:
        return REGIMES if max(self.rows, *self.keys) >= SUSTAINED_KEYS else REGIMES[:1]


def cases() -> list[Case]:
    """All, in the order in which they run."""
    prompts = (
        Case(f"prompt {nt}", *model, ((nt, 0),), floors)
        for model, lengths, floors in _PROMPTS
        for nt in lengths
    )
    continued = (
        Case(f"continued {rows}", 28, 4, 128, ((rows, LONGEST - rows),), floors)
        for rows, floors in ((512, _EQUAL), (256, {}), (64, {}), (1, {}))
    )
    rng = random.Random(0)
    packed = tuple((rng.randint(20, 600), 0) for _ in range(64))
    return [*prompts, *continued, Case("packed 64", 28, 4, 128, packed, _EQUAL)]


def expected_seconds(chosen: Iterable[Case], contestants: int = 1 + len(PEERS)) -> float:
    """How long a run takes if launches last no longer than the time set for them."""
    burst = (ROUNDS + 1) * (REST + 1e-3 * WORK_MS + _OVERHEAD)
    sustained = SUSTAINED_ROUNDS * 1e-3 * (LEAD_MS + SUSTAINED_MS)
    return sum(
        contestants * (_SET_UP + burst)
        + ("sustained" in case.regimes) * (1 + len(PEERS)) * sustained
        for case in chosen
    )


def speedups(figure: Mapping[str, Any], regime: str) -> dict[str, float]:
    """Each peer's median time over ours; peers and regimes that were not timed are left out."""
    medians = {who: statistics.median(ms) for who, ms in figure["ms"].get(regime, {}).items()}
    return {peer: medians[peer] / medians["ours"] for peer in PEERS if peer in medians}


def verdict(figure: Mapping[str, Any]) -> str:
    """ "" without floors, "ok", the regimes that are below theirs, or why that cannot be said.

    The faster of the peers counts. Without FlashAttention-3 nothing is said.
    """
    if not figure["floors"]:
        return ""
    if "fa3" in figure["skipped"]:
        return "fa3 is missing"
    below = []
    for regime, floor in figure["floors"].items():
        reached = min(speedups(figure, regime).values())
        if reached < floor:
            below.append(f"{regime} {reached:.3f} < {floor:g}")
    return "BELOW: " + ", ".join(below) if below else "ok"


def table(record: Mapping[str, Any]) -> list[str]:
    """Lines: per case our time and rate and what each peer takes over it, in both regimes."""
    head = "".join(
        f" | {regime + ' us':>12} {'TF':>4}" + "".join(f" {peer:>6}" for peer in PEERS)
        for regime in REGIMES
    )
    lines = [f"{'case':<24}{head} | floor"]
    for name, figure in record["cases"].items():
        cells = ""
        for regime in REGIMES:
            if regime not in figure["ms"]:
                cells += f" | {'':>17}" + 7 * len(PEERS) * " "
                continue
            ms, ratios = statistics.median(figure["ms"][regime]["ours"]), speedups(figure, regime)
            cells += f" | {1e3 * ms:>12.1f} {1e-9 * figure['flop'] / ms:>4.0f}"
            cells += "".join(
                f" {ratios[peer]:>5.2f}x" if peer in ratios else f" {'-':>6}" for peer in PEERS
            )
        lines.append(f"{name:<24}{cells} | {verdict(figure)}".rstrip())
        lines += [f"    {peer}: {why}" for peer, why in figure["skipped"].items()]
    return lines + [f"FAILED {name}: {text}" for name, text in record["failed"].items()]


def findings(record: Mapping[str, Any]) -> int:
    """Cases that failed, or are below a floor."""
    below = [figure for figure in record["cases"].values() if "BELOW" in verdict(figure)]
    return len(record["failed"]) + len(below)
