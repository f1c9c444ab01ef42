"""What work costs, in calls: as many on a busy machine as on an idle one, which seconds are not."""

from __future__ import annotations

import sys
from collections.abc import Callable


def calls(work: Callable[[], object]) -> int:
    """How many functions, of Python or C, `work` calls in this thread; generators count for each
    item. What it imports for the first time counts, too."""
    count, before = 0, sys.getprofile()

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
