"""The report of `pyruntime ledger --geometry`: planes, blocks per SM, and the launcher's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyruntime.commands.options import print_json
from pyruntime.cubin.geometry import Geometry, Mismatch, read_geometry
from pyruntime.cubin.limits import Limits
from pyruntime.cubin.occupancy import Demand, occupancy

from . import devices
from .ledger import PLANES, ledger_record, plane_rows, total_line
from .tables import table

_SHOWN = 8  # counter-examples of each kind


def report(path: Path, chosen: list[Limits], *, json: bool, everything: bool) -> int:
    """Prints the report; 1 if the launcher is wrong for any tile values of the sweep, else 0."""
    geometry = read_geometry(path)
    wrong = geometry.mismatches()
    if json:
        print_json("ledger", {"geometry": _record(geometry, chosen, wrong)})
    else:
        _print(geometry, chosen)
        if geometry.launcher:
            _print_launcher(geometry, chosen, wrong, everything)
    return 1 if wrong else 0


def demand(geometry: Geometry, values: dict[str, int], asked: int) -> Demand:
    """What a block asks for at some tile values with `asked` bytes of dynamic shared memory."""
    return Demand(geometry.threads(values), geometry.registers, geometry.static + asked)


def cost(geometry: Geometry, point: Mismatch, chosen: list[Limits]) -> dict[str, tuple[int, int]]:
    """device -> blocks per SM that the planes would allow, and that the launcher's bytes allow."""
    found = {}
    for limits in chosen:
        pair = tuple(
            occupancy(demand(geometry, point.values, size), limits).blocks
            for size in (point.needed, point.asked)
        )
        if pair[0] != pair[1]:
            found[limits.device] = (pair[0], pair[1])
    return found


def explanation(geometry: Geometry, difference: int) -> str:
    """Names what makes up `difference` bytes at the design's own values, if it is one thing."""
    for name, pad in geometry.padding().items():
        if pad and pad == difference:
            return f": the pad of {name}"
    for plane in geometry.ledger().planes:
        if plane.bytes == difference:
            return f": plane {plane.name}"
    return ""


def _print(geometry: Geometry, chosen: list[Limits]) -> None:
    ledger = geometry.ledger()
    own = demand(geometry, geometry.values, ledger.total)
    registers = geometry.registers or "unknown (not counted)"
    print(f"{geometry.name}{': ' if geometry.note else ''}{geometry.note}")
    print(f"  {_told(geometry.values)}; {own.threads} threads, registers {registers}")
    print(table(PLANES, plane_rows(ledger, geometry.padding())))
    print(f"  {total_line(ledger, geometry.static)}")
    print(table(devices.HEADERS, [devices.row(own, limits) for limits in chosen]))


def _print_launcher(
    geometry: Geometry, chosen: list[Limits], wrong: list[Mismatch], everything: bool
) -> None:
    assert geometry.launcher is not None
    count = sum(1 for _ in geometry.combinations())
    asked, needed = geometry.launcher(geometry.values), geometry.ledger().total
    print(f"  launcher: {geometry.launcher.text}")
    if asked == needed:
        print(f"    here: asks {asked:,} B, as needed")
    else:
        sign = "short" if asked < needed else "too many"
        why = explanation(geometry, abs(asked - needed))
        print(f"    here: asks {asked:,} B of {needed:,}, {abs(asked - needed):,} {sign}{why}")
    if not wrong:
        print(f"    right for all {count} combinations of the sweep")
        return
    for kind, title in (
        (True, "under-requests (the kernel writes past its memory)"),
        (False, "over-requests (they cost blocks per SM)"),
    ):
        points = [p for p in wrong if (p.asked < p.needed) is kind]
        if not points:
            continue
        print(f"    {title}: {len(points)} of {count} combinations")
        for point in points if everything else points[:_SHOWN]:
            print(f"      {_told(point.values)}: {_figures(geometry, point, chosen)}")
        if len(points) > _SHOWN and not everything:
            print(f"      … and {len(points) - _SHOWN} more (--all)")


def _figures(geometry: Geometry, point: Mismatch, chosen: list[Limits]) -> str:
    if point.asked < point.needed:
        short = point.needed - point.asked
        return f"asks {point.asked:,} B of {point.needed:,}, {short:,} short"
    groups: dict[tuple[int, int], list[str]] = {}
    for device, pair in cost(geometry, point, chosen).items():
        groups.setdefault(pair, []).append(device)
    lost = [f"{b} -> {a} blocks/SM on {', '.join(names)}" for (b, a), names in groups.items()]
    return "; ".join([f"asks {point.asked:,} B where {point.needed:,} do", *lost])


def _told(values: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _record(geometry: Geometry, chosen: list[Limits], wrong: list[Mismatch]) -> dict[str, Any]:
    ledger = geometry.ledger()
    own = demand(geometry, geometry.values, ledger.total)
    launcher = geometry.launcher and {
        "formula": geometry.launcher.text,
        "asked": geometry.launcher(geometry.values),
        "needed": ledger.total,
        "combinations": sum(1 for _ in geometry.combinations()),
        "mismatches": [
            {
                "values": point.values,
                "asked": point.asked,
                "needed": point.needed,
                "kind": "under" if point.asked < point.needed else "over",
                "blocks": cost(geometry, point, chosen),
            }
            for point in wrong
        ],
    }
    return {
        "name": geometry.name,
        "note": geometry.note,
        "values": geometry.values,
        "threads": own.threads,
        "registers": geometry.registers,
        "static_shared": geometry.static,
        "ledger": ledger_record(ledger),
        "devices": [devices.record(own, limits) for limits in chosen],
        "launcher": launcher,
    }
