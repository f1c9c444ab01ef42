"""`pyruntime sass`: what kinds of machine instructions a kernel is made of, as a whole and by loop.

Needs nvdisasm (pip install 'pyruntime-cuda[sass]'), no GPU. Counts are of the code, not of what
runs: how often a loop turns is not in a cubin.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from pyruntime.commands.options import add_json, print_json
from pyruntime.cubin.facts import KernelFacts
from pyruntime.cubin.loops import INDIRECT, Loop, loops
from pyruntime.cubin.nvdisasm import disassemble
from pyruntime.cubin.sass import KINDS, Instruction, mix
from pyruntime.errors import CubinError

from .kernels import kernels_named
from .tables import table

_LOOPS = 8  # columns


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0: fine, 2: unreadable input, no such kernel, or no nvdisasm."""
    parser = argparse.ArgumentParser("pyruntime sass", description=__doc__)
    parser.add_argument("kernel", help="a kernel's name, or a pattern (gemm_*)")
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="FILE", help="default: the installed cubins"
    )
    parser.add_argument("--arch", help="only this architecture, such as sm_90a")
    parser.add_argument("--listing", action="store_true", help="every instruction, with its "
                        "control codes: waits, read and write barrier, yield, stall")  # fmt: skip
    add_json(parser)
    args = parser.parse_args(argv)
    named, unread = kernels_named(args.kernel, args.paths)
    chosen = [
        kernel
        for variants in named.values()
        for kernel in variants.values()
        if args.arch in (None, kernel.arch)
    ]
    if not chosen:
        there = sorted({arch for variants in named.values() for arch in variants})
        raise CubinError(f"{args.kernel} is not there for {args.arch}, only {', '.join(there)}")
    listings = disassemble(chosen)
    if args.json:
        records = [_record(*pair, args.listing) for pair in zip(chosen, listings, strict=True)]
        print_json("sass", {"kernels": records})
    else:
        for kernel, instructions in zip(chosen, listings, strict=True):
            _print(kernel, instructions, args.listing)
    for reason in unread:
        print(f"pyruntime sass: {reason}", file=sys.stderr)
    return 2 if unread else 0


def _print(kernel: KernelFacts, instructions: tuple[Instruction, ...], listing: bool) -> None:
    found = loops(instructions)
    print(f"{kernel.name} ({kernel.arch}): {len(instructions):,} instructions")
    shown = sorted(sorted(found, key=lambda loop: -len(loop.body))[:_LOOPS], key=found.index)
    headers = ("class", "unit", "whole", *(f"loop {loop.name}" for loop in shown), "most often")
    columns = [mix(instructions), *(_mix(instructions, loop) for loop in shown)]
    rows: list[tuple[object, ...]] = [
        (
            kind.name,
            kind.unit,
            *(column.get(kind.name, "") for column in columns),
            _often(i.opcode for i in instructions if i.kind is kind),
        )
        for kind in KINDS
        if kind.name in columns[0]
    ]
    starts = (f"{loop.header:#x}" for loop in shown)
    rows.append(("all", "", len(instructions), *(len(loop.body) for loop in shown), ""))
    rows.append(("starts at", "", "0x0", *starts, ""))
    print(table(headers, rows))
    if len(found) > len(shown):
        print(f"  … and {len(found) - len(shown)} smaller loops (--json)")
    if indirect := sum(i.name in INDIRECT for i in instructions):
        print(f"  {indirect} indirect branches: where they lead is unknown, loops may be missing")
    if listing:
        _print_listing(instructions, found)


def _print_listing(instructions: tuple[Instruction, ...], found: tuple[Loop, ...]) -> None:
    for index, instruction in enumerate(instructions):
        depth = sum(index in loop.body for loop in found)
        print(f"  {'|' * depth:<3} {instruction.offset:05x} {instruction.control}  {instruction}")


def _often(opcodes: Any) -> str:
    return ", ".join(f"{name} {count}" for name, count in Counter(opcodes).most_common(3))


def _mix(instructions: tuple[Instruction, ...], loop: Loop) -> dict[str, int]:
    return mix(instructions[i] for i in loop.body)


def _record(
    kernel: KernelFacts, instructions: tuple[Instruction, ...], listing: bool
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": kernel.name,
        "arch": kernel.arch,
        "instructions": len(instructions),
        "mix": mix(instructions),
        "opcodes": dict(Counter(i.opcode for i in instructions).most_common()),
        "indirect_branches": sum(i.name in INDIRECT for i in instructions),
        "loops": [
            {
                "name": loop.name,
                "depth": loop.depth,
                "header": loop.header,
                "instructions": len(loop.body),
                "mix": _mix(instructions, loop),
            }
            for loop in loops(instructions)
        ],
    }
    if listing:
        record["listing"] = [
            {
                "offset": i.offset,
                "predicate": i.predicate,
                "opcode": i.opcode,
                "operands": i.operands,
                "class": i.kind.name,
                "target": i.target,
                "control": vars(i.control),
            }
            for i in instructions
        ]
    return record
