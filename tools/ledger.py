"""`pyruntime ledger`: a kernel's shared memory plane by plane, and the blocks per SM it leaves.

With --geometry the same for a design that is not built, and whether its launcher's formula asks for
the right bytes at every tile size.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pyruntime.commands.options import add_json, print_json
from pyruntime.cubin.facts import KernelFacts
from pyruntime.cubin.ledger import Ledger, ledger_of
from pyruntime.cubin.limits import DEFAULT_RESERVE, Limits
from pyruntime.cubin.occupancy import Demand
from pyruntime.cubin.records import demand_of

from . import devices
from .kernels import kernels_named, refuse_fixed, variant_for
from .tables import shown, table


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0: fine, 1: the launcher asks for wrong bytes, 2: unreadable input."""
    parser = argparse.ArgumentParser("pyruntime ledger", description=__doc__)
    parser.add_argument("kernel", nargs="?", help="a kernel's name, or a pattern (gemm_*)")
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="FILE", help="default: the installed cubins"
    )
    parser.add_argument(
        "--geometry", type=Path, metavar="TOML", help="a design instead of a kernel"
    )
    parser.add_argument("--all", action="store_true", help="every counter-example of a launcher")
    parser.add_argument("--threads", type=int, help="per block, where the kernel does not fix them")
    parser.add_argument("--dynamic", type=int, metavar="BYTES", help="likewise for shared memory")
    devices.add_device(parser)
    add_json(parser)
    args = parser.parse_args(argv)
    if (args.kernel is None) == (args.geometry is None):
        parser.error("give either a KERNEL or --geometry TOML")
    chosen = devices.devices(args.device)
    if args.geometry:
        from .designs import report

        return report(args.geometry, chosen, json=args.json, everything=args.all)
    kernels, unread = kernels_named(args.kernel, args.paths)
    every = (kernel for variants in kernels.values() for kernel in variants.values())
    refuse_fixed(every, threads=args.threads, dynamic=args.dynamic)
    records = [
        _record(variants, chosen, args.threads, args.dynamic) for variants in kernels.values()
    ]
    if args.json:
        print_json("ledger", {"kernels": records})
    else:
        for variants in kernels.values():
            _print(variants, chosen, args.threads, args.dynamic)
    for reason in unread:
        print(f"pyruntime ledger: {reason}", file=sys.stderr)
    return 2 if unread else 0


def plane_rows(ledger: Ledger, padding: dict[str, int] | None = None) -> list[tuple[object, ...]]:
    """Table rows under `PLANES`; the pad of a row is known for designs only."""
    return [
        (
            p.name,
            f"{p.bytes // p.row_stride if p.row_stride else 0} x {p.row_stride:,}",
            p.element,
            padding[p.name] if padding else "-",
            p.offset,
            p.bytes,
            f"on {p.on}" if p.on else "",
        )
        for p in ledger.planes
    ]


PLANES = ("plane", "rows x stride", "element", "pad", "offset", "bytes", "reuse")


def ledger_record(ledger: Ledger) -> dict[str, Any]:
    """A ledger as JSON values."""
    return {
        "planes": [
            {
                "name": p.name,
                "rows": p.bytes // p.row_stride if p.row_stride else 0,
                "row_stride": p.row_stride,
                "element": p.element,
                "offset": p.offset,
                "bytes": p.bytes,
                "on": p.on,
            }
            for p in ledger.planes
        ],
        "holes": [{"offset": offset, "bytes": size} for offset, size in ledger.holes],
        "reused": ledger.reused,
        "dynamic_shared": ledger.total,
    }


def total_line(ledger: Ledger, static: int | None) -> str:
    """The sum of a ledger in words."""
    holes = sum(size for _, size in ledger.holes)
    return (
        f"{ledger.total:,} B asked for ({ledger.reused:,} saved by reuse, {holes:,} lost to "
        f"alignment) + {shown(static)} static + {DEFAULT_RESERVE:,} that the driver keeps"
    )


def _demand(kernel: KernelFacts, threads: int | None, dynamic: int | None) -> Demand | None:
    return demand_of(kernel, threads or kernel.max_threads, dynamic)


def _record(
    variants: dict[str, KernelFacts],
    chosen: list[Limits],
    threads: int | None,
    dynamic: int | None,
) -> dict[str, Any]:
    first = next(iter(variants.values()))
    found = []
    for limits in chosen:
        kernel, runs = variant_for(limits, variants)
        demand = _demand(kernel, threads, dynamic)
        if demand:
            found.append({"cubin": kernel.arch, "runs": runs, **devices.record(demand, limits)})
    return {
        "name": first.name,
        "architectures": list(variants),
        "static_shared": first.static_shared,
        "ledger": ledger_record(ledger_of(first.spec)) if first.spec else None,
        "devices": found or None,
    }


def _print(
    variants: dict[str, KernelFacts],
    chosen: list[Limits],
    threads: int | None,
    dynamic: int | None,
) -> None:
    first = next(iter(variants.values()))
    print(f"{first.name} ({', '.join(variants)})")
    if first.spec:
        ledger = ledger_of(first.spec)
        if ledger.planes:
            print(table(PLANES, plane_rows(ledger)))
        print(f"  {total_line(ledger, first.static_shared)}")
    else:
        told = "unknown, chosen at launch" if dynamic is None else f"{dynamic:,} B, as you say"
        static = shown(first.static_shared)
        print(f"  static {static} B; dynamic {told}; planes unknown (no spec inside)")
    rows = []
    stars = False
    for limits in chosen:
        kernel, runs = variant_for(limits, variants)
        demand = _demand(kernel, threads, dynamic)
        if demand is None:
            missing = "--dynamic BYTES" if kernel.dynamic_shared is None and dynamic is None else ""
            more = "" if kernel.threads or threads or kernel.max_threads else "--threads N"
            print(f"  blocks per SM unknown: give {' and '.join(filter(None, [missing, more]))}")
            return
        name, *rest = devices.row(demand, limits)
        stars |= not runs
        rows.append((f"{name}{'' if runs else ' *'}", kernel.registers, demand.threads, *rest))
    device, *others = devices.HEADERS
    print(table((device, "regs", "threads", *others), rows))
    if stars:
        print("  * no cubin here runs there; counted as if its registers stayed the same")
