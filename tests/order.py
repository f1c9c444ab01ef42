"""What is ordered before what among everything that is enqueued on a fake driver.

That the host waits for streams is not counted on.

Sources: CUDA driver API, Stream Management and Event Management; CUDA programming guide,
"Programmatic Dependent Launch and Synchronization"; the rules of cuda/core/spec.cuh.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fake_driver import Capture, FakeDriver

from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Launch

DEPENDENT = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of device memory."""

    start: int
    stop: int

    def meets(self, other: Span) -> bool:
        return self.start < other.stop and other.start < self.stop


def span(array: Any) -> Span:
    """Of a device array, or of the array behind a tensor map."""
    array = getattr(array, "array", array)
    assert isinstance(array, DeviceArray)
    return Span(array.ptr, array.ptr + array.nbytes)


def kept_launches(monkeypatch: Any) -> dict[int, tuple[Launch, dict[str, Any]]]:
    """Each launch made from now on, with its parameters as they are now, by the address that the
    driver gets."""
    launches: dict[int, tuple[Launch, dict[str, Any]]] = {}
    made, pointed = Launch.__init__, Launch.point

    def note(launch: Launch, kernel: Any, grid: Any, params: dict[str, Any], role: str) -> None:
        made(launch, kernel, grid, params, role)
        launches[launch.arguments] = launch, params

    def point(launch: Launch, name: str, array: DeviceArray) -> None:
        pointed(launch, name, array)
        launches[launch.arguments][1][name] = array

    monkeypatch.setattr(Launch, "__init__", note)
    monkeypatch.setattr(Launch, "point", point)
    return launches


@dataclass
class Operation:
    """A launch, named by its role, or a copy.

    `early` and `late`: what has ended, as bits by number, before it may read what no kernel of its
    stream writes, and before it does anything else.
    """

    number: int
    name: str
    early: int
    late: int
    kernel: str = ""  # of a launch, with its parameters
    given: dict[str, Any] = field(default_factory=dict)
    reads: list[Span] = field(default_factory=list)
    reads_early: list[Span] = field(default_factory=list)
    writes: list[Span] = field(default_factory=list)

    def precedes(self, late_or_early: int) -> bool:
        return bool(late_or_early >> self.number & 1)


class Order:
    """Listens to a driver from its construction on."""

    def __init__(self, driver: FakeDriver, monkeypatch: Any) -> None:
        self.operations: list[Operation] = []
        self.also: Callable[[Operation], object] = lambda operation: None  # sees each, too
        self._launches = kept_launches(monkeypatch)
        self._done: defaultdict[Hashable, int] = defaultdict(int)  # by stream: ends with its last
        self._early: defaultdict[Hashable, int] = defaultdict(int)  # of a stream's last launch
        self._events: dict[Hashable, int] = {}
        self._replays = count()
        self._driver = driver
        self._lock = threading.RLock()  # threads load weights, finalizers come in the middle
        driver.hook = self._hear
        driver.replayed = self._replay

    def _hear(self, name: str, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            if self._driver.capture_of(name, arguments) is None:
                self._note(name, arguments, lambda handle: handle)

    def _replay(self, graph: Capture, stream: int) -> None:
        """Streams and events of a graph are its own; it is between what is before and after."""
        replay = next(self._replays)
        with self._lock:
            first = len(self.operations)
            self._done[replay, graph.origin] = self._done[stream]
            for name, arguments in graph.calls:
                self._note(name, arguments, lambda handle: (replay, handle))
            for number in range(first, len(self.operations)):
                self._done[stream] |= 1 << number

    def _note(
        self, name: str, arguments: tuple[Any, ...], known: Callable[[int], Hashable]
    ) -> None:
        """`known`: what a stream or event is known as here."""
        match name, arguments:
            case "cuLaunchKernelEx", (config, _, address, _):
                ids = {attribute.id.name for attribute in config.attrs[: config.numAttrs]}
                self._launch(known(int(config.hStream)), address, DEPENDENT in ids)
            case "cuMemcpy2DAsync", (copy, stream):
                at, to, rows = int(copy.srcDevice), int(copy.dstDevice), copy.Height
                copied = self._add(known(stream), "copy", self._done[known(stream)])
                copied.reads.append(Span(at, at + copy.srcPitch * rows))
                columns = copy.dstPitch * (rows - 1) + copy.WidthInBytes
                copied.writes.append(Span(to, to + columns))
                self.also(copied)
            case "cuEventRecord", (event, stream):
                self._events[known(event)] = self._done[known(stream)]
            case "cuStreamWaitEvent", (stream, event, _):
                self._done[known(stream)] |= self._events.get(known(event), 0)

    def _launch(self, stream: Hashable, address: int, dependent: bool) -> None:
        launch, given = self._launches[address]
        late = self._done[stream]
        # A dependent one may start when the launch before has: nothing else is counted on.
        early = self._early[stream] if dependent else late
        self._early[stream] = early
        operation = self._add(stream, launch.role, late, early)
        operation.kernel, operation.given = launch.kernel.name, given
        match launch.kernel.spec.family:
            case "dequant":
                operation.reads.append(span(given["source"]))
                operation.writes.append(span(given["out"]))
            case "gemm":
                operation.reads.append(span(given["a"]))
                operation.reads_early.append(span(given["w"]))
                # Of rows that rotate, K and V are left out: `sequences` says where they go.
                operation.writes.append(span(given["c" if "c" in given else "q"]))
        self.also(operation)

    def _add(self, stream: Hashable, name: str, late: int, early: int | None = None) -> Operation:
        number = len(self.operations)
        operation = Operation(number, name, late if early is None else early, late)
        self._done[stream] |= 1 << number
        self.operations.append(operation)
        return operation

    def races(self, within: Span, first: int) -> list[str]:
        """Reads and writes of the same bytes `within` that nothing orders, from operation `first`
        on."""
        found = []
        for writer in self.operations[first:]:
            for written in (s for s in writer.writes if s.meets(within)):
                for reader in self.operations[first:]:
                    for spans, after in (
                        (reader.reads, reader.late), (reader.reads_early, reader.early),
                    ):  # fmt: skip
                        if reader is writer or not any(s.meets(written) for s in spans):
                            continue
                        if not (writer.precedes(after) or reader.precedes(writer.late)):
                            found.append(
                                f"{reader.number} {reader.name} reads what "
                                f"{writer.number} {writer.name} writes"
                            )
        return found
