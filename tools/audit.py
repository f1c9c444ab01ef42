"""`pyruntime audit`: structure, resources and behaviour of a kernel on one page, and a verdict.

Structure needs nvdisasm (pip install 'pyruntime-cuda[sass]'). Behaviour is read from a record
(--record; docs/inspection.md shows one). What a change would be worth needs --share, and
--gain or a record with work and peaks. No GPU is used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pyruntime.commands.options import add_json, print_json
from pyruntime.cubin.audit import Audit, audit
from pyruntime.cubin.behaviour import read_behaviour
from pyruntime.cubin.limits import limits_of
from pyruntime.cubin.nvdisasm import disassemble
from pyruntime.cubin.records import demand_of
from pyruntime.errors import InputError, ToolError

from . import devices
from .audit_text import record, text
from .kernels import kernels_named, listed, refuse_fixed, variant_for


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0: shown, 1: the kernel is not what its contract says, 2: bad input."""
    parser = argparse.ArgumentParser("pyruntime audit", description=__doc__)
    parser.add_argument("kernel", help="a kernel's name, or a pattern that only one has")
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="FILE", help="default: the installed cubins"
    )
    parser.add_argument("--device", metavar="DEVICE", help="an architecture (sm_90) or a GPU of "
                        "this machine (cuda:0); default: that of the first cubin")  # fmt: skip
    parser.add_argument("--threads", type=int, help="per block, where the kernel does not fix them")
    parser.add_argument("--dynamic", type=int, metavar="BYTES", help="likewise for shared memory")
    parser.add_argument("--record", type=Path, metavar="JSON", help="timings or counters")
    parser.add_argument("--share", type=fraction, help="of the whole's time: 0.1 or 10%%")
    parser.add_argument("--gain", type=speed_up, help="possible: 2.4 (times as fast), or 11%% less "
                        "time")  # fmt: skip
    parser.add_argument("--bar", type=fraction, default=0.015, help="what a change must bring "
                        "(default: 1.5%%)")  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with figures there")
    add_json(parser)
    args = parser.parse_args(argv)
    found, unread = _audit(args)
    if args.html:
        from .audit_page import page

        args.html.write_text(page(found))
    if args.json:
        print_json("audit", record(found))
    else:
        print(text(found))
    for reason in unread:
        print(f"pyruntime audit: {reason}", file=sys.stderr)
    return 2 if unread else 1 if found.breaches else 0


def fraction(text: str) -> float:
    """0.1 or 10%, above 0 and up to 1."""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a part of a whole")
    return value


def speed_up(text: str) -> float:
    """2.4 or 2.4x (times as fast), or 11% (of its time saved)."""
    if text.endswith("%"):
        saved = float(text[:-1]) / 100
        value = 1 / (1 - saved) if saved < 1 else 0.0
    else:
        value = float(text.removesuffix("x"))
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no gain")
    return value


def _audit(args: argparse.Namespace) -> tuple[Audit, list[str]]:
    named, unread = kernels_named(args.kernel, args.paths)
    if len(named) > 1:
        raise InputError(f"{args.kernel} names {len(named)} kernels: {listed(list(named), 8)}")
    (variants,) = named.values()
    limits = devices.devices([args.device])[0] if args.device else limits_of(next(iter(variants)))
    kernel, runs = variant_for(limits, variants)
    if not runs:
        raise InputError(f"{kernel.name}: none of {', '.join(variants)} runs on {limits.device}")
    refuse_fixed([kernel], threads=args.threads, dynamic=args.dynamic)
    instructions, reason = None, ""
    try:
        (instructions,) = disassemble([kernel])
    except ToolError as error:
        reason = str(error)
    found = audit(
        kernel,
        limits,
        demand=demand_of(kernel, args.threads or kernel.max_threads, args.dynamic),
        instructions=instructions,
        no_structure=reason,
        behaviour=read_behaviour(args.record) if args.record else None,
        share=args.share,
        gain=args.gain,
        bar=args.bar,
    )
    return found, unread
