"""The sections of docs/campaign.md that hold what this project measured, as lines of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from regimes import REGIMES

from pyruntime.cubin.geometry import read_geometry
from pyruntime.tools.wallfiles import COLUMNS, facts_of, row

NT = 3325
BASE = "r46_base"
TOKENS = ("512", "2048", "3325", "8192")
MODEL = "qwen2.5-7b.gguf"
GEOMETRIES = Path(__file__).parent / "geometries"

Records = Mapping[str, Any]


def ladder(records: Records, history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each variant here, beside the source's figures."""
    lines = ["## The ladder", ""]
    if found := records.get("ladder"):
        lines += [f"{found['model']['name']}, {where(found)}; ms of one launch, in place.", ""]
    else:
        lines += [missing(f"python bench/ladder.py {MODEL}"), ""]
    here = ["bytes", "registers", "blocks/SM", *(f"ms at {nt}" for nt in TOKENS)]
    here += [f"share at {NT}", "prefill", "outcome"]
    there = ["GB10: bytes", "blocks/SM", f"ms at {NT}", "prefill", "verdict"]
    # Then the best by mma.sync, and what the engine picks when it is not told.
    today = [
        {"name": name}
        for name in ("fast", "auto")
        if name in (found or {"variants": ()})["variants"]
    ]
    rows = [_variant(records, known) for known in (*history, *today)]
    lines += table(["variant", *here, *there], rows)
    lines += [
        "",
        "Prefill is the gain of a whole prefill at 3,325 tokens: here against r46_base, on the GB10"
        " against what was landed then.",
        "",
    ]
    return [*lines, *(f"- {v['name']}: {v['tile']}; {v['what']}." for v in history), ""]


def _variant(records: Records, known: Mapping[str, Any]) -> list[str]:
    name = known["name"]
    found = records.get("ladder", {}).get("variants", {}).get(name, {"nt": {}, "kernels": {}})
    rows = found["nt"]
    at_nt = rows.get(str(NT))
    figures = found["kernels"][at_nt["kernels"][0]] if at_nt else {}
    against = against_base(records, name)
    return [
        name,
        f"{figures.get('dynamic_shared') or needed_bytes(known):,}",
        str(figures.get("registers", "")),
        str(figures.get("blocks", "")),
        *(f"{rows[nt]['attention_ms']:.4f}" if nt in rows else "" for nt in TOKENS),
        f"{100 * at_nt['share']:.2f} %" if at_nt else "",
        # A void series has raw values on record, but no gain to quote.
        f"{against['times']['wall']['gain']:+.2f} %"
        if against and against["times"] and not against["faults"]
        else "",
        "base" if name == BASE else against["verdict"]["outcome"] if against else "",
        f"{known['published_bytes']:,}" if "published_bytes" in known else "",
        str(known.get("blocks", "")),
        f"{known['ms']:.2f}" if "ms" in known else "",
        f"{known['effect']:+.2f} %" if "effect" in known else "",
        known.get("verdict", ""),
    ]


def needed_bytes(known: Mapping[str, Any]) -> int:
    """Shared memory of a variant by its planes."""
    return read_geometry(GEOMETRIES / f"{known['geometry']}.toml").ledger().total


def duel(records: Records) -> list[str]:
    """r46_base against r48, with every raw value."""
    lines = [f"## r46_base against r48 at {NT} tokens", ""]
    record = against_base(records, "r48")
    if record is None or record["times"] is None:
        command = f"pyruntime ab attention=r46_base attention=r48 {MODEL} --nt {NT} --save FILE"
        return [*lines, missing(command), ""]
    verdict, plan = record["verdict"], record["plan"]
    cleared = "cleared" if verdict["clears_bar"] else "not cleared"
    lines += [
        f"{where(record)}; {plan['pairs']} pairs, {plan['regime']} clocks, alpha "
        f"{plan['alpha']:g}, bar {plan['bar']:g} %.",
        "",
        f"**r48: {verdict['outcome']}.** {verdict['rule']}. The bar is {cleared}.",
        "",
    ]
    series = {"A against A": record["noise"]["times"], "A against B": record["times"]}
    for name, times in series.items():
        for kind in ("wall", "gpu"):
            if c := times[kind]:
                lines.append(
                    f"- {name}, {kind}: {c['median_a']:.3f} and {c['median_b']:.3f} ms, "
                    f"{c['gain']:+.3f} % (p = {c['p']:.2g}); {c['pairs']} pairs of this noise see "
                    + ("nothing" if c["visible"] is None else f"{c['visible']:.2f} % or more")
                )
    lines += [f"- {gate['name']}: {gate['text']}" for gate in record["gates"]]
    lines += [f"- {note}" for note in record["notes"]]
    lines += ["", "![wall times, pair by pair](images/campaign-ab.svg)", ""]
    return [*lines, *_raw(record), ""]


def _raw(record: Mapping[str, Any]) -> list[str]:
    rows = []
    for series, pairs in (("A, A", record["noise"]["pairs"]), ("A, B", record["pairs"])):
        for i, p in enumerate(pairs):
            times = [p[arm][kind] for kind in ("wall", "gpu") for arm in ("a", "b")]
            clocks = [p[arm][key] for key in ("clock", "clock_after") for arm in ("a", "b")]
            rows.append(
                [f"{series} {i + 1}", "second" if p["b_first"] else "first"]
                + ["" if t is None else f"{t:.4f}" for t in times]
                + ["" if c is None else f"{c:.0f}" for c in clocks]
            )
    head = ["pair", "first was", "wall ms", "", "gpu ms", "", "MHz before", "", "after", ""]
    return table(head, rows)


