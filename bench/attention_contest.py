"""One case of bench/attention_peers.py: contestants become CUDA graphs, are compared, then timed.

Needs torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from attention_cases import PEERS, Case
from attention_contestants import UnfitError, Work, cudnn, fa3, our_choices, ours
from regimes import (
    LEAD_MS,
    REST,
    ROUNDS,
    SUSTAINED_MS,
    SUSTAINED_ROUNDS,
    WORK_MS,
    by_unit,
    interleaved,
)
from stopwatch import Gpu, Graph, Stopwatch
from torch.nn.functional import pad

from pyruntime.measure.records import plan_hash

# Of a whole output, in the norm over BLOCK rows of a head. Rounding to bf16 is worth about 0.004.
TOLERANCE, BLOCK = 1e-2, 64


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
        **by_unit(readings, ("ms", "mhz")),
    }
