"""Passes that come again are captured into graphs and replayed.

Enqueueing the launches of a short prompt one by one may take the host longer than the GPU takes to
run them. A graph is one call. All that changes from pass to pass lies in the live block, whose
upload is the first thing in the graph, so the graph of a bucket (`model.buckets`) serves all
prompts whose length lies in it, and all caches.

A capture enqueues every launch once more without running it, and instantiates what comes of that.
So a bucket is captured when it is met for the second time, or ahead of time (`Replayer.warm`): a
prompt in a bucket that does not come again costs nothing more. The pass that captures runs as the
graph's first replay.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pyruntime.driver import api
from pyruntime.driver.graph import Graph
from pyruntime.driver.stream import Event, Stream
from pyruntime.errors import CudaError, OutOfMemoryError
from pyruntime.model.live import LiveBlock
from pyruntime.model.pipeline import Pass
from pyruntime.model.stats import Stats

if TYPE_CHECKING:
    from pyruntime.model.decoder import Shape

T = TypeVar("T", Event, Stream)
log = logging.getLogger("pyruntime")


class Recorded:
    """A pass up to the output norm (`body`), and what has become of it so far.

    Attributes:
        shape: what it was recorded for. live: the block that it reads.
        head: what comes after it, once there is such a thing; its logits change their address from
            pass to pass.
        runs: how often it has been enqueued whole. graph: of upload and body, once there is one.
        enqueued: how often the body has been; its kernels' launches are counted when it is dropped.
        refused: that it could not be captured.
    """

    def __init__(self, shape: Shape, live: LiveBlock, body: Pass) -> None:
        self.shape = shape
        self.live = live
        self.body = body
        self.head: Pass | None = None
        self.runs = self.enqueued = 0
        self.graph: Graph | None = None
        self.refused = False


class Replayer:
    """Enqueues passes on `stream`, as graphs where there are any.

    Args:
        overlap: see `Program.enqueue`.
        graphs: whether to make any.

    Attributes:
        started, ended: events around the last pass.
    """

    def __init__(self, stream: Stream, *, overlap: bool, graphs: bool) -> None:
        self._stream = stream
        self._overlap = overlap
        self._resources = ExitStack()
        self._aside: Stream | None = None
        self._stats = Stats()
        try:
            self.started, self.ended = (self._owned(Event(stream.device)) for _ in range(2))
            if graphs:
                self._aside = self._owned(Stream(stream.device, beside=stream))
        except BaseException:
            with suppress(CudaError):  # the first failure is the one to report
                self.close()
            raise

    def _owned(self, resource: T) -> T:
        self._resources.callback(resource.close)
        return resource

    @property
    def stats(self) -> Stats:
        """A copy of the counts."""
        return replace(self._stats)

    def warm(self, recorded: Recorded) -> bool:
        """Captures a pass that has no graph yet, but does not run it. Returns whether it did.

        Raises CudaError: the context was lost.
        """
        if recorded.graph is not None or recorded.refused:
            return False
        self._capture(recorded)
        return recorded.graph is not None

    def run(self, recorded: Recorded) -> bool:
        """Enqueues the upload of the live block and the body; the context must be current.

        Returns whether the last thing on the stream is a launch, for what `follow`s: what goes
        through a pipeline may end in a copy or in a wait.

        Raises:
            CudaError: a launch failed.
        """
        if recorded.graph is None and recorded.runs and not recorded.refused:
            self._capture(recorded)
        graph = recorded.graph
        if graph is not None:
            graph.launch(self._stream)
        else:
            self._stream.record(self.started)
            self._enqueue(recorded, self._stream)
        recorded.enqueued += 1
        return graph is None and recorded.body.pipeline is None

    def _enqueue(self, recorded: Recorded, stream: Stream) -> None:
        recorded.live.upload(stream)
        recorded.body.enqueue(stream, overlap=self._overlap)

    def end(self, recorded: Recorded) -> None:
        """Enqueues the end of a pass, and counts it."""
        recorded.live.download_overflow(self._stream)
        self._stream.record(self.ended)
        recorded.runs += 1
        if recorded.graph is not None:
            self._stats.hits += 1
        else:
            self._stats.misses += 1

    def follow(self, head: Pass, follows: bool = False) -> bool:
        """Enqueues a pass and counts it; returns what `run` does.

        `follows`: see `Program.enqueue`.
        """
        head.enqueue(self._stream, overlap=self._overlap, follows=follows)
        head.count()
        return head.pipeline is None

    def _capture(self, recorded: Recorded) -> None:
        """Makes the graph; if that fails, it says so and leaves the pass as it is."""
        aside, stats = self._aside, self._stats
        if aside is None:
            return
        started = time.perf_counter()

        def enqueue() -> None:
            aside.record_in_graph(self.started)
            self._enqueue(recorded, aside)

        try:
            recorded.graph = graph = Graph(aside, enqueue)
        except (CudaError, OutOfMemoryError) as error:
            if isinstance(error, CudaError) and error.code in api.STICKY:
                raise
            recorded.refused = True
            stats.failures += 1
            launches = len(recorded.body.launches)
            # Its text: who keeps the record must not keep the error's frames, and so the logits.
            log.warning("a pass stays at %d launches, without a graph: %s", launches, str(error))
        else:
            stats.captures += 1
            stats.graphs += 1
            stats.graph_bytes += graph.nbytes
        finally:
            stats.capture_ms += 1e3 * (time.perf_counter() - started)

    def drop(self, recorded: Recorded) -> None:
        """Destroys the graph of a pass that will not be run again; nothing may be running."""
        recorded.body.count(recorded.enqueued)
        graph, recorded.graph = recorded.graph, None
        if graph is not None:
            self._stats.graphs -= 1
            self._stats.graph_bytes -= graph.nbytes
            graph.close()

    def close(self) -> None:
        """Destroys the events, and the stream on which graphs are captured. Idempotent."""
        self._resources.close()
