"""Calls that run out of time, and threads that go on while a call waits for the GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Thread

import numpy as np
import pytest
from goldens import model_path

from pyruntime import Engine
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import BusyError, WaitTimeoutError
from pyruntime.model.config import KV_DTYPES
from pyruntime.ops.clock import clock

IDS = np.arange(2000) % 200


@pytest.fixture(params=["fp16", "per-layer"])
def weights(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=KV_DTYPES)
def engine(request: pytest.FixtureRequest, weights: str) -> Iterator[Engine]:
    with Engine.load(
        model_path("tiny-llama-q8_0"), device="cuda:0", weights=weights, kv_dtype=request.param,
        max_tokens=len(IDS),
    ) as engine:  # fmt: skip
        yield engine


def hold(engine: Engine) -> DeviceArray:
    """Keeps the engine's stream busy for a second; what it writes to has to live as long."""
    model, program = engine.model, Program()
    out = DeviceArray(model.device, (2,), np.int64)
    clock(program, model.library, out=out, nanoseconds=10**9)
    with model.device.current():
        program.run(model._stream)
    return out


def test_a_call_that_runs_out_of_time_leaves_an_engine_that_works(engine: Engine) -> None:
    for _ in range(2):  # the second is a graph
        want = np.asarray(engine.prefill(IDS, logits="all", timeout=60).logits)
    cache = engine.new_cache(len(IDS))
    held = hold(engine)
    with pytest.raises(WaitTimeoutError, match="the GPU was still at work"):
        engine.prefill(IDS[::-1], cache=cache, timeout=0.1)
    for timeout in (0, 0.001):
        with pytest.raises(BusyError, match="the GPU did not finish"):
            engine.prefill(IDS, cache=cache, logits="all", timeout=timeout)
    assert cache.length == 0
    got = np.asarray(engine.prefill(IDS, cache=cache, logits="all", timeout=60).logits)
    assert np.array_equal(got, want)
    held.close()
    cache.close()


def test_a_cache_is_closed_when_the_gpu_is_done_with_it(engine: Engine) -> None:
    want = np.asarray(engine.prefill(IDS).logits)
    cache = engine.new_cache(len(IDS))
    held = hold(engine)
    with pytest.raises(WaitTimeoutError):
        engine.prefill(IDS[::-1], cache=cache, timeout=0.1)
    cache.close()
    assert np.array_equal(np.asarray(engine.prefill(IDS, timeout=60).logits), want)
    held.close()


def test_threads_go_on_while_a_call_waits_for_the_gpu(engine: Engine) -> None:
    engine.prefill(IDS)
    held = hold(engine)
    thread, steps = Thread(target=engine.prefill, args=(IDS,)), 0
    thread.start()
    while thread.is_alive():
        time.sleep(1e-3)
        steps += 1
    assert steps > 100
    held.close()
