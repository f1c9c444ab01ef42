"""Recorded behaviour of a kernel: timings, work and counters, as an audit reads them.

    {"schema": "pyruntime.behaviour/1", "kernel": NAME, "device": NAME, "source": "CUDA events",
     "code_sha256": HEX, "milliseconds": [RAW, ...],
     "work": {"flop": N, "bytes": N}, "peak": {"flop_per_s": N, "bytes_per_s": N},
     "counters": {"achieved_occupancy": 0.17, "stall_mio": 0.36, ...}}

All but schema, kernel, device and source may be left out. `source` says how it was measured: times
of a profiler's replay and of a trace differ, and are never mixed. Counters are fractions or counts;
a few are known by name (see `COUNTERS`), others are shown as they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyruntime.errors import InputError
from pyruntime.schema import read_json

SCHEMA = "pyruntime.behaviour/1"
# Fractions, as are all that begin with stall_; then counts.
COUNTERS = {
    "achieved_occupancy": "warps on an SM, of the most that it can hold",
    "tensor_active": "of all cycles, those in which the tensor cores work",
    "bank_conflicts": "wavefronts beyond the least",
    "local_bytes": "moved to and from local memory",
}
_FRACTIONS = ("achieved_occupancy", "tensor_active")
_TEXTS = ("kernel", "device", "source")
_KEYS = {"schema", *_TEXTS, "code_sha256", "milliseconds", "work", "peak", "counters"}


@dataclass(frozen=True)
class Behaviour:
    """One record. Work is per launch, peaks are the device's."""

    kernel: str
    device: str
    source: str
    code_sha256: str | None
    milliseconds: tuple[float, ...]
    work: dict[str, float]
    peak: dict[str, float]
    counters: dict[str, float]

    @property
    def median(self) -> float | None:
        """Milliseconds."""
        return statistics.median(self.milliseconds) if self.milliseconds else None

    @property
    def floors(self) -> dict[str, float]:
        """Milliseconds that the work takes at least, by the peak that sets it."""
        return {
            what: 1e3 * self.work[what] / self.peak[f"{what}_per_s"]
            for what in ("flop", "bytes")
            if what in self.work and f"{what}_per_s" in self.peak
        }

    @property
    def headroom(self) -> float | None:
        """How many times as fast a perfect kernel would be; None without times, work and peaks."""
        floors = self.floors
        return self.median / max(floors.values()) if self.median and floors else None


def read_behaviour(path: Path) -> Behaviour:
    """Reads a record.

    Raises:
        InputError: see `read_json`; or a value that is none.
    """
    record = read_json(path, SCHEMA)
    if unknown := record.keys() - _KEYS:
        raise InputError(f"{path}: unknown {', '.join(sorted(unknown))}")
    texts: dict[str, Any] = {key: record.get(key) for key in (*_TEXTS, "code_sha256")}
    for key, text in texts.items():
        if not (isinstance(text, str) and text.isprintable()) and (key in _TEXTS or text):
            raise InputError(f"{path}: {key} = {text!r}: not a text")
    times = record.get("milliseconds", [])
    if not isinstance(times, list):
        raise InputError(f"{path}: milliseconds is not a list")
    return Behaviour(
        **texts,
        milliseconds=tuple(_number(path, "milliseconds", t, positive=True) for t in times),
        work=_numbers(path, "work", record, positive=True),
        peak=_numbers(path, "peak", record, positive=True),
        counters=_numbers(path, "counters", record, positive=False),
    )


def is_fraction(counter: str) -> bool:
    """Whether a counter is a part of a whole, by its name."""
    return counter in _FRACTIONS or counter.startswith("stall_")


def _numbers(
    path: Path, key: str, record: Mapping[str, Any], *, positive: bool
) -> dict[str, float]:
    found = record.get(key, {})
    if not isinstance(found, dict) or not all(map(str.isprintable, found)):
        raise InputError(f"{path}: {key} is not an object with names")
    return {n: _number(path, f"{key}.{n}", v, positive=positive) for n, v in found.items()}


def _number(path: Path, what: str, value: Any, *, positive: bool) -> float:
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf or (positive and number == 0):
        raise InputError(f"{path}: {what} = {value!r}: not a {'positive ' * positive}number")
    return number
