"""A CUDA driver made of host memory, for tests of everything around the kernels on any machine.

`FakeDriver` takes the place of the module `cuda.bindings.driver`. Device memory is host memory,
copies are made at once, kernels do nothing (so logits are zeros) but what `numpy_kernels` does for
them. It counts all that can leak, notes misuse that a real driver would punish late or not at all,
and fails where a test wants it to. Threads are served one at a time.
"""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from threading import RLock, get_ident
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from pyruntime.cubin.installed import manifest
from pyruntime.driver import tensormap

INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_STATE, NOT_READY = 1, 2, 401, 600
INVALIDATED, UNJOINED, ISOLATION = 901, 904, 905  # of captures
GLOBAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
THREAD_LOCAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
MAKERS = {"cuModuleLoadData": "modules", "cuStreamCreateWithPriority": "streams",
          "cuEventCreate": "events",
          "cuMemAlloc": "arrays", "cuMemHostAlloc": "pinned"}  # fmt: skip
ENDERS = {"cuModuleUnload": "modules", "cuStreamDestroy": "streams", "cuEventDestroy": "events",
          "cuMemFree": "arrays", "cuMemFreeHost": "pinned", "cuGraphDestroy": "graphs",
          "cuGraphExecDestroy": "execs"}  # fmt: skip
# Calls that a relaxed capture takes in, and where their stream is among the arguments.
CAPTURED = {"cuMemcpyHtoDAsync": -1, "cuMemcpyDtoHAsync": -1, "cuMemcpyDtoDAsync": -1,
            "cuMemcpy2DAsync": -1, "cuMemsetD8Async": -1, "cuLaunchKernelEx": 0,
            "cuEventRecord": 1, "cuEventRecordWithFlags": 1, "cuStreamWaitEvent": 0}  # fmt: skip
# Calls that change what kernels at work may use.
DISTURBING = {"cuMemFree", "cuMemFreeHost", "cuMemcpyHtoD", "cuMemcpyHtoDAsync", "cuModuleUnload",
              "cuGraphExecDestroy", "cuStreamDestroy"}  # fmt: skip
ANSWERS = {  # of functions without a state
    "cuDriverGetVersion": 13000, "cuDeviceGetCount": 1, "cuDeviceGetName": b"Made-up GPU\0",
    "cuFuncLoad": None, "cuFuncSetAttribute": None, "cuOccupancyMaxActiveClusters": 60,
    "cuTensorMapEncodeTiled": driver.CUtensorMap(), "cuLaunchKernelEx": None,
    "cuStreamSynchronize": None, "cuStreamWaitEvent": None, "cuEventRecord": None,
    "cuEventRecordWithFlags": None,
    "cuCtxGetStreamPriorityRange": (0, -5), "cuStreamGetPriority": 0,
    "cuEventSynchronize": None, "cuEventElapsedTime": 1.0,
}  # fmt: skip
ATTRIBUTES = {  # of the device and of every kernel
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024, "MULTIPROCESSOR_COUNT": 132,
    "MAX_THREADS_PER_BLOCK": 1024, "SHARED_SIZE_BYTES": 0, "NUM_REGS": 64,
}  # fmt: skip


def stream_of(name: str, arguments: tuple[Any, ...]) -> int:
    """The stream of a call that a capture may take in."""
    given = arguments[CAPTURED[name]]
    return int(given.hStream if name == "cuLaunchKernelEx" else given)


@dataclass(frozen=True)
class Node:
    """What a capture has taken in as its call of this number."""

    graph: Capture
    number: int


def snapshot(config: Any) -> Any:
    """A launch's configuration as it is now."""
    attributes = list(config.attrs[: config.numAttrs])
    return SimpleNamespace(
        hStream=int(config.hStream), attrs=attributes, numAttrs=len(attributes),
        gridDimX=config.gridDimX, gridDimY=config.gridDimY, gridDimZ=config.gridDimZ,
    )  # fmt: skip


class StatusError(Exception):
    """Ends a call with the CUresult of this number."""


@dataclass
class Capture:
    """A capture that goes on, or the graph that it became.

    Attributes:
        origin: its first stream. streams: all that take part. loose: those of which something has
            been captured that the origin does not wait for yet. events: those recorded in it.
        calls: what was captured, in order. broken: whether something made it useless.
        template: of an instance, the graph that it is one of.
    """

    origin: int
    streams: set[int] = field(default_factory=set)
    loose: set[int] = field(default_factory=set)
    events: dict[int, set[int]] = field(default_factory=dict)
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    broken: bool = False
    template: Capture | None = None


