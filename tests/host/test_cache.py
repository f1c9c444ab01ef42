"""What an application does with a K/V cache, in NumPy and on a fake driver's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_driver import FakeDriver

from pyruntime import Engine

Load = Callable[..., Engine]

on_both = pytest.mark.parametrize("device", ["cpu", "cuda:0"])


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
@pytest.mark.parametrize("tokens", [-1, 4, 2.0, "1", None])
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


@on_both
def test_a_closed_cache_takes_no_prompt(load: Load, device: str) -> None:
    engine = load(device=device)
    cache = engine.new_cache(8)
    for _ in range(2):
        cache.close()
    with pytest.raises(ValueError, match="this cache has been closed"):
        engine.prefill([1], cache=cache)
