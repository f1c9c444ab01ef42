"""Sections of docs/campaign.md about the source: what carries over, its faults, the commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from campaign_int8 import COMMANDS
from campaign_measured import GEOMETRIES, MODEL, NT, table

from pyruntime.cubin.geometry import Geometry, read_geometry
from pyruntime.cubin.limits import Limits, limits_of
from pyruntime.cubin.occupancy import Demand, occupancy

GB10, H200 = limits_of("sm_121"), limits_of("sm_90")


def carried_over(records: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where the source's numbers hold on another device, and where they do not."""
    rows = []
    for known in history:
        design = read_geometry(GEOMETRIES / f"{known['geometry']}.toml")
        blocks = [_blocks(design, limits) for limits in (GB10, H200)]
        seen = _recorded_blocks(records, known["name"])
        rows.append([known["name"], f"{design.ledger().total:,}", *map(str, [*blocks, seen])])
    lines = [
        "## What carries over",
        "",
        f"The bytes do: they follow from the planes. What they are worth does not. A GB10 has "
        f"{GB10.shared >> 10} KB of shared memory and {GB10.warps} warps per SM, an H200 "
        f"{H200.shared >> 10} KB and {H200.warps}. Blocks per SM "
        "by shared memory, threads and, for r48, its 124 registers; and those of our kernels, "
        "whose registers bind first on the larger device:",
        "",
        *table(["variant", "bytes", "on GB10", "on H200", "ours on H200"], rows),
        "",
        f"- r46 was built to go from one block to two. Here its base already holds {rows[0][3]}: "
        "the scarcity that it removes does not exist on this device, and its verdict there says "
        "nothing about it here.",
        "- The campaign's prefill multiplies 8-bit activations with packed weights; that of "
        "these walls unpacks to fp16 at load. The campaign's largest levers (expanding, scale "
        "planes, quantizing once) act on slices that such a wall does not have: "
        "`pyruntime lever price` says so and gives no number. With "
        '`weights="int8"` there are such slices: see above.',
        "- A lever is worth its share. Attention was 9.8 % (r46) and 10.2 % (r48's estimate) of "
        "that prefill; here its share depends on the variant and on the prompt's length, and every "
        "ceiling is worked out from the wall that was measured last.",
        "- An absolute time holds for its device only. Ratios between the variants are what can be "
        "compared, at the same number of tokens.",
    ]
    return [*lines, *_ratios(records), ""]


def _recorded_blocks(records: Mapping[str, Any], name: str) -> Any:
    """Blocks per SM of the kernel that ran, or nothing where that is not recorded."""
    found = records.get("ladder", {}).get("variants", {}).get(name)
    if not found or str(NT) not in found["nt"]:
        return ""
    return found["kernels"][found["nt"][str(NT)]["kernels"][0]]["blocks"]


def _blocks(design: Geometry, limits: Limits) -> int:
    demand = Demand(design.threads(design.values), design.registers, design.ledger().total)
    return occupancy(demand, limits).blocks


def _ratios(records: Mapping[str, Any]) -> list[str]:
    variants = records.get("ladder", {}).get("variants", {})
    rows = {name: v["nt"].get(str(NT)) for name, v in variants.items()}
    if not all(rows.get(name) for name in ("r46_base", "r46", "r48")):
        return []
    base, r46, r48 = (rows[name]["attention_ms"] for name in ("r46_base", "r46", "r48"))
    return [
        f"- r46 over its base: {5.16 / 4.58:.2f}x there, {base / r46:.2f}x here; r48 over its "
        f"base: {5.16 / 2.12:.2f}x there, {base / r48:.2f}x here. The base's share of the prefill "
        f"is {100 * rows['r46_base']['share']:.1f} % here, r48's "
        f"{100 * rows['r48']['share']:.1f} %."
    ]


def ways(stride: int) -> int:
    """How many of 8 rows of 16 bytes, `stride` bytes apart, meet in the same four banks at most."""
    groups = [row * stride % 128 // 16 for row in range(8)]
    return max(groups.count(group) for group in groups)


def faults() -> list[str]:
    """What the source got wrong, and what here says so."""
    r46 = read_geometry(GEOMETRIES / "r46.toml")
    assert r46.launcher is not None
    asked, needed = r46.launcher(r46.values), r46.ledger().total
    padded, half = (32 + 8) * 4, 3325**2 / 2048**2
    return [
        "## Faults of the source",
        "",
        f"1. r46's published ledger, {asked:,} B, leaves out its own pad: {needed:,} B "
        f"({needed - asked:,} more). `pyruntime ledger --geometry bench/geometries/r46.toml` names "
        f"the pad of S. A padded row of S is {padded} B at 32 keys, not the 288 B that were given "
        "(those belong to 64 keys).",
        "2. 8 floats are not the dose of 8 halves. Eight 16-byte reads down the rows meet "
        f"{ways(256)}-fold at a stride of 256 B, not at all at {256 + 16} B (8 halves), but still "
        f"{ways(288)}-fold at {256 + 32} B (8 floats), and {ways(padded)}-fold at {padded} B.",
        f'3. "5.72 times behind the peer" divides a time at 3,325 tokens by one at about 2,048. '
        f"Attention grows with the square: {half:.2f}x between the two, so about "
        f"{5.72 / half:.1f}x at the same length. Tables here compare at one length only.",
        "4. 5.16 ms (a profiler's replay) and 4.49 ms (a trace) are one kernel, "
        f"{100 * (5.16 / 4.49 - 1):.0f} % apart. Every time here comes from events in place, with "
        "its regime and clocks in the record.",
        f"5. A conclusion about blocks per SM belongs to a device: 69,376 B are "
        f"{_blocks(read_geometry(GEOMETRIES / 'r46-base.toml'), GB10)} block on a GB10 and "
        f"{_blocks(read_geometry(GEOMETRIES / 'r46-base.toml'), H200)} on an H200. Limits are read "
        "from the device, never assumed.",
        "",
    ]


def commands() -> list[str]:
    """How to make every record, and this page."""
    wall = f"pyruntime wall {MODEL} --nt {NT}"
    lines = [
        f"pyruntime synth qwen2.5-7b {MODEL}",
        f"python bench/ladder.py {MODEL}",
        *(
            f"pyruntime ab attention=r46_base attention={name} {MODEL} --nt {NT} "
            f"--save bench/results/ab-r46_base-{name}.json"
            for name in ("r46", "r48", "r50", "r57")
        ),
        f"{wall} --options attention=r46_base --save bench/results/wall-{NT}-before",
        f"{wall} --options attention=r48 --save bench/results/wall-{NT}-after",
        f"{wall} --save bench/results/wall-{NT}-today",
        f"pyruntime lever price --wall bench/results/wall-{NT}-before.json "
        "--save bench/results/lever-before.json",
        f"pyruntime lever price --wall bench/results/wall-{NT}-after.json "
        "--save bench/results/lever-after.json",
        f"python bench/peers.py --model {MODEL}",
        *COMMANDS.values(),
        "python bench/campaign.py",
    ]
    return ["## Run it again", "", "```", *lines, "```", ""]
