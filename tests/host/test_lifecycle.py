"""Engines from load to close on a fake driver: nothing leaks, and failures are named and kept."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from fake_driver import INVALID_VALUE, MAKERS, OUT_OF_MEMORY, FakeDriver
from goldens import GOLDEN

from pyruntime import Engine
from pyruntime.errors import CudaError, EngineError, GGUFError, OutOfMemoryError
from pyruntime.model import loader
from pyruntime.model.config import KV_DTYPES
from pyruntime.ops.attention_schedule import map_boxes

MODEL = GOLDEN / "tiny-llama-q8_0.gguf"
ILLEGAL_ADDRESS, TOO_MANY_RESOURCES = 700, 701  # CUresult: the first loses the context

Load = Callable[..., Engine]


def on_call(name: str, action: Callable[[], object]) -> Callable[[str, tuple[Any, ...]], object]:
    """A hook that acts before every call of the driver function `name`."""
    return lambda called, arguments: action() if called == name else None


# Loading

MAKING_OR_FILLING = (
    *MAKERS, "cuModuleGetFunction", "cuFuncSetAttribute", "cuMemcpyHtoDAsync", "cuLaunchKernelEx"
)  # fmt: skip


@pytest.mark.parametrize(
    ("function", "code"),
    [(name, INVALID_VALUE) for name in MAKING_OR_FILLING] + [("cuMemAlloc", OUT_OF_MEMORY)],
)
@pytest.mark.parametrize("weights", ["fp16", "per-layer", "int8"])
def test_a_failed_load_keeps_nothing(
    driver: FakeDriver, load: Load, weights: str, function: str, code: int
) -> None:
    """Not even as long as its exception is kept, as an interactive session does."""
    load = partial(load, weights=weights)
    load().close()
    calls = driver.calls[function]
    for succeeding in {*range(0, calls, calls // 10 or 1), calls - 1}:
        driver.fail[function] = (succeeding, code)
        with pytest.raises((CudaError, OutOfMemoryError)) as kept:
            load()
        assert driver.held() == {}, kept.value
        assert driver.fail == {}


def test_an_interrupted_load_keeps_nothing(driver: FakeDriver, load: Load) -> None:
    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:
        load(progress=interrupt)
    assert driver.held() == {}, kept.value


def test_a_file_that_shrinks_during_its_load(
    driver: FakeDriver, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "SLOT_BYTES", 4096)
    path = shutil.copy(MODEL, tmp_path / "m.gguf")
    driver.hook = on_call("cuMemcpyHtoDAsync", lambda: os.truncate(path, 20_000))
    with pytest.raises(GGUFError, match=r"m\.gguf: byte \d+: tensor ") as kept:
        load(model=path)
    assert driver.held() == {}, kept.value


def test_the_first_failure_of_a_load_is_the_one_reported(driver: FakeDriver, load: Load) -> None:
    """Not one of giving up. Which of the threads meets the lost context first is left to chance."""
    driver.hook = on_call("cuLaunchKernelEx", lambda: setattr(driver, "lost", ILLEGAL_ADDRESS))
    first = r"^cu(LaunchKernelEx|Memcpy\w+|MemAlloc|MemHostAlloc|Stream\w+) failed: .*700"
    with pytest.raises(CudaError, match=first):
        load()


def test_a_failure_to_free_does_not_hide_why_a_load_failed(driver: FakeDriver, load: Load) -> None:
    driver.cuDevicePrimaryCtxRetain(0)  # somebody else's, so that the context stays
    driver.fail = {"cuLaunchKernelEx": (0, INVALID_VALUE), "cuModuleUnload": (0, INVALID_VALUE)}
    with pytest.raises(CudaError, match="cuLaunchKernelEx failed"):
        load()
    assert driver.fail == {}


# Closing


@pytest.mark.parametrize("weights", ["fp16", "per-layer", "int8"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_close_gives_everything_back(
    driver: FakeDriver, load: Load, kv_dtype: str, weights: str
) -> None:
    engine = load(kv_dtype=kv_dtype, weights=weights)
    cache = engine.new_cache(100)
    engine.prefill([1] * 64)
    engine.prefill([1] * 64, logits="all")
    engine.prefill([1, 2], cache=cache)
    cache.close()
    engine.close()
    engine.close()
    assert driver.held() == {}


@pytest.mark.parametrize("weights", ["fp16", "per-layer", "int8"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["llama-q8_0", "qwen2-q4_k_m", "qwen3-q6_k", "gemma3-q8_0"])
def test_plan_is_what_load_and_a_prefill_allocate(
    driver: FakeDriver, load: Load, name: str, kv_dtype: str, weights: str
) -> None:
    options = {"model": GOLDEN / f"tiny-{name}.gguf", "kv_dtype": kv_dtype, "weights": weights}
    engine = load(**options)
    loading = engine.model.device.peak  # with staging buffers
    cache = engine.new_cache(64)
    result = engine.prefill([1] * 16, cache=cache)
    planned = Engine.plan(**options, max_tokens=16, kv_tokens=64)
    held = sum(a.nbytes for a in driver.live["arrays"].values())
    assert held == engine.model.device.allocated == planned.total
    assert engine.model.device.peak == max(loading, held)
    assert engine.weights == planned.weights == weights
    cache.close()
    del result


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_plan_is_what_load_and_a_list_of_prompts_allocate(
    driver: FakeDriver, load: Load, kv_dtype: str
) -> None:
    """Each prompt but the first has tensor maps of its own."""
    engine = load(kv_dtype=kv_dtype)
    engine.prefill([[1] * 3, [2] * 2, [3]], logits="none")
    planned = Engine.plan(
        GOLDEN / "tiny-llama-q8_0.gguf", kv_dtype=kv_dtype, max_tokens=16, kv_tokens=64
    )
    assert engine.model.device.allocated == planned.total - planned.nbytes["logits"]


def test_auto_loads_what_plan_says(
    driver: FakeDriver, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pyruntime")
    model = GOLDEN / "tiny-qwen3-q4_k_m.gguf"
    plan = partial(Engine.plan, model, max_tokens=16, kv_tokens=64)
    wide, packed = (plan(weights=weights).total for weights in ("fp16", "per-layer"))
    for budget, expected in (
        (None, "fp16"), (wide, "fp16"), (wide - 1, "per-layer"), (packed - 1, "int8")
    ):  # fmt: skip
        caplog.clear()
        planned = plan(memory_budget=budget)
        engine = load(model=model, memory_budget=budget)
        assert engine.weights == planned.weights == expected
        told = "" if expected == "fp16" else f", weights {expected}"
        assert engine.path == engine.model.device_name + told
        (record,) = (r for r in caplog.records if "weights 'auto' on" in r.message)
        assert f": {expected}, which takes {planned.total:,} bytes" in record.message
        assert (record.levelno == logging.WARNING) == (expected == "int8")
        engine.close()
    with pytest.raises(OutOfMemoryError, match=r"bytes .*are needed \(weights .*, scratch "):
        load(model=model, memory_budget=100_000, weights="per-layer")
    with pytest.raises(OutOfMemoryError, match=r"bytes .*are needed \(weights "):
        load(model=model, memory_budget=100_000)


def test_longer_prompts_than_a_pass_over_packed_weights_are_cut(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyruntime.model.footprint.PASS_TOKENS", {"per-layer": 8})
    engine = load(weights="per-layer")
    assert engine.max_tokens == engine.model.max_tokens == 8
    logits = engine.prefill([1] * 20, logits="all").logits
    assert logits.shape == (20, engine.config.vocab)


@pytest.mark.parametrize("weights", ["fp16", "per-layer", "int8"])
def test_a_dropped_engine_gives_everything_back_at_once(
    driver: FakeDriver, load: Load, weights: str
) -> None:
    """The garbage collector is not waited for: it knows nothing of device memory."""
    gc.collect()
    gc.disable()
    try:
        engine = load(weights=weights)
        engine.prefill([1])
        engine.score([[1, 2]], [[3]])
        del engine
        assert driver.held() == {}
    finally:
        gc.enable()


def test_results_and_caches_outlive_their_engine(driver: FakeDriver, load: Load) -> None:
    with load() as engine:
        result, cache = engine.prefill([1, 2]), engine.new_cache(8)
    assert np.asarray(result.logits).shape == (1, engine.config.vocab)
    assert driver.held() == {"arrays": 4, "contexts": 1}  # logits, K, V, their maps
    cache.close()
    del result
    gc.collect()
    assert driver.held() == {}


def test_one_part_that_cannot_be_freed_keeps_no_other(driver: FakeDriver, load: Load) -> None:
    driver.cuDevicePrimaryCtxRetain(0)  # somebody else's, so that the context stays
    engine = load()
    driver.fail["cuEventDestroy"] = (0, INVALID_VALUE)
    with pytest.raises(CudaError, match="cuEventDestroy"):
        engine.close()
    assert driver.held() == {"events": 1, "contexts": 1}


def test_closing_is_quiet_when_somebody_else_lost_the_context(
    driver: FakeDriver, load: Load
) -> None:
    engine = load()
    driver.lost = ILLEGAL_ADDRESS
    engine.close()
    assert driver.calls["cuStreamDestroy"] > 0


# Launches


@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_a_pass_overlaps_from_its_second_launch_on(
    driver: FakeDriver, load: Load, overlap: str
) -> None:
    engine = load(overlap=overlap)
    dependent: list[bool] = []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "cuLaunchKernelEx":
            config = arguments[0]
            ids = [attribute.id.name for attribute in config.attrs[: config.numAttrs]]
            dependent.append("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION" in ids)

    driver.hook = note
    for tokens in (1, 16):
        engine.prefill([1] * tokens)
        able = driver.attributes["COMPUTE_CAPABILITY_MAJOR"] >= 9 and overlap == "auto"
        assert dependent == [False] + [able] * (len(dependent) - 1) and len(dependent) > 10
        dependent.clear()


# Failures in use


def test_a_cache_that_another_thread_is_filling_is_full_then(
    driver: FakeDriver, load: Load
) -> None:
    engine = load()
    cache, refused = engine.new_cache(10), list[str]()

    def second() -> None:
        with pytest.raises(ValueError) as error:
            engine.model.forward([1] * 8, cache)
        refused.append(str(error.value))

    thread = Thread(target=second)

    def begin() -> None:
        if thread.ident is None:
            thread.start()

    driver.hook = on_call("cuLaunchKernelEx", begin)
    engine.model.forward([1] * 8, cache)
    thread.join()
    assert refused == ["8 tokens after 8 exceed the cache's 10 positions"]
    assert cache.length == 8


def test_a_lost_context_is_remembered_wherever_it_shows(driver: FakeDriver, load: Load) -> None:
    engine = load()
    driver.lost = ILLEGAL_ADDRESS
    with pytest.raises(CudaError):
        engine.new_cache(4)
    driver.lost = 0
    with pytest.raises(EngineError, match="lost by an earlier failure: cuMemGetInfo failed"):
        engine.prefill([1])


def test_a_context_lost_by_a_failed_pass_is_remembered(driver: FakeDriver, load: Load) -> None:
    """The launch that fails is not what lost it: that shows when the rest is waited for."""
    engine = load(graphs="off")
    engine.prefill([1])  # makes its cache
    driver.fail["cuLaunchKernelEx"] = (5, TOO_MANY_RESOURCES)
    lose = on_call("cuStreamSynchronize", lambda: setattr(driver, "lost", ILLEGAL_ADDRESS))
    driver.hook = lose
    with pytest.raises(CudaError, match="cuLaunchKernelEx failed"):
        engine.prefill([1])
    with pytest.raises(EngineError, match="lost by an earlier failure: cuStreamSynchronize failed"):
        engine.prefill([1])


def test_what_lost_the_context_is_what_is_named(driver: FakeDriver, load: Load) -> None:
    """Not the wait behind it, which fails, too."""
    engine = load(graphs="off")
    driver.hook = on_call("cuLaunchKernelEx", lambda: setattr(driver, "lost", ILLEGAL_ADDRESS))
    with pytest.raises(CudaError, match="cuLaunchKernelEx failed"):
        engine.prefill([1])
    driver.lost = 0
    with pytest.raises(EngineError, match="lost by an earlier failure: cuLaunchKernelEx failed"):
        engine.prefill([1])


@pytest.mark.parametrize(("weights", "streams"), [("fp16", 1), ("per-layer", 2), ("int8", 1)])
def test_an_interrupted_pass_is_waited_for(
    driver: FakeDriver, load: Load, weights: str, streams: int
) -> None:
    """Its kernels read the live block, which the next pass writes."""
    engine = load(weights=weights)
    cache = engine.new_cache(64)
    called: list[str] = []

    def interrupt(name: str, arguments: tuple[Any, ...]) -> None:
        if name in ("cuLaunchKernelEx", "cuStreamSynchronize"):
            called.append(name)
            if len(called) == 5:
                raise KeyboardInterrupt

    driver.hook = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.prefill([1, 2], cache=cache)
    assert called == ["cuLaunchKernelEx"] * 5 + ["cuStreamSynchronize"] * streams
    assert cache.length == 0


@pytest.mark.parametrize("code", [INVALID_VALUE, OUT_OF_MEMORY])
@pytest.mark.parametrize(("kv_dtype", "made"), [("f16", 1), ("f16", 2), ("e4m3", 1), ("e4m3", 3)])
def test_a_cache_that_cannot_be_made_keeps_nothing(
    driver: FakeDriver, load: Load, kv_dtype: str, made: int, code: int
) -> None:
    """Room for K and none for V, or for all but the maps or the last scales; the error is kept."""
    engine = load(kv_dtype=kv_dtype)
    before = driver.held()
    driver.fail["cuMemAlloc"] = (made, code)
    with pytest.raises((CudaError, OutOfMemoryError)) as kept:
        engine.new_cache(8)
    assert driver.held() == before, kept.value
    engine.close()
    assert driver.held() == {}


@pytest.mark.parametrize("function", ["cuTensorMapEncodeTiled", "cuMemcpyHtoD"])
def test_a_cache_whose_maps_cannot_be_made_keeps_nothing(
    driver: FakeDriver, load: Load, function: str
) -> None:
    engine = load()
    if not map_boxes(engine.model.library, engine.config.head_dim):
        pytest.skip("no kernel of this build needs maps")
    before = driver.held()
    driver.fail[function] = (0, INVALID_VALUE)
    with pytest.raises(CudaError, match=function) as kept:
        engine.new_cache(9)
    assert driver.held() == before, kept.value


@pytest.mark.parametrize("made", range(5))
def test_tables_that_cannot_grow_leave_the_engine_as_it_was(
    driver: FakeDriver, load: Load, made: int
) -> None:
    """K, V and maps of staging, then the rotary tables: short caches work on, whichever fails."""
    engine = load(kv_dtype="e4m3")
    cache = engine.new_cache(8)
    before = driver.held()
    driver.fail["cuMemAlloc"] = (made, OUT_OF_MEMORY)
    with pytest.raises(OutOfMemoryError) as kept:
        engine.new_cache(100)
    assert driver.held() == before, kept.value
    engine.prefill([1, 2], cache=cache)
    assert cache.length == 2
