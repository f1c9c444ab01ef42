"""What an application does with a K/V cache, in NumPy and on a fake driver's device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fake_driver import INVALID_VALUE, FakeDriver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyruntime import Engine
from pyruntime.errors import CudaError, EngineError, OutOfMemoryError
from pyruntime.model.any_cache import AnyCache
from pyruntime.model.config import KV_DTYPES

ILLEGAL_ADDRESS = 700  # a CUresult that loses the context

Load = Callable[..., Engine]

on_both = pytest.mark.parametrize("device", ["cpu", "cuda:0"])
of_both = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


def held(cache: AnyCache) -> dict[str, np.ndarray]:
    """The arrays of a cache, as far as they are filled."""
    named = {name: getattr(cache, name) for name in ("k", "v", "k_scale", "v_scale")}
    return {
        name: np.array(np.asarray(array)[:, :, : cache.length])
        for name, array in named.items()
        if array is not None
    }


def store(cache: AnyCache, ids: list[int], engine: Engine) -> None:
    """A prefill, after which the new positions hold something on a fake device, too."""
    start, random = cache.length, np.random.default_rng(sum(ids))
    engine.prefill(ids, cache=cache)
    if engine.path.startswith("cuda"):
        for name in held(cache):
            array = getattr(cache, name)
            values = np.asarray(array)
            new = values[:, :, start : cache.length]
            new[...] = random.integers(0, 100, new.shape)
            array.upload(values)


@dataclass
class Expected:
    """What a cache should hold."""

    ids: list[int]
    arrays: dict[str, np.ndarray]

    @classmethod
    def of(cls, cache: AnyCache, ids: list[int]) -> Expected:
        return cls(ids, held(cache))

    def up_to(self, tokens: int) -> Expected:
        return Expected(self.ids[:tokens], {n: a[:, :, :tokens] for n, a in self.arrays.items()})

    def check(self, cache: AnyCache) -> None:
        assert cache.length == len(self.ids) and cache.tokens.tolist() == self.ids
        assert cache.tokens.dtype == np.int32
        found = held(cache)
        assert found.keys() == self.arrays.keys()
        for name, array in found.items():
            assert array.dtype == self.arrays[name].dtype
            assert np.array_equal(array, self.arrays[name]), name


# Tokens and truncation


@on_both
def test_tokens_are_those_of_the_filled_positions(load: Load, device: str) -> None:
    engine = load(device=device)
    cache = engine.new_cache(64)
    assert cache.tokens.tolist() == [] and cache.length == 0
    engine.prefill([3, 1, 2], cache=cache)
    before = cache.tokens
    engine.prefill(range(40), cache=cache)  # in three passes
    assert cache.tokens.tolist() == [3, 1, 2, *range(40)] and cache.length == 43
    cache.truncate(5)
    assert cache.tokens.tolist() == [3, 1, 2, 0, 1]
    cache.length = 2
    engine.prefill([7], cache=cache)
    assert cache.tokens.tolist() == [3, 1, 7] and before.tolist() == [3, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        cache.tokens[0] = 1


@on_both
@pytest.mark.parametrize("tokens", [-1, 4, 2.0, True, "1", None])
def test_what_is_no_shorter_length_is_refused(load: Load, device: str, tokens: Any) -> None:
    engine = load(device=device)
    cache = engine.new_cache(8)
    engine.prefill([1, 2, 3], cache=cache)
    with pytest.raises(ValueError, match=f"of length 3 cannot be cut to {tokens!r}"):
        cache.truncate(tokens)
    assert cache.tokens.tolist() == [1, 2, 3]


@on_both
def test_a_prompt_that_fails_in_its_second_pass_leaves_no_token(load: Load, device: str) -> None:
    engine = load(device=device)
    cache = engine.new_cache(64)
    engine.prefill([1, 2, 3], cache=cache)
    run, lengths = engine.model.run, list[int]()

    def second_fails(*arguments: Any, **options: Any) -> Any:
        lengths.append(cache.length)
        if len(lengths) == 2:
            raise KeyboardInterrupt
        return run(*arguments, **options)

    engine.model.run = second_fails
    with pytest.raises(KeyboardInterrupt):
        engine.prefill([5] * 20, cache=cache)
    engine.close()
    assert lengths == [3, 19] and cache.tokens.tolist() == [1, 2, 3]


@on_both
def test_each_of_several_prompts_has_its_tokens(load: Load, device: str) -> None:
    """And none, if one of their passes fails."""
    engine = load(device=device)
    caches = [engine.new_cache(64) for _ in range(3)]
    prompts = [[1, 2], [3] * 20, [4]]
    engine.prefill(prompts, cache=caches)
    engine.prefill([9])  # without one
    assert [cache.tokens.tolist() for cache in caches] == prompts
    run, passes = engine.model.run, list[int]()

    def last_fails(batch: Any) -> Any:
        passes.append(batch.rows)
        if len(passes) == 4:
            raise KeyboardInterrupt
        return run(batch)

    engine.model.run = last_fails
    with pytest.raises(KeyboardInterrupt):
        engine.prefill(prompts, cache=caches)
    engine.close()
    assert passes == [2, 16, 4, 1] and [cache.tokens.tolist() for cache in caches] == prompts


@pytest.mark.parametrize("fails", [False, True])
def test_a_cache_that_is_cut_during_a_pass_stays_cut(
    driver: FakeDriver, load: Load, fails: bool
) -> None:
    """As another thread may do, which does not wait."""
    engine = load()
    cache = engine.new_cache(64)
    engine.prefill([1, 2, 3], cache=cache)

    def cut(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "cuLaunchKernelEx":
            cache.truncate(2)
            if fails:
                raise KeyboardInterrupt

    driver.hook = cut
    if fails:
        with pytest.raises(KeyboardInterrupt):
            engine.prefill([4, 5], cache=cache)
    else:
        engine.prefill([4, 5], cache=cache)
    assert cache.tokens.tolist() == [1, 2]


# Copies

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.lists(st.integers(0, 200), min_size=1, max_size=20)),
        st.tuples(st.just("truncate"), st.floats(0, 1)),
        st.tuples(st.sampled_from(["fork", "hand over"]), st.integers(0, 3)),
    ),
    min_size=3,
    max_size=8,
)


@on_both
@of_both
@settings(
    max_examples=20,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(operations=OPERATIONS)
def test_caches_hold_what_was_put_into_them(
    load: Load, device: str, kv_dtype: str, operations: list[tuple[str, Any]]
) -> None:
    """Whatever is done, in whichever order, and whatever is then done to their copies."""
    with load(device=device, kv_dtype=kv_dtype) as engine:
        cache = engine.new_cache(40)
        expected = Expected.of(cache, [])
        left: list[tuple[AnyCache, Expected]] = []
        for operation, value in operations:
            if operation == "prefill":
                ids = value[: cache.capacity - cache.length]
                if not ids:
                    continue
                store(cache, ids, engine)
                now = Expected.of(cache, expected.ids + ids)
                for name, array in expected.arrays.items():  # what was there stays
                    assert np.array_equal(now.arrays[name][:, :, : len(expected.ids)], array)
                expected = now
            elif operation == "truncate":
                tokens = int(value * cache.length)
                cache.truncate(tokens)
                expected = expected.up_to(tokens)
            else:
                left.append((cache, expected))
                capacity = max(cache.length + value, 1)
                if operation == "fork":
                    cache = cache.fork(capacity)
                else:
                    exported = cache.export()
                    cache = engine.new_cache(capacity)
                    cache.import_(exported)
                assert cache.capacity == capacity
            expected.check(cache)
        for earlier, then in left:
            then.check(earlier)
            earlier.close()
        cache.close()


@of_both
def test_copies_go_on_as_the_original(load: Load, kv_dtype: str) -> None:
    """In NumPy, which computes; and independently of it."""
    engine = load(device="cpu", kv_dtype=kv_dtype)
    cache = engine.new_cache(24)
    engine.prefill([5, 6, 7, 8], cache=cache)
    fork, other = cache.fork(), load(device="cpu", kv_dtype=kv_dtype)
    taken = other.new_cache(24)
    taken.import_(cache.export())
    logits = []
    for runner, each in ((engine, cache), (engine, fork), (other, taken)):
        logits.append(runner.prefill([9, 10], cache=each, logits="all").logits)
        assert each.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert np.array_equal(logits[1], logits[0]) and np.array_equal(logits[2], logits[0])


@on_both
@of_both
def test_a_fork_that_is_too_short_is_refused(load: Load, device: str, kv_dtype: str) -> None:
    engine = load(device=device, kv_dtype=kv_dtype)
    cache = engine.new_cache(8)
    engine.prefill([1, 2, 3], cache=cache)
    with pytest.raises(ValueError, match="2 positions of 3 that are filled"):
        cache.fork(2)
    for capacity in (0, -1):
        with pytest.raises(ValueError, match=f"capacity={capacity}: "):
            cache.fork(capacity)
    assert cache.fork(3).capacity == 3 and cache.fork().capacity == 8


def test_a_fork_that_does_not_fit_says_how_much(driver: FakeDriver, load: Load) -> None:
    engine = load()
    before, cache = driver.held(), engine.new_cache(8)
    with pytest.raises(OutOfMemoryError, match=r"[\d,]+ bytes of .* are needed .* are free on"):
        cache.fork(1 << 22)
    cache.close()
    assert driver.held() == before


@pytest.mark.parametrize("copied", [0, 3])
def test_a_fork_that_fails_keeps_nothing(driver: FakeDriver, load: Load, copied: int) -> None:
    """At the first copy or the last; the error is kept."""
    engine = load(kv_dtype="e4m3")
    cache = engine.new_cache(8)
    engine.prefill([1, 2], cache=cache)
    before = driver.held()
    driver.fail["cuMemcpy2DAsync"] = (copied, INVALID_VALUE)
    with pytest.raises(CudaError, match=r"cuMemcpy2DAsync failed.* rows of ") as kept:
        cache.fork()
    assert driver.held() == before, kept.value
    assert cache.fork().tokens.tolist() == [1, 2]


def test_an_import_that_fails_leaves_an_empty_cache(driver: FakeDriver, load: Load) -> None:
    engine = load()
    cache = engine.new_cache(8)
    engine.prefill([1, 2], cache=cache)
    exported = cache.export()
    driver.fail["cuMemcpy2DAsync"] = (1, INVALID_VALUE)
    with pytest.raises(CudaError):
        cache.import_(exported)
    assert cache.length == 0
    cache.import_(exported)
    assert cache.tokens.tolist() == [1, 2]


USES: dict[str, Callable[[AnyCache], object]] = {
    "fork": lambda cache: cache.fork(),
    "export": lambda cache: cache.export(),
}


@pytest.mark.parametrize("use", USES)
def test_a_context_lost_by_a_copy_is_remembered(driver: FakeDriver, load: Load, use: str) -> None:
    engine = load()
    cache = engine.new_cache(8)
    engine.prefill([1], cache=cache)
    driver.fail["cuMemcpy2DAsync"] = (0, ILLEGAL_ADDRESS)
    with pytest.raises(CudaError):
        USES[use](cache)
    for again in ("fork", "export"):
        with pytest.raises(EngineError, match="lost by an earlier failure: cuMemcpy2DAsync failed"):
            USES[again](cache)


@pytest.mark.parametrize("use", USES)
def test_copies_of_a_closed_or_forked_engine_are_refused(load: Load, use: str) -> None:
    engine = load()
    cache = engine.new_cache(8)
    engine.model.turns._forks -= 1
    with pytest.raises(EngineError, match="belongs to the parent process"):
        USES[use](cache)
    engine.model.turns._forks += 1
    engine.close()
    with pytest.raises(EngineError, match="has been closed"):
        USES[use](cache)


@on_both
@of_both
def test_a_closed_cache_is_refused_everywhere(load: Load, device: str, kv_dtype: str) -> None:
    engine = load(device=device, kv_dtype=kv_dtype)
    cache = engine.new_cache(8)
    exported = cache.export()
    for _ in range(2):
        cache.close()
    for use in (
        *USES.values(),
        lambda c: c.import_(exported),
        lambda c: engine.prefill([1], cache=c),
    ):
        with pytest.raises(ValueError, match="this cache has been closed"):
            use(cache)


# Prefixes


@pytest.mark.parametrize(
    ("before", "asked", "logits", "reused"),
    [
        ([1, 2, 3], [1, 2, 3, 4, 5], "last", 3),
        ([1, 2, 3], [1, 2, 9, 4], "last", 2),
        ([1, 2, 3], [7, 8], "last", 0),
        ([1, 2, 3], [1, 2, 3], "last", 2),  # a row is run for its logits
        ([1, 2, 3, 4], [1, 2], "last", 1),
        ([1, 2, 3], [1, 2, 3], "none", 2),
        ([], [4, 5], "last", 0),
        ([1, 2, 3], [1, 2, 3, 4], "all", 0),
        ([1, 2, 3], [1, 2, 3, 4, 5], [1, 4], 1),
    ],
)
def test_a_beginning_that_is_cached_is_not_run_again(
    load: Load, before: list[int], asked: list[int], logits: Any, reused: int
) -> None:
    engine = load(device="cpu")
    cache = engine.new_cache(8)
    if before:
        engine.prefill(before, cache=cache)
    result = engine.prefill(asked, cache=cache, reuse=True, logits=logits)
    assert (result.reused, result.tokens) == (reused, len(asked) - reused)
    assert cache.tokens.tolist() == asked
    if logits != "none":
        whole = engine.prefill(asked, logits=logits).logits
        np.testing.assert_allclose(result.logits, whole, atol=1e-4)


@on_both
def test_several_prompts_reuse_what_each_cache_holds(load: Load, device: str) -> None:
    """Which is all that is left where a pass fails."""
    engine = load(device=device)
    caches = [engine.new_cache(8) for _ in range(2)]
    engine.prefill([[1, 2, 3], [4, 5]], cache=caches)
    asked = [[1, 2, 9], [4, 5, 6, 7]]
    results = engine.prefill(asked, cache=caches, reuse=True)
    assert [(r.reused, r.tokens) for r in results] == [(2, 1), (2, 2)]
    assert [cache.tokens.tolist() for cache in caches] == asked
    run = engine.model.run

    def fails(batch: Any) -> Any:
        run(batch)
        raise KeyboardInterrupt

    engine.model.run = fails
    with pytest.raises(KeyboardInterrupt):
        engine.prefill([[1, 8], [4, 5, 6, 8, 8]], cache=caches, reuse=True)
    engine.close()
    assert [cache.tokens.tolist() for cache in caches] == [[1], [4, 5, 6]]


@on_both
def test_what_cannot_be_reused_is_left_alone(load: Load, device: str) -> None:
    engine, other = load(device=device), load(device=device)
    cache, foreign = engine.new_cache(4), other.new_cache(4)
    for e, c in ((engine, cache), (other, foreign)):
        e.prefill([1, 2], cache=c)
    closed = engine.new_cache(4)
    closed.close()
    for ids, caches, text in (
        ([9] * 5, cache, "4 positions"),
        ([9], foreign, "another model"),
        ([9], None, "no cache to reuse"),
        ([[9], [9]], [cache, cache], "two prompts share"),
        ([[9], [9]], [cache, foreign], "prompt 1: .*another model"),
        ([[9], [9]], [cache, closed], "prompt 1: .*closed"),
        ([[9], [9]], [cache, "cache"], "prompt 1: .*another model"),
    ):
        with pytest.raises(ValueError, match=text):
            engine.prefill(ids, cache=caches, reuse=True)
    assert cache.tokens.tolist() == foreign.tokens.tolist() == [1, 2]
