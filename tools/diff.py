"""`pyruntime diff A B`: what changed between two builds: kernels, registers, memory, code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from pyruntime.commands.options import add_json, print_json
from pyruntime.cubin.difference import Change, Difference, Figure, compare
from pyruntime.cubin.nvdisasm import disassemble
from pyruntime.cubin.records import read_all
from pyruntime.cubin.sass import KINDS, mix
from pyruntime.errors import ToolError

_MOST_CODE = 8 << 20  # bytes that are disassembled: about 20 seconds

Mix = dict[str, tuple[int, int]]


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0: no difference, 1: some, 2: something could not be read."""
    parser = argparse.ArgumentParser("pyruntime diff", description=__doc__)
    parser.add_argument("before", type=Path, metavar="A", help="file or folder with cubins")
    parser.add_argument("after", type=Path, metavar="B", help="likewise")
    add_json(parser)
    args = parser.parse_args(argv)
    old, unread_old = read_all([args.before])
    new, unread_new = read_all([args.after])
    difference = compare(old, new)
    unread = unread_old + unread_new
    mixes, reason = _mixes([c for c in difference.common if not c.same_code])
    if args.json:
        record = _record(difference, mixes)
        print_json("diff", {**record, "mix_unknown": reason, "unread": unread})
    else:
        _print(difference, mixes)
        if reason:
            print(f"instruction mix unknown: {reason}")
    for reason in unread:
        print(f"pyruntime diff: {reason}", file=sys.stderr)
    if unread:
        return 2
    return 1 if difference.added or difference.removed or difference.changed else 0


def _mixes(changes: list[Change]) -> tuple[dict[int, Mix], str | None]:
    """id of a change -> class -> instructions before and after, where they differ.

    Or the reason why it is not known.
    """
    size = sum(len(c.before.code) + len(c.after.code) for c in changes)
    if size > _MOST_CODE:
        return {}, f"{size:,} B of changed code; `pyruntime sass` shows single kernels"
    try:
        listings = disassemble(kernel for c in changes for kernel in (c.before, c.after))
    except ToolError as error:
        return {}, str(error)
    found = {}
    for change, old, new in zip(changes, listings[::2], listings[1::2], strict=True):
        a, b = mix(old), mix(new)
        counts = {k.name: (a.get(k.name, 0), b.get(k.name, 0)) for k in KINDS}
        found[id(change)] = {name: pair for name, pair in counts.items() if pair[0] != pair[1]}
    return found, None


def _print(difference: Difference, mixes: dict[int, Mix]) -> None:
    for sign, names in (("+", difference.added), ("-", difference.removed)):
        for name in names:
            print(f"{sign} {name}")
    for change in difference.changed:
        print(f"~ {change.name} ({change.arch}): {_verdict(change)}")
        for field, (before, after) in change.fields.items():
            _print_figures(field, before, after)
        for kind, (before, after) in mixes.get(id(change), {}).items():
            _print_figures(f"instr. {kind}", before, after)
    same = sum(c.same_code for c in difference.common)
    if same == len(difference.common) and not (difference.added or difference.removed):
        print(f"same machine code in all {same} kernels")
    print(
        f"{len(difference.added)} added, {len(difference.removed)} removed, "
        f"{len(difference.changed)} changed; {same} of {len(difference.common)} in both have the "
        "same machine code"
    )


def _print_figures(name: str, before: Figure, after: Figure) -> None:
    figures = f"{_figure(before):>10} -> {_figure(after):<10}{_delta(before, after)}"
    print(f"    {name:<18} {figures}".rstrip())


def _verdict(change: Change) -> str:
    if change.same_code:
        return "same machine code, other figures"
    return "other figures" if change.fields else "other machine code, same figures"


def _figure(value: Figure) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, list):
        return "x".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else value


def _delta(before: Figure, after: Figure) -> str:
    if isinstance(before, int) and isinstance(after, int):
        return f"({after - before:+,})"
    return ""


def _pairs(fields: Mapping[str, tuple[Figure, Figure]]) -> dict[str, object]:
    return {name: {"before": a, "after": b} for name, (a, b) in fields.items()}


def _record(difference: Difference, mixes: dict[int, Mix]) -> dict[str, object]:
    return {
        "added": difference.added,
        "removed": difference.removed,
        "common": [
            {
                "name": c.name,
                "arch": c.arch,
                "same_code": c.same_code,
                "fields": _pairs(c.fields),
                "mix": _pairs(mixes[id(c)]) if id(c) in mixes else None,
            }
            for c in difference.common
        ],
    }