class FakeDriver:
    """One device with 1 GiB of memory, of an architecture that the installed cubins are for.

    Attributes:
        live: kind of thing -> handle or address -> its bytes (one byte where it needs none).
        answers, attributes: ANSWERS and ATTRIBUTES; the driver is its own device and context.
        fail: function name -> (calls that still succeed, code of the one that then fails).
        lost: the code of a sticky error; while it is set, all but context pushes and pops fail.
        slow: how often streams must be asked after a launch until they say that they are done.
        working: what is left of that; until it is 0, or a stream is waited for, DISTURBING calls
            are misuse.
        hook: called with name and arguments before each call; what it raises, the caller gets.
        calls: how often each function was called. misuse: what should not have happened.
        captures: those that go on. graphs: by handle, captured or instantiated.
        replayed: called with each graph that is launched, and the stream.
        carry_out: called with the configuration of each launch, its kernel and its parameters'
            address when it is carried out, those of a graph among its copies.
        keep: called with kernel and address when a graph takes a launch over, and when a node of it
            is updated; what it gives is what `carry_out` is then called with instead of an address.
        fresh: what the bytes of new memory are.
    """

    total = 1 << 30

    def __init__(self) -> None:
        kinds = (*MAKERS.values(), "graphs", "execs")
        self.live: dict[str, dict[int, np.ndarray]] = {kind: {} for kind in kinds}
        self.answers: dict[str, Any] = {**ANSWERS, "cuDeviceGet": self}
        self.fail: dict[str, tuple[int, int]] = {}
        self.lost = self._retained = 0
        self.slow = self.working = 0.0
        self.hook: Callable[[str, tuple[Any, ...]], object] = lambda name, arguments: None
        self.calls: Counter[str] = Counter()
        self.misuse: list[str] = []
        self.captures: list[Capture] = []
        self._ended: list[Capture] = []
        self.graphs: dict[int, Capture] = {}
        self.replayed: Callable[[Capture, int], object] = lambda graph, stream: None
        self.carry_out: Callable[[Any, str, Any], object] = lambda config, kernel, address: None
        self.keep: Callable[[str, int], Any] = lambda kernel, address: address
        self.fresh = 0
        self._loaded: set[str] = set()  # kernels
        self._lock = RLock()  # a finalizer may come in the middle
        self._pushed: defaultdict[int, list[str]] = defaultdict(list)  # by thread
        self._modes: dict[int, Any] = {}  # of capture, by thread, where it is not GLOBAL
        arch = min(manifest()["architectures"], key=lambda a: a != "90a")  # it has clusters
        major, minor = divmod(int(arch.rstrip("af")), 10)
        capability = {"COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": minor}
        self.attributes = ATTRIBUTES | capability
        tensormap._encode.cache_clear()  # by another driver, of arrays that lay where new ones will

    def held(self) -> dict[str, int]:
        """How many of each thing have not been given back; {} if all have."""
        counts = {kind: len(things) for kind, things in self.live.items()}
        counts |= {"contexts": self._retained, "pushes": sum(map(len, self._pushed.values()))}
        counts["modes"] = len(self._modes)
        return {kind: count for kind, count in counts.items() if count}

    def __getattr__(self, name: str) -> Any:
        """Its calls; all else (enums, structs, `cuuint32_t`) comes from the bindings."""
        is_call = name.startswith("cu") and name[2].isupper()
        return partial(self._call, name) if is_call else getattr(driver, name)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Status and results, as the bindings return them."""
        if any(a is not self for a in arguments if isinstance(a, FakeDriver)):
            return (driver.CUresult(INVALID_VALUE),)  # garbage of a test that failed earlier
        with self._lock:
            return self._answer(name, arguments)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls[name] += 1
        self.hook(name, arguments)
        try:
            if name == "cuStreamEndCapture":  # it ends, whatever comes of it
                self._ended = [c for c in self.captures if c.origin == arguments[0]]
                self.captures = [c for c in self.captures if c not in self._ended]
            if not name.startswith(("cuCtx", "cuThread")):
                self._fail_if_due(name)
            if not name.startswith(("cuCtx", "cuThread", "cuDevice", "cuDriver")):
                self._require(self._pushed[get_ident()], f"{name} without a current context")
                self._require(
                    self._modes.get(get_ident()) == RELAXED, f"{name} ends captures of others"
                )
            if name == "cuFuncLoad":
                self._loaded.add(arguments[0])
            elif name == "cuLaunchKernelEx":  # which would load it, and that ends a capture
                self._require(arguments[1] in self._loaded, f"{arguments[1]} was not loaded before")
            if (capture := self.capture_of(name, arguments)) is not None:
                self._take(capture, name, arguments)
                return (driver.CUresult(0),)
            self._require(name != "cuEventRecordWithFlags", "an external event outside a capture")
            result = self._result(name, *arguments)
        except StatusError as error:
            return (driver.CUresult(*error.args),)
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        return (driver.CUresult(0), *results)

    def capture_of(self, name: str, arguments: tuple[Any, ...]) -> Capture | None:
        """The capture that takes a call in: its stream is part of it, or its event lets it in."""
        if name not in CAPTURED or not self.captures:
            return None
        stream = stream_of(name, arguments)
        for capture in self.captures:
            enters = name == "cuStreamWaitEvent" and arguments[1] in capture.events
            if enters or stream in capture.streams:
                return capture
        return None

    def _take(self, capture: Capture, name: str, arguments: tuple[Any, ...]) -> None:
        stream = stream_of(name, arguments)
        if name == "cuEventRecord":
            capture.events[arguments[0]] = capture.loose & {stream}
        elif name == "cuStreamWaitEvent":
            if arguments[1] not in capture.events:  # that is outside
                capture.broken = True
                raise StatusError(ISOLATION)
            capture.streams.add(stream)
            if stream == capture.origin:
                capture.loose -= capture.events[arguments[1]]
        elif stream != capture.origin:
            capture.loose.add(stream)
        if name == "cuLaunchKernelEx":  # a graph keeps a launch as it is now
            config, kernel, address, extra = arguments
            arguments = (snapshot(config), kernel, self.keep(kernel, address), extra)
        capture.calls.append((name, arguments))

    def _begin(self, stream: int) -> None:
        self._require(stream in self.live["streams"], "a capture on a stream of somebody else")
        self._require(not any(stream in c.streams for c in self.captures), "a capture in a capture")
        self.captures.append(Capture(stream, {stream}))

    def _end(self) -> int:
        if not self._ended:
            raise StatusError(ILLEGAL_STATE)
        (capture,) = self._ended
        if capture.broken or capture.loose:
            raise StatusError(INVALIDATED if capture.broken else UNJOINED)
        return self._new_graph("graphs", capture)

    def _captured(self, stream: int) -> tuple[Any, ...]:
        """State, id, graph, the last node of the stream, its edge, their number."""
        found = [capture for capture in self.captures if stream in capture.streams]
        self._require(found, "the last node of a stream that is not captured")
        (capture,) = found
        last = max(
            i for i, (name, given) in enumerate(capture.calls) if stream_of(name, given) == stream
        )
        active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return active, 1, 0, [Node(capture, last)], [driver.CUgraphEdgeData()], 1

    def _launch_of(self, node: Node) -> tuple[Any, ...]:
        """The arguments of a node that is a launch, of a graph that has not been destroyed."""
        there = any(self.graphs[handle] is node.graph for handle in self.live["graphs"])
        self._require(there, "a node of no graph")
        name, arguments = node.graph.calls[node.number]
        self._require(name == "cuLaunchKernelEx", "a node that is no launch")
        return arguments

    def _update(self, handle: int, node: Node, parameters: Any) -> None:
        """As the driver does, this changes the instance alone."""
        config, kernel, _, extra = self._launch_of(node)
        graph = self.graphs[handle]
        self._require(graph.template is node.graph, "a node of another graph")
        self._require(parameters.func == kernel, "a node of another kernel")
        kept = config, kernel, self.keep(kernel, parameters.kernelParams), extra
        graph.calls[node.number] = "cuLaunchKernelEx", kept

    def _new_graph(self, kind: str, graph: Capture) -> int:
        thing = np.zeros(1, np.uint8)
        self.live[kind][thing.ctypes.data] = thing
        self.graphs[thing.ctypes.data] = graph
        return thing.ctypes.data

    def _replay(self, handle: int, stream: Any) -> None:
        self._require(handle in self.live["execs"], "launch of no graph")
        graph = self.graphs[handle]
        self.replayed(graph, int(stream))
        for name, arguments in graph.calls:
            self._result(name, *arguments)

    def _memory(self, nbytes: int) -> NDArray[np.uint8]:
        return np.zeros(nbytes, np.uint8)

    def _fail_if_due(self, name: str) -> None:
        left, code = self.fail.pop(name, (0, 0))
        if left:
            self.fail[name] = (left - 1, code)
        elif self.lost or code:
            raise StatusError(self.lost or code)

    def _require(self, condition: object, otherwise: str) -> None:
        if not condition:
            self.misuse.append(otherwise)
            raise StatusError(INVALID_VALUE)

    def _require_inside(self, at: int, nbytes: int) -> None:
        arrays = list(self.live["arrays"].items())  # a finalizer may come in the middle
        inside = any(a <= at <= a + array.nbytes - nbytes for a, array in arrays)
        self._require(inside, f"{nbytes} bytes at {at:#x} are not inside of one array")

    def _row(self, copy: Any, end: str, row: int) -> int:
        """Where a row of a 2D copy begins at one of its ends."""
        on_device = getattr(copy, f"{end}MemoryType") == driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        start = int(getattr(copy, end + ("Device" if on_device else "Host")))
        at = start + row * int(getattr(copy, f"{end}Pitch"))
        if on_device:
            self._require_inside(at, copy.WidthInBytes)
        return at

    def _result(self, name: str, *arguments: Any) -> Any:
        match name.removesuffix("Async"), arguments:
            case "cuStreamSynchronize" | "cuStreamDestroy", (stream,) if any(
                stream in c.streams for c in self.captures
            ):
                self._require(False, f"{name} of a stream that is being captured")
            case "cuStreamBeginCapture", (stream, _):
                self._begin(stream)
            case "cuStreamEndCapture", _:
                return self._end()
            case "cuGraphInstantiate", (graph, _):
                self._require(graph in self.live["graphs"], "an instance of no graph")
                template = self.graphs[graph]
                made = replace(template, calls=list(template.calls), template=template)
                return self._new_graph("execs", made)
            case "cuStreamGetCaptureInfo", (stream,):
                return self._captured(stream)
            case "cuGraphKernelNodeGetParams", (node,):
                return SimpleNamespace(func=self._launch_of(node)[1], kernelParams=0)
            case "cuGraphExecKernelNodeSetParams", (handle, node, parameters):
                self._require(handle in self.live["execs"], "an update of no graph")
                self._update(handle, node, parameters)
            case "cuGraphLaunch", (handle, stream):
                self._replay(handle, stream)
            case "cuStreamQuery", _:
                self.working = max(self.working - 1, 0)
                if self.working:
                    raise StatusError(NOT_READY)
                return None
            case _ if name in DISTURBING and self.working:
                self._require(False, f"{name} while the GPU is at work")
            case _ if name in self.answers:
                if name == "cuLaunchKernelEx":
                    self.working = self.slow
                    self.carry_out(*arguments[:3])
                elif name == "cuStreamSynchronize" and arguments[0]:  # others do not wait for ours
                    self.working = 0
                return self.answers[name]
            case _, (size, *_) if name in MAKERS:
                nbytes = size if name.startswith("cuMem") else 1
                if name == "cuMemAlloc" and nbytes > self._result("cuMemGetInfo")[0]:
                    raise StatusError(OUT_OF_MEMORY)
                thing = self._memory(nbytes)
                if self.fresh:
                    thing.fill(self.fresh)
                self.live[MAKERS[name]][thing.ctypes.data] = thing
                return thing.ctypes.data
            case _, (handle,) if name in ENDERS:
                self._require(self.live[ENDERS[name]].pop(handle, None) is not None, f"bad {name}")
            case "cuDeviceGetAttribute" | "cuFuncGetAttribute", (member, _):
                return self.attributes[member.name.split("_ATTRIBUTE_")[1]]
            case "cuModuleGetFunction", (_, kernel):
                return kernel.decode()
            case "cuDevicePrimaryCtxRetain", _:
                self._retained += 1
                return self
            case "cuDevicePrimaryCtxRelease", _:
                self._retained -= 1
                self._require(self._retained > 0 or not self.held(), f"release with {self.held()}")
            case "cuCtxPushCurrent", (context,):
                self._require(self._retained > 0, "push of a released context")
                self._pushed[get_ident()].append(context)
            case "cuCtxPopCurrent", ():
                return self._pushed[get_ident()].pop()
            case "cuThreadExchangeStreamCaptureMode", (mode,):
                before = self._modes.pop(get_ident(), GLOBAL)
                if mode != GLOBAL:
                    self._modes[get_ident()] = mode
                return before
            case "cuMemGetInfo", ():
                return self.total - sum(a.nbytes for a in self.live["arrays"].values()), self.total
            case "cuMemcpyHtoD" | "cuMemcpyDtoH" | "cuMemsetD8", (target, source, nbytes, *_):
                self._require_inside(source if "DtoH" in name else target, nbytes)
                (ctypes.memset if "set" in name else ctypes.memmove)(target, source, nbytes)
            case "cuMemcpy2D", (copy, _):
                for row in range(copy.Height):
                    to, at = (self._row(copy, end, row) for end in ("dst", "src"))
                    ctypes.memmove(to, at, copy.WidthInBytes)
            case _:
                raise NotImplementedError(f"{name}{arguments}")
