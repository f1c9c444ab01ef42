"""What a client gets: OpenAI's text_completion objects, whole or in pieces as they come."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence as Items
from functools import cached_property
from typing import Any

from pyruntime.serve.protocol import Asked
from pyruntime.serve.scores import Scores
from pyruntime.serve.sequence import Sequence
from pyruntime.serve.texts import Offsets, Texts, joined


def dumped(record: Any) -> bytes:
    """Strict JSON."""
    return json.dumps(record, allow_nan=False, separators=(",", ":")).encode()


class Answer:
    """The answer to a request, about `sequences` that are its prompts in their order."""

    def __init__(self, asked: Asked, texts: Texts, model: str) -> None:
        self._asked = asked
        self._texts = texts
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
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
        self._pieces: dict[int, _Pieces] = {}
        self._over: set[int] = set()  # choices whose end was told

    def whole(self, timings: dict[str, float]) -> dict[str, Any]:
        """The answer once all sequences are over, with the seconds that it took."""
        choices = [self._next(place) for place in range(len(self.sequences))]
        return {**self._head, "choices": choices, **self._usage(), "timings": timings}

    def chunk(self, sequence: Sequence) -> dict[str, Any] | None:
        """What is new of one of the sequences since the chunk before; None for nothing."""
        if not (sequence.tokens or sequence.finish):
            return None  # in the midst of its prompt
        choice = self._next(self.sequences.index(sequence))
        if choice["text"] or choice["finish_reason"] or choice["logprobs"]:
            return {**self._head, "choices": [choice]}
        return None

    def last_chunks(self) -> list[dict[str, Any]]:
        """What no chunk has told once all sequences are over."""
        untold = [sequence for n, sequence in enumerate(self.sequences) if n not in self._over]
        chunks = [chunk for sequence in untold if (chunk := self.chunk(sequence))]
        if self._asked.include_usage:
            chunks.append({**self._head, "choices": [], **self._usage()})
        return chunks

    def _next(self, place: int) -> dict[str, Any]:
        if place not in self._pieces:
            sequence, text = self.sequences[place], self._asked.texts[place]
            self._pieces[place] = _Pieces(sequence, self._asked, self._texts, text)
        text, logprobs, finish = self._pieces[place].next()
        if finish:
            self._over.add(place)
        return {"text": text, "index": place, "logprobs": logprobs, "finish_reason": finish}

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(s.prompt) for s in self.sequences)
        completion = sum(len(s.tokens) for s in self.sequences)
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            }
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

    @cached_property
    def _prompt_pieces(self) -> list[bytes]:
        pieces = self._texts.pieces(self._sequence.prompt)
        if self._text is not None and self._texts.adds_bos:
            pieces[0] = b""  # nobody wrote it
        return pieces

    @cached_property
    def _prompt_text(self) -> str:
        return joined(self._prompt_pieces) if self._text is None else self._text

    def next(self) -> tuple[str, dict[str, Any] | None, str | None]:
        """Its text, its log-probabilities, and why it ended, if it did."""
        reply, finish = self._sequence.reply, self._sequence.finish
        until = len(reply.text) if finish else reply.settled
        text = reply.text[self._shown : until]
        self._shown = until
        logprobs = None if self._asked.logprobs is None else self._logprobs()
        if self._echo:
            text = self._prompt_text + text
        self._echo = False
        return text, logprobs, finish

    def _logprobs(self) -> dict[str, Any]:
        sequence = self._sequence
        ids = sequence.tokens[self._told :]
        scores = sequence.scores
        first = len(scores) - len(ids)
        self._offsets = self._offsets or Offsets(len(self._prompt_text))
        starts = [self._offsets.take(p) for p in self._texts.pieces(ids, begins=False)]
        values, tops = self._rows(scores.rows(first, len(scores)))
        if self._echo:
            at = Offsets(0)
            starts = [*map(at.take, self._prompt_pieces), *starts]
            prompt_values, prompt_tops = self._rows(scores.rows(0, first))
            values, tops = [None, *prompt_values, *values], [None, *prompt_tops, *tops]
            ids = [*sequence.prompt.tolist(), *ids]
        self._told = len(sequence.tokens)
        return {
            "tokens": [self._texts.token(id) for id in ids],
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": starts,
        }

    def _rows(self, scores: Scores) -> tuple[list[Any], list[Any]]:
        """The log-probability of each token, and that of the likeliest by their texts."""
        chosen = scores.chosen.tolist()
        rows = zip(scores.tokens.tolist(), chosen, scores.best.tolist(), scores.values.tolist(),
                   strict=True)  # fmt: skip
        return chosen, [self._top([*best, id], [*values, own]) for id, own, best, values in rows]

    def _top(self, ids: Items[int], values: Items[float]) -> dict[str, float]:
        """By text; of tokens that look the same the likelier one."""
        found: dict[str, float] = {}
        for id, value in zip(ids, values, strict=True):
            found.setdefault(self._texts.token(id), value)
        return found


def event(record: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + (record if isinstance(record, bytes) else dumped(record)) + b"\n\n"
