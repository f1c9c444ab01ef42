"""One case of bench/attention_peers.py: contestants become CUDA graphs, are compared, then timed.

Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attention_cases import (
    LEAD_MS,
    PEERS,
    REST,
    ROUNDS,
    SUSTAINED_MS,
    SUSTAINED_ROUNDS,
    WORK_MS,
    Case,
)
from attention_contestants import Contestant, UnfitError, Work, cudnn, fa3, our_choices, ours
from contestants import Gpu
from peers import interleaved
from torch.nn.functional import pad

from pyruntime.measure.clock import ClockProbe
from pyruntime.measure.inplace import Hold, spans
from pyruntime.measure.records import plan_hash

# Of a whole output, in the norm over BLOCK rows of a head. Rounding to bf16 is worth about 0.004.
TOLERANCE, BLOCK = 1e-2, 64
MOST = 256  # calls of one graph
HOLD_MS = 0.5  # that the host may take to launch a graph
HOST_MS = 0.15  # that torch may take to enqueue one call


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
        return total / (times * graph.calls), self._probe.mhz()

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


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error [rows, heads, head dim], in the norm over BLOCK rows of a head.

    NaN if a value is.
    """

    def norms(x: torch.Tensor) -> torch.Tensor:
        squares = x.square().sum(-1)
        whole = pad(squares, (0, 0, 0, -len(squares) % BLOCK))
        return whole.view(-1, BLOCK, squares.shape[1]).sum(1).sqrt()

    wanted = expected.float()
    return float((norms(found.float() - wanted) / norms(wanted)).max())


def compete(gpu: Gpu, watch: Stopwatch, case: Case, rows: bool) -> dict[str, Any]:
    """The figure of one case: raw milliseconds and clocks by regime, and what was compared.

    Args:
        rows: every row of our kernel table takes part.

    Raises:
        ArithmeticError: ours is not what a peer computes, or no peer computes it.
    """
    work = Work(gpu, case)
    contestants, graphs = {}, {}
    skipped: dict[str, str] = {}
    for peer, build in zip(PEERS, (fa3, cudnn), strict=True):
        try:
            contestants[peer] = build(gpu, work)
            graphs[peer] = Graph(gpu, contestants[peer], watch)
        except UnfitError as error:
            skipped[peer] = str(error)
        except Exception as error:  # its refusal must not lose the others' figures
            skipped[peer] = f"{type(error).__name__}: {error}".partition("\n")[0]
    if not graphs:
        raise ArithmeticError(f"no peer to compare with: {skipped}")
    reference, *others = graphs
    for name, choice in our_choices(gpu, case, rows).items():
        contestants[name] = ours(gpu, work, choice)
        graphs[name] = Graph(gpu, contestants[name], watch)
        others.append(name)
    graphs[reference].replay()
    errors = {}
    for name in others:
        gpu.stream.synchronize()
        work.out.fill(0xFF)  # a NaN that nothing may leave there
        graphs[name].replay()
        distance = apart(graphs[name].result, graphs[reference].result)
        if distance < TOLERANCE:
            errors[name] = distance
            continue
        told = f"{distance:.4g} from {reference}'s in relative norm"
        if name not in PEERS:
            raise ArithmeticError(f"the result of {contestants[name].note} is {told}")
        del graphs[name]
        skipped[name] = f"its result is {told}"
    readings = {
        "burst": interleaved(
            graphs, partial(watch.reading, ms=WORK_MS), rounds=ROUNDS, rest=REST, warm_up=1
        )
    }
    if "sustained" in case.regimes:
        readings["sustained"] = interleaved(
            {name: graph for name, graph in graphs.items() if name in ("ours", *PEERS)},
            partial(watch.reading, ms=SUSTAINED_MS, lead=LEAD_MS),
            rounds=SUSTAINED_ROUNDS,
            rest=0.0,
            warm_up=0,
        )
    launches = [x for contestant in contestants.values() for x in contestant.launches]
    return {
        "kernels": sorted({x.kernel.name for x in launches}),
        "plan": plan_hash(launches),
        "sequences": case.sequences,
        "flop": case.flop,
        "floors": case.floors,
        "notes": {name: contestants[name].note for name in graphs},
        "calls": {name: graph.calls for name, graph in graphs.items()},
        "reference": reference,
        "relative_error": errors,
        "skipped": skipped,
        **{
            unit: {
                regime: {name: [x[i] for x in raw] for name, raw in found.items()}
                for regime, found in readings.items()
            }
            for i, unit in enumerate(("ms", "mhz"))
        },
    }
