"""Calls with a timeout, interrupted calls, and calls from many threads, on whole engines."""

from __future__ import annotations

import gc
import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_driver import ENDERS, FakeDriver
from threads import LONG, NotedQueue, exit_code, finish, start

from pyruntime import Engine
from pyruntime.errors import BusyError, EngineError, WaitTimeoutError
from pyruntime.turns import Deadline

Load = Callable[..., Engine]
DEVICES = ["cpu", "cuda:0"]
SHORT = 0.01  # seconds, of a wait that cannot end well


@pytest.fixture(autouse=True)
def no_chance_collections() -> Iterator[None]:
    """Which free what an earlier error's frames held, while the fake driver wants nothing freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# The GPU


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of deadlines; it stands still until `now` is set."""
    clock = SimpleNamespace(now=0.0)
    patched = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("pyruntime.turns.time", patched)
    return clock


def fail_slowly(driver: FakeDriver, engine: Engine, ids: list[int], cache: Any = None) -> None:
    """A call whose time runs out, after which the GPU works on for ever, until it is waited for."""
    driver.slow = math.inf
    with pytest.raises(
        WaitTimeoutError, match=r"^the timeout of 0.01 s ran out: the GPU was still at work"
    ) as caught:
        engine.prefill(ids, cache=cache, timeout=SHORT)
    assert not isinstance(caught.value, BusyError)
    driver.slow = 0


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("weights", "warm"), [("fp16", []), ("fp16", [1, 2]), ("per-layer", [])])
def test_a_pass_that_takes_too_long(
    driver: FakeDriver, load: Load, weights: str, warm: list[int]
) -> None:
    engine = load(weights=weights)
    engine.warm(warm, continues=True)
    cache = engine.new_cache(64)
    engine.prefill([1, 2], cache=cache)
    fail_slowly(driver, engine, [3, 4], cache)
    assert cache.length == 2
    for timeout in (SHORT, 0):
        text = f"^busy: within {timeout} s the GPU did not finish what is left of an earlier call"
        with pytest.raises(BusyError, match=text):
            engine.prefill([3], cache=cache, timeout=timeout)
    driver.working = 4
    engine.prefill([3, 4], cache=cache, timeout=LONG)
    assert cache.length == 4 and driver.working == 0


