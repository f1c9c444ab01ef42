"""`pyruntime inspect`: what the compiler wrote into cubins about their kernels. Needs no GPU."""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from pyruntime.commands.options import add_json, print_json
from pyruntime.cubin.facts import CubinFacts, KernelFacts
from pyruntime.cubin.records import blocks_of, cubin_record, read_all
from pyruntime.errors import InputError

from .tables import shortened, table

HEADERS = (
    "kernel", "regs", "static", "dynamic", "stack", "spill st/ld", "barriers", "params", "threads",
    "cluster", "blocks/SM", "code",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0: all read, 2: something could not be."""
    parser = argparse.ArgumentParser("pyruntime inspect", description=__doc__)
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="FILE",
        help=".cubin, fat binary, .o, .so, executable or folder; default: the installed cubins",
    )
    parser.add_argument("--kernel", metavar="GLOB", default="*", help="only kernels named so")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also parameters, planes and attributes"
    )
    add_json(parser)
    args = parser.parse_args(argv)
    cubins, unread = read_all(args.paths)
    named = any(fnmatchcase(k.name, args.kernel) for cubin in cubins for k in cubin.kernels)
    if args.kernel != "*" and not named:
        raise InputError(f"no kernel matches {args.kernel}")
    if args.json:
        records = [cubin_record(cubin) for cubin in cubins]
        for record in records:
            record["kernels"] = [
                k for k in record["kernels"] if fnmatchcase(k["name"], args.kernel)
            ]
        print_json("inspect", {"cubins": records, "unread": unread})
    else:
        for cubin in cubins:
            _print(cubin, args.kernel, args.verbose)
    for reason in unread:
        print(f"pyruntime inspect: {reason}", file=sys.stderr)
    return 2 if unread else 0


def _print(cubin: CubinFacts, pattern: str, verbose: bool) -> None:
    kernels = [k for k in cubin.kernels if fnmatchcase(k.name, pattern)]
    if not kernels and pattern != "*":
        return
    toolkit = f"CUDA {cubin.toolkit}" if cubin.toolkit else ""
    made = [toolkit, cubin.tool or "", shortened(cubin.options or "", 60)]
    count = f"{len(kernels)} kernel{'' if len(kernels) == 1 else 's'}"
    print("  ".join(filter(None, [f"{cubin.label}: {cubin.arch}, {count}", *made])))
    for remark in cubin.remarks:
        print(f"  note: {remark}")
    if kernels:
        print(table(HEADERS, [_row(kernel) for kernel in kernels]))
    if verbose:
        print(
            f"  global variables {cubin.global_bytes:,} B, __constant__ {cubin.constant_bytes:,} B"
        )
        for kernel in kernels:
            _print_details(kernel)


def _row(kernel: KernelFacts) -> tuple[object, ...]:
    spills = kernel.spills
    threads: object = kernel.threads or (f"<={kernel.max_threads}" if kernel.max_threads else "-")
    return (
        kernel.name,
        kernel.registers,
        kernel.static_shared,
        kernel.dynamic_shared,
        kernel.stack,
        f"{spills.stores:,}/{spills.loads:,}" if spills else None,
        kernel.barriers,
        kernel.param_bytes,
        threads,
        "x".join(map(str, kernel.cluster)) if kernel.cluster else "-",
        blocks_of(kernel),
        len(kernel.code),
    )


def _print_details(kernel: KernelFacts) -> None:
    print(f"\n  {kernel.name}")
    cap = f"at most {kernel.register_cap} registers" if kernel.register_cap else "no register cap"
    bound = f"at most {kernel.max_threads:,} threads" if kernel.max_threads else "no launch bound"
    print(f"    launch: {bound}, {cap}; constant bank 0: {kernel.constant_bytes:,} B")
    if kernel.spills and kernel.spills.shared:
        print(f"    spills to shared memory: {kernel.spills.shared:,} B of instructions")
    if kernel.calls:
        print(f"    calls (a recursion would need more stack): {', '.join(kernel.calls)}")
    if kernel.uses:
        print(f"    uses: {', '.join(kernel.uses)}")
    params = ", ".join(f"{p.ordinal}: {p.size} B at {p.offset}" for p in kernel.params)
    print(f"    parameters: {params or 'none'}")
    if kernel.spec:
        spec = kernel.spec
        tile = " ".join(f"{name}={value}" for name, value in spec.tile.items())
        print(f"    tile: {tile or 'none'}; at least {spec.min_blocks} blocks/SM wanted")
        print("    signature: " + ", ".join(f"{p.name}:{p.letter}@{p.offset}" for p in spec.params))
        for p in spec.planes:
            on = f" on {p.on}" if p.on else ""
            print(
                f"    plane {p.name}{on}: {p.bytes:,} B at {p.offset:,}, "
                f"rows of {p.row_stride:,} B, elements of {p.element} B"
            )
    else:
        print("    dynamic shared memory: chosen at launch, not in the file")
    print("    attributes: " + ", ".join(f"{a.name}={a.text}" for a in kernel.attributes))
