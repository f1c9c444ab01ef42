"""A captured graph: what was enqueued once, launched again by one call.

Sources: CUDA programming guide, "CUDA Graphs"; CUDA driver API, Graph Management.

A launch that may overlap with the one before it is captured as a programmatic edge, clusters and a
stream's priority as attributes of the nodes, a wait for an event as an edge. So the graph runs as
the streams did, but that what depends on a launch waits for that launch alone, where a stream waits
for all before it, too: every kernel ends after the one before it (cuda/core/spec.cuh), so the last
one of a stream stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any

from pyruntime.driver import api
from pyruntime.driver.program import Launch, Program
from pyruntime.driver.stream import Stream
from pyruntime.errors import CudaError

Nodes = Iterable[tuple[Launch, Any]]  # launches, and where they are in a graph


class Graph:
    """What `enqueue` puts on `stream`, ready to be launched on any stream.

    Nothing of it runs while it is captured. Other streams may take part: an event lets them in,
    another one has to bring them back. The arguments of kernels are copied, the arrays that they
    point to are not: whoever has the graph keeps them alive.

    Attributes:
        nbytes: what free device memory fell by. The driver takes it in large pieces, of which a
            graph may find enough left; and what others do at the time counts as well.

    Args:
        stream: one of our own that nothing else uses, as a capture makes it useless meanwhile.
        enqueue: returns what `update` is to reach, as `nodes` gives it.

    Raises:
        CudaError, OutOfMemoryError: it cannot be captured. The stream can be used again.
        what `enqueue` raises, likewise.
    """

    def __init__(self, stream: Stream, enqueue: Callable[[], Nodes | None]) -> None:
        self._device = device = stream.device
        self._handle: Any = None
        self._template: Any = None  # nodes are named by it, as long as it is there
        self._nodes: list[tuple[Any, Any]] = []  # and their parameters
        flag = api.constant(
            "CUgraphInstantiate_flags", "CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY"
        )
        with device.current():
            self._template, found = _captured(stream, enqueue)
            try:
                free, _ = device.memory()
                self._handle = api.make(
                    "cuGraphInstantiate", "cuGraphExecDestroy", self._template, flag
                )
                self.nbytes = max(free - device.memory()[0], 0)
                self._nodes = [(node, _parameters(launch, node)) for launch, node in found]
                if not self._nodes:
                    with suppress(CudaError):
                        self._drop_template()
            except BaseException:
                with suppress(CudaError):  # the first failure is the one to report
                    self.close()
                raise

    def launch(self, stream: Stream) -> None:
        """Enqueues it: it runs after all before it on `stream`, and all after it waits for it.

        The device's context must be current.
        """
        api.call("cuGraphLaunch", self._handle, stream.handle)

    def update(self) -> None:
        """Gives the launches that `enqueue` returned their arguments of now.

        That is for launches of the graph to come: the driver says that those under way keep what
        they were launched with. The device's context must be current.

        Raises CudaError: some may have the new ones and some the old; it can be tried again.
        """
        for node, parameters in self._nodes:
            api.call("cuGraphExecKernelNodeSetParams", self._handle, node, parameters)

    def close(self) -> None:
        """Destroys it. Idempotent."""
        handle, self._handle = self._handle, None
        with ExitStack() as parts:  # one that fails keeps no other
            parts.callback(self._drop_template)
            if handle is not None:
                with self._device.current():
                    api.call("cuGraphExecDestroy", handle)

    def _drop_template(self) -> None:
        template, self._template = self._template, None
        if template is not None:
            with self._device.current():
                api.call("cuGraphDestroy", template)


def nodes(launches: Iterable[Launch], stream: Stream, *, overlap: bool) -> list[tuple[Launch, Any]]:
    """Captures launches, which follow one (`Program.enqueue`), for a graph that can update them."""
    found = []
    for launch in launches:
        Program([launch]).enqueue(stream, overlap=overlap, follows=True)
        found.append((launch, stream.captured()))
    return found


def _parameters(launch: Launch, node: Any) -> Any:
    """What the driver has of a node, but with the arguments that its launch will have by then."""
    parameters = api.call("cuGraphKernelNodeGetParams", node)
    parameters.kernelParams = launch.arguments
    return parameters


def _captured(stream: Stream, enqueue: Callable[[], Nodes | None]) -> tuple[Any, Nodes]:
    """The graph, not yet one that can be launched, and what `enqueue` returned.

    The mode is relaxed: in this thread the garbage collector may free device memory at any time,
    which in other modes ends the capture. What other threads do is theirs in any case.
    """
    mode = api.constant("CUstreamCaptureMode", "CU_STREAM_CAPTURE_MODE_RELAXED")
    try:
        api.call("cuStreamBeginCapture", stream.handle, mode)
        found = enqueue() or ()
        return api.make("cuStreamEndCapture", "cuGraphDestroy", stream.handle), found
    except BaseException:
        # However far it came. It says no more than that there was a failure, or no capture.
        with suppress(CudaError):
            api.call("cuGraphDestroy", api.call("cuStreamEndCapture", stream.handle))
        raise
