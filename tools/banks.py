"""`pyruntime banks`: which lanes of a warp wait for one another in shared memory.

Either for the planes that a kernel exports, under the standard accesses, or for one access to rows
(--stride) or to addresses by formula (--address 'lane % 8 * 256 + lane // 8 * 16').
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pyruntime.commands.options import add_json, print_json
from pyruntime.cubin.banks import ACCESSES, SWIZZLES, Conflict, Served, in_rows, picture, serve
from pyruntime.cubin.expression import Address
from pyruntime.cubin.facts import KernelFacts
from pyruntime.cubin.layouts import Use, shapes, uses
from pyruntime.errors import InputError

from .bank_figure import draw
from .kernels import kernels_named
from .tables import table

_SHOWN = 4  # groups of conflicting lanes


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0: no lane waits, or a kernel's planes were shown, 1: some do."""
    parser = argparse.ArgumentParser("pyruntime banks", description=__doc__)
    parser.add_argument("kernel", nargs="?", help="a kernel's name, or a pattern (gemm_*)")
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="FILE", help="default: the installed cubins"
    )
    parser.add_argument("--access", choices=ACCESSES, default="ldmatrix.x4", metavar="KIND",
                        help=f"{', '.join(ACCESSES)} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--stride", type=int, metavar="BYTES", help="from row to row")
    parser.add_argument("--pad", type=int, default=0, metavar="BYTES", help="added to the stride")
    parser.add_argument("--lanes-per-row", type=int, default=1, metavar="N",
                        help="side by side in each row; not for ldmatrix (default: 1)")  # fmt: skip
    parser.add_argument("--swizzle", type=int, choices=SWIZZLES, default=0, help="as TMA's, bytes")
    parser.add_argument("--address", metavar="FORMULA", help="byte address by lane")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw lanes by banks there")
    add_json(parser)
    args = parser.parse_args(argv)
    if sum(x is not None for x in (args.kernel, args.stride, args.address)) != 1:
        parser.error("give one of KERNEL, --stride and --address")
    if args.kernel is not None:
        return _kernels(args)
    title, served = _pattern(args)
    if args.json:
        print_json("banks", {"pattern": title, **_record(served)})
    else:
        _print(title, served)
        if args.stride is not None and not args.swizzle and served.wavefronts > served.ideal:
            use = Use(title, served.access, args.stride + args.pad, args.lanes_per_row)
            print(f"  free with: {_remedy(use)}")
    if args.png:
        draw(args.png, [(title, served)])
    return 1 if served.wavefronts > served.ideal else 0


def _pattern(args: argparse.Namespace) -> tuple[str, Served]:
    access = ACCESSES[args.access]
    if args.address is not None:
        formula = Address(args.address)
        return f"{access.name} at {args.address}", serve(
            access, lambda lane: formula({"lane": lane})
        )
    stride = args.stride + args.pad
    if stride < 0 or args.lanes_per_row < 1:
        raise InputError(f"rows of {stride} B, {args.lanes_per_row} lanes each: not possible")
    served = in_rows(access, stride, lanes_per_row=args.lanes_per_row, swizzle=args.swizzle)
    title = f"{access.name}, rows of {stride:,} B"
    if not access.matrices and args.lanes_per_row > 1:
        title += f", {args.lanes_per_row} lanes in each"
    return title + (f", {args.swizzle} B swizzle" if args.swizzle else ""), served


def _print(title: str, served: Served) -> None:
    print(f"{title}: {_verdict(served)}")
    for conflict in served.conflicts[:_SHOWN]:
        print(f"  {_told(conflict)}")
    if len(served.conflicts) > _SHOWN:
        print(f"  … and {len(served.conflicts) - _SHOWN} more (--json)")
    print("  wavefront of its phase in which each bank serves each lane:")
    print("\n".join(f"  {line}".rstrip() for line in picture(served)))


