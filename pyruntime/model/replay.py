"""Passes that come again are captured into graphs and replayed.

Enqueueing the launches of a short prompt one by one may take the host longer than the GPU takes to
run them. A graph is one call. All that changes from pass to pass lies in the live block, whose
upload is the first thing in the graph, so the graph of a bucket (`model.buckets`) serves all
prompts whose length lies in it, and all caches.

A capture enqueues every launch once more without running it, and instantiates what comes of that.
So a bucket is captured when it is met for the second time, or ahead of time (`Replayer.warm`): a
prompt in a bucket that does not come again costs nothing more. The pass that captures runs as the
graph's first replay.

There are two graphs of a pass, each made when it is needed. One is of all of it, from the event
that begins it to the one that ends it, if all that comes of it is the logits of all rows that are
kept, or the likeliest token by one row of them. Of logits the address does change: the graph's
launches that make or read them are updated where it has.
The other one is of upload and body, before whatever else is to come after that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pyruntime.driver import api
from pyruntime.driver.graph import Graph, Nodes, nodes
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.stream import Event, Stream
from pyruntime.errors import CudaError, OutOfMemoryError
from pyruntime.model.live import LiveBlock
from pyruntime.model.pipeline import Pass
from pyruntime.model.stats import Stats

if TYPE_CHECKING:
    from pyruntime.model.decoder import Shape

LOGITS = {"head": "c", "softcap": "x", "scores": "logits"}  # what launches of these roles call them
T = TypeVar("T", Event, Stream)
log = logging.getLogger("pyruntime")


class Recorded:
    """A pass up to the output norm (`body`), and what has become of it so far.

    Attributes:
        shape: what it was recorded for. live: the block that it reads.
        head: what makes the logits of all rows that are kept, and what `shape` has come of them,
            once there is such a thing.
        runs: how often all of a pass has been enqueued.
        graph: of upload and body, once there is one. whole: of all of a pass, likewise.
        logits_at: the address of the logits of `whole`; 0: not known, or there are none.
        enqueued, replayed: how often the body has been enqueued, and the head in `whole`; launches
            of their kernels are counted when it is dropped.
        refused: that it could not be captured. apart: that the logits of `whole` could not be given
            another address, so that head and body are enqueued apart.
    """

    def __init__(self, shape: Shape, live: LiveBlock, body: Pass) -> None:
        self.shape = shape
        self.live = live
        self.body = body
        self.head: Pass | None = None
        self.runs = self.enqueued = self.replayed = self.logits_at = 0
        self.graph: Graph | None = None
        self.whole: Graph | None = None
        self.refused = self.apart = False

    @property
    def graphs(self) -> list[Graph]:
        """Those that it has."""
        return [graph for graph in (self.graph, self.whole) if graph is not None]

    def uncounted(self) -> list[tuple[Pass, int]]:
        """Its parts, and how often each has been enqueued without being counted."""
        parts = [(self.body, self.enqueued)]
        return parts if self.head is None else [*parts, (self.head, self.replayed)]

    def point(self, logits: DeviceArray) -> None:
        """Points the head to other logits, which the caller keeps alive."""
        assert self.head is not None
        for launch in self.head.before.launches:
            if launch.role in LOGITS:
                launch.point(LOGITS[launch.role], logits)


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
        self._gone = 0  # graphs that there were
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

    def stats(self, graphs: Iterable[Graph]) -> Stats:
        """A copy of the counts; `graphs`: those that there are."""
        sizes = [graph.nbytes for graph in graphs]
        captures = self._gone + len(sizes)
        return replace(self._stats, captures=captures, graphs=len(sizes), graph_bytes=sum(sizes))

    def makes_whole(self, recorded: Recorded) -> bool:
        """Whether a graph of all of a pass is there or may be made: not where passes of a bucket
        have heads of several sizes, which it would not serve.
        """
        if recorded.whole is not None:
            return True
        if self._aside is None or recorded.refused or recorded.apart:
            return False
        return recorded.body.pipeline is None and recorded.shape.exact

    def warm(self, recorded: Recorded, logits: DeviceArray | None = None) -> Graph | None:
        """Captures a pass, all of it if it `makes_whole`, but does not run it. Returns the graph if
        it has made one.

        Args:
            logits: see `replay`.

        Raises CudaError: the context was lost.
        """
        whole = self.makes_whole(recorded)
        if recorded.refused or (recorded.whole if whole else recorded.graph):
            return None
        self._capture(recorded, logits, whole=whole)
        return recorded.whole if whole else recorded.graph

    def replay(self, recorded: Recorded, logits: DeviceArray | None) -> bool:
        """Enqueues all of a pass that `makes_whole`, as one graph, and counts it; the context must
        be current. False: there is none, and nothing has been enqueued.

        Args:
            logits: of all rows that are kept, for the head that there is; None where none are.

        Raises:
            CudaError: the graph could not be launched, or the context was lost.
        """
        if recorded.whole is None:
            self._capture(recorded, logits, whole=True)
        elif logits is not None and recorded.logits_at != logits.ptr:
            self._move(recorded, recorded.whole, logits)
        if recorded.whole is None:
            return False
        recorded.whole.launch(self._stream)
        recorded.enqueued += 1
        recorded.replayed += 1
        recorded.runs += 1
        self._stats.hits += 1
        return True

    def run(self, recorded: Recorded) -> bool:
        """Enqueues the upload of the live block and the body; the context must be current.

        Returns whether the last thing on the stream is a launch, for what `follow`s: what goes
        through a pipeline may end in a copy or in a wait.

        Raises:
            CudaError: a launch failed.
        """
        again = recorded.runs or recorded.whole is not None  # which may have been warmed
        if recorded.graph is None and again and not recorded.refused:
            self._capture(recorded, None, whole=False)
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
        recorded.live.download(self._stream)
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

    def _capture(self, recorded: Recorded, logits: DeviceArray | None, *, whole: bool) -> None:
        """Makes one of the graphs; if that fails, it says so and leaves the pass as it is."""
        aside = self._aside
        if aside is None:
            return
        started = time.perf_counter()

        def enqueue() -> Nodes:
            aside.record_in_graph(self.started)
            self._enqueue(recorded, aside)
            if not whole:
                return ()
            head = recorded.head.launches if logits is not None and recorded.head else ()
            found = nodes(head, aside, overlap=self._overlap)
            recorded.live.download(aside)
            aside.record_in_graph(self.ended)
            return found

        try:
            if not whole:
                recorded.graph = Graph(aside, enqueue)
            else:
                if logits is not None:
                    recorded.point(logits)
                    recorded.logits_at = logits.ptr
                recorded.whole = Graph(aside, enqueue)
        except (CudaError, OutOfMemoryError) as error:
            recorded.refused = True
            launches = len(recorded.body.launches)
            self._failed(error, f"a pass stays at {launches} launches, without a graph")
        finally:
            self._stats.capture_ms += 1e3 * (time.perf_counter() - started)

    def _move(self, recorded: Recorded, graph: Graph, logits: DeviceArray) -> None:
        """Gives the logits of `whole` another address; if that fails, it says so, and the graph is
        no more."""
        recorded.logits_at = 0  # until it is over, however it ends
        recorded.point(logits)
        try:
            graph.update()
            recorded.logits_at = logits.ptr
        except (CudaError, OutOfMemoryError) as error:
            recorded.apart = True
            self._failed(error, "the logits of a pass are made apart from its graph")
            recorded.whole = None
            self._gone += 1
            graph.close()

    def _failed(self, error: CudaError | OutOfMemoryError, what: str) -> None:
        """Counts a failure that passes go on without, and says so. Raises it where they cannot."""
        if isinstance(error, CudaError) and error.code in api.STICKY:
            raise error
        self._stats.failures += 1
        # Its text: who keeps the record must not keep the error's frames, and so the logits.
        log.warning("%s: %s", what, str(error))

    def drop(self, recorded: Recorded) -> None:
        """Destroys the graphs of a pass that will not be run again; nothing may be running."""
        for part, runs in recorded.uncounted():
            part.count(runs)
        with ExitStack() as graphs:  # one that fails keeps no other
            for graph in recorded.graphs:
                graphs.callback(graph.close)
            self._gone += len(recorded.graphs)
            recorded.graph = recorded.whole = None

    def close(self) -> None:
        """Destroys the events, and the stream on which graphs are captured. Idempotent."""
        self._resources.close()
