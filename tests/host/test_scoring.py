"""Prompts in lists, rows that are asked for, scores, perplexity and embeddings, in NumPy."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from models import write_wide_model
from serving import write_spoken_model

from pyruntime import Engine
from pyruntime.errors import NumericalError
from pyruntime.model.calls import wanted_logits
from pyruntime.model.scores import PIECE_BYTES, Targets, token_scores
from pyruntime.model.scoring import Score, windows

PATH = GOLDEN / "tiny-qwen3-q4_k_m.gguf"
PROMPTS = [[1, 2, 3], [7] * 11, [5], list(range(40, 62))]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(PATH, device="cpu", max_tokens=16, kv_tokens=40) as engine:
        yield engine


def softmax(logits: Any) -> Any:
    wide = np.asarray(logits, np.float64)
    wide = np.exp(wide - wide.max(-1, keepdims=True))
    return wide / wide.sum(-1, keepdims=True)


# Lists


@pytest.mark.parametrize("logits", ["last", "all"])
def test_a_row_in_a_list_is_that_of_the_prompt_alone(engine: Engine, logits: Any) -> None:
    """Bit for bit, of prompts in one pass; the last one takes two."""
    for result, ids in zip(engine.prefill(PROMPTS, logits=logits), PROMPTS, strict=True):
        alone = engine.prefill(ids, logits=logits)
        assert result.tokens == len(ids) and result.cache is None
        np.testing.assert_array_equal(result.logits, alone.logits)


def test_lists_go_on_in_caches_of_their_own(engine: Engine) -> None:
    caches = [engine.new_cache(30) for _ in PROMPTS]
    engine.prefill([ids[:1] for ids in PROMPTS], cache=caches, logits="none")
    rest = [ids[1:] or [9] for ids in PROMPTS]
    results = engine.prefill(rest, cache=caches)
    for result, cache, ids, more in zip(results, caches, PROMPTS, rest, strict=True):
        assert result.cache is cache and cache.length == 1 + len(more)
        whole = engine.prefill([*ids[:1], *more])
        np.testing.assert_allclose(result.logits, whole.logits, atol=1e-4)


def test_a_list_of_one_and_of_arrays(engine: Engine) -> None:
    (one,) = engine.prefill([[4, 5]])
    (other,) = engine.prefill((np.array([4, 5]),))
    np.testing.assert_array_equal(one.logits, engine.prefill([4, 5]).logits)
    np.testing.assert_array_equal(one.logits, other.logits)


def test_all_caches_of_a_list_are_filled_or_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [engine.new_cache(30) for _ in PROMPTS]
    engine.prefill([[3]] * 4, cache=caches)
    run, passes = engine.model.run, []

    def fails_late(batch: Any) -> Any:
        passes.append(batch)
        if len(passes) == 3:
            raise NumericalError("made up")
        return run(batch)

    monkeypatch.setattr(engine.model, "run", fails_late)
    with pytest.raises(NumericalError, match="made up"):
        engine.prefill(PROMPTS, cache=caches)
    assert len(passes) == 3 and [cache.length for cache in caches] == [1] * 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ids": [[1], [300]]}, "prompt 1: token id 300"),
        ({"ids": [[1], []]}, "prompt 1: token ids are empty"),
        ({"ids": [[1], [2]], "cache": [None]}, "cache: a list of 2"),
        ({"ids": [[1], [2]], "logits": [[0]]}, "logits: a list of 2"),
        ({"ids": [[1], [2]], "logits": [[0], [1]]}, "prompt 1: .*positions of a prompt of 1 token"),
        ({"ids": [[1], [2] * 41]}, "prompt 1: 41 tokens .*kv_tokens=40"),
        ({"ids": [[1], [2]], "cache": [None, 3]}, "prompt 1: this cache belongs to another model"),
        ({"ids": [1], "cache": ["cache"]}, "^this cache belongs to another model"),
        ({"ids": [1], "logits": "first"}, "logits='first'"),
        ({"ids": [1], "logits": []}, "logits="),
        ({"ids": [1, 2], "logits": [1, 0]}, "ascend"),
        ({"ids": [1, 2], "logits": [0.5]}, "logits="),
        ({"ids": [1], "hidden": "first"}, "hidden='first'"),
    ],
)
def test_what_cannot_be_asked_for(engine: Engine, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        engine.prefill(**arguments)


# Rows


@pytest.mark.parametrize("ids", PROMPTS)
def test_rows_that_are_asked_for(engine: Engine, ids: list[int]) -> None:
    every = engine.prefill(ids, logits="all").logits
    assert engine.prefill(ids, logits="none").logits is None
    rows = sorted({0, len(ids) // 2, len(ids) - 1})
    np.testing.assert_allclose(engine.prefill(ids, logits=rows).logits, every[rows], atol=1e-5)
    np.testing.assert_allclose(engine.prefill(ids, logits=[-1]).logits, every[-1:], atol=1e-5)
    again = engine.prefill(ids, logits=np.array(rows)).logits
    np.testing.assert_array_equal(again, engine.prefill(ids, logits=rows).logits)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i8", "u8"])
def test_positions_are_integers_of_any_width(dtype: str) -> None:
    assert wanted_logits(np.array([1, 100], dtype), 300).tolist() == [1, 100]


@pytest.mark.parametrize("ids", PROMPTS)
def test_hidden_states_are_what_the_output_matrix_takes(engine: Engine, ids: list[int]) -> None:
    last = engine.prefill(ids, logits="last", hidden="last")
    assert last.hidden.shape == (1, engine.config.hidden) and last.hidden.dtype == np.float32
    product = last.hidden @ engine.model._output.T
    np.testing.assert_allclose(product, last.logits, rtol=1e-4, atol=1e-4)
    mean = engine.prefill(ids, logits="none", hidden="mean").hidden
    states = [engine.prefill(ids[: n + 1], hidden="last").hidden[0] for n in range(len(ids))]
    np.testing.assert_allclose(mean[0], np.mean(states, axis=0), rtol=1e-3, atol=1e-3)


def test_logits_of_many_passes_are_held_once(tmp_path: Path) -> None:
    with Engine.load(write_wide_model(tmp_path / "m.gguf"), device="cpu", max_tokens=8) as engine:
        engine.prefill([1])
        tracemalloc.start()
        logits = engine.prefill([1] * 400, logits="all").logits
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 1.5 * logits.nbytes
        np.testing.assert_allclose(logits[-1:], engine.prefill([1] * 400).logits, atol=1e-4)


# Scores


def test_scores_take_no_more_logits_at_a_time_than_they_may(tmp_path: Path) -> None:
    with Engine.load(write_wide_model(tmp_path / "m.gguf"), device="cpu", max_tokens=400) as engine:
        row, texts = 4 * engine.config.vocab, ([[i] for i in range(40)], [[1] * 10] * 40)
        engine.score(*texts)
        tracemalloc.start()
        engine.score(*texts, logits_bytes=10 * row)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 0.6 * 400 * row


@given(
    st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 9), st.integers(1, 40),
    st.floats(0.1, 1000),
)  # fmt: skip
def test_token_scores(seed: int, rows: int, count: int, vocab: int, scale: float) -> None:
    random = np.random.default_rng(seed)
    logits = (scale * random.standard_normal((rows, vocab))).astype(np.float32)
    row, tokens = (random.integers(0, n, count).astype(np.int32) for n in (rows, vocab))
    row.sort()
    tokens[0] = logits[row[0]].argmax()
    wide = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    expected = wide[row, tokens] - np.log(np.exp(wide).sum(axis=1))[row]
    best = logits.argmax(axis=1)
    found = token_scores(logits, Targets(row, tokens))
    np.testing.assert_allclose(found.log_probs, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.greedy, best[row] == tokens)


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 40), st.data())
def test_the_likeliest_tokens(seed: int, rows: int, vocab: int, data: Any) -> None:
    """Of logits with many equal ones; -1 stands for the first of them."""
    random, top = np.random.default_rng(seed), data.draw(st.integers(1, vocab))
    logits = random.choice(
        np.array([-np.inf, -3, -0.0, 0, 2, 8.5], np.float32), (rows, vocab), p=[0.3, *[0.14] * 5]
    )
    logits[:, random.integers(vocab)] = 1
    targets = Targets(np.arange(rows, dtype=np.int32), random.integers(-1, vocab, rows, np.int32))
    wide = logits.astype(np.float64)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    best = np.argsort(-wide, axis=1, kind="stable")[:, :top]
    found = token_scores(logits, targets, top)
    np.testing.assert_array_equal(found.best, best)
    np.testing.assert_allclose(found.values, np.take_along_axis(wide, best, axis=1), atol=1e-5)
    tokens = np.where(targets.tokens < 0, best[:, 0], targets.tokens)
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_allclose(found.log_probs, wide[np.arange(rows), tokens], atol=1e-5)


def test_what_is_not_a_number_is_the_likeliest() -> None:
    row = np.array([[1, np.nan, 5, np.inf, np.nan, -np.inf]], np.float32)
    with np.errstate(invalid="ignore"):
        found = token_scores(row, Targets(np.zeros(1, np.int32), np.array([2], np.int32)), 6)
    assert found.best.tolist() == [[1, 4, 3, 2, 0, 5]]
    assert np.isnan(found.log_probs).all() and np.isnan(found.values).all()


def test_more_rows_than_are_looked_at_together() -> None:
    vocab = PIECE_BYTES // 16
    logits = np.random.default_rng(0).standard_normal((9, vocab), np.float32)
    targets = Targets(np.repeat(np.arange(9, dtype=np.int32), 2), np.arange(18, dtype=np.int32))
    whole = token_scores(logits.copy(), targets, 2)
    for row in range(9):
        own = slice(2 * row, 2 * row + 2)
        alone = Targets(np.zeros(2, np.int32), targets.tokens[own])
        found = token_scores(logits[row : row + 1].copy(), alone, 2)
        for ours, theirs in zip(whole.part(own), found, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("logits_bytes", [1, 5000, 1 << 20])
@pytest.mark.parametrize("cached", [False, True])
def test_rows_of_prompts_are_scored(engine: Engine, logits_bytes: int, cached: bool) -> None:
    """Of prompts of one pass and of several, with what a cache holds before them or without."""
    rows = [[0, 2], [10], [0], [1, 2, 15, 16, 21]]
    tokens = [[4, -1], [-1], [9], [0, 1, -1, 3, -1]]
    before = [[9] * n for n in (1, 2, 3, 4)] if cached else [[]] * 4
    caches = [engine.new_cache(30) for _ in PROMPTS] if cached else None
    if caches:
        engine.prefill(before, cache=caches, logits="none")
    found, timings = engine.score_rows(
        PROMPTS, rows, tokens, top=3, cache=caches, logits_bytes=logits_bytes
    )
    assert timings["wall"] > 0
    for scores, held, ids, own, after in zip(found, before, PROMPTS, rows, tokens, strict=True):
        logits = engine.prefill([*held, *ids], logits="all").logits[len(held) :][own]
        targets = Targets(np.arange(len(own), dtype=np.int32), np.array(after, np.int32))
        expected = token_scores(logits.copy(), targets, 3)
        np.testing.assert_array_equal(scores.tokens, expected.tokens)
        np.testing.assert_array_equal(scores.best, expected.best)
        np.testing.assert_allclose(scores.log_probs, expected.log_probs, atol=1e-4)
        np.testing.assert_allclose(scores.values, expected.values, atol=1e-4)
    if caches:
        assert [cache.length for cache in caches] == [4, 13, 4, 26]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"prompts": None}, "prompts=None: a list"),
        ({"rows": [[0]]}, "rows: a list of 2"),
        ({"rows": 0}, "rows=0: a list"),
        ({"tokens": [[0]] * 3}, "tokens: a list of 2"),
        ({"cache": [None]}, "cache: a list of 2"),
        ({"rows": [[0], [3]]}, "prompt 1: logits"),
        ({"tokens": [[0, 1], [0]]}, "prompt 0: 1 rows, and tokens"),
        ({"tokens": [[0], [-2]]}, "prompt 1: tokens from -2"),
        ({"tokens": [[300], [0]]}, "prompt 0: tokens from 300"),
        ({"tokens": [[0], [0.5]]}, "prompt 1: 1 rows, and tokens float64"),
        ({"top": 0}, "top=0"),
        ({"top": 10**6}, "1 to the"),
        ({"top": "all"}, "top='all'"),
        ({"top": 2.0}, "top=2.0"),
        ({"logits_bytes": 0}, "logits_bytes=0"),
    ],
)
def test_rows_that_cannot_be_scored(engine: Engine, changed: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"prompts": [[1], [2, 3]], "rows": [[0], [1]], "tokens": [[4], [-1]]}
    with pytest.raises(ValueError, match=text):
        engine.score_rows(**{**given, **changed})
    assert engine.score_rows([], [], [])[0] == []


def test_of_equal_tokens_the_first_is_greedy() -> None:
    rows, tokens = np.zeros(3, np.int32), np.arange(3, dtype=np.int32)
    found = token_scores(np.array([[0, 1, 1]], np.float32), Targets(rows, tokens))
    assert found.greedy.tolist() == [False, True, False]


@pytest.mark.parametrize("logits_bytes", [1, 5000, 1 << 20])
def test_scores_are_of_the_tokens_and_not_of_those_beside_them(
    engine: Engine, logits_bytes: int
) -> None:
    continuations = [[9, 8, 7], [1], [2, 3], [4] * 9]
    scores = engine.score(PROMPTS, continuations, logits_bytes=logits_bytes)
    for ids, more, found in zip(PROMPTS, continuations, scores, strict=True):
        whole = [*ids, *more]
        probabilities = softmax(engine.prefill(whole, logits="all").logits)
        rows = np.arange(len(ids) - 1, len(whole) - 1)
        expected = np.log(probabilities[rows, more])
        assert len(found.log_probs) == len(more)
        np.testing.assert_allclose(found.log_probs, expected, atol=1e-4)
        assert found.greedy == (probabilities[rows].argmax(axis=1) == more).tolist()
        assert found.total == pytest.approx(sum(found.log_probs))


def test_a_token_that_nothing_precedes_has_no_score(engine: Engine) -> None:
    first, alone, nothing, none = engine.score([[], [], [], [1]], [[5, 6], [5], [], []])
    assert first.log_probs[0] is None and alone.log_probs == [None] and alone.total == 0
    assert first.greedy[0] is None and alone.greedy == [None] and alone.is_greedy
    assert nothing == none == Score()
    (second,) = engine.score([[5]], [[6]])
    np.testing.assert_allclose(first.log_probs[1:], second.log_probs, atol=1e-5)
    assert first.greedy[1:] == second.greedy


def test_what_is_generated_is_greedy(engine: Engine) -> None:
    made = [engine.generate(ids, 5) for ids in PROMPTS]
    assert all(score.is_greedy for score in engine.score(PROMPTS, made))
    for at in range(5):
        other = [[*ids[:at], (ids[at] + 1) % engine.config.vocab, *ids[at + 1 :]] for ids in made]
        for score in engine.score(PROMPTS, other):
            assert score.greedy[: at + 1] == [*[True] * at, False] and not score.is_greedy


@pytest.mark.parametrize("logits_bytes", [1, 5000, 1 << 20])
def test_texts_that_differ_in_their_last_token_are_run_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, logits_bytes: int
) -> None:
    """Of which one is longer than a pass, and one has more of its tokens scored."""
    long = list(range(20, 50))
    prompts = [PROMPTS[0], long, PROMPTS[0], [5], long[:-1], PROMPTS[0], [], [1]]
    continuations = [[4], [7], [5], [6, 7], [long[-1], 9], [4], [2], [2]]
    pairs = list(zip(prompts, continuations, strict=True))
    alone = [engine.score([ids], [more])[0] for ids, more in pairs]
    rows = 0
    score = engine.model.score

    def counted(batch: Any, targets: Any, **options: Any) -> Any:
        nonlocal rows
        rows += batch.rows
        return score(batch, targets, **options)

    monkeypatch.setattr(engine.model, "score", counted)
    found = engine.score(prompts, continuations, logits_bytes=logits_bytes)
    assert rows == 3 + 30 + 2 + 1
    for mine, want in zip(found, alone, strict=True):
        assert mine.greedy == want.greedy
        assert (mine.log_probs[0] is None) == (want.log_probs[0] is None)
        np.testing.assert_allclose(
            np.array(mine.log_probs, float), np.array(want.log_probs, float), atol=1e-5
        )


def test_scores_need_as_many_of_both(engine: Engine) -> None:
    with pytest.raises(ValueError, match="2 prompts and 1 continuations"):
        engine.score([[1], [2]], [[1]])
    with pytest.raises(ValueError, match="prompts='one': a list is needed, even for one text"):
        engine.score("one", "two")
    with pytest.raises(ValueError, match="prompt 2: 41 tokens"):
        engine.score([[], [1], [2] * 41], [[], [1], [1]])
    with pytest.raises(ValueError, match="logits_bytes=0"):
        engine.score([[1]], [[1]], logits_bytes=0)


def test_texts_are_scored_and_embedded_as_they_are_tokenized(tmp_path: Path) -> None:
    with Engine.load(write_spoken_model(tmp_path / "m.gguf"), device="cpu") as engine:
        pair = "The", " the cat"
        context, rest = engine.tokenize_pair(*pair)
        assert context.tolist() == engine.tokenize(pair[0]).tolist() and rest.dtype == np.int32
        assert [*context, *rest] == engine.tokenize("".join(pair)).tolist() and len(rest) > 1
        (text,), (ids,) = engine.score(*([x] for x in pair)), engine.score([context], [rest])
        assert text.log_probs == ids.log_probs
        ended = engine.tokenize(pair[0], ends=True)
        assert np.array_equal(engine.embed([pair[0]]), engine.embed([ended]))
        assert engine.tokenize([]).tolist() == [] and engine.tokenize((3, 1)).tolist() == [3, 1]
        with pytest.raises(ValueError, match="token id -1 at position 0"):
            engine.tokenize([-1])


def test_a_text_that_its_prompt_takes_in_is_refused(tmp_path: Path) -> None:
    """Without tokens of its own it would be the likeliest of all."""
    with Engine.load(write_spoken_model(tmp_path / "m.gguf"), device="cpu") as engine:
        nothing, one = engine.score(["The", "The"], ["", " the"])
        assert (len(nothing.log_probs), len(one.log_probs)) == (0, 1)
        with pytest.raises(ValueError, match=r"^prompt 1: together with its prompt 'e' makes no"):
            engine.score(["The", "Th"], [" the", "e"])


@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_windows_score_each_token_once_in_the_first_that_reaches_it(
    count: int, size: int, data: Any
) -> None:
    stride = data.draw(st.integers(1, size - 1))
    texts = windows(np.arange(count, dtype=np.int32), size, stride)
    assert [t for _, continuation in texts for t in continuation] == list(range(1, count))
    for context, continuation in texts:
        assert 2 <= len(context) + len(continuation) <= size
        assert context[0] % stride == 0 and context[-1] + 1 == continuation[0]
        earlier = context[0] - stride
        assert earlier < 0 or earlier + size <= continuation[0]


def test_perplexity(engine: Engine) -> None:
    ids = np.random.default_rng(3).integers(0, engine.config.vocab, 30)
    (scores,) = engine.score([ids[:1]], [ids[1:]])
    assert engine.perplexity(ids) == pytest.approx(np.exp(-np.mean(scores.log_probs)))
    short = engine.perplexity(ids, window=8, stride=3)
    texts = windows(ids.astype(np.int32), 8, 3)
    parts = engine.score([t[0] for t in texts], [t[1] for t in texts])
    assert short == pytest.approx(np.exp(-np.mean([x for part in parts for x in part.log_probs])))
    for wrong in ({"ids": [1]}, {"window": 1}, {"stride": 0}, {"window": 4, "stride": 4}):
        with pytest.raises(ValueError, match="at least"):
            engine.perplexity(wrong.pop("ids", ids), **wrong)


# Embeddings


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings(engine: Engine, pooling: Any) -> None:
    vectors = engine.embed(PROMPTS, pooling=pooling)
    assert vectors.shape == (len(PROMPTS), engine.config.hidden) and vectors.dtype == np.float32
    for vector, ids in zip(vectors, PROMPTS, strict=True):
        np.testing.assert_array_equal(vector, engine.prefill(ids, hidden=pooling).hidden[0])
    normed = engine.embed(PROMPTS, pooling=pooling, normalize=True)
    np.testing.assert_allclose(np.linalg.norm(normed, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(
        normed * np.linalg.norm(vectors, axis=1)[:, None], vectors, rtol=1e-5
    )
    assert engine.embed([]).shape == (0, engine.config.hidden)
    with pytest.raises(ValueError, match="pooling"):
        engine.embed(PROMPTS, pooling="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="list"):
        engine.embed("text")
