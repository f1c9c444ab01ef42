"""What bench/peers.py measures, what it should come to, and its record as tables.

Needs no GPU and no library.
"""

from __future__ import annotations

import re
import statistics
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from regimes import LEAD_MS, REGIMES, REST, ROUNDS, SUSTAINED_MS, SUSTAINED_ROUNDS, WORK_MS

CASES = tomllib.loads(Path(__file__).with_name("cases.toml").read_text())
QUICK = (
    "gemm qkv 512", "gemm gate_up 2048", "gemm down 4096", "prefill qwen2.5-7b 128",
    "prefill qwen2.5-7b 2048",
)  # fmt: skip
MMA_TOKENS = 4096  # the length at which our products without wgmma are timed, too

# A product works for WORK_MS in burst, for this long when sustained.
PRODUCT_MS = 200.0
# A prefill rests for longer before its one run: it draws full power for up to a fifth of a second.
PREFILL_ROUNDS, PREFILL_REST = 7, 0.2
_SET_UP, _OVERHEAD, _LOAD = 0.25, 0.003, 8.0  # seconds: of a contestant, a timing, a model


@dataclass(frozen=True)
class Case:
    """A product or a prefill of so many tokens; `about`: its entry in cases.toml."""

    kind: str
    about: Mapping[str, Any]
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.about['name']} {self.tokens}"

    @property
    def flop(self) -> int:
        """Of a product."""
        return 2 * self.tokens * int(self.about["n"]) * int(self.about["k"])

    @property
    def mma(self) -> bool:
        """Whether our products without wgmma take part."""
        return self.kind == "gemm" and self.tokens == MMA_TOKENS


def cases() -> list[Case]:
    """All, in the order in which they run."""
    gemm = CASES["gemm"]
    found = [Case("gemm", x, nt) for x in gemm["product"] for nt in gemm["tokens"]]
    return found + [Case("prefill", x, nt) for x in CASES["prefill"] for nt in x["tokens"]]


def choose(pattern: str, quick: bool) -> list[Case]:
    """The cases whose name the regular expression finds, and which are quick if that is asked."""
    return [
        case
        for case in cases()
        if re.search(pattern, case.name) and (not quick or case.name in QUICK)
    ]


def expected_seconds(chosen: Iterable[Case]) -> float:
    """How long a run takes if launches last no longer than the time set for them."""
    total, models = 0.0, set()
    for case in chosen:
        if case.kind == "gemm":
            both, all_ = 2 + case.mma, 3 + case.mma
            burst = (ROUNDS + 1) * (REST + 1e-3 * WORK_MS + _OVERHEAD)
            sustained = 1e-3 * (LEAD_MS + PRODUCT_MS)
        else:
            both = all_ = 1 + case.about["libraries"]
            # A prefill at some 45,000 tokens a second.
            burst = (PREFILL_ROUNDS + 1) * (PREFILL_REST + case.tokens / 45e3 + 10 * _OVERHEAD)
            sustained = 1e-3 * (LEAD_MS + SUSTAINED_MS) + case.tokens / 45e3
            models.add(case.about["name"])
        total += all_ * (_SET_UP + burst) + both * SUSTAINED_ROUNDS * sustained
    return total + _LOAD * (1 + len(models))


def median(figure: Mapping[str, Any], who: str, regime: str, unit: str = "ms") -> float | None:
    """Of a contestant; None if it was not timed so."""
    raw = figure.get(unit, {}).get(regime, {}).get(who)
    return statistics.median(raw) if raw else None


def speedup(figure: Mapping[str, Any], peer: str, regime: str, unit: str = "ms") -> float | None:
    """A peer's median time over ours; None if one of them was not timed."""
    theirs, ours = median(figure, peer, regime, unit), median(figure, "ours", regime, unit)
    return theirs / ours if theirs and ours else None


Record = Mapping[str, Any]
Value = Callable[[Record, str], "float | None"]


@dataclass(frozen=True)
class Floor:
    """What a quantity should be, at least or (`most`) at most, by regime.

    Attributes:
        aim: what is hoped for.
        value: the quantity in a record and regime; None if that was not measured.
    """

    quantity: str
    floors: Mapping[str, float]
    aim: float
    value: Value
    most: bool = False

    def verdict(self, record: Record) -> str | None:
        """ "ok", or the regimes that miss the floor; None if nothing was measured."""
        found = {regime: self.value(record, regime) for regime in self.floors}
        if all(value is None for value in found.values()):
            return None
        below = [
            regime
            for regime, value in found.items()
            if value is not None
            and (value > self.floors[regime] if self.most else value < self.floors[regime])
        ]
        return f"MISSED: {', '.join(below)}" if below else "ok"


def _both(floor: float) -> dict[str, float]:
    return dict.fromkeys(REGIMES, floor)


