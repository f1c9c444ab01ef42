"""The cases of bench/peers.py: who takes part, and their raw times. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contestants import (
    Libraries,
    Prefill,
    Replayed,
    our_prefill,
    products,
    transformers_prefill,
)
from peers_cases import PREFILL_REST, PREFILL_ROUNDS, PRODUCT_MS, Case
from regimes import (
    LEAD_MS,
    OURS,
    REST,
    ROUNDS,
    SUSTAINED_MS,
    SUSTAINED_ROUNDS,
    WORK_MS,
    by_unit,
    interleaved,
    willing,
)
from stopwatch import Gpu, Graph, Stopwatch

from pyruntime import Engine
from pyruntime.measure.launches import gpu_model
from pyruntime.measure.records import plan_hash

Figure = dict[str, Any]


def product(gpu: Gpu, watch: Stopwatch, case: Case) -> Figure:
    """The figure of a product. Raises ArithmeticError, see `contestants.products`."""
    skipped: dict[str, str] = {}
    contestants = products(gpu, case.about, case.tokens, case.mma, skipped)
    ours = Graph(gpu, contestants[OURS], watch)
    peers = {
        name: partial(Graph, gpu, contestant, watch)
        for name, contestant in contestants.items()
        if name != OURS
    }
    graphs = {OURS: ours, **willing(peers, skipped)}
    burst = partial(watch.reading, ms=WORK_MS)
    sustained = partial(watch.reading, ms=PRODUCT_MS, lead=LEAD_MS)
    readings = {
        "burst": interleaved(graphs, burst, rounds=ROUNDS, rest=REST, warm_up=1, skipped=skipped)
    }
    steady = {name: x for name, x in graphs.items() if name not in ("fused", *skipped)}
    readings["sustained"] = interleaved(
        steady, sustained, rounds=SUSTAINED_ROUNDS, rest=0, warm_up=0, skipped=skipped
    )
    launches = [launch for x in contestants.values() for launch in x.launches]
    return {
        "flop": case.flop,
        "also": case.about["also"],
        "kernels": sorted({launch.kernel.name for launch in launches}),
        "plan": plan_hash(launches),
        "notes": {name: x.note for name, x in contestants.items()},
        "calls": {name: graph.calls for name, graph in graphs.items()},
        "skipped": skipped,
        **by_unit(readings, ("ms", "mhz")),
    }


class Field:
    """One model's prefills, and what runs beside them.

    Args:
        chosen: the cases that will be run.
    """

    def __init__(
        self, gpu: Gpu, watch: Stopwatch, chosen: list[Case], path: Path, transformers: bool
    ) -> None:
        self._watch = watch
        most = max(case.tokens for case in chosen)
        self._engine = Engine.load(path, device="cuda:0", max_tokens=most)
        config = self._engine.config

        def libraries() -> Callable[[int], Prefill]:
            all_of_them = Libraries(config)
            return lambda nt: Replayed(gpu, watch, all_of_them.contestant(nt))

        makers: dict[str, Callable[[], Callable[[int], Prefill]]] = {}
        if chosen[0].about["libraries"]:
            makers["libraries"] = libraries
        if transformers:
            makers["transformers"] = partial(transformers_prefill, watch, config)
        self._skipped: dict[str, str] = {}  # in all cases
        self._peers = willing(makers, self._skipped)

    def prefill(self, case: Case) -> Figure:
        """The figure of a prefill."""
        nt, skipped = case.tokens, self._skipped.copy()
        prefills: dict[str, Prefill] = {OURS: our_prefill(self._watch, self._engine, nt)}
        prefills |= willing({x: partial(make, nt) for x, make in self._peers.items()}, skipped)
        readings = {
            "burst": interleaved(
                prefills, lambda x: x.reading(0), rounds=PREFILL_ROUNDS, rest=PREFILL_REST,
                warm_up=1, skipped=skipped,
            )
        }  # fmt: skip
        steady = {name: x for name, x in prefills.items() if name not in skipped}
        readings["sustained"] = interleaved(
            steady, lambda x: x.reading(SUSTAINED_MS, LEAD_MS), rounds=SUSTAINED_ROUNDS, rest=0,
            warm_up=0, skipped=skipped,
        )  # fmt: skip
        with (
            closing(self._engine.new_cache(nt)) as cache,
            gpu_model(self._engine).staged(np.zeros(nt, np.int32), cache) as (launches, _),
        ):
            kernels = sorted({launch.kernel.name for launch in launches})
            plan = plan_hash(launches)
        return {
            "tokens": nt,
            "mix": case.about["mix"],
            "kernels": kernels,
            "plan": plan,
            "skipped": skipped,
            **by_unit(readings, ("ms", "gpu_ms", "mhz")),
        }

    def close(self) -> None:
        """Gives all memory back."""
        self._engine.close()
        self._peers.clear()