@pytest.mark.usefixtures("clock")
def test_the_next_call_waits_for_what_the_last_one_left(driver: FakeDriver, load: Load) -> None:
    """As long as it takes, also one that makes a larger cache of the engine's own."""
    engine = load(kv_tokens=None)
    engine.kv_tokens = 64  # of the first one
    for ids in ([1], [1] * 100):
        fail_slowly(driver, engine, [1, 2])
        result = engine.prefill(ids)
        assert result.tokens == len(ids) and not driver.working


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("passes", [0, 1])
def test_a_score_that_takes_too_long(driver: FakeDriver, load: Load, passes: int) -> None:
    """In its pass, or after it, when there are more targets than a pass has rows."""
    engine = load(max_tokens=4)
    texts = [[1, 2]] * 3, [[3, 4], [3, 5], [3, 6]]
    expected = engine.score(*texts)
    driver.slow = math.inf if passes == 0 else 1

    def slow_down(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "cuStreamQuery":
            driver.slow = math.inf

    driver.hook = slow_down
    with pytest.raises(WaitTimeoutError, match="the GPU was still at work"):
        engine.score(*texts, timeout=SHORT)
    gc.collect()
    driver.hook, driver.slow = lambda name, arguments: None, 0
    assert driver.working and engine.score(*texts) == expected


def test_a_wait_that_is_long_enough_asks_and_one_without_end_does_not(
    driver: FakeDriver, load: Load
) -> None:
    engine = load()
    engine.prefill([1])  # makes its cache
    driver.calls.clear()
    driver.slow = 5
    engine.prefill([1], timeout=LONG)
    assert (driver.calls["cuStreamQuery"], driver.calls["cuStreamSynchronize"]) == (5, 0)
    for timeout in (None, 0):
        driver.calls.clear()
        engine.prefill([1], timeout=timeout)
        assert (driver.calls["cuStreamQuery"], driver.calls["cuStreamSynchronize"]) == (0, 1)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("end", ["cache", "engine", "drop"])
def test_nothing_is_freed_while_the_gpu_is_at_work(
    driver: FakeDriver, load: Load, end: str
) -> None:
    """The driver notes it as misuse."""
    engine = load()
    cache = engine.new_cache(8)
    fail_slowly(driver, engine, [1, 2], cache)
    assert driver.working
    if end == "cache":
        cache.close()
        assert not driver.working
    if end != "drop":
        engine.close()
        assert not driver.working
        cache.close()
    del engine, cache
    gc.collect()
    assert driver.held() == {} and not driver.working


@pytest.mark.usefixtures("clock")
def test_a_cache_that_is_dropped_lives_as_long_as_the_gpu_is_at_work(
    driver: FakeDriver, load: Load
) -> None:
    engine = load()
    cache = engine.new_cache(8)
    fail_slowly(driver, engine, [1, 2], cache)
    freed = driver.calls["cuMemFree"]
    del cache
    gc.collect()
    assert driver.working and driver.calls["cuMemFree"] == freed
    engine.prefill([1, 2])
    assert driver.calls["cuMemFree"] == freed + 3  # K, V and their maps


def test_an_interrupted_wait_for_an_interrupted_call(driver: FakeDriver, load: Load) -> None:
    """The next call waits, within its time: nothing of the live block may change before."""
    engine = load()
    cache, launches = engine.new_cache(8), 0
    driver.slow = math.inf

    def interrupt(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal launches
        launches += name == "cuLaunchKernelEx"
        if name == "cuStreamSynchronize" or (name == "cuLaunchKernelEx" and launches == 5):
            raise KeyboardInterrupt

    driver.hook = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.prefill([1, 2], cache=cache)
    with pytest.raises(KeyboardInterrupt):  # it waits first
        engine.prefill([1, 2], cache=cache)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert launches == 5 and cache.length == 0
    with pytest.raises(EngineError, match="has been closed"):
        engine.prefill([1, 2], cache=cache)
    driver.hook = lambda name, arguments: None
    engine.close()
    assert driver.held().keys() == {"arrays", "contexts"}  # the cache's


def warm_anew(engine: Engine, cache: Any, **more: Any) -> None:
    """After longer tables, which drop all graphs."""
    engine.new_cache(engine.model._decoder.positions + 1, **more)
    engine.warm([1, 20], **more)


def hand_over(engine: Engine, cache: Any, **more: Any) -> None:
    other = engine.new_cache(4, **more)
    engine.prefill([1, 2], cache=other, **more)
    cache.import_(other.fork(**more).export(**more), **more)


CALLS: dict[str, Callable[..., object]] = {
    "prefill": lambda engine, cache, **more: engine.prefill([1, 2], cache=cache, **more),
    "prefill of a list": lambda engine, cache, **more: engine.prefill(
        [[1, 2], [3]], cache=[cache, engine.new_cache(3)], **more
    ),
    "score": lambda engine, cache, **more: engine.score([[1, 2]], [[3, 4, 5]], **more),
    "embed": lambda engine, cache, **more: engine.embed([[1, 2], [3]], **more),
    "generate": lambda engine, cache, **more: engine.generate([1, 2], 2, **more),
    "warm": warm_anew,
    "hand over": hand_over,
}


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("timeout", [None, LONG])
@pytest.mark.parametrize("kind", CALLS)
def test_an_interrupt_at_any_call_of_the_driver_leaves_an_engine_that_works(
    driver: FakeDriver, load: Load, kind: str, graphs: str, timeout: float | None
) -> None:
    """But where it takes something down."""
    engine, call = load(graphs=graphs), CALLS[kind]
    cache = engine.new_cache(64)
    driver.slow, left = 3, 0

    def interrupt(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        left -= name not in ENDERS and not name.startswith(("cuCtx", "cuThread"))
        if not left:
            left = math.inf
            raise KeyboardInterrupt

    call(engine, cache)  # the next time it becomes a graph
    driver.hook = interrupt
    for at in count(1):
        cache.length, left = 0, at
        try:
            call(engine, cache, timeout=timeout)
        except KeyboardInterrupt:
            assert cache.length == 0
        else:
            break
        engine.prefill([1, 2, 3], cache=cache, timeout=LONG)
    assert at > 10
    left = math.inf
    engine.close()
    cache.close()
    assert driver.held() == {}


# Passes and tokens


def before_passes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]
) -> None:
    """Acts before each pass of engines of this kind, all of which are made by `run`."""
    kind = type(engine.model)
    monkeypatch.setattr(kind, "replay", lambda *arguments, **options: False)
    run = kind.run

    def act_first(*arguments: Any, **options: Any) -> Any:
        action()
        return run(*arguments, **options)

    monkeypatch.setattr(kind, "run", act_first)


def take_a_second_each(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    """Passes do."""
    before_passes(engine, monkeypatch, lambda: setattr(clock, "now", clock.now + 1))


@pytest.mark.parametrize("device", DEVICES)
def test_a_prompt_stops_between_passes(
    load: Load, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, device: str
) -> None:
    engine = load(device=device, max_tokens=4)
    take_a_second_each(engine, monkeypatch, clock)
    cache = engine.new_cache(64)
    engine.prefill([1], cache=cache)
    text = r"^the timeout of 1.5 s ran out: 8 of 12 tokens were done$"
    with pytest.raises(WaitTimeoutError, match=text):
        engine.prefill([1] * 12, cache=cache, timeout=1.5)
    assert cache.length == 1
    for timeout in (2.5, 0, None):
        assert engine.prefill([1] * 12, timeout=timeout).tokens == 12


def test_a_graph_is_not_replayed_when_no_time_is_left(
    driver: FakeDriver, load: Load, clock: SimpleNamespace
) -> None:
    engine = load()
    engine.warm([3])
    engine.prefill([1, 2, 3], timeout=1)
    late = Deadline(1)
    clock.now = 1.0
    text = r"^the timeout of 1 s ran out: 0 of 3 tokens were done$"
    with pytest.raises(WaitTimeoutError, match=text):
        engine.prefill([1, 2, 3], timeout=late)
    assert driver.calls["cuGraphLaunch"] == 1
    engine.prefill([1, 2, 3], timeout=0)
    assert driver.calls["cuGraphLaunch"] == 2


@pytest.mark.parametrize("device", DEVICES)
def test_generate_has_one_timeout(
    load: Load, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, device: str
) -> None:
    engine = load(device=device)
    monkeypatch.setattr(Engine, "_stop_ids", frozenset())
    expected = engine.generate([1, 2], 4)
    take_a_second_each(engine, monkeypatch, clock)
    assert engine.generate([1, 2], 4, timeout=3.5) == engine.generate([1, 2], 4, timeout=0)
    assert engine.generate([1, 2], 4) == expected
    text = r"^the timeout of 2.5 s ran out: 0 of 1 tokens were done$"
    with pytest.raises(WaitTimeoutError, match=text):
        engine.generate([1, 2], 4, timeout=2.5)


@pytest.mark.parametrize("timeout", [-1, math.nan, "1"])
def test_a_timeout_that_is_none_is_refused(load: Load, timeout: Any) -> None:
    engine = load(device="cpu")
    for call in ALL_CALLS:
        with pytest.raises(ValueError, match=r"^timeout="):
            call(engine, timeout=timeout)


# Threads

ALL_CALLS: list[Callable[..., object]] = [
    lambda engine, **more: engine.prefill([1], **more),
    lambda engine, **more: engine.prefill([[1], [2]], **more),
    lambda engine, **more: engine.generate([1], 1, **more),
    lambda engine, **more: engine.score([[1]], [[2]], **more),
    lambda engine, **more: engine.score_rows([[1]], [[0]], [[2]], **more),
    lambda engine, **more: engine.warm([1], **more),
    lambda engine, **more: engine.perplexity([1, 2], **more),
    lambda engine, **more: engine.embed([[1, 2]], **more),
    lambda engine, **more: engine.new_cache(1, **more),
]


def test_all_calls_with_a_timeout_are_among_them() -> None:
    limited = {
        name
        for name, method in inspect.getmembers(Engine, inspect.isfunction)
        if not name.startswith("_") and "timeout" in inspect.signature(method).parameters
    }
    assert limited == {name for call in ALL_CALLS for name in call.__code__.co_names}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_all_calls_of_a_closed_or_forked_engine_are_refused(load: Load, device: str) -> None:
    engine = load(device=device)

    def require(text: str) -> None:
        for call in (*ALL_CALLS, Engine.launches, Engine.stats):
            with pytest.raises(EngineError, match=text):
                call(engine)

    assert exit_code(lambda: require("belongs to the parent process")) == 0
    engine.close()
    require("has been closed")


class Stuck:
    """Lets passes wait until `over` is set; `inside` says that one does."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside, self.over = threading.Event(), threading.Event()
        before_passes(engine, monkeypatch, self._stay)

    def _stay(self) -> None:
        self.inside.set()
        assert self.over.wait(LONG)


@pytest.mark.parametrize("device", DEVICES)
def test_close_waits_for_the_running_call_and_refuses_those_that_wait(
    driver: FakeDriver, load: Load, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    engine = load(device=device)
    stuck, joined = Stuck(engine, monkeypatch), threading.Semaphore(0)
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(np.asarray(engine.prefill([1, 2]).logits).shape)
        except EngineError as error:
            results.append(str(error))

    running = start(call)
    assert stuck.inside.wait(LONG)
    engine.model.turns._queue = NotedQueue(joined.release)
    waiting = [start(call), start(call), start(engine.close)]
    for _ in waiting:
        assert joined.acquire(timeout=LONG)
    call()  # this comes after `close`
    closed = "this engine has been closed"
    assert results == [closed]
    stuck.over.set()
    finish(running, *waiting)
    assert Counter(results) == {closed: 3, (1, engine.config.vocab): 1}
    gc.collect()
    assert driver.held() == {}


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_is_not_closed_under_a_call_that_fills_it(
    load: Load, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    engine = load(device=device)
    cache, stuck = engine.new_cache(8), Stuck(engine, monkeypatch)
    running = start(lambda: engine.prefill([1, 2], cache=cache))
    assert stuck.inside.wait(LONG)
    joined = threading.Semaphore(0)
    engine.model.turns._queue = NotedQueue(joined.release)
    closing = start(cache.close)
    assert joined.acquire(timeout=LONG) and not cache.closed
    stuck.over.set()
    finish(running, closing)
    assert cache.length == 2 and cache.closed


@pytest.mark.parametrize("device", DEVICES)
def test_busy_while_another_call_is_served(
    load: Load, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    engine = load(device=device)
    engine.prefill([1], timeout=0)
    cache = engine.new_cache(1)
    calls = [partial(call, engine) for call in ALL_CALLS]
    calls += [cache.fork, cache.export, partial(cache.import_, cache.export(timeout=0))]
    stuck = Stuck(engine, monkeypatch)
    running = start(engine.prefill, [1])
    assert stuck.inside.wait(LONG)
    for timeout in (0, SHORT):
        for call in calls:
            with pytest.raises(BusyError, match=r"calls before it: 1$"):
                call(timeout=timeout)
    stuck.over.set()
    finish(running)
    engine.prefill([1], timeout=0)


@pytest.mark.parametrize("device", DEVICES)
def test_two_engines_run_at_the_same_time(
    load: Load, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Each one's pass begins when the other's does."""
    engines = [load(device=device) for _ in range(2)]
    before_passes(engines[0], monkeypatch, threading.Barrier(2, timeout=LONG).wait)
    results: list[int] = []
    finish(*[start(lambda e=e: results.append(e.prefill([1, 2]).tokens)) for e in engines])
    assert results == [2, 2]
