"""How passes were run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stats:
    """Counts since the model was loaded, of which those of passes are of passes enqueued whole.

    Attributes:
        hits: passes replayed as a graph. misses: passes enqueued launch by launch.
        captures: graphs made; failures: graphs that could not be made.
        capture_ms: milliseconds of the host spent on both.
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
