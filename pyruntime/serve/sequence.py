"""One prompt on its way through the engine, and its greedy continuation."""

from __future__ import annotations

from collections.abc import Sequence as Strings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pyruntime.model.batch import Rows, ascending
from pyruntime.model.scores import GREEDY, TokenScores
from pyruntime.serve.texts import Reply, Texts


@dataclass(frozen=True)
class Step:
    """What a sequence gives the engine next.

    Attributes:
        ids: int32 [nt]. rows: the ascending positions of `ids` that are followed by what is scored.
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
        self._begun = False
        self._texts = texts
        self._scores: list[TokenScores] = []
        # Nothing is asked of the last token where nothing follows it.
        self._run = len(prompt) if max_tokens else len(prompt) - 1 if scored else 0
        self.finish: Literal["stop", "length"] | None = None if self._run else "length"
        # Positions of the cache that it needs; 0 if one step does it all.
        self.capacity = self._run + max_tokens - 1 if max_tokens > 1 else 0

    def step(self) -> Step:
        """The next tokens."""
        if self._begun:
            return Step(np.array(self.tokens[-1:], np.int32), _ZERO, _GREEDY)
        if not self.scored:
            return Step(self.prompt, ascending(self._run - 1, self._run), _GREEDY)
        targets = self.prompt[1:]
        if self.max_tokens:
            targets = np.append(targets, np.int32(GREEDY))
        return Step(self.prompt[: self._run], ascending(0, self._run), targets)

    def take(self, step: Step, scores: TokenScores) -> None:
        """What came of a step: scores of its rows, with the `top` likeliest or more."""
        self._begun = True
        self._scores.append(scores.with_top(self.top))
        if step.targets[-1] == GREEDY:
            self._follow(int(scores.tokens[-1]))
        else:  # scored, with nothing to follow
            self.finish = "length"

    def _follow(self, token: int) -> None:
        self.tokens.append(token)
        if token in self._texts.stop_ids:
            self.finish = "stop"
        elif self.reply.take(self._texts.piece(token)):
            self.finish = "stop"
            return
        elif len(self.tokens) == self.max_tokens:
            self.finish = "length"
        if self.finish:
            self.reply.end()

    @property
    def scores(self) -> TokenScores:
        """Of all tokens but the first if the prompt is scored, else of the continuation's.

        With the `top` likeliest, or all that there are; none for 0.
        """
        if not self._scores:
            return TokenScores.empty(0, self.top)
        self._scores = [TokenScores.joined(self._scores)]
        return self._scores[0]


_ZERO, _GREEDY = np.zeros(1, np.int32), np.full(1, GREEDY, np.int32)
