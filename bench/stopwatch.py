"""A GPU that we share with torch, contestants as CUDA graphs, and their times. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from regimes import WORK_MS

from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Launch
from pyruntime.driver.stream import Stream
from pyruntime.measure.clock import ClockProbe
from pyruntime.measure.inplace import Hold, spans

MOST = 256  # calls of one graph
HOLD_MS = 0.5  # that the host may take to launch a graph
HOST_MS = 0.15  # that torch may take to enqueue one call


class Gpu:
    """Device 0, with our kernels, and with `stream`, which is torch's current `torch_stream`."""

    def __init__(self) -> None:
        self.device = Device(0)
        self.library = Library(self.device)
        self.torch_stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.torch_stream)
        self.stream = Stream(self.device, self.torch_stream.cuda_stream)

    def normal(self, *shape: int) -> tuple[DeviceArray, torch.Tensor]:
        """Random-normal fp16, as our array and as torch's view of it."""
        array = DeviceArray(self.device, shape, np.float16)
        view = torch.as_tensor(array, device="cuda")
        return array, view.normal_()


@dataclass(frozen=True)
class Contestant:
    """A way to do the work.

    Attributes:
        enqueue: enqueues so many calls on torch's stream; gives the last one's result.
        note: what it does it with.
        launches: of one call, if they are ours.
    """

    enqueue: Callable[[int], torch.Tensor]
    note: str
    launches: Sequence[Launch] = ()


class Stopwatch:
    """Times functions on the shared stream, with the host's part hidden; reads the SM clock."""

    def __init__(self, gpu: Gpu) -> None:
        self._stream = gpu.stream
        self._hold = Hold(gpu.stream)
        self._probe = ClockProbe(gpu.library)

    def __call__(self, *parts: Callable[[], object], hold: float = HOLD_MS) -> list[float]:
        """Milliseconds of each part.

        Args:
            hold: milliseconds that the host may take to enqueue the first part.
        """
        self._stream.synchronize()
        self._hold(hold)
        return spans(self._stream, parts)

    def reading(self, graph: Graph, ms: float, lead: float = 0.0) -> tuple[float, float]:
        """Milliseconds per call over about `ms`, after `lead` that do not count, and MHz then."""
        before, times = round(lead / graph.ms), max(round(ms / graph.ms), 1)
        _, total = self(partial(graph.replay, before), partial(graph.replay, times))
        return total / (times * graph.calls), self.mhz()

    def mhz(self) -> float:
        """The SM clock now."""
        return self._probe.mhz()

    def close(self) -> None:
        """Frees what it holds. Idempotent."""
        self._hold.close()
        self._probe.close()


class Graph:
    """Calls of a contestant, captured.

    Attributes:
        calls: how many, for about WORK_MS.
        ms: what one replay took.
        result: the last call's result, written by every replay.
    """

    def __init__(self, gpu: Gpu, contestant: Contestant, watch: Stopwatch) -> None:
        enqueue = contestant.enqueue
        enqueue(1)  # loads and plans what is lazy
        (three,) = watch(lambda: enqueue(3), hold=HOLD_MS + 3 * HOST_MS)
        self.calls = min(max(round(3 * WORK_MS / three), 1), MOST)
        enqueue(self.calls)  # nothing is left to be allocated or loaded
        gpu.stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self._graph, stream=gpu.torch_stream, capture_error_mode="thread_local"
        ):
            self.result = enqueue(self.calls)
        self.replay()
        (self.ms,) = watch(self.replay)

    def replay(self, times: int = 1) -> None:
        """Enqueues it so many times."""
        for _ in range(times):
            self._graph.replay()
