"""Log-probabilities and the likeliest tokens of rows of logits, on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyruntime.model.batch import Rows

GREEDY = -1  # as a target: the likeliest token
PIECE_BYTES = 4 << 20  # of logits at a time

Map = Callable[[Callable[[slice], "Scores"], Iterable[slice]], Iterable["Scores"]]


@dataclass(frozen=True)
class Scores:
    """Of rows of logits.

    Attributes:
        tokens: int32 [rows], the targets, and in place of GREEDY the likeliest token.
        chosen: float64 [rows], the log-probabilities of `tokens`.
        best: int32 [rows, top], the likeliest tokens, likeliest first.
        values: float64 [rows, top], their log-probabilities.
    """

    tokens: Rows
    chosen: NDArray[np.float64]
    best: Rows
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def joined(cls, parts: Iterable[Scores]) -> Scores:
        """The rows of all parts, of which there must be one."""
        fields = zip(*((p.tokens, p.chosen, p.best, p.values) for p in parts), strict=True)
        return cls(*(np.concatenate(arrays) for arrays in fields))

    def rows(self, first: int, last: int) -> Scores:
        """Rows [first, last)."""
        part = slice(first, last)
        return Scores(self.tokens[part], self.chosen[part], self.best[part], self.values[part])


def scores(logits: NDArray[np.float32], targets: Rows, top: int, over: Map = map) -> Scores:
    """Scores of `targets`, int32 [rows], each a token or GREEDY, by logits [rows, vocab].

    Args:
        top: how many of the likeliest tokens; 0 gives the arrays of Scores an axis of no length.
        over: `map`, or that of an executor: pieces are independent.
    """
    rows, vocab = logits.shape
    size = max(PIECE_BYTES // (4 * vocab), 1)
    pieces = [slice(first, first + size) for first in range(0, rows, size)]
    if len(pieces) == 1:
        return _piece(logits, targets, top)
    return Scores.joined(over(lambda piece: _piece(logits[piece], targets[piece], top), pieces))


def _piece(logits: NDArray[np.float32], targets: Rows, top: int) -> Scores:
    top = min(top, logits.shape[1])
    best = _best(logits, max(top, 1))
    tokens = np.where(targets == GREEDY, best[:, 0], targets).astype(np.int32)
    peak = logits.max(axis=1, keepdims=True)
    shifted = logits - peak
    chosen = _picked(shifted, tokens[:, None])[:, 0]
    values = _picked(shifted, best[:, :top])
    np.exp(shifted, out=shifted)
    norm = np.log(shifted.sum(axis=1, dtype=np.float64))
    return Scores(tokens, chosen - norm, best[:, :top], values - norm[:, None])


def _best(logits: NDArray[np.float32], top: int) -> Rows:
    """The `top` largest of each row, largest first; of equals the lowest id first."""
    best = np.empty((len(logits), top), np.int32)
    left = logits.copy() if top > 1 else logits
    for place in range(top):  # faster than a partition as long as they are few
        best[:, place] = ids = left.argmax(axis=1)
        if place + 1 < top:
            left[np.arange(len(left)), ids] = -np.inf
    return best


def _picked(rows: NDArray[np.float32], ids: Any) -> NDArray[np.float64]:
    picked: Any = np.take_along_axis(rows, ids.astype(np.intp), axis=1)
    wide: NDArray[np.float64] = picked.astype(np.float64)
    return wide
