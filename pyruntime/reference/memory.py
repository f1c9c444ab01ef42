"""Host memory: what is available, and a refusal before the machine starts to swap."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pyruntime.errors import OutOfMemoryError

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be allocated without swapping; all physical memory where Linux is not."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        available = int(found[1]) * 1024
    else:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = _cgroup_memory()
    return available if left is None else min(available, left)


def _cgroup_memory() -> int | None:
    """What a container's limit leaves (control group v2), if there is one."""
    try:
        most, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no such group, or "max"
        return None
    return max(most - used, 0)


def require_memory(needed: int, what: str) -> None:
    """Raise OutOfMemoryError, with both numbers, if `needed` bytes are more than is available."""
    available = available_memory()
    if needed > available:
        raise OutOfMemoryError(
            f"{what} needs {needed:,} bytes of host memory, but {available:,} are available"
        )
