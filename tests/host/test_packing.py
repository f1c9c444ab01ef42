"""How prompts of any lengths become passes, and what a pass of several is told."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver
from hypothesis import given
from hypothesis import strategies as st

from pyruntime import Engine
from pyruntime.model.batch import REGION, Batch, Prompt, runs, whole_regions
from pyruntime.model.buckets import PARTS, TILE, bucket
from pyruntime.model.decoder import PASSES, Shape
from pyruntime.model.packing import passes

Load = Callable[..., Engine]
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 40), st.none() | st.integers(1, 6), st.none() | st.integers(50, 90))
def test_every_token_is_in_one_pass_and_in_order(
    lengths: list[int], rows: int, prompts: int | None, positions: int | None
) -> None:
    found = list(passes(lengths, rows=rows, prompts=prompts, positions=positions))
    covered = [
        (part.prompt, token) for p in found for part in p for token in range(part.first, part.last)
    ]
    assert covered == [(i, token) for i, length in enumerate(lengths) for token in range(length)]
    for parts in found:
        assert parts and sum(part.last - part.first for part in parts) <= rows
        assert prompts is None or len(parts) <= prompts
        assert len(parts) == 1 or all(part.last == lengths[part.prompt] for part in parts)
        ends = [part.region + lengths[part.prompt] for part in parts]
        assert all(end <= after.region for end, after in zip(ends, parts[1:], strict=False))
        assert all(part.region % REGION == 0 for part in parts)
        assert positions is None or len(parts) == 1 or ends[-1] <= positions


@given(LENGTHS, st.integers(50, 200))
def test_no_two_passes_in_a_row_would_have_been_one(lengths: list[int], rows: int) -> None:
    sizes = [sum(p.last - p.first for p in parts) for parts in passes(lengths, rows=rows)]
    firsts = [parts[0] for parts in passes(lengths, rows=rows)]
    for (size, _), (_, following) in pairwise(zip(sizes, firsts, strict=True)):
        assert size + following.last - following.first > rows


def test_what_is_cached_before_takes_positions() -> None:
    split = passes([10, 10, 10], starts=[0, 30, 0], rows=100, positions=70)
    assert [[part.region for part in parts] for parts in split] == [[0, 16], [0]]
    assert whole_regions(16) == 16 and whole_regions(17) == 32


@given(st.lists(st.integers(0, 60), unique=True).map(sorted), st.integers(1, 9))
def test_runs(rows: list[int], most: int) -> None:
    found = runs(np.array(rows, np.int32), most)
    assert [first + i for first, count in found for i in range(count)] == rows
    assert all(1 <= count <= most for _, count in found)
    for (first, count), (following, _) in pairwise(found):
        assert first + count < following or count == most


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_a_bucket_wastes_little(n: int, more: int) -> None:
    assert n <= bucket(n, n + more) <= min(n * 1.12, n + more)


def test_buckets_end_where_tiles_do() -> None:
    """So that no length takes more tiles than it has rows for, where there are few."""
    whole = {n: bucket(n, 1 << 20) for n in range(20_000)}
    assert all(bucket(edge, 1 << 20) == edge for edge in whole.values())
    assert list(whole.values()) == sorted(whole.values())
    assert all(whole[n] == n for n in range(18))
    for rows in (8, 16, 32, 64, 128):
        assert all(-(-n // rows) == -(-whole[n] // rows) for n in range(PARTS * rows + 1)), rows
    assert all(-(-n // TILE) == -(-edge // TILE) for n, edge in whole.items())
    assert whole[3325] == 3328
    assert len({whole[n] for n in range(1, 4097)}) <= PASSES


def test_more_than_there_may_be_is_not_cut() -> None:
    assert bucket(40, 37) == 40 and bucket(37, 39) == 39


# What a pass is told


class Fixed:
    """A cache that has a length, and room for anything."""

    capacity = 1 << 30

    def __init__(self, length: int = 0) -> None:
        self.length = length


def batch(*prompts: tuple[int, list[int], list[int]], start: int = 0) -> Batch:
    def rows(values: list[int]) -> Any:
        return np.array(values, np.int32)

    found = Batch([Prompt(rows([0] * n), Fixed(start), rows(a), rows(b)) for n, a, b in prompts])
    found.begin(lambda cache: None)
    return found


def test_rows_of_a_batch() -> None:
    two = batch((3, [2], []), (4, [0, 3], [1, 3]))
    assert two.rows == 7 and two.longest == 4 and two.fresh
    assert two.logits.tolist() == [2, 3, 6] and two.hidden.tolist() == [4, 6]
    assert two.kept.tolist() == [2, 3, 4, 6]
    assert not batch((1, [], []), start=1).fresh


@pytest.mark.parametrize(
    ("prompts", "shape"),
    [
        ([(37, [36], [])], Shape(40, 40, 1, 1, True)),
        ([(38, [37], [])], Shape(40, 40, 1, 1, True)),
        ([(37, [], [])], Shape(40, 40, 1, 0, True)),
        ([(37, list(range(37)), [])], Shape(40, 40, 1, 40, True)),
        ([(38, list(range(37)), [])], Shape(40, 40, 1, 40, True)),  # but one
        ([(37, list(range(0, 37, 2)), [])], Shape(40, 40, 1, 20, True)),  # 19
        ([(17, [16], [])], Shape(17, 17, 1, 1, True)),
        ([(400, list(range(300)), [])], Shape(416, 416, 1, 416, True)),  # too many to be gathered
        ([(510, [0], [])], Shape(512, 512, 1, 1, True)),
        ([(37, [36], []), (34, [33], [])], Shape(72, 40, 2, 2, True)),
        ([(37, [36], list(range(37)))] * 2, Shape(80, 40, 2, 80, True)),
    ],
)
def test_shapes(prompts: list[Any], shape: Shape) -> None:
    assert Shape.of(batch(*prompts), 512) == shape


def test_live_values_of_packed_prompts(driver: FakeDriver, load: Load) -> None:
    """Without caches of their own they lie side by side in the engine's."""
    engine = load(max_tokens=64, kv_tokens=64)
    results = engine.prefill([[1, 2, 3], [4] * 20, [5]])
    assert [np.asarray(r.logits).shape for r in results] == [(1, engine.config.vocab)] * 3
    live, cache = engine.model._decoder.live, engine._cache
    assert np.asarray(live.live).tolist()[:3] == [24, 3, 3]
    row_bytes = 2 * engine.config.head_dim
    for i, (row, rows, first) in enumerate([(0, 3, 0), (3, 20, 16), (23, 1, 48)]):
        entry = struct.unpack("<4i3Q", np.asarray(live.sequences)[i])
        assert entry[:4] == (row, rows, 0, 64)
        assert entry[4:6] == tuple(a.ptr + first * row_bytes for a in (cache.k, cache.v))
    assert np.asarray(live.ids)[:24].tolist() == [1, 2, 3, *[4] * 20, 5]
    assert np.asarray(live.positions)[:24].tolist() == [0, 1, 2, *range(20), 0]
    assert np.asarray(live.sequence_of)[:24].tolist() == [0] * 3 + [1] * 20 + [2]
    assert np.asarray(live.wanted_rows)[:3].tolist() == [2, 22, 23]
    assert driver.misuse == []


