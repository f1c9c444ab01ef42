"""Several prompts in one pass, rows that are asked for, and scores, against the prompts alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from goldens import model_path
from numpy.typing import NDArray

from pyruntime import Engine

STEMS = ["tiny-qwen2-q4_k_m", "tiny-qwen3-q6_k", "tiny-gemma2-q8_0", "tiny-mistral-q8_0"]
LENGTHS = [1, 2, 15, 16, 17, 40, 1, 96, 33, 5]  # more rows than a pass has
WEIGHTS = pytest.mark.parametrize("weights", ["fp16", "per-layer"])
# Rounding otherwise (another tile, keys divided otherwise), relative to the norm of the logits.
TOLERANCE = {"f16": 2e-3, "e4m3": 2e-2}


@contextmanager
def engine_for(stem: str, **options: Any) -> Iterator[Engine]:
    given = {"device": "cuda:0", "max_tokens": 128, "kv_tokens": 192, **options}
    with Engine.load(model_path(stem), **given) as engine:
        yield engine


def made_up(engine: Engine, lengths: list[int] = LENGTHS) -> list[NDArray[np.int32]]:
    random = np.random.default_rng(len(lengths))
    return [random.integers(0, engine.config.vocab, n).astype(np.int32) for n in lengths]


def poison(engine: Engine) -> None:
    """NaN in the cache behind calls without one."""
    engine.prefill([1])
    for array in (engine._cache.k, engine._cache.v):
        array.fill(0xFF)


def difference(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape and np.isfinite(found).all()
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@WEIGHTS
@pytest.mark.parametrize("kv_dtype", ["f16", "e4m3"])
@pytest.mark.parametrize("stem", STEMS)
def test_packed_rows_are_those_of_prompts_alone(stem: str, kv_dtype: str, weights: str) -> None:
    with engine_for(stem, kv_dtype=kv_dtype, weights=weights) as engine:
        prompts = made_up(engine)
        for rows in ("last", "all"):
            alone = [engine.prefill(ids, logits=rows).logits for ids in prompts]
            if kv_dtype == "f16":
                poison(engine)
            for _ in range(2):  # then as graphs
                for result, want in zip(engine.prefill(prompts, logits=rows), alone, strict=True):
                    assert difference(result.logits, want) <= TOLERANCE[kv_dtype]


@pytest.mark.parametrize("kv_dtype", ["f16", "e4m3"])
def test_packed_prompts_go_on_in_their_caches(kv_dtype: str) -> None:
    with engine_for(STEMS[0], kv_dtype=kv_dtype) as engine:
        prompts = made_up(engine, [30, 5, 64])
        caches = [engine.new_cache(len(ids)) for ids in prompts]
        engine.prefill([ids[:4] for ids in prompts], cache=caches, logits="none")
        results = engine.prefill([ids[4:] for ids in prompts], cache=caches)
        for result, ids, cache in zip(results, prompts, caches, strict=True):
            assert cache.length == len(ids)
            alone = engine.prefill(ids).logits
            assert difference(result.logits, alone) <= TOLERANCE[kv_dtype]


@WEIGHTS
@pytest.mark.parametrize("stem", STEMS)
def test_rows_that_are_asked_for(stem: str, weights: str) -> None:
    with engine_for(stem, weights=weights) as engine:
        (ids,) = made_up(engine, [120])
        every = np.asarray(engine.prefill(ids, logits="all").logits)
        for rows in ([0], [3, 4, 5, 119], list(range(120)), list(range(0, 120, 7))):
            found = engine.prefill(ids, logits=rows).logits
            assert difference(found, every[rows]) <= TOLERANCE["f16"]


@WEIGHTS
@pytest.mark.parametrize("stem", STEMS)
def test_logits_of_some_rows_where_all_are_kept(stem: str, weights: str) -> None:
    """Of an odd number of columns."""
    with engine_for(stem, weights=weights) as engine:
        prompts = made_up(engine)
        for result, ids in zip(engine.prefill(prompts, hidden="mean"), prompts, strict=True):
            alone = engine.prefill(ids, hidden="mean")
            assert difference(result.logits, alone.logits) <= TOLERANCE["f16"]
            assert difference(result.hidden, alone.hidden) <= TOLERANCE["f16"]


def test_a_pass_without_logits_fills_the_cache() -> None:
    with engine_for(STEMS[0]) as engine:
        (ids,) = made_up(engine, [90])
        filled, other = engine.new_cache(90), engine.new_cache(90)
        assert engine.prefill(ids[:89], cache=filled, logits="none").logits is None
        engine.prefill(ids[:89], cache=other)
        for mine, theirs in ((filled.k, other.k), (filled.v, other.v)):
            assert np.array_equal(np.asarray(mine)[:, :, :89], np.asarray(theirs)[:, :, :89])
        last = [engine.prefill(ids[89:], cache=cache).logits for cache in (filled, other)]
        assert np.array_equal(*map(np.asarray, last))


@WEIGHTS
@pytest.mark.parametrize("stem", STEMS)
def test_scores_and_hidden_states_are_numpys(stem: str, weights: str) -> None:
    """Logits in pieces of a few rows, too."""
    with engine_for(stem, weights=weights) as engine, engine_for(stem, device="cpu") as numpy:
        prompts = made_up(engine)
        more = made_up(engine, [3, 1, 20, 1, 2, 60, 9, 1, 4, 30])
        want = numpy.score(prompts, more)
        for logits_bytes in (1 << 20, 4 * engine.config.vocab * 7):
            found = engine.score(prompts, more, logits_bytes=logits_bytes)
            for mine, theirs in zip(found, want, strict=True):
                np.testing.assert_allclose(mine.log_probs, theirs.log_probs, atol=0.03)
        for pooling in ("mean", "last"):
            vectors, expected = (e.embed(prompts, pooling=pooling) for e in (engine, numpy))
            for mine, theirs in zip(vectors, expected, strict=True):
                assert difference(mine, theirs) <= 5e-3


def test_answers_to_choose_from_are_scored_as_alone() -> None:
    """Texts that differ in their last token are run once; one prompt is longer than a pass."""
    with engine_for(STEMS[0]) as engine:
        prompts = made_up(engine, [20, 140, 5])
        asked = [(ids, [token]) for ids in prompts for token in (1, 2, 3)]
        asked.append((prompts[0][:-2], [*prompts[0][-2:], 4]))
        found = engine.score(*zip(*asked, strict=True))
        for score, (ids, more) in zip(found, asked, strict=True):
            (alone,) = engine.score([ids], [more])
            assert len(score.log_probs) == len(more)
            np.testing.assert_allclose(score.log_probs, alone.log_probs, atol=0.03)


def test_what_is_generated_is_greedy() -> None:
    with engine_for(STEMS[0]) as engine:
        prompts = made_up(engine, [20, 100, 5])
        made = [engine.generate(ids, 4) for ids in prompts]
        assert all(score.is_greedy for score in engine.score(prompts, made))
        other = [[*ids[:-1], (ids[-1] + 1) % engine.config.vocab] for ids in made]
        for score in engine.score(prompts, other):
            assert score.greedy == [True, True, True, False]
