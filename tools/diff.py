"""`pyruntime diff A B`: what changed between two builds: kernels, registers, memory, code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pyruntime.commands.options import add_json, print_json
from pyruntime.cubin.difference import Change, Difference, Figure, compare
from pyruntime.cubin.records import read_all


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
    if args.json:
        print_json("diff", {**_record(difference), "unread": unread})
    else:
        _print(difference)
    for reason in unread:
        print(f"pyruntime diff: {reason}", file=sys.stderr)
    if unread:
        return 2
    return 1 if difference.added or difference.removed or difference.changed else 0


def _print(difference: Difference) -> None:
    for sign, names in (("+", difference.added), ("-", difference.removed)):
        for name in names:
            print(f"{sign} {name}")
    for change in difference.changed:
        print(f"~ {change.name} ({change.arch}): {_verdict(change)}")
        for field, (before, after) in change.fields.items():
            figures = f"{_figure(before):>10} -> {_figure(after):<10}{_delta(before, after)}"
            print(f"    {field:<15} {figures}".rstrip())
    same = sum(c.same_code for c in difference.common)
    if same == len(difference.common) and not (difference.added or difference.removed):
        print(f"same machine code in all {same} kernels")
    print(
        f"{len(difference.added)} added, {len(difference.removed)} removed, "
        f"{len(difference.changed)} changed; {same} of {len(difference.common)} in both have the "
        "same machine code"
    )


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


def _record(difference: Difference) -> dict[str, object]:
    return {
        "added": difference.added,
        "removed": difference.removed,
        "common": [
            {
                "name": c.name,
                "arch": c.arch,
                "same_code": c.same_code,
                "fields": {f: {"before": a, "after": b} for f, (a, b) in c.fields.items()},
            }
            for c in difference.common
        ],
    }
