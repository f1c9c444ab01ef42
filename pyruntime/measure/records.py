"""Measurement records: JSON files with a schema, tied to the machine code that ran."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyruntime.cubin.installed import cubins_for, installed_code
from pyruntime.driver.device import Device, driver_version
from pyruntime.driver.program import Launch
from pyruntime.errors import InputError
from pyruntime.schema import read_json


def identity(device: Device, launches: Iterable[Launch], commit: str | None) -> dict[str, Any]:
    """What a measurement is tied to: commit, date, device, driver, machine code, launch plan."""
    architecture = architecture_of(device)
    code = installed_code(architecture)
    plan = list(launches)
    return {
        "commit": commit or head_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device.name,
        "architecture": architecture,
        "cuda": driver_version(),
        "kernels": {name: code[name] for name in sorted({x.kernel.name for x in plan})},
        "plan": plan_hash(plan),
    }


def architecture_of(device: Device) -> str:
    """The architecture of the installed cubins that a device loads, such as "sm_90a"."""
    return next(iter(cubins_for(device.compute_capability, device.name))).parent.name


def plan_hash(launches: Iterable[Launch]) -> str:
    """sha256 over role, kernel and grid of every launch, in order."""
    lines = (f"{x.role} {x.kernel.name} {x.grid}" for x in launches)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def head_commit(folder: Path | None = None) -> str | None:
    """The commit of this project's clone in `folder` (default: where we run); None elsewhere."""
    here = folder or Path.cwd()
    if not (here / "cuda/table.def").exists():
        return None
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    return git.stdout.strip() or None


def void_reasons(record: dict[str, Any], plan: str | None = None) -> list[str]:
    """Why a record no longer speaks of the installed kernels; [] if it does.

    Args:
        plan: the launch plan of today, if it could be made (that takes a GPU and the model).
    """
    code = installed_code(record["architecture"])
    if not code:
        return [f"no cubins for {record['architecture']} are installed to compare with"]
    reasons = [
        f"kernel {name} {'has other machine code' if name in code else 'is gone'}"
        for name, recorded in record["kernels"].items()
        if code.get(name) != recorded
    ]
    if plan is not None and plan != record["plan"]:
        reasons.append("the launch plan is another")
    return reasons


# What those who read a record count on, by its kind.
_WHOLE = {
    "wall": {
        "model", "nt", "options", "device", "architecture", "commit", "date", "kernels", "plan",
        "roofline", "sm_mhz", "slices", "gap", "launches", "busy_ms", "wall_ms", "event_us",
        "checks",
    },
}  # fmt: skip


def load_record(path: Path, kind: str) -> dict[str, Any]:
    """Reads a record.

    Raises:
        InputError: see `read_json`; or something is missing in it.
    """
    record = read_json(path, f"pyruntime.{kind}/1")
    if missing := _WHOLE.get(kind, set()) - record.keys():
        raise InputError(f"{path}: {record['schema']} without {', '.join(sorted(missing))}")
    return record


def save_record(path: Path, kind: str, record: dict[str, Any]) -> None:
    """Writes a record as strict JSON, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": f"pyruntime.{kind}/1", **record}, allow_nan=False, indent=1)
    path.write_text(text + "\n")
