"""Shared-memory designs that are not built yet, and whether a launcher's formula fits them.

A design is a TOML file: tile values, planes whose rows and columns are formulas over them, and the
formula with which a launcher asks for bytes. The launcher is checked for every combination in the
sweep, not only for today's values: a formula that is right while two tile values are equal is the
usual way in which kernel and launcher drift apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyruntime.cubin.expression import Formula
from pyruntime.cubin.ledger import Ledger
from pyruntime.cubin.spec import Plane
from pyruntime.errors import InputError
from pyruntime.schema import read_toml

SCHEMA = "pyruntime.geometry/1"
_MOST_COMBINATIONS = 100_000
_ALIGNMENT = 16  # bytes: what cp.async, ldmatrix and 16-byte loads need
_PLANE_KEYS = {"name", "rows", "columns", "pad", "stride", "element", "count", "align", "on"}
_KEYS = {
    "schema",
    "note",
    "threads",
    "registers",
    "static",
    "values",
    "sweep",
    "planes",
    "launcher",
}


@dataclass(frozen=True)
class PlaneDesign:
    """A plane by formulas: `count` copies of `rows` rows of `stride` elements of `element` bytes.

    `columns` of a row are used, the rest is pad. `on` names the plane whose memory it reuses from
    its start, over later planes too if it is longer.
    """

    name: str
    rows: Formula
    columns: Formula
    stride: Formula
    count: Formula
    element: int
    align: int
    on: str | None


@dataclass(frozen=True)
class Mismatch:
    """Tile values for which the launcher asks for other bytes than the planes need."""

    values: dict[str, int]
    asked: int
    needed: int


@dataclass(frozen=True)
class Geometry:
    """A design. `values` is the point that is meant; `sweep` lists more for the launcher check."""

    name: str
    note: str
    threads: Formula
    registers: int | None
    static: int
    values: dict[str, int]
    sweep: dict[str, tuple[int, ...]]
    planes: tuple[PlaneDesign, ...]
    launcher: Formula | None

    def ledger(self, values: Mapping[str, int] | None = None) -> Ledger:
        """The planes laid out in order for some tile values (default: the design's own).

        Raises:
            InputError: a formula gives a negative size, or names no value.
        """
        values = {**self.values, **(values or {})}
        placed: dict[str, Plane] = {}
        end = 0
        for design in self.planes:
            stride = self._size(design, "stride", values) * design.element
            size = stride * self._size(design, "rows", values) * self._size(design, "count", values)
            at = -(-end // design.align) * design.align
            if design.on is None:
                end = at + size
            else:
                at = placed[design.on].offset
            placed[design.name] = Plane(design.name, at, size, stride, design.element, design.on)
        planes = tuple(placed.values())
        return Ledger(planes, max((p.offset + p.bytes for p in planes), default=0))

    def padding(self) -> dict[str, int]:
        """Bytes of each plane that hold no column of a row, at the design's own values."""
        pads = {}
        for design in self.planes:
            stride, columns, rows, count = (
                self._size(design, part, self.values)
                for part in ("stride", "columns", "rows", "count")
            )
            pads[design.name] = (stride - columns) * rows * count * design.element
        return pads

    def combinations(self) -> Iterator[dict[str, int]]:
        """All tile values of the sweep, the last name changing fastest."""
        for point in itertools.product(*self.sweep.values()):
            yield {**self.values, **dict(zip(self.sweep, point, strict=True))}

    def mismatches(self) -> list[Mismatch]:
        """Where the launcher is wrong: under-requests first (they corrupt memory), then
        over-requests (they cost occupancy), and of each those nearest to the design first. Empty
        if it is right everywhere in the sweep.
        """
        if self.launcher is None:
            return []
        points = [Mismatch(v, self.launcher(v), self.ledger(v).total) for v in self.combinations()]

        def order(point: Mismatch) -> tuple[bool, int]:
            changed = sum(point.values[n] != own for n, own in self.values.items())
            return point.asked > point.needed, changed

        return sorted((p for p in points if p.asked != p.needed), key=order)

    def _size(self, design: PlaneDesign, part: str, values: Mapping[str, int]) -> int:
        formula: Formula = getattr(design, part)
        size = formula(values)
        if size < 0:
            raise InputError(f"{self.name}: plane {design.name}: {part} = {size} at {dict(values)}")
        return size


def read_geometry(path: Path) -> Geometry:
    """Reads a design.

    Raises:
        InputError: see `read_toml`; or a key or formula that is wrong: the text names it.
    """
    record = read_toml(path, SCHEMA)
    try:
        return _geometry(path.stem, record)
    except (InputError, KeyError, TypeError, ValueError) as error:
        text = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path}: {text}") from None


def _geometry(name: str, record: dict[str, Any]) -> Geometry:
    _only(record, _KEYS, "the file")
    values = {key: _integer(value, key) for key, value in record["values"].items()}
    sweep = {
        key: tuple(_integer(v, f"sweep.{key}") for v in listed)
        for key, listed in record.get("sweep", {}).items()
    }
    _only(sweep, set(values), "sweep")
    if math.prod(map(len, sweep.values())) > _MOST_COMBINATIONS:
        raise InputError(f"the sweep has more than {_MOST_COMBINATIONS:,} combinations")
    planes: list[PlaneDesign] = []
    for plane in record["planes"]:
        planes.append(_plane(plane, [p.name for p in planes]))
    geometry = Geometry(
        name=name,
        note=str(record.get("note", "")),
        threads=_formula(record["threads"]),
        registers=record.get("registers"),
        static=_integer(record.get("static", 0), "static"),
        values=values,
        sweep=sweep,
        planes=tuple(planes),
        launcher=_formula(record["launcher"]) if "launcher" in record else None,
    )
    geometry.ledger()
    return geometry


def _plane(record: dict[str, Any], earlier: list[str]) -> PlaneDesign:
    _only(record, _PLANE_KEYS, f"plane {record['name']}")
    name, on = record["name"], record.get("on")
    if name in earlier:
        raise InputError(f"two planes are called {name}")
    if on is not None and on not in earlier:
        raise InputError(f"plane {name}: no earlier plane is called {on}")
    if "stride" in record and "pad" in record:
        raise InputError(f"plane {name}: give either pad or stride")
    columns = record.get("columns", 1)
    return PlaneDesign(
        name=name,
        rows=_formula(record.get("rows", 1)),
        columns=_formula(columns),
        stride=_formula(record.get("stride", f"({columns}) + ({record.get('pad', 0)})")),
        count=_formula(record.get("count", 1)),
        element=_integer(record["element"], "element"),
        align=max(_integer(record.get("align", _ALIGNMENT), "align"), 1),
        on=on,
    )


def _formula(value: int | str) -> Formula:
    return Formula(str(value))


def _integer(value: Any, what: str) -> int:
    if type(value) is not int or value < 0:
        raise InputError(f"{what} = {value!r}: not a whole number")
    return value


def _only(record: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = record.keys() - known
    if unknown:
        raise InputError(f"{where}: unknown {', '.join(sorted(unknown))}; known: {sorted(known)}")