def walls(records: Records) -> list[str]:
    """Where the time goes."""
    lines = [f"## The wall at {NT} tokens", ""]
    found = walls_at_nt(records)
    if not found:
        command = f"pyruntime wall {MODEL} --nt {NT} --save bench/results/wall-{NT}"
        return [*lines, missing(command), ""]
    for name, wall in found.items():
        lines += [
            f"### {wall['options'] or 'Default options'}",
            "",
            f"{'; '.join(facts_of(wall))}; GPU-busy {median(wall['busy_ms']):.3f} ms, wall "
            f"{median(wall['wall_ms']):.3f} ms.",
            "",
            f"![stacked bars](images/campaign-{name}.svg)",
            "",
            *table(COLUMNS, [row(s) for s in sorted(wall["slices"], key=lambda s: -s["ms"])]),
            "",
            *(f"- {'ok' if c['passed'] else '**FAILED**'}: {c['text']}" for c in wall["checks"]),
            "",
        ]
    return lines


def levers(records: Records) -> list[str]:
    """Ceilings against the wall before and after a landing."""
    lines = ["## Levers, priced again", ""]
    before, after = (records.get(f"lever-{when}") for when in ("before", "after"))
    if not (before and after):
        command = "pyruntime lever price --wall WALL --save bench/results/lever-before.json"
        return [*lines, missing(f"{command}, and likewise lever-after.json"), ""]
    lines += [
        f"Before: {before['wall']['options'] or 'default options'}; after: "
        f"{after['wall']['options'] or 'default options'}. Levers on slices that this project does "
        "not have are left out; `pyruntime lever report` lists all.",
        "",
    ]
    old = {p["id"]: p for p in before["prices"]}
    rows = [
        [
            p["id"],
            ", ".join(p["slice"]),
            *(f"{100 * x['share']:.2f} %" for x in (old[p["id"]], p)),
            *(_percent(x["ceiling"]) for x in (old[p["id"]], p)),
            _percent(p["bar"]),
            p["verdict"],
        ]
        for p in after["prices"]
        if p["id"] in old and p["share"] is not None and old[p["id"]]["share"] is not None
    ]
    head = ["lever", "slice", "share before", "after", "ceiling before", "after", "bar", "verdict"]
    return [*lines, *table(head, rows), ""]


def peers(records: Records) -> list[str]:
    """The libraries' times in the same window."""
    lines = ["## Peers in the same window", ""]
    found = records.get("peers")
    if not found:
        return [*lines, missing(f"python bench/peers.py --model {MODEL}"), ""]
    told = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    lines += [f"{where(found)}; {told}; medians, ms, and how many times ours.", ""]
    kinds = dict.fromkeys(case.split()[0] for case in found["cases"])
    for kind, regime in product(kinds, REGIMES):
        figures = {
            case.partition(" ")[2]: figure["ms"][regime]
            for case, figure in found["cases"].items()
            if case.startswith(kind) and regime in figure["ms"]
        }
        names = list(dict.fromkeys(name for raw in figures.values() for name in raw))
        rows = []
        for case, raw in figures.items():
            ours = median(raw["ours"])
            times = [median(raw[name]) if name in raw else None for name in names]
            rows.append([case, *("" if t is None else f"{t:.4f} ({t / ours:.2f}x)" for t in times)])
        if rows:
            lines += [*table([f"{kind}, {regime}", *names], rows), ""]
    lines += [f"- failed: {name}: {text}" for name, text in found["failed"].items()]
    for quoted in found["quoted"]:
        rates = ", ".join(f"{rate:,} at {nt}" for nt, rate in quoted["tokens_per_s"].items())
        lines.append(
            f"- quoted, not measured: {quoted['peer']}, {quoted['model']}: {rates} tokens/s "
            f"({quoted['source']})"
        )
    return [*lines, ""]


def against_base(records: Records, name: str) -> Any:
    """The ab record of r46_base against a variant at NT tokens, or None."""
    for record in records.values():
        if record["schema"] == "pyruntime.ab/1" and record["nt"] == NT:
            asked = [str(record[arm]["options"].get("attention", "auto")) for arm in ("a", "b")]
            if [x.replace("-", "_") for x in asked] == [BASE, name]:
                return record
    return None


def walls_at_nt(records: Records) -> dict[str, Any]:
    """The wall records of NT tokens by name."""
    walls = {n: r for n, r in records.items() if r["schema"] == "pyruntime.wall/1"}
    return {n: r for n, r in walls.items() if r["nt"] == NT}


def where(record: Mapping[str, Any]) -> str:
    """Device, commit and date of a record."""
    commit = (record["commit"] or "unknown")[:12]
    return f"{record['device']}, commit {commit}, {record['date'][:10]}"


def missing(command: str) -> str:
    """Says that there is no record, and how to make it."""
    return f"Not recorded yet: `{command}`."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} %"
