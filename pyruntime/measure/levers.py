"""Levers: changes that could make a prefill faster, priced before they are tried.

ceiling = share of the slice × (1 − 1 / speed-up of the slice): the part of the prefill that even a
perfect result would save. A wall record gives today's shares, so every ceiling can be worked out
again after each landing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pyruntime.errors import InputError
from pyruntime.schema import read_toml

SCHEMA = "pyruntime.levers/1"
STATUSES = ("LANDED", "REVERTED", "MEASURED-ONLY", "CLOSED")


@dataclass(frozen=True)
class Lever:
    """A row of the ledger; what is not known is None.

    Attributes:
        slice: roles of a wall that it acts on, or names of slices that this project does not have.
        where: the device on which the figures were taken.
        bar: percent of a whole prefill that it had to gain.
        evidence: a file of this project, or a citation.
        speed_up: of the slice. share: the slice's part of the prefill then, from 0 to 1.
        effect: measured gain of the whole prefill, in percent.
        status: one of `STATUSES`; None: priced, not tried.
    """

    id: str
    title: str
    slice: tuple[str, ...]
    where: str
    bar: float
    evidence: str
    reopen: str
    speed_up: float | None = None
    share: float | None = None
    effect: float | None = None
    status: str | None = None

    @property
    def ceiling(self) -> float | None:
        """Percent of the prefill, at the share of that time."""
        return ceiling(self.share, self.speed_up)


@dataclass(frozen=True)
class Price:
    """A lever against a wall of today; `share` and `ceiling` (percent) are None if unknown."""

    lever: Lever
    share: float | None
    ceiling: float | None

    @property
    def verdict(self) -> str:
        """Whether trying it (again) can pay."""
        if self.share is None:
            return "no such slice here"
        if self.ceiling is None:
            return "no speed-up stated"
        return "clears the bar" if self.ceiling >= self.lever.bar else "below the bar"


def ceiling(share: float | None, speed_up: float | None) -> float | None:
    """Percent of the whole that a slice's speed-up can save at most."""
    return None if share is None or speed_up is None else 100 * share * (1 - 1 / speed_up)


def price(levers: Sequence[Lever], slices: Sequence[Mapping[str, Any]]) -> list[Price]:
    """Every lever at the shares of a wall's slices, highest ceiling first."""
    shares = {s["role"]: float(s["share"]) for s in slices}
    priced = []
    for lever in levers:
        known = [shares[role] for role in lever.slice if role in shares]
        share = sum(known) if known else None
        priced.append(Price(lever, share, ceiling(share, lever.speed_up)))
    return sorted(priced, key=lambda p: -1.0 if p.ceiling is None else p.ceiling, reverse=True)


def read_levers(path: Path) -> list[Lever]:
    """Reads a ledger.

    Raises:
        InputError: see `read_toml`; or a lever that is not whole: the text names it.
    """
    record = read_toml(path, SCHEMA)
    levers = [
        _lever(row, f"{path}: lever {i + 1}") for i, row in enumerate(record.get("lever", []))
    ]
    ids = [lever.id for lever in levers]
    if twice := {i for i in ids if ids.count(i) > 1}:
        raise InputError(f"{path}: more than one lever {', '.join(sorted(twice))}")
    return levers


def _lever(row: Mapping[str, Any], what: str) -> Lever:
    if isinstance(row.get("id"), str):
        what += f" ({row['id']})"
    known = {f.name for f in fields(Lever)}
    if unknown := row.keys() - known:
        raise InputError(f"{what}: unknown {', '.join(sorted(unknown))}")
    if missing := {"id", "title", "slice", "where", "bar", "evidence", "reopen"} - row.keys():
        raise InputError(f"{what}: {', '.join(sorted(missing))} missing")
    if row.get("status") not in (None, *STATUSES):
        raise InputError(f"{what}: status {row['status']!r}; known are {', '.join(STATUSES)}")
    numbers = [row.get(name) for name in ("bar", "speed_up", "share", "effect")]
    if not all(n is None or isinstance(n, int | float) for n in numbers):
        raise InputError(f"{what}: bar, speed_up, share and effect are numbers")
    if not 0 <= row.get("share", 0) <= 1 or row.get("speed_up", 1) <= 0:
        raise InputError(f"{what}: share lies between 0 and 1, speed_up above 0")
    if not isinstance(row["slice"], list) or not all(isinstance(s, str) for s in row["slice"]):
        raise InputError(f"{what}: slice is a list of names")
    return Lever(**{**row, "slice": tuple(row["slice"])})