@pytest.mark.parametrize("weights", ["fp16", "per-layer"])
def test_scattered_rows_are_gathered_before_the_output_matrix(load: Load, weights: str) -> None:
    """Which is read once, not for each of them."""
    engine = load(weights=weights, max_tokens=64, kv_tokens=256)

    def launched(**asked: Any) -> int:
        before = sum(engine.launches().values())
        engine.prefill([[1] * 5] * 9, **asked)
        return sum(engine.launches().values()) - before

    launched(hidden="mean")  # some are recorded with sizes
    assert launched(hidden="mean") == launched() + 1  # the sums
    live = engine.model._decoder.live
    engine.prefill([[1] * 5] * 9, hidden="mean")
    assert np.asarray(live.live)[2] == 9
    assert np.asarray(live.wanted_rows)[:9].tolist() == list(range(4, 45, 5))


def test_live_values_of_packed_8_bit_prompts(load: Load) -> None:
    """Each is widened into a place of its own in the staging cache."""
    engine = load(kv_dtype="e4m3", max_tokens=64, kv_tokens=64)
    caches = [engine.new_cache(n) for n in (8, 24)]
    for step in ([[1, 2], [3]], [[1], [3] * 7]):
        engine.prefill(step, cache=caches)
    live, staging = engine.model._decoder.live, engine.model._decoder.staging
    row_bytes = 2 * engine.config.head_dim
    for i, (row, rows, start, first) in enumerate([(0, 1, 2, 0), (1, 7, 1, 16)]):
        seen = struct.unpack("<4i3Q", np.asarray(live.sequences)[i])
        assert seen[:4] == (row, rows, start, 64)
        assert seen[4:6] == tuple(a.ptr + first * row_bytes for a in (staging.k, staging.v))
        stored = struct.unpack("<4i4Q", np.asarray(live.stored)[i])
        assert stored == (row, rows, start, caches[i].capacity, *(a.ptr for a in caches[i].arrays))


