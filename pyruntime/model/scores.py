"""What logits say of given tokens, and which tokens they make the likeliest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

GREEDY = -1  # as a target: the likeliest token
PIECE_BYTES = 4 << 20  # of logits at a time, which are read several times


class Targets(NamedTuple):
    """Tokens that are scored, each by a row of logits.

    Attributes:
        rows: int32 [targets], ascending; several targets may have one row.
        tokens: int32 [targets], each below the vocabulary, or GREEDY.
    """

    rows: NDArray[np.int32]
    tokens: NDArray[np.int32]

    def within(self, first: int, last: int) -> tuple[slice, Targets]:
        """Those of rows [first, last): which they are, and they with rows counted from `first`."""
        part = slice(*np.searchsorted(self.rows, (first, last)).tolist())
        return part, Targets(self.rows[part] - np.int32(first), self.tokens[part])


class TokenScores(NamedTuple):
    """Of targets.

    Attributes:
        tokens: int32 [targets], as given, and in place of GREEDY the likeliest.
        log_probs: float32 [targets], natural logarithms.
        best: int32 [targets, top], the likeliest tokens of each target's row, likeliest first; of
            equal ones the first. Top is 1 at least, and the vocabulary at most.
        values: float32 [targets, top], the log-probabilities of `best`.
    """

    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    best: NDArray[np.int32]
    values: NDArray[np.float32]

    @property
    def greedy(self) -> NDArray[np.bool_]:
        """Bool [targets], whether the token is its row's argmax, the first of equal ones."""
        found: NDArray[np.bool_] = self.tokens == self.best[:, 0]
        return found

    @classmethod
    def empty(cls, count: int, top: int) -> TokenScores:
        """Room for those of `count` targets."""
        best = np.empty((count, top), np.int32)
        return cls(
            np.empty(count, np.int32), np.empty(count, np.float32), best,
            np.empty((count, top), np.float32),
        )  # fmt: skip

    @classmethod
    def joined(cls, parts: Iterable[TokenScores]) -> TokenScores:
        """The targets of all parts, of which there must be one."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        arrays: list[Any] = [np.concatenate(each) for each in zip(*parts, strict=True)]
        return cls(*arrays)

    def part(self, which: slice) -> TokenScores:
        """Some of the targets; a view."""
        arrays: list[Any] = [array[which] for array in self]
        return TokenScores(*arrays)

    def with_top(self, top: int) -> TokenScores:
        """Only the `top` likeliest of each, or all that there are; a view."""
        return self._replace(best=self.best[:, :top], values=self.values[:, :top])

    def put(self, which: slice, scores: TokenScores) -> None:
        """Overwrites some of the targets' scores."""
        for array, given in zip(self, scores, strict=True):
            array[which] = given


def token_scores(logits: NDArray[np.float32], targets: Targets, top: int = 1) -> TokenScores:
    """The scores of targets, and the `top` likeliest tokens of their rows.

    Args:
        logits: float32 [rows, vocab], overwritten.
        top: at least 1, at most vocab.

    Sums are of float64.
    """
    rows, vocab = logits.shape
    found = TokenScores.empty(len(targets.rows), top)
    size = max(PIECE_BYTES // (4 * vocab), 1)
    for first in range(0, rows, size):
        part, own = targets.within(first, first + size)
        found.put(part, _scores(logits[first : first + size], own, top))
    return found


def _scores(logits: NDArray[np.float32], targets: Targets, top: int) -> TokenScores:
    best = _best(logits, top)
    likeliest = best[targets.rows]
    tokens = np.where(targets.tokens < 0, likeliest[:, 0], targets.tokens)
    logits -= np.take_along_axis(logits, best[:, :1], axis=1)
    chosen = logits[targets.rows, tokens]
    values = logits[targets.rows[:, None], likeliest]
    np.exp(logits, out=logits)
    norms = np.log(logits.sum(axis=1, dtype=np.float64))[targets.rows]
    return TokenScores(
        tokens, (chosen - norms).astype(np.float32), likeliest,
        (values - norms[:, None]).astype(np.float32),
    )  # fmt: skip


def _best(logits: NDArray[np.float32], top: int) -> NDArray[np.int32]:
    """The `top` likeliest of each row: NaN before numbers, then by value, of equals the first."""
    if top == 1:
        first: NDArray[np.int32] = logits.argmax(axis=1)[:, None].astype(np.int32)
        return first
    best = np.empty((len(logits), top), np.int32)
    left, at = logits.copy(), np.arange(len(logits))
    for place in range(top):  # faster than a partition as long as they are few
        best[:, place] = ids = left.argmax(axis=1)
        if np.isneginf(left[at, ids]).any():  # taken, or so from the start
            return np.lexsort((-logits, ~np.isnan(logits)))[:, :top].astype(np.int32)
        left[at, ids] = -np.inf
    return best
