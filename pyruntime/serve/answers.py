"""What a client gets: OpenAI's text_completion objects, whole or in pieces as they come.

They are put together as text: of prompts that are scored most of an answer are numbers and names of
tokens, which takes several times as long through dictionaries.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyruntime.model.scores import TokenScores
from pyruntime.serve.protocol import Asked
from pyruntime.serve.sequence import Sequence
from pyruntime.serve.texts import Objects, Offsets, Texts, joined


def _table(form: str) -> Objects:
    return np.array([form.format(n) for n in range(1000)], np.object_)


_THREE_DIGITS = _table("{:03}")
_MOST = 999
_WHOLES = {before: _table(before + "-{}.") for before in ",:"}


_NOTHING = '""'  # as JSON has it


def dumped(record: Any) -> bytes:
    """Strict JSON."""
    return _json(record).encode()


def _json(record: Any) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def _array(items: Iterable[str]) -> str:
    return f"[{','.join(items)}]"


class Answer:
    """The answer to a request, about `sequences` that are its prompts in their order."""

    def __init__(self, asked: Asked, texts: Texts, model: str) -> None:
        self._asked = asked
        self._texts = texts
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._head = _json(head)[:-1]
        self.sequences = [
            Sequence(
                ids,
                texts,
                max_tokens=asked.max_tokens,
                scored=asked.echo and asked.logprobs is not None,
                top=asked.logprobs or 0,
                stop=asked.stop,
            )
            for ids in asked.prompts
        ]
        self._pieces = [
            _Pieces(sequence, asked, texts, text)
            for sequence, text in zip(self.sequences, asked.texts, strict=True)
        ]
        self._over: set[int] = set()  # choices whose end was told

    @property
    def numbers(self) -> int:
        """About how many log-probabilities there are to be told."""
        asked = self._asked
        if asked.logprobs is None:
            return 0
        tokens = sum(map(len, asked.prompts)) if asked.echo else 0
        return (tokens + len(asked.prompts) * asked.max_tokens) * (1 + asked.logprobs)

    def prepare(self) -> None:
        """Makes what can be made of the answer before the engine has."""
        for pieces in self._pieces:
            pieces.prepare()

    def whole(self, timings: dict[str, float]) -> bytes:
        """The answer once all sequences are over, with the seconds that it took."""
        choices = [self._next(place)[1] for place in range(len(self.sequences))]
        return self._record(choices, usage=self._usage(), timings=timings)

    def chunk(self, sequence: Sequence) -> bytes | None:
        """What is new of one of the sequences since the chunk before; None for nothing."""
        if not (sequence.tokens or sequence.finish):
            return None  # in the midst of its prompt
        new, choice = self._next(self.sequences.index(sequence))
        return self._record([choice]) if new else None

    def last_chunks(self) -> list[bytes]:
        """What no chunk has told once all sequences are over."""
        untold = [sequence for n, sequence in enumerate(self.sequences) if n not in self._over]
        chunks = [chunk for sequence in untold if (chunk := self.chunk(sequence))]
        if self._asked.include_usage:
            chunks.append(self._record([], usage=self._usage()))
        return chunks

    def _record(self, choices: list[str], **more: dict[str, Any]) -> bytes:
        tail = "".join(f',"{name}":{_json(value)}' for name, value in more.items())
        return f'{self._head},"choices":{_array(choices)}{tail}}}'.encode()

    def _next(self, place: int) -> tuple[bool, str]:
        """Whether there is anything new of a choice, and that."""
        text, logprobs, finish = self._pieces[place].next()
        if finish:
            self._over.add(place)
        choice = (
            f'{{"text":{text},"index":{place},"logprobs":{logprobs or "null"},'
            f'"finish_reason":{_json(finish)}}}'
        )
        return bool(text != _NOTHING or logprobs or finish), choice

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(s.prompt) for s in self.sequences)
        completion = sum(len(s.tokens) for s in self.sequences)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


class _Pieces:
    """One choice, piece by piece: each begins where the one before ended."""

    def __init__(self, sequence: Sequence, asked: Asked, texts: Texts, text: str | None) -> None:
        self._sequence, self._asked, self._texts = sequence, asked, texts
        self._shown = 0  # characters of the completion
        self._told = 0  # tokens of the completion
        self._echo = asked.echo  # is still to come
        self._text = text
        self._offsets: Offsets | None = None  # of the completion

    def prepare(self) -> None:
        """Makes what an answer has of the prompt alone."""
        if self._asked.echo:
            self._prompt_told  # noqa: B018
            if self._asked.logprobs is not None:
                self._prompt_names, self._prompt_starts  # noqa: B018

    @cached_property
    def _prompt_pieces(self) -> list[bytes]:
        pieces = self._texts.pieces(self._sequence.prompt)
        if self._text is not None and self._texts.adds_bos:
            pieces[0] = b""  # nobody wrote it
        return pieces

    @cached_property
    def _prompt_text(self) -> str:
        return joined(self._prompt_pieces) if self._text is None else self._text

    @cached_property
    def _prompt_told(self) -> str:
        return _json(self._prompt_text)

    @cached_property
    def _prompt_names(self) -> str:
        return ",".join(self._texts.quoted(self._sequence.prompt).tolist())

    @cached_property
    def _prompt_starts(self) -> str:
        pieces = self._prompt_pieces
        lengths = None
        if not self._texts.changes_start:
            lengths = self._texts.lengths(self._sequence.prompt).tolist()
            if not pieces[0]:
                lengths[0] = 0  # of a BOS that nobody wrote
        return ",".join(map(str, Offsets(0).take(pieces, lengths)))

    def next(self) -> tuple[str, str | None, str | None]:
        """Its text and its log-probabilities as JSON, and why it ended, if it did."""
        reply, finish = self._sequence.reply, self._sequence.finish
        until = len(reply.text) if finish else reply.settled
        text = _json(reply.text[self._shown : until])
        self._shown = until
        logprobs = None if self._asked.logprobs is None else self._logprobs()
        if self._echo:
            text = self._prompt_told[:-1] + text[1:]
        self._echo = False
        return text, logprobs, finish

    def _logprobs(self) -> str:
        """Of tokens that have not been told."""
        ids = self._sequence.tokens[self._told :]
        names = self._texts.quoted(ids).tolist()
        self._offsets = self._offsets or Offsets(len(self._prompt_text))
        starts = [*map(str, self._offsets.take([*map(self._texts.piece, ids)]))]
        scores = self._sequence.scores
        if self._echo:
            names, starts = [self._prompt_names, *names], [self._prompt_starts, *starts]
            values, tops = (["null", *items] for items in self._rows(scores))
        else:
            values, tops = self._rows(scores.part(slice(len(scores.tokens) - len(ids), None)))
        self._told += len(ids)
        return (
            f'{{"tokens":{_array(names)},"token_logprobs":{_array(values)},'
            f'"top_logprobs":{_array(tops)},"text_offset":{_array(starts)}}}'
        )

    def _rows(self, scores: TokenScores) -> tuple[list[str], list[str]]:
        """The items of `token_logprobs` and of `top_logprobs`, which are one string each, if any.

        Of tokens that look the same the likelier one is told, which comes first.
        """
        if not len(scores.tokens):
            return [], []
        ids = np.column_stack([scores.best, scores.tokens])
        ones, high, low = _digits(np.column_stack([scores.values, scores.log_probs]))
        parts = np.empty((*ids.shape, 5), np.object_)
        parts[..., 0] = ","
        parts[:, 0, 0] = "},{"
        parts[..., 1], looks = self._texts.shown(ids)
        parts[..., 2] = _wholes(":", ones)
        parts[..., 3], parts[..., 4] = _THREE_DIGITS[high], _THREE_DIGITS[low]
        chosen = parts[:, -1, 2:].copy()
        chosen[:, 0] = _wholes(",", ones[:, -1])
        parts[_repeated(looks)] = ""
        return [_together(chosen)[1:]], [_together(parts)[2:] + "}"]


def _together(parts: Objects) -> str:
    return "".join(parts.ravel().tolist())


def _repeated(rows: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Bool [rows, columns]: the same number is in a column before."""
    found = np.zeros(rows.shape, np.bool_)
    for column in range(1, rows.shape[1]):
        same = rows[:, :column] == rows[:, column, None]
        found[:, column] = same.any(axis=1)
    return found


def _digits(log_probs: NDArray[np.float32]) -> Iterable[NDArray[np.int64]]:
    """To a millionth: ones, thousandths, and millionths of what is left, of -log_probs.

    Raises ValueError: one is not finite.
    """
    if not np.isfinite(log_probs).all():
        raise ValueError("a log-probability is not finite, and so not JSON compliant")
    millionths = (log_probs * np.float64(-1e6)).round().clip(0, 1e18).astype(np.int64)
    thousandths, low = np.divmod(millionths, 1000)
    return *np.divmod(thousandths, 1000), low


def _wholes(before: str, ones: NDArray[np.int64]) -> Objects:
    """The beginnings of numbers, each after `before`."""
    found: Objects = _WHOLES[before][np.minimum(ones, _MOST)]
    for at in zip(*np.nonzero(ones >= _MOST), strict=True):
        found[at] = f"{before}-{ones[at]}."
    return found


def event(record: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + record + b"\n\n"
