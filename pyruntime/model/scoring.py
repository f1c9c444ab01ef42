"""Log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pyruntime.model.batch import NONE, Batch, Rows
from pyruntime.model.calls import Call
from pyruntime.model.packing import Part


class Scored:
    """The calls that score continuations, and what their passes find.

    The token after row i is scored by the logits of row i. So the last token is not run, and the
    first one of a text has no score.

    Args:
        texts: pairs of int32 ids: the context, and the tokens after it that are scored.

    Attributes:
        calls: of those texts that have anything to be scored.
    """

    def __init__(self, texts: Sequence[tuple[Rows, Rows]]) -> None:
        self._wholes = [np.concatenate([NONE, *text]) for text in texts]
        self._firsts = [len(context) for context, _ in texts]
        self._found: list[list[NDArray[np.float32]]] = [[] for _ in texts]
        self._places: list[int] = []  # of the texts that the calls are of
        self.calls: list[Call] = []
        for place, (whole, first) in enumerate(zip(self._wholes, self._firsts, strict=True)):
            rows = np.arange(max(first, 1) - 1, len(whole) - 1, dtype=np.int32)
            if len(rows):
                self._places.append(place)
                self.calls.append(Call(whole[:-1], None, logits=rows))

    def targets(self, batch: Batch, parts: list[Part]) -> Rows:
        """The token after each row of a pass whose logits are wanted."""
        wholes = [self._wholes[self._places[part.prompt]] for part in parts]
        pairs = zip(wholes, parts, batch.prompts, strict=True)
        return np.concatenate([w[part.first + prompt.logits + 1] for w, part, prompt in pairs])

    def take(self, batch: Batch, parts: list[Part], found: NDArray[np.float32]) -> None:
        """The log-probabilities of the targets of a pass."""
        at = 0
        for part, prompt in zip(parts, batch.prompts, strict=True):
            count = len(prompt.logits)
            self._found[self._places[part.prompt]].append(found[at : at + count])
            at += count

    def results(self) -> list[list[float | None]]:
        """Of each text, for each token after its context; None for one that nothing precedes."""
        results: list[list[float | None]] = []
        for whole, first, found in zip(self._wholes, self._firsts, self._found, strict=True):
            scores: list[float | None] = [None] if first == 0 and len(whole) else []
            for part in found:
                scores += part.tolist()
            results.append(scores)
        return results


def windows(ids: Rows, size: int, stride: int) -> list[tuple[Rows, Rows]]:
    """`ids` cut into contexts and continuations of `size` tokens together, moved by `stride`.

    Every token but the first one is in one continuation, the earliest that reaches it.
    """
    texts, done = [], 1
    for start in range(0, len(ids), stride):
        end = min(start + size, len(ids))
        if end > done:
            texts.append((ids[start:done], ids[done:end]))
            done = end
    return texts