def floors() -> Iterator[Floor]:
    """All, in the order in which they are shown."""
    yield Floor("cuBLAS over ours, mean", {"burst": 1.0, "sustained": 1.02}, 1.08, _gemm_mean)
    yield Floor("  worst cell", {}, 0.98, _gemm_worst)
    for nt, floor in ((512, 0.95), (2048, 1.0), (3325, 1.0), (8192, 1.0)):
        case = f"prefill qwen2.5-7b {nt}"
        yield Floor(
            f"7B {nt}: libraries over ours", _both(floor), 1.05, partial(_ratio, case, "ms")
        )
        yield Floor("  without our host's part", {}, 1.05, partial(_ratio, case, "gpu_ms"))
    for nt, floor, aim in ((512, 44, 50), (2048, 47, 53), (3325, 47, 52), (8192, 44, 50)):
        rate = partial(_rate, f"prefill qwen2.5-7b {nt}")
        yield Floor(f"7B {nt}: k tokens/s", _both(floor), aim, rate)
    for nt, floor, aim in ((128, 5.0, 3.8), (1, 4.5, 3.6)):
        time = partial(_time, f"prefill qwen2.5-7b {nt}")
        yield Floor(f"7B {nt}: ms", {"burst": floor}, aim, time, most=True)
    for nt in (512, 2048, 8192):
        quoted = partial(_quoted, "qwen2.5-0.5b", nt)
        yield Floor(f"0.5B {nt}: times llama.cpp (quoted)", {"burst": 3.0}, 5.0, quoted)
    yield Floor(f"mma.sync {MMA_TOKENS}: least TF", {"burst": 350.0}, 350.0, _mma)


def _gemms(record: Record) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((name, x) for name, x in record["cases"].items() if name.startswith("gemm"))


def _gemm_ratios(record: Record, regime: str) -> list[float]:
    found = (speedup(figure, "cublas", regime) for _, figure in _gemms(record))
    return [x for x in found if x]


def _gemm_mean(record: Record, regime: str) -> float | None:
    ratios = _gemm_ratios(record, regime)
    return statistics.geometric_mean(ratios) if ratios else None


def _gemm_worst(record: Record, regime: str) -> float | None:
    return min(_gemm_ratios(record, regime), default=None)


def _mma(record: Record, regime: str) -> float | None:
    found = ((x["flop"], median(x, "mma", regime)) for _, x in _gemms(record))
    return min((1e-9 * flop / ms for flop, ms in found if ms), default=None)


def _time(case: str, record: Record, regime: str) -> float | None:
    figure = record["cases"].get(case)
    return median(figure, "ours", regime) if figure else None


def _rate(case: str, record: Record, regime: str) -> float | None:
    """Thousands of tokens a second, for the caller."""
    ms = _time(case, record, regime)
    return record["cases"][case]["tokens"] / ms if ms else None


def _ratio(case: str, unit: str, record: Record, regime: str) -> float | None:
    figure = record["cases"].get(case)
    return speedup(figure, "libraries", regime, unit) if figure else None


def _quoted(model: str, nt: int, record: Record, regime: str) -> float | None:
    rate = _rate(f"prefill {model} {nt}", record, regime)
    (theirs,) = (x["tokens_per_s"] for x in record["quoted"] if x["model"] == model)
    return 1e3 * rate / theirs[str(nt)] if rate else None


def table(record: Record) -> list[str]:
    """Lines: every case with our time, and each peer's over it; then the floors."""
    lines = [f"{'case':<28} " + "".join(f"| {regime:<46}" for regime in REGIMES)]
    for name, figure in record["cases"].items():
        lines.append(f"{name:<28} " + "".join(f"| {_cell(figure, x):<46}" for x in REGIMES))
        lines += [f"    {who}: {why}" for who, why in figure["skipped"].items()]
    lines += [f"FAILED {name}: {text}" for name, text in record["failed"].items()]
    lines += ["", f"{'quantity':<34} {'floor':>12} {'aim':>6} {'burst':>8} {'sustained':>10}"]
    for floor in floors():
        shown = [floor.value(record, regime) for regime in REGIMES]
        if any(x is not None for x in shown):
            told = "/".join(f"{x:g}" for x in dict.fromkeys(floor.floors.values())) or "-"
            burst, sustained = (f"{x:.3f}" if x is not None else "" for x in shown)
            lines.append(
                f"{floor.quantity:<34} {told:>12} {floor.aim:>6g} {burst:>8} {sustained:>10}  "
                f"{floor.verdict(record) if floor.floors else ''}".rstrip()
            )
    return lines


def _cell(figure: Mapping[str, Any], regime: str) -> str:
    """Our time; a product's rate, a prefill's in tokens; what each peer takes over it."""
    ours = median(figure, "ours", regime)
    if ours is None:
        return ""
    rate = f"{1e-9 * figure['flop'] / ours:.0f} TF" if "flop" in figure else ""
    rate = rate or f"{figure['tokens'] / ours:.1f} k/s"
    peers = [x for x in figure["ms"][regime] if x != "ours"]
    ratios = (f"{x} {speedup(figure, x, regime):.2f}x" for x in peers)
    return f"{ours:.4g} ms {rate} {' '.join(ratios)}"


def findings(record: Record) -> int:
    """Cases that failed, and floors that were missed."""
    missed = [x for x in floors() if "MISSED" in (x.verdict(record) or "")]
    return len(record["failed"]) + len(missed)
