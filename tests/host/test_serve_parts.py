"""The parts of the scoring service that need no server: texts, stop strings, scores."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import VOCABULARY

from pyruntime.gguf import GGUFFile
from pyruntime.model.scores import TokenScores
from pyruntime.serve.answers import Answer
from pyruntime.serve.protocol import Asked
from pyruntime.serve.texts import CUT, Offsets, Reply, Texts
from pyruntime.text.tokenizer import Tokenizer


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
    half = len(pieces) // 2
    found = offsets.take(pieces[:half]) + offsets.take(pieces[half:])
    for n, at in enumerate(found):
        before = b"".join(pieces[:n]).decode(errors="ignore")
        assert at == start + len(before)
    assert len(found) == len(pieces)


def test_bytes_that_are_no_text() -> None:
    reply = Reply(())
    reply.take(b"a\xf0\x9f")
    assert reply.text == "a"
    reply.end()
    assert reply.text == "a\ufffd"


def answered(scores: TokenScores, logprobs: int) -> dict[str, Any]:
    """The choice of a prompt of one token more than there are scores, which is echoed.

    Ids that are odd look like the even ones before them.
    """

    class Alike(Texts):
        def _made(self, ids: list[int], *, begins: bool = False) -> list[bytes]:
            return [b" %d" % (id // 2) for id in ids]

    texts = Alike(SimpleNamespace(has_vocabulary=False, config=SimpleNamespace(vocab=10)))
    prompt = np.array([0, *scores.tokens], np.int32)
    asked = Asked([prompt], [None], 0, True, logprobs, [], False, False)
    answer = Answer(asked, texts, "m")
    answer.sequences[0].take(answer.sequences[0].step(), scores)
    answer.prepare()
    choice: dict[str, Any] = json.loads(answer.whole({"queued": 1.5}))["choices"][0]
    return choice


@pytest.mark.parametrize("top", [0, 1, 2, 3])
def test_of_tokens_that_look_alike_the_likelier_is_told(top: int) -> None:
    scores = TokenScores(
        np.array([7, 4], np.int32), np.array([-0.25, -7.5], np.float32),
        np.array([[7, 6, 2], [8, 9, 5]], np.int32),
        np.array([[-0.25, -1, -2], [-0.5, -1.5, -3.000001]], np.float32),
    )  # fmt: skip
    found = answered(scores, top)["logprobs"]
    assert found["tokens"] == [" 0", " 3", " 2"] and found["text_offset"] == [0, 2, 4]
    assert found["token_logprobs"] == [None, -0.25, -7.5]
    expected = [
        [{" 3": -0.25}, {" 2": -7.5}],
        [{" 3": -0.25}, {" 4": -0.5, " 2": -7.5}],
        [{" 3": -0.25}, {" 4": -0.5, " 2": -7.5}],
        [{" 3": -0.25, " 1": -2}, {" 4": -0.5, " 2": -3.000001}],
    ]
    assert found["top_logprobs"] == [None, *expected[top]]
    for told, wanted in zip(found["top_logprobs"][1:], expected[top], strict=True):
        assert list(told) == list(wanted), "the likeliest first"


def test_numbers_of_any_size() -> None:
    scores = TokenScores(
        np.array([1, 3, 5], np.int32), np.array([-1234.5, -999.5, -2e9], np.float32),
        np.array([[6], [6], [6]], np.int32), np.array([[1e-9], [-1000], [-0.000001]], np.float32),
    )  # fmt: skip
    found = answered(scores, 1)["logprobs"]
    assert found["token_logprobs"] == [None, -1234.5, -999.5, -2e9]
    expected = [{" 3": 0, " 0": -1234.5}, {" 3": -1000, " 1": -999.5}, {" 3": -1e-6, " 2": -2e9}]
    assert found["top_logprobs"] == [None, *expected]


def test_texts_are_the_same_made_at_once_or_one_by_one() -> None:
    """Those of a model that has more rows than its vocabulary has tokens."""
    with GGUFFile(VOCABULARY) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    size = tokenizer.vocab_size
    engine = SimpleNamespace(
        has_vocabulary=True, tokenizer=tokenizer, config=SimpleNamespace(vocab=size + 3)
    )
    filled, slow = Texts(engine), Texts(engine)
    filled.fill()
    ids = np.random.default_rng(0).permutation(size + 3)
    for id in ids.tolist():
        slow.piece(id)
    pieces = filled.pieces(ids, begins=False)
    assert pieces == slow.pieces(ids, begins=False)
    assert pieces == [*map(slow.piece, ids.tolist())]
    names = filled.quoted(ids).tolist()
    assert names == slow.quoted(ids).tolist()
    lengths, looks = filled.lengths(ids), filled.shown(ids)[1]
    np.testing.assert_array_equal(lengths, slow.lengths(ids))
    assert len({*zip(names, looks.tolist(), strict=True)}) == len({*names}) == len({*looks})
    assert CUT in lengths, "the bytes of characters that have no token"
    data, start = b"".join(pieces), 0
    for piece, at in zip(pieces, Offsets(0).take(pieces, lengths.tolist()), strict=True):
        decoder = getincrementaldecoder("utf-8")("replace")
        assert at == len(decoder.decode(data[:start]))
        start += len(piece)


@pytest.mark.parametrize("name", ["log_probs", "values"])
def test_a_value_that_is_no_number_is_not_hidden(name: str) -> None:
    scores = TokenScores.empty(2, 1)
    for array in scores:
        array[...] = 1
    answered(scores, 1)
    getattr(scores, name)[1] = np.nan
    with pytest.raises(ValueError, match="not JSON compliant"):
        answered(scores, 1)
