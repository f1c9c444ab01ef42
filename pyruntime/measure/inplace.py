"""Every launch of a program timed where it stands, and the program timed as a whole.

Launches are timed one after the other: none starts before the one before has ended, so that their
times add up. What a program gains where they overlap is timed apart.

Events between the launches cost time of their own. How much is measured on a short launch, with and
without them, and taken off. The GPU is kept busy while the host enqueues, so that no launch waits
for the host: what is timed is the GPU alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Launch, Program
from pyruntime.driver.stream import Event, Stream

HOST_MS = 0.04  # that enqueueing a launch and an event may take
SHORT = 64  # repetitions of a short launch, to see what an event costs


class Hold:
    """Keeps a stream busy for a while by copying device memory; the context must be current."""

    _BYTES = 128 << 20

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._array = DeviceArray(stream.device, (2 * self._BYTES,), np.uint8, what="copy buffer")
        self._copy(4)
        (total,) = spans(stream, [lambda: self._copy(16)])
        self._ms = total / 16

    def _copy(self, times: int) -> None:
        for _ in range(times):
            self._stream.copy_on_device(self._array.ptr, self._array.ptr + self._BYTES, self._BYTES)

    def __call__(self, milliseconds: float) -> None:
        """Enqueues copies that take at least so long."""
        self._copy(int(milliseconds / self._ms) + 1)

    def close(self) -> None:
        """Frees the buffer. Idempotent."""
        self._array.close()


@dataclass(frozen=True)
class InPlace:
    """Milliseconds, one entry per round.

    Attributes:
        busy: all launches one after the other, with nothing between them.
        overlapped: all launches as a prefill runs them.
        each: per round one time per launch, without the events' cost.
        event: what one event between launches costs.
    """

    busy: list[float]
    overlapped: list[float]
    each: list[list[float]]
    event: float

    @property
    def medians(self) -> list[float]:
        """One time per launch."""
        return [statistics.median(times) for times in zip(*self.each, strict=True)]


def time_in_place(
    launches: Sequence[Launch], stream: Stream, *, rounds: int, rest: float, overlap: bool
) -> InPlace:
    """Times `launches` in order, in `rounds` rounds; the context must be current.

    Args:
        rest: seconds before each run.
        overlap: whether a prefill lets them overlap, see `Program.run`.
    """
    hold = Hold(stream)
    steps = [_step(launch, stream) for launch in launches]

    def run(parts: Sequence[Callable[[], object]]) -> list[float]:
        stream.synchronize()
        time.sleep(rest)
        hold(HOST_MS * len(steps) + 0.5)
        return spans(stream, parts)

    whole = Program(launches)
    run(steps)  # warms up
    busy, overlapped, each = [], [], []
    for _ in range(rounds):
        busy += run([lambda: whole.run(stream, overlap=False)])
        overlapped += run([lambda: whole.run(stream, overlap=overlap)])
        each.append(run(steps))
    shortest = steps[int(np.argmin(each[0]))]
    event = _event_cost([shortest] * SHORT, run, rounds)
    hold.close()
    return InPlace(busy, overlapped, [[t - event for t in times] for times in each], event)


def _step(launch: Launch, stream: Stream) -> Callable[[], object]:
    program = Program([launch])
    return lambda: program.run(stream)


def _event_cost(
    steps: Sequence[Callable[[], object]],
    run: Callable[[Sequence[Callable[[], object]]], list[float]],
    rounds: int,
) -> float:
    """What one event between two steps adds, at least nothing."""

    def together() -> None:
        for step in steps:
            step()

    with_events = statistics.median(sum(run(steps)) for _ in range(rounds))
    without = statistics.median(sum(run([together])) for _ in range(rounds))
    return max((with_events - without) / len(steps), 0.0)


def spans(stream: Stream, parts: Sequence[Callable[[], object]]) -> list[float]:
    """Enqueues the parts with events around them and waits; milliseconds of each.

    The context must be current.
    """
    events = [Event(stream.device) for _ in range(len(parts) + 1)]
    events[0].record(stream)
    for part, event in zip(parts, events[1:], strict=True):
        part()
        event.record(stream)
    events[-1].synchronize()
    times = [later.milliseconds_since(earlier) for earlier, later in pairwise(events)]
    for event in events:
        event.close()
    return times
