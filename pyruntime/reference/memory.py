"""Host memory: what is available, and a refusal before the machine starts to swap."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pyruntime.errors import OutOfMemoryError

MEMINFO = Path("/proc/meminfo")


def available_memory() -> int:
    """Bytes that can be allocated without swapping; all physical memory where Linux is not."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_memory(needed: int, what: str) -> None:
    """Raise OutOfMemoryError, with both numbers, if `needed` bytes are more than is available."""
    available = available_memory()
    if needed > available:
        raise OutOfMemoryError(
            f"{what} needs {needed:,} bytes of host memory, but {available:,} are available"
        )
