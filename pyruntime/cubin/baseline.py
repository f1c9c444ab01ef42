"""A record of what kernels took, against which later builds are held."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pyruntime.cubin.facts import CubinFacts
from pyruntime.cubin.records import kernel_record, kernels_of
from pyruntime.errors import InputError
from pyruntime.schema import read_toml

SCHEMA = "pyruntime.resources/1"
# What must not grow.
FIELDS = ("registers", "static_shared", "dynamic_shared", "stack", "spill_bytes", "spill_shared")

Baseline = dict[str, dict[str, int]]


def key_of(record: dict[str, Any]) -> str:
    """The name of a kernel's entry: "norm_t256 sm_90a"."""
    return f"{record['name']} {record['arch']}"


def baseline_of(cubins: Iterable[CubinFacts]) -> Baseline:
    """The figures of all kernels; what is unknown has no entry. Of namesakes the highest counts."""
    found: Baseline = {}
    for record in (kernel_record(kernel) for _, kernel in kernels_of(cubins)):
        entry = found.setdefault(key_of(record), {})
        for field in FIELDS:
            if record[field] is not None:
                entry[field] = max(record[field], entry.get(field, 0))
    return found


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Writes a baseline as TOML, sorted by kernel."""
    lines = [f'schema = "{SCHEMA}"', ""]
    for key in sorted(baseline):
        # A JSON string is a TOML basic string.
        figures = ", ".join(f"{name} = {value}" for name, value in baseline[key].items())
        lines.append(f"{json.dumps(key)} = {{ {figures} }}")
    path.write_text("\n".join(lines) + "\n")


def read_baseline(path: Path) -> Baseline:
    """Reads a baseline.

    Raises:
        InputError: see `read_toml`; or not a baseline.
    """
    record = read_toml(path, SCHEMA)
    del record["schema"]
    for key, figures in record.items():
        if not isinstance(figures, dict) or not all(
            name in FIELDS and type(value) is int for name, value in figures.items()
        ):
            raise InputError(f"{path}: entry {key!r} does not hold figures of {', '.join(FIELDS)}")
    return record


def against(baseline: Baseline, record: dict[str, Any]) -> list[str]:
    """What is worse in a kernel's record than in the baseline, one text per figure."""
    known = baseline.get(key_of(record))
    if known is None:
        return ["is not in the baseline; write it anew if the kernel is meant to be there"]
    worse = []
    for field, limit in known.items():
        value = record[field]
        if value is None:
            worse.append(f"{field} is unknown, was {limit:,}")
        elif value > limit:
            worse.append(f"{field} {value:,}, was {limit:,}")
    return worse
