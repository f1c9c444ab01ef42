"""The parts of the scoring service that need no server: texts, stop strings, scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyruntime.serve.answers import dumped
from pyruntime.serve.scores import GREEDY, PIECE_BYTES, scores
from pyruntime.serve.texts import Offsets, Reply


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


WORDS = st.text("ab🚆", max_size=3)


@given(st.text("ab🚆", max_size=12), st.lists(st.integers(0, 4)), st.lists(WORDS.filter(bool)))
def test_a_reply_ends_at_its_first_stop_string(
    text: str, sizes: list[int], stops: list[str]
) -> None:
    """However the text is cut into tokens, and what is settled is never taken back."""
    reply, settled, stopped = Reply(stops), "", False
    for piece in cut(text.encode(), sizes):
        stopped = reply.take(piece)
        assert reply.text.startswith(settled)
        settled = reply.text if stopped else reply.text[: reply.settled]
        if stopped:
            break
    else:
        reply.end()
    places = [text.find(stop) for stop in stops if stop in text]
    assert stopped == bool(places)
    assert text.startswith(reply.text) and not any(stop in reply.text for stop in stops)
    if len(places) < 2:  # of several the first to be complete ends it
        assert reply.text == text[: min(places, default=None)]


@given(st.text("ab🚆ï"), st.lists(st.integers(0, 4)), st.integers(0, 9))
def test_offsets(text: str, sizes: list[int], start: int) -> None:
    offsets, pieces = Offsets(start), cut(text.encode(), sizes)
    for n, piece in enumerate(pieces):
        before = b"".join(pieces[:n]).decode(errors="ignore")
        assert offsets.take(piece) == start + len(before)


def test_bytes_that_are_no_text() -> None:
    reply = Reply(())
    reply.take(b"a\xf0\x9f")
    assert reply.text == "a"
    reply.end()
    assert reply.text == "a\ufffd"


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 40), st.integers(0, 50), st.data())
def test_scores(seed: int, rows: int, vocab: int, top: int, data: Any) -> None:
    random = np.random.default_rng(seed)
    logits = random.integers(-9, 9, (rows, vocab)).astype(np.float32)  # with many equals
    targets = random.integers(-1, vocab, rows).astype(np.int32)
    found = scores(logits, targets, top)
    wide = logits.astype(np.float64)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    best = np.argsort(-wide, axis=1, kind="stable")
    expected = np.where(targets == GREEDY, best[:, 0], targets)
    np.testing.assert_array_equal(found.tokens, expected)
    np.testing.assert_allclose(found.chosen, wide[np.arange(rows), expected], atol=1e-5)
    assert found.best.shape == found.values.shape == (rows, min(top, vocab))
    np.testing.assert_allclose(found.values, -np.sort(-wide, axis=1)[:, :top], atol=1e-5)
    np.testing.assert_array_equal(found.best, best[:, :top])


def test_scores_of_more_rows_than_a_piece_has() -> None:
    vocab = PIECE_BYTES // 16
    logits = np.random.default_rng(0).standard_normal((9, vocab), np.float32)
    targets = np.arange(9, dtype=np.int32)
    whole = scores(logits, targets, 2)
    for row in range(9):
        alone = scores(logits[row : row + 1], targets[row : row + 1], 2)
        assert whole.chosen[row] == alone.chosen[0]
        np.testing.assert_array_equal(whole.best[row], alone.best[0])


def test_a_value_that_is_no_number_is_not_hidden() -> None:
    found = scores(np.array([[1, np.nan]], np.float32), np.zeros(1, np.int32), 1)
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumped(found.chosen.tolist())
