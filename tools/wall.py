"""`pyruntime wall`: where the time of a prefill goes, kernel by kernel, and whether it adds up.

Every launch is timed where it stands, on a GPU; no profiler is needed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyruntime.commands.options import add_json, print_json

from .arms import parse_options
from .tables import table
from .wallfiles import COLUMNS, facts_of, row, write_files

if TYPE_CHECKING:
    from pyruntime.engine import Engine


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pyruntime wall", description=__doc__)
    parser.add_argument("model", nargs="?", help="a .gguf file, an alias, or hf:owner/repo/file")
    parser.add_argument("--nt", type=int, help="tokens of the prompt")
    parser.add_argument("--options", default="", help="of Engine.load: attention=r48,overlap=off")
    parser.add_argument("--regime", choices=("burst", "sustained"), default="burst")
    parser.add_argument("--rounds", type=int, default=9, help="of every timing (default 9)")
    parser.add_argument(
        "--save", type=Path, metavar="PREFIX", help="write PREFIX.json, .html, .png, .trace.json"
    )
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help="a record to show")
    parser.add_argument("--check", type=Path, metavar="FILE", help="is this record void?")
    parser.add_argument("--again", action="store_true", help="measure the roofline again, too")
    parser.add_argument("--commit", help="recorded instead of asking git")
    add_json(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0: fine, 1: a check failed or the record is void, 3: no GPU."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.check:
        return _check(args)
    from pyruntime.measure.records import load_record, save_record

    if args.source:
        record = load_record(args.source, "wall")
        _warn(args.source, record)
    elif args.model is None or args.nt is None or args.nt < 1 or args.rounds < 1:
        parser.error("give MODEL and --nt (at least 1), or --from FILE, or --check FILE")
    else:
        record = _measure(args)
    if args.save:
        plain = {key: value for key, value in record.items() if key != "schema"}
        save_record(args.save.with_name(args.save.name + ".json"), "wall", plain)
        written = write_files(record, args.save)
        if not any(path.suffix == ".png" for path in written):
            print("pyruntime wall: no PNG: pip install 'pyruntime-cuda[plot]'", file=sys.stderr)
    if args.json:
        print_json("wall", record)
    else:
        _print(record)
    return 0 if all(c["passed"] for c in record["checks"]) else 1


def _load(args: argparse.Namespace) -> Engine:
    from pyruntime.engine import Engine

    options = {"max_tokens": args.nt, "device": "cuda:0", **parse_options(args.options)}
    return Engine.load(args.model, **options)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    from pyruntime.measure.launches import gpu_model
    from pyruntime.measure.roofline import roofline
    from pyruntime.measure.wall import measure_wall

    from .arms import require_gpu

    require_gpu("wall")
    with _load(args) as engine:
        roof = roofline(gpu_model(engine).library, again=args.again)
        record = measure_wall(
            engine, args.nt, roof, regime=args.regime, rounds=args.rounds, commit=args.commit
        )
    return {**record, "options": args.options}


def _warn(path: Path, record: dict[str, Any]) -> None:
    from pyruntime.measure.records import void_reasons

    if reasons := void_reasons(record):
        print(f"pyruntime wall: {path} is void: {told(reasons)}", file=sys.stderr)


def told(reasons: list[str]) -> str:
    """Reasons in one line: the first, and how many more."""
    more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return f"{reasons[0]}{more}"


def _check(args: argparse.Namespace) -> int:
    from pyruntime.measure.records import load_record, void_reasons

    record = load_record(args.check, "wall")
    reasons = void_reasons(record, None if args.model is None else _plan(args, record))
    if args.json:
        print_json("wall-check", {"file": str(args.check), "void": bool(reasons), "why": reasons})
        return 1 if reasons else 0
    if reasons:
        print(f"{args.check} is void: {'; '.join(reasons)}")
        return 1
    plan = "" if args.model else " (launch plan not compared: give MODEL, on a GPU)"
    print(f"{args.check} speaks of the installed kernels{plan}")
    return 0


def _plan(args: argparse.Namespace, record: dict[str, Any]) -> str:
    """The launch plan of a record's prefill as it would be today."""
    import numpy as np

    from pyruntime.measure.launches import gpu_model
    from pyruntime.measure.records import plan_hash

    from .arms import require_gpu

    require_gpu("wall --check MODEL")
    args.nt, args.options = record["nt"], record["options"]
    with _load(args) as engine:
        ids = np.zeros(args.nt, np.int32)
        with gpu_model(engine).staged(ids, engine.new_cache(args.nt)) as (launches, _):
            return plan_hash(launches)


def _print(record: dict[str, Any]) -> None:
    from statistics import median

    slices = sorted(record["slices"], key=lambda s: -s["ms"])
    print(f"{record['model']['name']}, {record['nt']} tokens{_with(record['options'])}")
    print(f"  {'; '.join(facts_of(record))}")
    print(table(COLUMNS, [row(s) for s in slices]))
    busy, wall = median(record["busy_ms"]), median(record["wall_ms"])
    rate = 1e3 * record["nt"] / wall
    print(f"  GPU-busy {busy:.3f} ms, wall {wall:.3f} ms ({rate:,.0f} tok/s); between them:")
    for part in record["gap"]:
        print(f"    {part['name']:<32} {part['ms']:8.3f} ms")
    print(f"  events between launches cost {record['event_us']:.2f} us each, taken off")
    for check in record["checks"]:
        print(f"  {'ok  ' if check['passed'] else 'FAIL'} {check['name']}: {check['text']}")


def _with(options: str) -> str:
    return f", {options}" if options else ""