def _verdict(served: Served) -> str:
    if served.wavefronts == served.ideal:
        return f"no conflicts, {served.wavefronts} wavefront{'s' * (served.wavefronts != 1)}"
    return f"{max(served.ways)}-way, {served.wavefronts} wavefronts where {served.ideal} would do"


def _told(conflict: Conflict) -> str:
    first, last = conflict.banks[0], conflict.banks[-1]  # neighbours, as an access is in one piece
    banks = f"bank {first}" if first == last else f"banks {first}-{last}"
    groups = " | ".join(" ".join(map(str, lanes)) for lanes in conflict.groups)
    return f"phase {conflict.phase}, {banks}: lanes {groups}"


def _remedy(use: Use) -> str:
    found = []
    if use.pad is not None:
        found.append(f"{use.pad} B more per row")
    if use.swizzle:
        found.append(f"{use.swizzle} B swizzle")
    return " or ".join(found) or "neither a pad nor a TMA swizzle"


HEADERS = (
    "planes",
    "rows x stride",
    "element",
    "access",
    "kind",
    "wavefronts",
    "ways",
    "free with",
)


def _kernels(args: argparse.Namespace) -> int:
    kernels, unread = kernels_named(args.kernel, args.paths)
    chosen = [next(iter(variants.values())) for variants in kernels.values()]
    for kernel in chosen:
        if kernel.spec is None and len(chosen) == 1:
            raise InputError(f"{kernel.name} exports no planes; give --stride or --address instead")
    if args.json:
        print_json("banks", {"kernels": [_kernel_record(k) for k in chosen if k.spec]})
    else:
        for kernel in chosen:
            _print_kernel(kernel)
    if args.png:
        pictures = [
            (f"{kernel.name}: {', '.join(names)}, {use.text}", use.served())
            for kernel in chosen
            for plane, names in shapes(kernel.spec.planes if kernel.spec else ()).items()
            for use in uses(plane)
        ]
        draw(args.png, pictures)
    for reason in unread:
        print(f"pyruntime banks: {reason}", file=sys.stderr)
    return 2 if unread else 0


def _print_kernel(kernel: KernelFacts) -> None:
    print(kernel.name)
    rows: list[tuple[object, ...]] = []
    for plane, names in shapes(kernel.spec.planes if kernel.spec else ()).items():
        count = plane.bytes // plane.row_stride if plane.row_stride else 0
        size = f"{count} x {plane.row_stride:,}"
        for use in uses(plane):
            served = use.served()
            free = served.wavefronts == served.ideal
            figures = (f"{served.wavefronts} of {served.ideal}", max(served.ways))
            rows.append((", ".join(names), size, plane.element, use.text, use.access.name, *figures,
                         "" if free else _remedy(use)))  # fmt: skip
    if not rows:
        print("  no plane of eight rows or more")
        return
    print(table(HEADERS, rows))
    print("  at plain addresses: whether the kernel permutes them is not in its contract")


def _record(served: Served) -> dict[str, Any]:
    return {
        "access": served.access.name,
        "addresses": list(served.addresses),
        "wavefronts": served.wavefronts,
        "ideal": served.ideal,
        "ways": list(served.ways),
        "conflicts": [
            {"phase": c.phase, "banks": list(c.banks), "lanes": [list(g) for g in c.groups]}
            for c in served.conflicts
        ],
    }


def _kernel_record(kernel: KernelFacts) -> dict[str, Any]:
    assert kernel.spec is not None
    return {
        "name": kernel.name,
        "planes": [
            {
                "name": plane.name,
                "row_stride": plane.row_stride,
                "element": plane.element,
                "uses": [
                    {
                        "text": use.text,
                        "lanes_per_row": use.lanes_per_row,
                        "free_pad": use.pad,
                        "free_swizzle": use.swizzle,
                        **_record(use.served()),
                    }
                    for use in uses(plane)
                ],
            }
            for plane in kernel.spec.planes
        ],
    }
