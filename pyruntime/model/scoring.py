"""Scores of given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pyruntime.model.batch import NONE, Batch, Rows
from pyruntime.model.calls import Call
from pyruntime.model.packing import Part
from pyruntime.model.scores import Targets, TokenScores


@dataclass(frozen=True)
class Score:
    """How likely a continuation is after its prompt.

    Attributes:
        log_probs: the natural logarithm of each token's probability; None for one that nothing
            precedes.
        greedy: whether each token is the likeliest one, which `Engine.generate` takes; None for
            one that nothing precedes.
    """

    log_probs: list[float | None] = field(default_factory=list)
    greedy: list[bool | None] = field(default_factory=list)

    @property
    def total(self) -> float:
        """The sum of the log-probabilities that there are."""
        return sum(x for x in self.log_probs if x is not None)

    @property
    def is_greedy(self) -> bool:
        """Whether no token is known to be other than the likeliest."""
        return False not in self.greedy


class Scored:
    """The calls that score continuations, and what their passes find.

    The token after row i is scored by the logits of row i. So the last token is not run, and the
    first one of a text has no score. Texts that differ in nothing but their last token share a
    call.

    Args:
        texts: pairs of int32 ids: the context, and the tokens after it that are scored.

    Attributes:
        calls: of those texts that have anything to be scored.
    """

    def __init__(self, texts: Sequence[tuple[Rows, Rows]]) -> None:
        self._results = [Score() for _ in texts]
        self.calls: list[Call] = []
        self._targets: list[Targets] = []  # of each call
        self._owners: list[Rows] = []  # the texts that they are of
        alike: dict[bytes, list[int]] = {}
        wholes = [np.concatenate([NONE, *text]) for text in texts]
        for place, (whole, (context, _)) in enumerate(zip(wholes, texts, strict=True)):
            if not len(context) and len(whole):
                self._results[place].log_probs.append(None)
                self._results[place].greedy.append(None)
            if len(whole) > max(len(context), 1):
                alike.setdefault(whole[:-1].tobytes(), []).append(place)
        for places in alike.values():
            last = len(wholes[places[0]]) - 1
            rows = [np.arange(max(len(texts[p][0]), 1) - 1, last, dtype=np.int32) for p in places]
            owners = np.repeat(places, [len(own) for own in rows]).astype(np.int32)
            tokens = [wholes[p][own + 1] for p, own in zip(places, rows, strict=True)]
            every, token = np.concatenate(rows), np.concatenate(tokens)
            order = np.argsort(every, kind="stable")
            self._owners.append(owners[order])
            self._targets.append(Targets(every[order], token[order]))
            ids, logits = wholes[places[0]][:-1], np.unique(every)
            self.calls.append(Call(ids, None, logits=logits, place=places[0]))

    def targets(self, batch: Batch, parts: Sequence[Part]) -> Targets:
        """What a pass is to score, by the rows of its logits."""
        return _of_pass(self._targets, batch, parts)

    def take(self, parts: Sequence[Part], found: TokenScores) -> None:
        """The scores of the targets of a pass. Those of a text come in their order."""
        log_probs, greedy = iter(found.log_probs.tolist()), iter(found.greedy.tolist())
        for part in parts:
            own, _ = self._targets[part.prompt].within(part.first, part.last)
            for owner in self._owners[part.prompt][own].tolist():
                self._results[owner].log_probs.append(next(log_probs))
                self._results[owner].greedy.append(next(greedy))

    def results(self) -> list[Score]:
        """Of each text."""
        return self._results


class ScoredRows:
    """What passes find of calls whose rows have one target each.

    Args:
        calls: whose `logits` are the rows. tokens: of each call the targets of its rows.
    """

    def __init__(self, calls: Sequence[Call], tokens: Sequence[Rows]) -> None:
        pairs = zip(calls, tokens, strict=True)
        self._targets = [Targets(call.logits, own) for call, own in pairs]
        self._found: list[list[TokenScores]] = [[] for _ in calls]

    def targets(self, batch: Batch, parts: Sequence[Part]) -> Targets:
        """What a pass is to score, by the rows of its logits."""
        return _of_pass(self._targets, batch, parts)

    def take(self, batch: Batch, parts: Sequence[Part], found: TokenScores) -> None:
        """The scores of the targets of a pass."""
        before = 0
        for part, prompt in zip(parts, batch.prompts, strict=True):
            count = len(prompt.logits)
            self._found[part.prompt].append(found.part(slice(before, before + count)))
            before += count

    def results(self) -> list[TokenScores]:
        """Of each call."""
        return [TokenScores.joined(parts) for parts in self._found]


def _of_pass(targets: Sequence[Targets], batch: Batch, parts: Sequence[Part]) -> Targets:
    """Targets of each call's rows as those of a pass, by the rows of its logits."""
    found = [NONE], [NONE]
    before = 0
    for part, prompt in zip(parts, batch.prompts, strict=True):
        _, own = targets[part.prompt].within(part.first, part.last)
        found[0].append(np.searchsorted(prompt.logits, own.rows).astype(np.int32) + before)
        found[1].append(own.tokens)
        before += len(prompt.logits)
    return Targets(*map(np.concatenate, found))


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
