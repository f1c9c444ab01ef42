"""`pyruntime ab A B MODEL`: is B faster than A? Interleaved, with a noise floor, gates and a rule.

A and B are option sets (attention=r48), "default", or other builds (python:/path/to/python).
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyruntime.commands.options import add_json, print_json

from .arms import ArmSpec, parse_arm, require_gpu
from .tables import table

if TYPE_CHECKING:
    from pyruntime.measure.ab import Open, Plan

HEADERS = ("", "A ms", "B ms", "gain", "interval", "p", "visible", "ranges")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pyruntime ab", description=__doc__)
    parser.add_argument("a", metavar="A", help="default, key=value,… or python:/path/to/python")
    parser.add_argument("b", metavar="B", help="likewise")
    parser.add_argument("model", help="a .gguf file, an alias, or hf:owner/repo/file")
    parser.add_argument("--nt", type=int, required=True, help="tokens of the prompt")
    parser.add_argument("--pairs", type=int, default=9, help="of each series (default 9)")
    parser.add_argument("--alpha", type=float, default=0.01, help="of the test (default 0.01)")
    parser.add_argument(
        "--bar", type=float, default=1.5, help="gain asked for, in percent (default 1.5)"
    )
    parser.add_argument(
        "--regime", choices=("burst", "sustained"), default="burst",
        help="burst: rests between runs; sustained: none, at the power limit",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, default=0.08, help="of a logit (default 0.08); 0: bit for bit"
    )
    parser.add_argument("--tokens", type=int, default=32, help="of greedy text to compare")
    parser.add_argument("--seed", type=int, default=0, help="of the order within pairs")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the record there")
    parser.add_argument("--commit", help="recorded instead of asking git")
    add_json(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0: judged, 1: B is worse or the result is void, 3: no GPU."""
    parser = _parser()
    args = parser.parse_args(argv)
    arms = [parse_arm(text) for text in (args.a, args.b)]
    if args.nt < 1 or args.tokens < 1 or args.bar < 0 or not 0 < args.alpha < 1:
        parser.error("--nt and --tokens at least 1, --bar at least 0, --alpha between 0 and 1")
    from pyruntime.measure.ab import Plan
    from pyruntime.measure.paired import refusing

    if refusing(args.pairs, args.alpha) < 1:
        parser.error(f"{args.pairs} pairs can never reach p <= {args.alpha}: more pairs, or alpha")
    require_gpu("ab")
    plan = Plan(
        pairs=args.pairs, alpha=args.alpha, bar=args.bar, regime=args.regime, seed=args.seed,
        tolerance=args.tolerance, tokens=args.tokens,
    )  # fmt: skip
    record = _run(args, arms, plan)
    if args.save:
        from pyruntime.measure.records import save_record

        save_record(args.save, "ab", record)
    if args.json:
        print_json("ab", record)
    else:
        _print(record)
    return 1 if record["faults"] or record["verdict"]["outcome"] == "worse" else 0


def _run(args: argparse.Namespace, arms: list[ArmSpec], plan: Plan) -> dict[str, Any]:
    from datetime import UTC, datetime

    from pyruntime.driver.device import Device, driver_version
    from pyruntime.measure.ab import judge, measure
    from pyruntime.measure.builds import plan_of
    from pyruntime.measure.records import head_commit
    from pyruntime.measure.series import SystemClock
    from pyruntime.measure.telemetry import Telemetry

    device = Device(0)
    with Telemetry(device) as telemetry:
        seen = measure(_opener(arms[0], args), _opener(arms[1], args), plan, SystemClock())
    clocks = telemetry.record()
    if clocks and clocks["thermal_slowdown"]:
        seen.faults.append("the GPU slowed down for heat")
    judged = judge(seen, plan, [arm.options for arm in arms])
    named = {}
    for key, arm, facts in zip("ab", arms, seen.facts, strict=True):
        named[key] = {
            "label": arm.label,
            "options": arm.options,
            "python": facts["python"],
            "version": facts["version"],
            "plan": plan_of(facts),
            "kernels": {n: f["code_sha256"] for n, f in (facts["kernels"] or {}).items()},
        }
    record = {
        "model": args.model,
        "nt": args.nt,
        **named,
        "commit": args.commit or head_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device.name,
        "cuda": driver_version(),
        "clocks": clocks,
        **judged,
    }
    device.close()
    return record


def _opener(arm: ArmSpec, args: argparse.Namespace) -> Open:
    from pyruntime.hub import resolve
    from pyruntime.measure.arms import open_build, open_here

    model = str(resolve(args.model))
    if arm.python:
        return partial(open_build, arm.python, model, args.nt, arm.options)
    return partial(open_here, model, args.nt, arm.options)


def _print(record: dict[str, Any]) -> None:
    plan, verdict = record["plan"], record["verdict"]
    print(f"A {record['a']['label']}   B {record['b']['label']}")
    print(
        f"  {record['model']}, {record['nt']} tokens on {record['device']}; {plan['pairs']} pairs, "
        f"alpha {plan['alpha']:g}, bar {plan['bar']:g} %, {plan['regime']}, seed {plan['seed']}"
    )
    series = [("A/A", record["noise"]["times"]), ("A/B", record["times"])]
    rows = [
        (f"{name} {kind}", *_figures(times[kind]))
        for name, times in series
        if times
        for kind in ("wall", "gpu")
        if times[kind]
    ]
    if rows:
        print(table(HEADERS, rows))
    for arm in ("a", "b"):
        walls = [f"{p[arm]['wall']:.3f}" for p in record["pairs"]]
        print(f"  {arm.upper()} wall, ms: {' '.join(walls)}")
    _print_roles(record["roles_ms"])
    if record["identical_code"]:
        print("  A and B run the same machine code on the same grids, byte for byte")
    for difference in record["resources"]:
        changed = ", ".join(f"{f} {x} -> {y}" for f, (x, y) in difference["fields"].items())
        print(f"  {difference['role']}: {difference['a']} -> {difference['b']}: {changed}")
    for note in record["notes"]:
        print(f"  {note}")
    for gate in record["gates"]:
        print(f"  {'ok  ' if gate['passed'] else 'FAIL'} {gate['name']}: {gate['text']}")
    bar = "cleared" if verdict["clears_bar"] else "not cleared"
    print(f"B: {verdict['outcome']}. {verdict['rule']}. Bar of {plan['bar']:g} %: {bar}")


def _figures(c: dict[str, Any]) -> tuple[str, ...]:
    low, high = ("?" if end is None else f"{end:+.2f}" for end in (c["low"], c["high"]))
    return (
        f"{c['median_a']:.3f}",
        f"{c['median_b']:.3f}",
        f"{c['gain']:+.2f} %",
        f"{low} … {high} %",
        f"{c['p']:.2g}",
        "?" if c["visible"] is None else f"{c['visible']:.2f} %",
        "apart" if c["separated"] else "overlap",
    )


def _print_roles(roles: dict[str, dict[str, float] | None]) -> None:
    a, b = roles.get("a"), roles.get("b")
    if not (a and b):
        return
    moved = [
        f"{role} {a[role]:.3f} -> {b[role]:.3f}"
        for role in a
        if role in b and abs(a[role] / b[role] - 1) > 0.02
    ]
    print(f"  kernels in place, ms, where they moved by 2 %: {', '.join(moved) or 'none'}")
