"""What a GPU does for a call, which may be over sooner: its time ran out, or it was interrupted.

The live block, the activations and the call's own arrays are in use until that is done. So whoever
comes next waits for it, before anything is written or freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyruntime.driver.stream import Stream


class Underway:
    """The work of at most one call.

    Attributes:
        streams: those that it may be under way on; empty where there is none.
    """

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self._used: list[object] = []
        self.hold = self._used.append  # what else must live as long as the work that has begun

    def begin(self, streams: Sequence[Stream], *used: object) -> None:
        """Says, before work is enqueued on `streams`, what else must live as long as it runs."""
        self._used.extend(used)
        self.streams[:] = streams

    def wait(self, left: Callable[[], float | None]) -> bool:
        """Waits until all is done, for at most `left()` seconds (None: for ever); whether it is.

        Raises CudaError: it is not known.
        """
        return all(stream.synchronize(left()) for stream in self.streams)

    def end(self) -> None:
        """Says that all is done."""
        self._used.clear()
        self.streams.clear()
