"""What logits say of given tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Targets(NamedTuple):
    """Tokens that are scored, each by a row of logits.

    Attributes:
        rows: int32 [targets], ascending; several targets may have one row.
        tokens: int32 [targets], each below the vocabulary.
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
        log_probs: float32 [targets], natural logarithms.
        greedy: bool [targets], whether the token is its row's argmax, the first of equal ones.
    """

    log_probs: NDArray[np.float32]
    greedy: NDArray[np.bool_]

    @classmethod
    def empty(cls, targets: Targets) -> TokenScores:
        """Room for theirs."""
        count = len(targets.rows)
        return cls(np.empty(count, np.float32), np.empty(count, np.bool_))


def token_scores(logits: NDArray[np.float32], targets: Targets) -> TokenScores:
    """log softmax(logits)[token] of each target, and whether the token is the row's argmax.

    Args:
        logits: float32 [rows, vocab], overwritten.

    Sums are of float64.
    """
    rows, tokens = targets
    best = logits.argmax(axis=1)
    logits -= np.take_along_axis(logits, best[:, None], axis=1)
    chosen = logits[rows, tokens]
    np.exp(logits, out=logits)
    log_probs = chosen - np.log(logits.sum(axis=1, dtype=np.float64))[rows]
    return TokenScores(log_probs.astype(np.float32), best[rows] == tokens)
