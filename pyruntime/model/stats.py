"""How passes were run, and which were made ready."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stats:
    """Counts since the model was loaded, of which those of passes are of passes enqueued whole.

    Attributes:
        hits: passes replayed as a graph, at least up to the logits. misses: passes enqueued launch
            by launch.
        captures: graphs made; failures: graphs that could not be made, or not be told where logits
            lie now, and so were given up.
        capture_ms: milliseconds of the host spent on both, those of `Engine.warm` included.
        graphs: graphs held now; graph_bytes: device memory that they took, as far as that shows
            (`driver.graph.Graph`).
    """

    hits: int = 0
    misses: int = 0
    captures: int = 0
    failures: int = 0
    capture_ms: float = 0.0
    graphs: int = 0
    graph_bytes: int = 0


@dataclass(frozen=True)
class Warmed:
    """A kind of pass that `Engine.warm` has made ready.

    Attributes:
        rows: the most that it serves, a bucket's end. kept: rows that it makes logits of: 0 or 1,
            or `rows`. fresh: nothing is cached before.
        captured: a graph was made; if not, there was one, or there is to be none, or it could not
            be made (`Stats.failures`).
        ms: milliseconds of the host, recording included. nbytes: device memory of the graph that
            was made, as far as that shows, else 0.
    """

    rows: int
    kept: int
    fresh: bool
    captured: bool
    ms: float
    nbytes: int
