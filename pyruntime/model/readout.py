"""What is read of a pass on a GPU besides logits: scores of tokens, and sums of hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.model.batch import Batch, Rows, ascending
from pyruntime.model.decoder import Piece
from pyruntime.model.pipeline import Pass
from pyruntime.model.scores import Targets, TokenScores
from pyruntime.ops.pool import pool
from pyruntime.ops.scores import scores

Activations = Mapping[str, DeviceArray]


class Scorer:
    """Scores of a pass's targets, `parts` of them one after the other, with the `top` likeliest.

    Args:
        head: makes what makes the logits of a piece, see `Decoder.head`.
        pieces: of the rows that targets are counted by.
        logits: float32 [rows of any piece or more, vocab], for one piece after the other.

    Attributes:
        parts: of the targets, each as many as there is room for; one at least.
    """

    def __init__(
        self,
        library: Library,
        activations: Activations,
        head: Callable[[Piece, DeviceArray], Pass],
        pieces: list[Piece],
        targets: Targets,
        logits: DeviceArray,
        top: int,
    ) -> None:
        self._library, self._activations, self._head = library, activations, head
        self._pieces, self._targets, self._logits = pieces, targets, logits
        self._made: Piece | None = None  # whose logits there are
        scores, self._top = activations["scores"], top
        room, words = scores.shape
        most = min(room, len(targets.rows))
        if most * (1 + 2 * top) > room * words:
            scores = DeviceArray(scores.device, (most, 1 + 2 * top), np.int32, what="scores")
        self._scores = scores
        starts = range(0, max(len(targets.rows), 1), room)
        self.parts = [slice(start, start + room) for start in starts]

    def passes(self, part: slice) -> Iterator[Pass]:
        """Uploads targets, while nothing is at work; then what makes their scores.

        Parts come in their order: a piece whose targets are in several is made once.
        """
        rows, tokens = self._targets.rows[part], self._targets.tokens[part]
        if not len(rows):
            return iter(())
        count = sum(piece.rows for piece in self._pieces)
        first = np.searchsorted(rows, ascending(0, count + 1)).astype(np.int32)
        buffer = self._activations["targets"]
        buffer.rows(0, count + 1 + len(tokens)).upload(np.concatenate([first, tokens]))
        return self._passes(first, buffer.rows(count + 1, count + 1 + len(tokens)))

    def _passes(self, first: Rows, tokens: DeviceArray) -> Iterator[Pass]:
        act, (count,), top = self._activations, tokens.shape, self._top
        # One after the other, so that one copy brings all.
        log_probs = self._scores.view(0, (count,), np.float32)
        values = self._scores.view(4 * count, (count, top), np.float32)
        best = self._scores.view(4 * count * (1 + top), (count, top), np.int32)
        for piece in self._pieces:
            end = piece.before + piece.rows
            if first[piece.before] == first[end]:
                continue
            logits = self._logits.rows(0, piece.rows)
            if piece is not self._made:
                yield self._head(piece, logits)
                self._made = piece
            program = Program()
            scores(
                program, self._library, rows=piece.counted, max_rows=piece.rows, logits=logits,
                first=act["targets"].rows(piece.before, end + 1), tokens=tokens,
                log_probs=log_probs, best=best, values=values,
            )  # fmt: skip
            yield Pass(program)

    def download(self, part: slice, found: TokenScores) -> None:
        """Scores of a part of the targets, once its passes are over."""
        tokens = self._targets.tokens[part]
        count, top = len(tokens), self._top
        words = np.asarray(self._scores.view(0, (count * (1 + 2 * top),), np.int32))
        log_probs, values, best = np.split(words, (count, count * (1 + top)))
        best = best.reshape(count, top)
        found.put(
            part,
            TokenScores(
                np.where(tokens < 0, best[:, 0], tokens),
                log_probs.view(np.float32),
                best,
                values.view(np.float32).reshape(count, top),
            ),
        )


class Pooled:
    """The sums of the hidden states that prompts of a batch want.

    They are made where the residual stream of kept rows was, which nothing reads after the output
    norm.

    Args:
        places: rows of `normed` that hold those states, of one prompt after the other.
    """

    def __init__(
        self, library: Library, activations: Activations, batch: Batch, places: Rows
    ) -> None:
        """Uploads which rows are whose, while nothing is at work."""
        self._library, self._activations = library, activations
        rows = np.array([len(prompt.hidden) for prompt in batch.prompts if len(prompt.hidden)])
        self._count = count = len(rows)
        spans = np.stack([places[np.cumsum(rows) - rows], rows], axis=1)
        self._spans = activations["spans"].rows(0, count).upload(spans)
        self._sums = activations["last_x"].rows(0, count)

    def passes(self) -> Iterator[Pass]:
        """What makes the sums; asked for when all that writes to `normed` has been enqueued."""
        program, act, count = Program(), self._activations, self._count
        pool(
            program, self._library, count=act["counts"].rows(count, count + 1), max_count=count,
            spans=self._spans, x=act["normed"], sums=self._sums,
        )  # fmt: skip
        yield Pass(program)

    def download(self) -> NDArray[np.float32]:
        """Float32 [prompts that want hidden states, hidden], once the pass is over."""
        return np.asarray(self._sums)
