"""A pass over two streams: one computes, the other fills the memory that is read next.

A pass is a row of steps. What step i reads lies in slot i % SLOTS, which its fill writes. So

    fill i        waits for all of step i - SLOTS, which read the slot before
    step i        waits for all of fill i

and nothing else binds the streams to one another: fill i runs beside the steps before i.

Kernels may read weights before the kernel before them in their stream has ended (`Program.run`,
cuda/core/spec.cuh), because no kernel of that stream writes them. Here another stream's do, so the
rule is kept by where steps begin:

- A step is a run of its own. Its first launch waits for everything before it in its stream, the
  wait for the fill included, and reads nothing sooner. Each later one starts after the one before
  it has started, and so, all the way back, after that wait: whatever it reads early is there.
- GEMMs read weights through L2 alone (cp.async.cg, TMA): no L1 cache holds an older layer's.
- A slot is given up by an event recorded behind its last reader. An event is reached when all
  before it in its stream has ended, not when it has let the next kernel start.
- The last launch of a fill has ended only if those before it have (spec.cuh again), so the event
  behind it stands for the whole fill. Kernels that fill wait before they write: they may overlap.

Which stream should be urgent is for measurements to say (bench/prefill.py --urgent). A wgmma GEMM
holds every multiprocessor to its end, with so many registers that no other block fits beside one of
its own. So a fill gets what a kernel leaves at its end, where the next kernel of the pass, which
starts early, waits for the very same. An urgent fill takes it, and runs at once under the tail of
that kernel; one that is not is put off until the pass has to wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property

from pyruntime.driver.device import Device
from pyruntime.driver.library import Kernel
from pyruntime.driver.program import Launch, Program
from pyruntime.driver.stream import Event, Stream
from pyruntime.errors import CudaError

SLOTS = 2
URGENT_FILLS = True  # False: the pass's stream is the urgent one, if it is our own


@dataclass(frozen=True)
class Step:
    """`fill` writes the step's slot, `use` reads it; `after` enqueues what else does."""

    fill: Program
    use: Program
    after: Callable[[Stream], object] | None = None


@dataclass(frozen=True)
class Pass:
    """What is recorded of a pass, or of a part: `before`, the steps if there are any (then with a
    `pipeline`), `after`."""

    before: Program
    after: Program = field(default_factory=Program)
    steps: Sequence[Step] = ()
    pipeline: Pipeline | None = None

    @property
    def programs(self) -> list[Program]:
        """All of them; a step's fill before the step."""
        return [self.before, *(p for s in self.steps for p in (s.fill, s.use)), self.after]

    @property
    def launches(self) -> list[Launch]:
        """Of all programs."""
        return [launch for program in self.programs for launch in program.launches]

    @cached_property
    def _whole(self) -> Program:
        return Program(self.launches)

    def enqueue(self, stream: Stream, *, overlap: bool, follows: bool = False) -> None:
        """Enqueues the pass; all of it is over when `stream` is. The context must be current.

        Args:
            overlap: see `Program.enqueue`; without it fills, too, take their turn on `stream`.
            follows: see there.

        Raises:
            CudaError: a launch failed.
        """
        if self.pipeline is None:
            self._whole.enqueue(stream, overlap=overlap, follows=follows)
        else:
            self.pipeline.enqueue(stream, self, overlap=overlap)

    def count(self, runs: int = 1) -> None:
        """See `Program.count`."""
        self._whole.count(runs)

    @property
    def counts(self) -> Counter[Kernel]:
        """See `Program`."""
        return self._whole.counts


class Pipeline:
    """The stream that fills, and the events that bind it to the one that computes."""

    def __init__(self, device: Device) -> None:
        self._resources = ExitStack()
        try:
            self.stream = Stream(device, urgent=URGENT_FILLS)
            self._resources.callback(self.stream.close)
            self._begun, *events = (self._event(device) for _ in range(1 + 2 * SLOTS))
            self._filled, self._free = events[:SLOTS], events[SLOTS:]
        except BaseException:
            with suppress(CudaError):  # the first failure is the one to report
                self.close()
            raise

    def _event(self, device: Device) -> Event:
        event = Event(device, timed=False)
        self._resources.callback(event.close)
        return event

    def enqueue(self, stream: Stream, work: Pass, *, overlap: bool) -> None:
        """See `Pass.enqueue`."""
        side = self.stream if overlap else stream
        steps = work.steps

        def fill(index: int) -> None:
            steps[index].fill.enqueue(side, overlap=overlap)
            self._filled[index % SLOTS].record(side)

        self._begun.record(stream)
        side.wait(self._begun)  # readers of an earlier pass
        for index in range(min(SLOTS, len(steps))):
            fill(index)
        work.before.enqueue(stream, overlap=overlap)
        for index, step in enumerate(steps):
            slot = index % SLOTS
            stream.wait(self._filled[slot])
            step.use.enqueue(stream, overlap=overlap)
            if step.after is not None:
                step.after(stream)
            if index + SLOTS < len(steps):
                self._free[slot].record(stream)
                side.wait(self._free[slot])
                fill(index + SLOTS)
        work.after.enqueue(stream, overlap=overlap)

    def close(self) -> None:
        """Destroys stream and events. Idempotent."""
        self._resources.close()
