"""Measures the wall of a prefill: every launch in place, all of them together, and whole calls."""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np

from pyruntime.driver.memory import DeviceArray, PinnedBuffer
from pyruntime.driver.stream import Stream
from pyruntime.engine import Engine
from pyruntime.measure import records
from pyruntime.measure.account import Call, account, checks, explain
from pyruntime.measure.clock import ClockProbe
from pyruntime.measure.graph import Packed, Planes, expected_work
from pyruntime.measure.inplace import spans, time_in_place
from pyruntime.measure.launches import gpu_model
from pyruntime.measure.roofline import Roofline
from pyruntime.measure.series import REGIMES
from pyruntime.measure.telemetry import Telemetry
from pyruntime.model.gpu import GpuModel
from pyruntime.model.live import RESULT_BYTES, live_bytes
from pyruntime.model.weights import Weights
from pyruntime.ops.attention_choice import Choice


def measure_wall(
    engine: Engine, nt: int, roofline: Roofline, *, regime: str, rounds: int, commit: str | None
) -> dict[str, Any]:
    """Times a prefill of `nt` random tokens; the record (schema pyruntime.wall/1, without it).

    Raises:
        EngineError: the engine does not run on a GPU, or with weights "per-layer", whose launches
            run on two streams. ValueError: nt is beyond its `max_tokens`.
    """
    model = gpu_model(engine)
    ids = np.random.default_rng(0).integers(0, engine.config.vocab, nt)
    rest = REGIMES[regime].rest
    with (
        closing(engine.new_cache(nt)) as cache,
        closing(ClockProbe(model.library)) as probe,
        Telemetry(model.device) as telemetry,
    ):
        warm_up = time.perf_counter() + REGIMES[regime].warm_up
        while time.perf_counter() < warm_up:
            engine.prefill(ids)
        calls = [_call(engine, ids, rest) for _ in range(rounds)]
        clock = probe.mhz()
        with model.staged(ids, cache) as (launches, stream):
            timed = time_in_place(launches, stream, rounds=rounds, rest=rest, overlap=model.overlap)
            copies = _copies(stream, model.max_tokens, rounds)
            about = records.identity(model.device, launches, commit)
            named = [(launch.role, launch.kernel.name) for launch in launches]
        logits = np.asarray(engine.prefill(ids).logits)
    row_bytes = model.weights.outer["embedding"].shape[1]
    scheduled = any(x.role == "attention" and Choice(x.kernel).scheduled for x in launches)
    rotates = any(x.kernel.spec.tile.get("epilogue") == "qkv" for x in launches)
    packed_head = any(x.kernel.spec.tile.get("op") == "logits" for x in launches)
    expected = expected_work(
        engine.config, nt, row_bytes, model.kv_dtype, scheduled, rotates, packed_head,
        packed_matrices(model),
    )  # fmt: skip
    slices = account(named, timed.medians, expected, roofline)
    gap = explain(calls, statistics.median(timed.busy), statistics.median(timed.overlapped), copies)
    return {
        "model": _model(engine),
        "nt": nt,
        "regime": regime,
        **about,
        "sm_mhz": clock,
        "clocks": telemetry.record(),
        "roofline": asdict(roofline),
        "busy_ms": timed.busy,
        "overlapped_ms": timed.overlapped,
        "wall_ms": [call.wall for call in calls],
        "gpu_ms": [call.gpu for call in calls],
        "event_us": 1e3 * timed.event,
        "slices": slices,
        "gap": gap,
        "launches": [
            {"role": role, "kernel": kernel, "ms": ms}
            for (role, kernel), ms in zip(named, timed.medians, strict=True)
        ],
        "checks": checks(nt, slices, timed, gap, bool(np.isfinite(logits).all())),
    }


def packed_matrices(model: GpuModel) -> Planes:
    """The matrices that a model multiplies with int8 activations."""
    weights = model.weights
    if not isinstance(weights, Weights):
        return ()
    groups = zip(weights.planes, [weights.outer, *weights.layers], strict=True)
    return [
        {name: Packed(kind, arrays[name].nbytes) for name, kind in planes.items()}
        for planes, arrays in groups
    ]


def _call(engine: Engine, ids: Any, rest: float) -> Call:
    time.sleep(rest)
    started = time.perf_counter()
    result = engine.prefill(ids)
    ended = time.perf_counter()
    first, waited = gpu_model(engine).host_span
    return Call(
        wall=1e3 * (ended - started),
        before=1e3 * (first - started),
        gpu=1e3 * result.timings["gpu"],
        after=1e3 * (ended - waited),
    )


def _copies(stream: Stream, max_tokens: int, rounds: int) -> float:
    """Milliseconds of a pass's copies: the live block up, what a pass leaves there down."""
    nbytes = live_bytes(max_tokens)
    host = PinnedBuffer(stream.device, nbytes)
    array = DeviceArray(stream.device, (nbytes,), np.uint8)

    def copy() -> None:
        stream.copy_to_device(array.ptr, host.ptr, nbytes)
        stream.copy_to_host(host.ptr, array.ptr, RESULT_BYTES)

    times = spans(stream, [copy] * rounds)
    array.close()
    host.close()
    return statistics.median(times)


def _model(engine: Engine) -> dict[str, Any]:
    c = engine.config
    names = ("arch", "name", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    return {name: getattr(c, name) for name in names}
