"""One prompt on its way through the engine, and its greedy continuation."""

from __future__ import annotations

from collections.abc import Sequence as Strings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pyruntime.model.batch import NONE, Rows
from pyruntime.serve.scores import GREEDY, Scores
from pyruntime.serve.texts import Reply, Texts


@dataclass(frozen=True)
class Step:
    """What a sequence gives the engine next.

    Attributes:
        ids: int32 [nt]. rows: the ascending positions of `ids` whose logits are wanted.
        targets: the token that each of them is to score, or GREEDY.
    """

    ids: Rows
    rows: Rows
    targets: Rows


class Sequence:
    """Prompt ids, what is wanted of them, and what has come of it.

    Args:
        prompt: int32 [nt], nt >= 1.
        max_tokens: of the continuation. scored: whether the prompt's tokens are scored, too.
        top: how many of the likeliest tokens are kept for each token that is scored.
        stop: strings that end the continuation.

    Attributes:
        tokens: the continuation, with the token that ended it. reply: its text, without.
        finish: None as long as it is not over: "stop" or "length".
        cache: the engine's cache behind it, if it takes several steps.
    """

    def __init__(
        self,
        prompt: Rows,
        texts: Texts,
        *,
        max_tokens: int = 1,
        scored: bool = False,
        top: int = 0,
        stop: Strings[str] = (),
    ) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.scored = scored
        self.top = top
        self.tokens: list[int] = []
        self.reply = Reply(stop)
        self.cache: Any = None
        self._texts = texts
        self._fed = 0
        self._scores: list[Scores] = []
        # Nothing is asked of the last token where nothing follows it.
        self._run = len(prompt) if max_tokens else len(prompt) - 1 if scored else 0
        self.finish: Literal["stop", "length"] | None = None if self._run else "length"

    @property
    def decoding(self) -> bool:
        """Whether the prompt is through."""
        return self._fed >= self._run

    def capacity(self, most_rows: int) -> int:
        """Positions of the cache that it needs; 0 if one step of `most_rows` logits does it all."""
        if self.max_tokens > 1 or (self.scored and self._run > most_rows):
            return self._run + max(self.max_tokens - 1, 0)
        return 0

    def step(self, most_rows: int) -> Step:
        """The next tokens, with at most that many rows of logits."""
        if self.decoding:
            return Step(np.array(self.tokens[-1:], np.int32), _ZERO, _GREEDY)
        if not self.scored:
            return Step(self.prompt, np.array([self._run - 1], np.int32), _GREEDY)
        ids = self.prompt[self._fed : min(self._fed + most_rows, self._run)]
        after = self.prompt[self._fed + 1 : self._fed + 1 + len(ids)]
        targets = after if len(after) == len(ids) else np.append(after, np.int32(GREEDY))
        return Step(ids, np.arange(len(ids), dtype=np.int32), targets)

    def take(self, step: Step, scores: Scores) -> None:
        """What came of a step: scores of its rows."""
        self._fed += len(step.ids)
        self._scores.append(scores)
        if step.targets[-1] == GREEDY:
            self._follow(int(scores.tokens[-1]))
        elif self.decoding:  # scored, with nothing to follow
            self.finish = "length"

    def _follow(self, token: int) -> None:
        self.tokens.append(token)
        if token in self._texts.stop_ids:
            self.finish = "stop"
        elif self.reply.take(self._texts.pieces([token], begins=False)[0]):
            self.finish = "stop"
            return
        elif len(self.tokens) == self.max_tokens:
            self.finish = "length"
        if self.finish:
            self.reply.end()

    @property
    def scores(self) -> Scores:
        """Of all tokens but the first if the prompt is scored, else of the continuation's."""
        return Scores.joined(self._scores) if self._scores else _nothing(self.top)


_ZERO, _GREEDY = np.zeros(1, np.int32), np.full(1, GREEDY, np.int32)


def _nothing(top: int) -> Scores:
    return Scores(NONE, np.empty(0), np.empty((0, top), np.int32), np.empty((0, top)))
