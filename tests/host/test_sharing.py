"""Caches of others, many threads, forked processes: what one engine serves, and what it refuses."""

from __future__ import annotations

import gc
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver
from threads import LONG, exit_code, finish, start

from pyruntime import Engine
from pyruntime.driver.program import Launch
from pyruntime.errors import EngineError, OutOfMemoryError
from pyruntime.model.batch import Prompt
from pyruntime.model.decoder import Shape
from pyruntime.model.live import LiveBlock

Load = Callable[..., Engine]


def test_a_closed_cache_is_refused(load: Load) -> None:
    engine = load()
    cache = engine.new_cache(8)
    cache.close()
    with pytest.raises(ValueError, match="cache has been closed"):
        engine.prefill([1], cache=cache)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("length", [-5, 65, 2.0])
def test_a_length_that_cannot_be_is_refused(load: Load, device: str, length: Any) -> None:
    engine = load(device=device)
    cache = engine.new_cache(64)
    with pytest.raises(ValueError, match=f"a cache of length 0 cannot be cut to {length}"):
        cache.length = length


@pytest.mark.parametrize("other", ["cpu", "cuda:0"])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_cache_of_another_engine_is_refused(load: Load, device: str, other: str) -> None:
    cache = load(device=other).new_cache(8)
    with pytest.raises(ValueError, match="belongs to another model"):
        load(device=device).prefill([1], cache=cache)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize(("ours", "other"), [("f16", "e4m3"), ("e4m3", "f16")])
def test_a_cache_of_another_dtype_is_refused(
    load: Load, device: str, ours: str, other: str
) -> None:
    cache = load(device=device, kv_dtype=other).new_cache(8)
    engine = load(device=device, kv_dtype=ours)
    with pytest.raises(ValueError, match=f"holds {other}; .* loaded with kv_dtype='{ours}'"):
        engine.prefill([1], cache=cache)
    assert cache.length == 0


def test_attention_reads_the_staging_of_an_e4m3_cache(load: Load, attention: str) -> None:
    """Layer 0 of it; the rows go to the cache's own layers, which are widened in between."""
    engine = load(kv_dtype="e4m3", attention=attention)
    cache = engine.new_cache(50)
    engine.prefill([1, 2, 3], cache=cache)
    engine.prefill([4, 5], cache=cache)
    decoder = engine.model._decoder
    live, staging = decoder.live, decoder.staging
    seen = struct.unpack("<4i3Q", np.asarray(live.sequences)[0])
    assert seen == (0, 2, 3, 64, *(array.ptr for array in staging.arrays))
    assert staging.k.shape == (1, engine.config.kv_heads, 64, engine.config.head_dim)
    held = struct.unpack("<4i4Q", np.asarray(live.stored)[0])
    arrays = (cache.k, cache.v, cache.k_scale, cache.v_scale)
    assert held == (0, 2, 3, 50, *(array.ptr for array in arrays))

    def given(launch: Launch, name: str, form: str) -> int | None:
        for p in launch.kernel.spec.params:
            if p.name == name:
                return int(struct.unpack_from(form, launch._block, p.offset)[0])
        return None

    launches = decoder.recorded(Shape(2, 2, 1, 1, fresh=False)).body.launches
    found = [
        (family, given(launch, "layer", "<i"), given(launch, "sequences", "<Q"))
        for launch in launches
        if (family := launch.kernel.spec.family) in ("schedule", "rope", "widen", "attention")
    ]
    listed = [] if attention == "fast" else [("schedule", None, live.sequences.ptr)]
    assert found == listed + [
        (family, index, address)
        for layer in range(engine.config.layers)
        for family, index, address in (
            ("rope", layer, live.stored.ptr),
            ("widen", layer, live.sequences.ptr),
            ("attention", 0, None if listed else live.sequences.ptr),
        )
    ]


def test_a_continuation_is_recorded_apart(load: Load) -> None:
    """Its attention is divided for more keys; a pass of the same kind meets the same launches."""
    engine = load()
    for _ in range(2):
        cache = engine.new_cache(8)
        for _ in range(3):
            engine.prefill([1, 2], cache=cache)
        cache.close()
    passes = engine.model._decoder._passes
    assert set(passes) == {
        Shape(16, 16, 1, 1, fresh=True), Shape(2, 2, 1, 1, fresh=True),
        Shape(2, 2, 1, 1, fresh=False),
    }  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("tokens", [10**9, 10**12, 2**60, np.int32(2**30)])
