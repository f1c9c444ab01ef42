"""The section of docs/campaign.md on the levers of products with int8 activations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from campaign_measured import missing, table, where

from pyruntime.measure.levers import Lever, read_levers
from pyruntime.measure.paired import Comparison
from pyruntime.measure.series import REGIMES, Pair, Sample
from pyruntime.measure.verdict import Verdict, clock_fault, decide, times

ALPHA, BAR = 0.01, 1.5
PREFILLS = (  # levers, what they are here, before, after: arms of bench/int8.py
    (("r49",), "one plane for all products that read it", "int8:separate", "int8:memo"),
    (("r51",), "norms write planes, and fp16 besides", "int8:memo", "int8:copy"),
    (("r52",), "and no fp16", "int8:copy", "int8"),
    (("r51", "r52"), "both", "int8:memo", "int8"),
    ((), "the wanted row gathered before `o`", "int8:late", "int8"),
)
ROW = "int8_{}_m64_n128_k1_{}"
PRODUCTS = (  # the source's round, its lever, what it is here, types, before, after
    ("r39", "q6k-double-buffer", "two slots, not one", ("Q6_K",), "s1_b2_c16", "s2_b2"),
    ("r40", "third-block", "three blocks per SM, not two", ("Q4_K", "Q6_K"), "s2_b2", "s2_b3"),
    ("r41", "expand16", "16 bytes at a time, not one", ("Q4_K",), "s2_b2_c1", "s2_b2"),
)
LENGTHS = (512, 2048)
COMMANDS = {
    "int8": "python bench/int8.py --arms int8 int8:separate int8:memo int8:copy int8:late "
    "--save bench/results/int8.json",
    "gemm-int8": "python bench/gemm_int8.py --save bench/results/gemm-int8.json",
}
FIGURES = ("ms before", "after", "gain", "interval", "p", "outcome", "on the GB10", "so")

Raw = Mapping[str, Any]


def int8(records: Mapping[str, Any]) -> list[str]:
    """What the source's levers on quantizing and on products gain here."""
    levers = {x.id: x for x in read_levers(Path(__file__).with_name("levers.toml"))}
    return [
        "## The int8 line on an H200",
        "",
        'Most of what the source gained was in products of packed weights. `weights="int8"` has '
        "such products; each lever is a way to run it, or a row of the kernel table. Both forms "
        "run in every round, in an order that is drawn anew.",
        "",
        "- Outcome: by the rule of `pyruntime ab` ([measuring.md](measuring.md#ab)) at alpha "
        f"{ALPHA:g}, a round being a pair. Void if the clocks were apart, no verdict if what ran "
        "twice differs from itself. Logits are no part of it: tests hold the forms against each "
        "other.",
        "- So: *as there* if the outcome is that of the source's sign and its effect is within the "
        "interval, *same sign* if it is not, or cannot be compared; *not so* if the outcome is "
        "another; *open* without a verdict.",
        "",
        *_section("### Prefills", "int8", records, levers),
        *_section("### Products", "gemm-int8", records, levers),
    ]


def _section(
    title: str, kind: str, records: Mapping[str, Any], levers: Mapping[str, Lever]
) -> list[str]:
    record = records.get(kind)
    if not record:
        return [title, "", missing(COMMANDS[kind]), ""]
    rows = (_prefills if kind == "int8" else _products)(record, levers)
    return [title, "", f"{where(record)}.", "", *rows, ""]


def _prefills(record: Raw, levers: Mapping[str, Lever]) -> list[str]:
    arms, rows, rules = record["arms"], [], []
    base = next(iter(arms.values()))
    for ids, what, before, after in PREFILLS:
        if not {before, after} <= arms.keys():
            continue
        for nt in record["again"]:
            for regime in REGIMES:
                noise = _pairs(base[nt][regime], record["again"][nt][regime])
                pairs = _pairs(arms[before][nt][regime], arms[after][nt][regime])
                cells, rule = _judged(noise, pairs, [levers[x] for x in ids])
                name = f"{' and '.join(ids) or what}, {nt.removeprefix('nt')} tokens, {regime}"
                rows.append([name, what, f"`{before}`", f"`{after}`", *cells])
                rules += [f"- {name}: {rule}."] * bool(rule)
    head = ["lever, tokens, regime", "what", "before", "after", *FIGURES]
    return [*table(head, rows), "", *rules, *_over_llama_cpp(record)]


