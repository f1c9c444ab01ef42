"""A captured graph: what was enqueued once, launched again by one call.

Sources: CUDA programming guide, "CUDA Graphs"; CUDA driver API, Graph Management.

A launch that may overlap with the one before it is captured as a programmatic edge, clusters and a
stream's priority as attributes of the nodes, a wait for an event as an edge. So the graph runs as
the streams did, but that what depends on a launch waits for that launch alone, where a stream waits
for all before it, too: every kernel ends after the one before it (cuda/core/spec.cuh), so the last
one of a stream stands for all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pyruntime.driver import api
from pyruntime.driver.stream import Stream
from pyruntime.errors import CudaError


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

    Raises:
        CudaError, OutOfMemoryError: it cannot be captured. The stream can be used again.
        what `enqueue` raises, likewise.
    """

    def __init__(self, stream: Stream, enqueue: Callable[[], object]) -> None:
        self._device = device = stream.device
        self._handle: Any = None
        flag = api.constant(
            "CUgraphInstantiate_flags", "CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY"
        )
        with device.current():
            graph = _captured(stream, enqueue)
            try:
                free, _ = device.memory()
                self._handle = api.call("cuGraphInstantiate", graph, flag)
                self.nbytes = max(free - device.memory()[0], 0)
            except BaseException:
                with suppress(CudaError):  # the first failure is the one to report
                    self.close()
                raise
            finally:
                with suppress(CudaError):
                    api.call("cuGraphDestroy", graph)

    def launch(self, stream: Stream) -> None:
        """Enqueues it: it runs after all before it on `stream`, and all after it waits for it.

        The device's context must be current.
        """
        api.call("cuGraphLaunch", self._handle, stream.handle)

    def close(self) -> None:
        """Destroys it. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with self._device.current():
                api.call("cuGraphExecDestroy", handle)


def _captured(stream: Stream, enqueue: Callable[[], object]) -> Any:
    """The graph, not yet one that can be launched.

    The mode is relaxed: in this thread the garbage collector may free device memory at any time,
    which in other modes ends the capture. What other threads do is theirs in any case.
    """
    mode = api.constant("CUstreamCaptureMode", "CU_STREAM_CAPTURE_MODE_RELAXED")
    try:
        api.call("cuStreamBeginCapture", stream.handle, mode)
        enqueue()
        return api.call("cuStreamEndCapture", stream.handle)
    except BaseException:
        # However far it came. It says no more than that there was a failure, or no capture.
        with suppress(CudaError):
            api.call("cuGraphDestroy", api.call("cuStreamEndCapture", stream.handle))
        raise