def test_a_cache_beyond_all_memory_is_refused_at_once(
    driver: FakeDriver, load: Load, device: str, tokens: int
) -> None:
    """Before anything of its size is made, such as rotary tables on the host."""
    engine = load(device=device)
    allocations = driver.calls["cuMemAlloc"]
    with pytest.raises(OutOfMemoryError, match=r"[\d,]{13,} bytes .*[\d,]{9,}"):
        engine.new_cache(tokens)
    assert driver.calls["cuMemAlloc"] == allocations


def test_sizes_may_be_integers_of_numpy(load: Load) -> None:
    engine = load(max_tokens=np.int8(16), kv_tokens=np.int8(100))
    assert engine.prefill([1] * 100).tokens == 100


def test_logits_of_many_passes_do_not_pile_up_on_the_device(driver: FakeDriver, load: Load) -> None:
    engine = load(max_tokens=4)
    engine.prefill([1])
    most, before = 0, driver.held()["arrays"]

    def count(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal most
        most = max(most, driver.held()["arrays"])

    driver.hook = count
    logits = engine.prefill([1] * 60, logits="all").logits
    assert logits.shape == (60, engine.config.vocab)
    assert most <= before + 2


# Threads and processes


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def run_threads(*targets: Callable[[], object]) -> None:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("hasty_threads")
def test_threads_share_an_engine_without_a_cache_on_the_cpu(load: Load) -> None:
    """Their prompts all go through the one cache behind the engine."""
    engine = load(device="cpu")
    random = np.random.default_rng(0)
    prompts = [random.integers(0, engine.config.vocab, n) for n in (50, 20)]
    expected = [engine.prefill(prompt).logits for prompt in prompts]
    errors: list[float] = []

    def work(prompt: np.ndarray, logits: np.ndarray) -> None:
        for _ in range(15):
            errors.append(float(np.abs(engine.prefill(prompt).logits - logits).max()))

    run_threads(*(partial(work, *pair) for pair in zip(prompts, expected, strict=True)))
    assert len(errors) == 30 and max(errors) < 1e-4


@pytest.mark.usefixtures("hasty_threads")
def test_threads_share_an_engine_without_a_cache_on_a_gpu(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt's passes start where its last one ended, and nobody else's come between."""
    engine = load()
    starts: list[int] = []
    fill = LiveBlock.fill

    def noted(block: LiveBlock, prompts: Sequence[Prompt], *args: Any) -> None:
        starts.append(prompts[0].cache.length)
        fill(block, prompts, *args)

    monkeypatch.setattr(LiveBlock, "fill", noted)
    run_threads(*[lambda: [engine.prefill([1] * 64) for _ in range(20)]] * 3)
    assert starts == [0, 16, 32, 48] * 60


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_forked_during_a_pass_is_refused_and_does_not_hang(
    driver: FakeDriver, load: Load
) -> None:
    """It inherits a lock whose owner is a thread that it does not have."""
    engine = load()
    inside, over = threading.Event(), threading.Event()
    parent = threading.Thread(target=engine.prefill, args=([1, 2],))

    def stay(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "cuStreamSynchronize":
            inside.set()
            over.wait(120)

    def child() -> None:
        engine.close()
        with pytest.raises(EngineError, match="belongs to the parent process"):
            engine.prefill([1])
        with pytest.raises(EngineError, match="belongs to the parent process"):
            engine.new_cache(1)

    driver.hook = stay
    parent.start()
    try:
        assert inside.wait(60)
        assert exit_code(child) == 0
    finally:
        over.set()
        parent.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_lets_go_of_what_its_parent_has(
    driver: FakeDriver, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quietly, and without the device's lock, which a thread of the parent's may have."""
    engine = load()
    arrays = [engine.prefill([1, 2]).logits for _ in range(2)]
    shared, device = [arrays[0].__dlpack__()], engine.model.device
    complaints: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)

    def child() -> None:
        nonlocal engine
        for share in (lambda a: a.__dlpack__(), lambda a: a.__cuda_array_interface__, np.asarray):
            with pytest.raises(EngineError, match="forked child"):
                share(arrays[1])
        shared.clear()
        arrays.clear()
        del engine
        gc.collect()
        assert complaints == []

    inside, over = threading.Event(), threading.Event()

    def hold() -> None:
        with device.lock:
            inside.set()
            over.wait(LONG)

    thread = start(hold)
    try:
        assert inside.wait(LONG)
        assert exit_code(child) == 0
    finally:
        over.set()
        finish(thread)
