"""`pyruntime lever`: the ledger of what could be made faster, priced before it is tried.

`price` works out every ceiling anew against the newest wall record; `report` writes the ledger.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyruntime.commands.options import add_json, print_json

from .tables import table
from .wall import told

if TYPE_CHECKING:
    from pyruntime.measure.levers import Lever, Price

LEVERS = Path("bench/levers.toml")
RESULTS = Path("bench/results")
PRICES = ("lever", "slice", "status", "speed-up", "share", "ceiling", "then", "bar", "verdict")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0: fine, 2: no ledger or no wall record."""
    parser = argparse.ArgumentParser("pyruntime lever", description=__doc__)
    parser.add_argument("action", choices=("price", "report"))
    parser.add_argument("--levers", type=Path, default=LEVERS, help=f"default: {LEVERS}")
    parser.add_argument(
        "--wall", type=Path, metavar="FILE", help=f"default: the newest wall*.json in {RESULTS}"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the record or report there"
    )
    add_json(parser)
    args = parser.parse_args(argv)
    from pyruntime.measure.levers import read_levers

    levers = read_levers(args.levers)
    if args.action == "report":
        return _report(levers, args)
    return _price(levers, args)


def _price(levers: list[Lever], args: argparse.Namespace) -> int:
    from pyruntime.measure.levers import price
    from pyruntime.measure.records import load_record, save_record, void_reasons

    path = args.wall or newest(RESULTS)
    wall = load_record(path, "wall")
    prices = price(levers, wall["slices"])
    about: dict[str, Any] = {
        "file": path.name,
        **{k: wall[k] for k in ("nt", "options", "device", "commit", "date")},
        "model": wall["model"]["name"],
        "void": void_reasons(wall),
    }
    record = {"wall": about, "prices": [_price_record(p) for p in prices]}
    if args.save:
        save_record(args.save, "lever", record)
    if args.json:
        print_json("lever", record)
        return 0
    print(f"{path}: {about['model']}, {about['nt']} tokens, {about['device']}, {about['date']}")
    if about["void"]:
        print(f"  this wall is void: {told(about['void'])}")
    print(table(PRICES, [price_row(p) for p in prices]))
    return 0


def newest(folder: Path) -> Path:
    """The wall record with the latest date. Raises InputError if there is none."""
    from pyruntime.errors import InputError
    from pyruntime.measure.records import load_record

    paths = [p for p in folder.glob("wall*.json") if not p.name.endswith(".trace.json")]
    if not paths:
        raise InputError(f"no wall*.json in {folder}: make one with pyruntime wall --save")
    return max(paths, key=lambda p: str(load_record(p, "wall")["date"]))


def price_row(p: Price) -> tuple[str, ...]:
    """A price as the texts under `PRICES`."""
    lever = p.lever
    return (
        lever.id,
        "+".join(lever.slice),
        lever.status or "not tried",
        "-" if lever.speed_up is None else f"{lever.speed_up:.2f}x",
        _percent(None if p.share is None else 100 * p.share),
        _percent(p.ceiling),
        _percent(lever.ceiling),
        _percent(lever.bar),
        p.verdict,
    )


def _price_record(p: Price) -> dict[str, Any]:
    return {
        "id": p.lever.id,
        "slice": list(p.lever.slice),
        "share": p.share,
        "ceiling": p.ceiling,
        "bar": p.lever.bar,
        "verdict": p.verdict,
    }


def _report(levers: list[Lever], args: argparse.Namespace) -> int:
    if args.json:
        print_json("levers", {"levers": [vars(lever) for lever in levers]})
        return 0
    text = report(levers)
    if args.save:
        args.save.write_text(text)
    else:
        print(text, end="")
    return 0


def report(levers: list[Lever]) -> str:
    """The ledger as a Markdown table."""
    lines = [
        "| lever | slice | speed-up | share | ceiling | measured | bar | status | evidence "
        "| what reopens it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for lever in levers:
        cells = (
            f"{lever.id}: {lever.title}",
            ", ".join(lever.slice),
            "-" if lever.speed_up is None else f"{lever.speed_up:.2f}×",
            _percent(None if lever.share is None else 100 * lever.share),
            _percent(lever.ceiling),
            "-" if lever.effect is None else f"{lever.effect:+.2f} %",
            _percent(lever.bar),
            f"{lever.status or 'not tried'} ({lever.where})",
            lever.evidence,
            lever.reopen,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} %"
