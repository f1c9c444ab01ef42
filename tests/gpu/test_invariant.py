"""exact="invariant": a row has its bits whatever its pass holds, and however its prompt was cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from goldens import SMOLLM2, model_path
from numpy.typing import NDArray

from pyruntime import Engine

STEMS = [
    SMOLLM2, "tiny-qwen2-q4_k_m", "tiny-qwen3-q6_k", "tiny-gemma2-q8_0", "tiny-mistral-q8_0",
    "tiny-llama-q8_0",
]  # fmt: skip
MOST = 256  # rows of a pass
WEIGHTS = pytest.mark.parametrize("weights", ["fp16", "per-layer"])
KV = pytest.mark.parametrize("kv_dtype", ["f16", "e4m3"])
ALL = pytest.mark.parametrize("stem", STEMS)


@contextmanager
def engine_for(stem: str, **options: Any) -> Iterator[Engine]:
    given = {"device": "cuda:0", "max_tokens": MOST, "kv_tokens": 512, "exact": "invariant"}
    with Engine.load(model_path(stem), **{**given, **options}) as engine:
        yield engine


def made_up(engine: Engine, n: int, seed: int = 0) -> NDArray[np.int32]:
    most = engine.config.context_length
    random = np.random.default_rng(seed)
    return random.integers(0, engine.config.vocab, min(n, most)).astype(np.int32)


def logits(engine: Engine, ids: Any, rows: Any = "all", **given: Any) -> NDArray[np.float32]:
    found = np.asarray(engine.prefill(ids, logits=rows, **given).logits)
    assert np.isfinite(found).all()
    return found


def same(found: Any, expected: Any) -> bool:
    found, expected = (np.ascontiguousarray(x) for x in (found, expected))
    return found.shape == expected.shape and bool((found.view("u1") == expected.view("u1")).all())


def lengths_for(ids: NDArray[np.int32]) -> list[int]:
    """In many buckets, at their ends and between, and of every engine's tiles."""
    found = (1, 2, 7, 8, 9, 16, 17, 19, 33, 41, 64, 65, 97, 127, 128, 129, 150, 193, 256, 300)
    return [n for n in found if n <= len(ids)]


@KV
@WEIGHTS
@ALL
def test_a_row_alone_is_that_of_the_whole_prompt(stem: str, weights: str, kv_dtype: str) -> None:
    """In passes of every bucket, enqueued and replayed; also the rows that are gathered."""
    with engine_for(stem, weights=weights, kv_dtype=kv_dtype) as engine:
        ids = made_up(engine, 300)
        whole = logits(engine, ids)
        for n in lengths_for(ids):
            for _ in range(3):
                assert same(logits(engine, ids[:n], "last"), whole[n - 1 : n]), n
            assert same(logits(engine, ids[:n]), whole[:n]), n
            some = sorted({0, n // 3, n // 2, n - 1})
            assert same(logits(engine, ids[:n], some), whole[some]), n
        assert engine.stats().failures == 0


@KV
@WEIGHTS
@ALL
def test_a_prompt_may_be_cut_anyhow(stem: str, weights: str, kv_dtype: str) -> None:
    """Logits, and what is cached of it."""
    with engine_for(stem, weights=weights, kv_dtype=kv_dtype) as engine:
        ids = made_up(engine, 200)
        held = []
        cuts = [[], [1], [64], [63, 65, 66], [17, 100, 150], list(range(20, 40))]
        for cut in cuts:
            ends = [0, *(at for at in cut if at < len(ids)), len(ids)]
            cache = engine.new_cache(len(ids))
            parts = [logits(engine, ids[a:b], cache=cache) for a, b in pairwise(ends)]
            held.append([np.concatenate(parts), *(np.asarray(a) for a in cache.arrays[:2])])
            cache.close()
        for cut, found in zip(cuts, held, strict=True):
            assert all(map(same, found, held[0])), cut


@KV
@WEIGHTS
@ALL
def test_a_prompt_may_be_packed_with_any(stem: str, weights: str, kv_dtype: str) -> None:
    """Logits and hidden states, at all places of a pass."""
    with engine_for(stem, weights=weights, kv_dtype=kv_dtype) as engine:
        lengths = [1, 2, 15, 16, 17, 40, 1, 96, 33, 5, 120]
        prompts = [made_up(engine, n, seed) for seed, n in enumerate(lengths)]
        alone = [engine.prefill(ids, logits="all", hidden="last") for ids in prompts]
        for order in (1, -1):
            for rows in ("all", "last"):
                for _ in range(2):  # then as graphs
                    found = engine.prefill(prompts[::order], logits=rows, hidden="last")
                    for result, want in zip(found, alone[::order], strict=True):
                        expected = np.asarray(want.logits)[0 if rows == "all" else -1 :]
                        assert same(result.logits, expected)
                        assert same(result.hidden, want.hidden)


@WEIGHTS
@pytest.mark.parametrize("stem", [SMOLLM2, "tiny-qwen2-q4_k_m"])
def test_scores_are_those_of_a_text_alone(stem: str, weights: str) -> None:
    with engine_for(stem, weights=weights) as engine:
        prompts = [made_up(engine, n, n) for n in (20, 3, 130, 1)]
        more = [made_up(engine, n, n) for n in (5, 60, 1, 2)]
        together = engine.score(prompts, more, logits_bytes=4 * engine.config.vocab * 7)
        for score, prompt, rest in zip(together, prompts, more, strict=True):
            (alone,) = engine.score([prompt], [rest])
            assert score.log_probs == alone.log_probs and score.greedy == alone.greedy


@KV
@ALL
def test_weights_and_graphs_change_no_bit(stem: str, kv_dtype: str) -> None:
    found = []
    for options in ({}, {"graphs": "off"}, {"overlap": "off"}, {"weights": "per-layer"}):
        with engine_for(stem, kv_dtype=kv_dtype, **options) as engine:
            ids = made_up(engine, 150)
            for rows in ("all", "last"):
                for _ in range(3):
                    last = logits(engine, ids, rows)[-1:]
                found.append(last)
    assert all(same(x, found[0]) for x in found)


@pytest.mark.parametrize("stem", [SMOLLM2, "tiny-qwen2-q4_k_m"])
def test_generated_tokens_are_those_of_whole_prompts(stem: str) -> None:
    """Each step's logits, of one row, are those of the row in a pass of all."""
    with engine_for(stem) as engine:
        ids = made_up(engine, 60)
        whole, cache = logits(engine, ids), engine.new_cache(len(ids))
        for n, token in enumerate(ids):
            assert same(logits(engine, [token], cache=cache), whole[n : n + 1]), n


@pytest.mark.smoke
def test_small_invariant_passes() -> None:
    with engine_for("tiny-qwen2-q4_k_m", max_tokens=40, kv_tokens=40) as engine:
        ids = made_up(engine, 37)
        whole = logits(engine, ids)
        assert same(logits(engine, ids[:19], "last"), whole[18:19])
        beside, own = engine.prefill([ids[5:8], ids[:30]], logits="all")
        assert same(own.logits, whole[:30]) and beside.tokens == 3


def test_fast_is_another_class() -> None:
    """So that these tests could fail: a row alone has other bits than among many."""
    with engine_for(SMOLLM2, exact="fast") as engine:
        ids = made_up(engine, 256)
        whole = logits(engine, ids)
        alone = [same(logits(engine, ids[:n], "last"), whole[n - 1 : n]) for n in (1, 9, 33, 64)]
        if engine.model.device.compute_capability == (9, 0):
            assert not all(alone)