def test_each_region_has_maps_of_its_own(driver: FakeDriver, load: Load) -> None:
    """They begin where it does, end where the cache does, and are made once."""
    engine = load(max_tokens=64, kv_tokens=64)
    made: list[tuple[int, list[int]]] = []
    driver.hook = lambda name, given: (
        made.append((given[2], [int(n) for n in given[3]]))
        if name == "cuTensorMapEncodeTiled"
        else None
    )
    engine.prefill([[1] * 3] * 3)
    cache, row_bytes = engine._cache, 2 * engine.config.head_dim
    bases = {
        a.ptr + first * row_bytes: 64 - first for a in (cache.k, cache.v) for first in (16, 32)
    }
    own = [(address, sizes) for address, sizes in made if address in bases]
    assert {address for address, _ in own} == set(bases) or not own  # no kernel that copies by maps
    assert all(sizes[1] == bases[address] for address, sizes in own)
    made.clear()
    engine.prefill([[1] * 3] * 3)
    assert not [address for address, _ in made if address in bases]


def test_a_batch_that_a_model_cannot_take_is_refused(load: Load) -> None:
    engine = load(max_tokens=8, kv_tokens=8)
    cache, other = engine.new_cache(4), engine.new_cache(4)

    def run(*prompts: tuple[int, Any]) -> None:
        parts = [Prompt(np.zeros(n, np.int32), c) for n, c in prompts]
        engine.model.run(Batch(parts))

    for prompts, text in (
        ([(1, cache), (1, cache)], "share a cache"),
        ([(4, cache), (5, other)], "5 tokens after 0 exceed"),
        ([(4, engine.new_cache(8)), (5, engine.new_cache(8))], "9 tokens in one pass"),
    ):
        with pytest.raises(ValueError, match=text):
            run(*prompts)
    assert cache.length == other.length == 0


def test_8_bit_caches_that_staging_cannot_hold_at_once_take_turns(load: Load) -> None:
    engine = load(kv_dtype="e4m3", max_tokens=64, kv_tokens=40)
    caches = [engine.new_cache(30) for _ in range(3)]
    engine.prefill([[1] * 20] * 3, cache=caches)
    assert engine.stats().misses + engine.stats().hits == 3
    parts = [Prompt(np.zeros(1, np.int32), cache) for cache in caches]
    with pytest.raises(ValueError, match="positions in 8-bit caches"):
        engine.model.run(Batch(parts))
