"""What one forward pass works on: the rows of one prompt, or of several side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]
NONE: Rows = np.empty(0, np.int32)
REGION = 16  # positions of a cache at whose multiples a prompt's may begin, if several share it


def whole_regions(positions: int) -> int:
    """`positions` rounded up to where the next prompt's may begin."""
    return -(-positions // REGION) * REGION


def require_room(cache: Any, tokens: int, start: int) -> None:
    """Raises ValueError unless a cache has room for so many tokens from position `start` on."""
    if start + tokens > cache.capacity:
        raise ValueError(
            f"{tokens} tokens after {start} exceed the cache's {cache.capacity} positions"
        )


@dataclass(frozen=True)
class Prompt:
    """Tokens that a pass appends to a cache, and the rows of them that something is wanted of.

    Attributes:
        ids: int32 [nt], nt >= 1, each below the vocabulary.
        cache: a cache of the model, as long as it was before the pass.
        logits, hidden: ascending indices into `ids`, int32.
    """

    ids: Rows
    cache: Any
    logits: Rows = field(default_factory=lambda: NONE)
    hidden: Rows = field(default_factory=lambda: NONE)


@dataclass(frozen=True)
class Batch:
    """The prompts of a pass, packed: the rows of one follow those of the one before."""

    prompts: Sequence[Prompt]

    @classmethod
    def of_one(cls, ids: Rows, cache: Any, logits: Literal["last", "all"]) -> Batch:
        """One prompt, and logits of its last row or of all."""
        if logits not in ("last", "all"):
            raise ValueError(f"logits={logits!r}: 'last' or 'all'")
        rows = np.arange(len(ids) if logits == "all" else 1, dtype=np.int32)
        return cls([Prompt(ids, cache, rows if logits == "all" else rows + len(ids) - 1)])

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Around a pass: where nothing is raised, its tokens are then those of the caches, too."""
        starts = [prompt.cache.length for prompt in self.prompts]
        yield
        for prompt, start in zip(self.prompts, starts, strict=True):
            prompt.cache.append(prompt.ids, start)

    @cached_property
    def first_rows(self) -> list[int]:
        """Where each prompt begins, and at the end the rows of all."""
        return list(accumulate((len(prompt.ids) for prompt in self.prompts), initial=0))

    @property
    def rows(self) -> int:
        """Of all prompts."""
        return self.first_rows[-1]

    @property
    def longest(self) -> int:
        """The most rows of a prompt."""
        return max(len(prompt.ids) for prompt in self.prompts)

    @property
    def fresh(self) -> bool:
        """Whether nothing is cached before any of them."""
        return not any(prompt.cache.length for prompt in self.prompts)

    @cached_property
    def logits(self) -> Rows:
        """The rows of the pass whose logits are wanted, ascending."""
        return self._rows("logits")

    @cached_property
    def hidden(self) -> Rows:
        """The rows of the pass whose hidden states are wanted, ascending."""
        return self._rows("hidden")

    @cached_property
    def kept(self) -> Rows:
        """The rows that something is wanted of, ascending."""
        if not len(self.hidden) or not len(self.logits):
            return self.hidden if len(self.hidden) else self.logits
        return np.union1d(self.logits, self.hidden).astype(np.int32)

    def kept_places(self, rows: Rows) -> Rows:
        """Where ascending `rows` are among those that are kept."""
        if len(rows) == len(self.kept):
            return np.arange(len(rows), dtype=np.int32)
        return np.searchsorted(self.kept, rows).astype(np.int32)

    def _rows(self, name: Literal["logits", "hidden"]) -> Rows:
        if len(self.prompts) == 1:
            own: Rows = getattr(self.prompts[0], name)
            return own
        places = zip(self.first_rows, self.prompts, strict=False)
        return np.concatenate([getattr(p, name) + np.int32(first) for first, p in places])


@dataclass(frozen=True)
class Output:
    """What a pass gives, for the rows that were wanted, in their order.

    Attributes:
        logits: float32 [rows, vocab]. hidden: float32 [rows, hidden], on the host.
    """

    logits: Any
    hidden: NDArray[np.float32]


def runs(rows: Rows, most: int) -> list[tuple[int, int]]:
    """Ascending `rows` as (first, count) of those that follow each other, `most` at a time."""
    if 0 < len(rows) <= most and rows[-1] - rows[0] == len(rows) - 1:
        return [(int(rows[0]), len(rows))]
    found: list[tuple[int, int]] = []
    for part in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        found += [(int(part[at]), min(most, len(part) - at)) for at in range(0, len(part), most)]
    return found
