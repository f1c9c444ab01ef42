"""`pyruntime occupancy`: blocks per SM for numbers that you give; no kernel and no GPU needed."""

from __future__ import annotations

import argparse

from pyruntime.commands.options import add_json, print_json
from pyruntime.cubin.limits import THREADS_PER_BLOCK, Limits
from pyruntime.cubin.occupancy import Demand, occupancy

from . import devices
from .tables import table

_PORTABLE_CLUSTER = 8


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0: at least one block fits everywhere, 1: somewhere none does."""
    parser = argparse.ArgumentParser("pyruntime occupancy", description=__doc__)
    parser.add_argument("--threads", type=_positive, required=True, help="per block")
    parser.add_argument("--registers", type=_positive, help="per thread; default: not counted")
    parser.add_argument(
        "--shared", type=_count, default=0, metavar="BYTES", help="static + dynamic per block"
    )
    parser.add_argument("--barriers", type=_count, default=0, help="named barriers per block")
    parser.add_argument("--cluster", type=_positive, metavar="BLOCKS", help="blocks per cluster")
    devices.add_device(parser)
    add_json(parser)
    args = parser.parse_args(argv)
    if args.threads > THREADS_PER_BLOCK:
        parser.error(f"--threads: a block has at most {THREADS_PER_BLOCK}")
    demand = Demand(args.threads, args.registers, args.shared, args.barriers)
    chosen = devices.devices(args.device)
    if args.json:
        records = [
            {
                **devices.record(demand, limits),
                "clusters_at_most": _clusters(demand, limits, args.cluster),
            }
            for limits in chosen
        ]
        print_json(
            "occupancy", {"demand": vars(demand), "cluster": args.cluster, "devices": records}
        )
    else:
        print(table(devices.HEADERS, [devices.row(demand, limits) for limits in chosen]))
        if args.cluster:
            _print_clusters(demand, chosen, args.cluster)
    return 0 if all(occupancy(demand, limits).blocks for limits in chosen) else 1


def _clusters(demand: Demand, limits: Limits, size: int | None) -> int | None:
    return occupancy(demand, limits).clusters_at_most(size) if size else None


def _print_clusters(demand: Demand, chosen: list[Limits], size: int) -> None:
    if size > _PORTABLE_CLUSTER:
        print(f"  clusters of more than {_PORTABLE_CLUSTER} blocks need a launch attribute")
    for limits in chosen:
        most = _clusters(demand, limits, size)
        told = f"at most {most:,}" if most is not None else "unknown without its number of SMs"
        print(f"  clusters of {size} on {limits.device}: {told}")
    print("  (a bound: how many fit its groups of SMs, only the driver knows)")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value
