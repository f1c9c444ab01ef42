"""The devices that a resource is held against: rows of the limits table, or a GPU that is there."""

from __future__ import annotations

import argparse

from pyruntime.cubin.limits import ARCHITECTURES, Limits, limits_of
from pyruntime.cubin.occupancy import Demand, Occupancy, Step, next_step, occupancy
from pyruntime.errors import CubinError


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device, which may be given several times."""
    parser.add_argument(
        "--device",
        action="append",
        metavar="DEVICE",
        help=f"an architecture ({ARCHITECTURES[0]} … {ARCHITECTURES[-1]}) or a GPU of this machine "
        "(cuda:0); may be repeated; default: every architecture",
    )


def devices(names: list[str] | None) -> list[Limits]:
    """The limits of each named device, or of all architectures.

    Raises:
        CubinError: an architecture without known limits.
        DriverNotFoundError: cuda:N without a driver or such a device.
    """
    return [
        live(int(name[5:])) if name.startswith("cuda:") and name[5:].isdigit() else limits_of(name)
        for name in names or ARCHITECTURES
    ]


def live(ordinal: int) -> Limits:
    """What the driver says about device `ordinal`. Barriers are not in its answer: by architecture.

    Raises:
        DriverNotFoundError: no driver, or no such device.
    """
    from pyruntime.driver.device import Device

    device = Device(ordinal)
    try:
        arch = "sm_{}{}".format(*device.compute_capability)
        try:
            barriers = limits_of(arch).barriers
        except CubinError:
            barriers = None
        return Limits(
            device=f"cuda:{ordinal}",
            arch=arch,
            products=device.name,
            warps=device.attribute("MAX_THREADS_PER_MULTIPROCESSOR") // 32,
            blocks=device.attribute("MAX_BLOCKS_PER_MULTIPROCESSOR"),
            shared=device.smem_per_sm,
            shared_per_block=device.smem_per_block,
            barriers=barriers,
            registers=device.attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
            reserve=device.smem_reserved,
            sms=device.sm_count,
        )
    finally:
        device.close()


HEADERS = ("device", "blocks/SM", "warps/SM", "occupancy", "binds", "for one block more")


def row(demand: Demand, limits: Limits) -> tuple[object, ...]:
    """A table row under `HEADERS`."""
    found = occupancy(demand, limits)
    return (
        f"{limits.device} ({limits.products})",
        found.blocks,
        f"{found.warps}/{limits.warps}",
        f"{found.fraction:.0%}",
        ", ".join(found.binding),
        told(next_step(demand, limits)),
    )


def told(step: Step) -> str:
    """A step in words."""
    if step.never:
        return "never: the most blocks that an SM holds"
    words = {"shared": "B less shared memory"}
    return " and ".join(
        f"{amount:,} {words.get(name, f'fewer {name}')}" for name, amount in step.less.items()
    )


def record(demand: Demand, limits: Limits) -> dict[str, object]:
    """The same as JSON values."""
    found: Occupancy = occupancy(demand, limits)
    step = next_step(demand, limits)
    return {
        "device": limits.device,
        "arch": limits.arch,
        "products": limits.products,
        "blocks": found.blocks,
        "warps": found.warps,
        "warps_limit": limits.warps,
        "binding": list(found.binding),
        "allowed": found.allowed,
        "next": None if step.never else {"blocks": step.blocks, "less": step.less},
    }