def _over_llama_cpp(record: Raw) -> list[str]:
    arm, found = next(iter(record["arms"].items()))
    peer = f"llama.cpp: {record['llama_cpp']['source']}"
    if "over_llama_cpp" not in found:
        return [f"- {peer}."]
    ratios = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in found["over_llama_cpp"].items())
    return [f"- `{arm}` in tokens/s over llama.cpp: {ratios}. {peer}."]


def _products(record: Raw, levers: Mapping[str, Lever]) -> list[str]:
    rows, rules = [], []
    for round_, lever, what, types, before, after in PRODUCTS:
        for case, figure in record["figures"].items():
            kind, rest = case.split(" ", 1)
            shape, m = rest.rsplit(" ", 1)
            a, b = (figure["ms"].get(ROW.format(kind.lower(), x)) for x in (before, after))
            if kind not in types or int(m) not in LENGTHS or not (a and b):
                continue
            noise = _pairs(*({"gpu_ms": x} for x in (figure["ms"][figure["choice"]],
                                                     figure["again"])))  # fmt: skip
            pairs = _pairs({"gpu_ms": a}, {"gpu_ms": b})
            cells, rule = _judged(noise, pairs, [levers[lever]], whole=False)
            rows.append([f"{round_}, {lever}", what, kind, shape, m, *cells])
            rules += [f"- {round_}, {kind}, {shape}, {m} tokens: {rule}."] * bool(rule)
    head = ["lever", "what", "type", "product", "tokens", *FIGURES]
    note = "GPU time of the product alone; the source's effects are of its whole prefill."
    return [note, "", *table(head, rows), "", *rules]


def _pairs(a: Raw, b: Raw) -> list[Pair]:
    """The rounds as pairs. A product has no other time than the GPU's."""

    def samples(of: Raw) -> list[Sample]:
        gpu = of["gpu_ms"]
        clocks = of.get("mhz", [None] * len(gpu))
        return [Sample(*x) for x in zip(of.get("wall_ms", gpu), gpu, clocks, strict=True)]

    return [Pair(x, y, False) for x, y in zip(samples(a), samples(b), strict=True)]


def _judged(
    noise: Sequence[Pair], pairs: Sequence[Pair], levers: Sequence[Lever], whole: bool = True
) -> tuple[list[str], str]:
    """The cells of FIGURES, and why there is no difference or no verdict.

    `whole`: they are of a whole prefill, as bars and effects are.
    """
    found = times(pairs, ALPHA)
    bar = max((lever.bar for lever in levers), default=BAR)
    faults = [fault for fault in [clock_fault(pairs)] if fault]
    verdict = decide(times(noise, ALPHA), found, bar=bar, gates=[], faults=faults)
    c = found.wall
    cells = [
        f"{c.median_a:.4f}",
        f"{c.median_b:.4f}",
        f"{c.gain:+.2f} %",
        f"{c.low:+.2f} … {c.high:+.2f} %" if math.isfinite(c.low) else "open",
        f"{c.p:.2g}",
        verdict.outcome + (", bar cleared" if whole and verdict.clears_bar else ""),
        " and ".join(f"{x.effect:+.2f} %, {x.status}" for x in levers),
        _against(verdict, c, levers, whole),
    ]
    return cells, "" if verdict.outcome in ("better", "worse") else verdict.rule


def _against(verdict: Verdict, c: Comparison, levers: Sequence[Lever], whole: bool) -> str:
    """What an outcome says of the published effects."""
    effects = [x.effect for x in levers if x.effect is not None]
    if not effects:
        return ""
    if verdict.outcome == "no verdict":
        return "open"
    there = 100 * (math.prod(1 + x / 100 for x in effects) - 1)
    if verdict.outcome != ("better" if there > 0 else "worse"):
        return "not so"
    return "as there" if whole and c.low <= there <= c.high else "same sign"
