"""What one forward pass works on: the rows of one prompt, or of several side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]
NONE: Rows = np.empty(0, np.int32)
REGION = 16  # positions of a cache at whose multiples a prompt's may begin, if several share it
_first_integers: Rows = NONE  # what `ascending` gives parts of


def ascending(first: int, last: int) -> Rows:
    """[first, ..., last - 1], which nobody writes to."""
    global _first_integers
    integers = _first_integers
    if last > len(integers):
        integers = np.arange(1 << last.bit_length(), dtype=np.int32)
        integers.setflags(write=False)
        _first_integers = integers
    return integers[first:last]


def whole_regions(positions: int) -> int:
    """`positions` rounded up to where the next prompt's may begin."""
    return -(-positions // REGION) * REGION


def require_room(cache: Any, tokens: int, start: int) -> None:
    """Raises ValueError unless a cache has room for so many tokens from position `start` on."""
    if start + tokens > cache.capacity:
        raise ValueError(
            f"{tokens} tokens after {start} exceed the cache's {cache.capacity} positions"
        )


class Prompt:
    """Tokens that a pass appends to a cache, and the rows of them that something is wanted of.

    Attributes:
        ids: int32 [nt], nt >= 1, each below the vocabulary.
        cache: a cache of the model, as long as it was before the pass.
        logits, hidden: ascending indices into `ids`, int32; those of `hidden` follow one another.
    """

    __slots__ = ("cache", "hidden", "ids", "logits")

    def __init__(self, ids: Rows, cache: Any, logits: Rows = NONE, hidden: Rows = NONE) -> None:
        self.ids = ids
        self.cache = cache
        self.logits = logits
        self.hidden = hidden


class Batch:
    """The prompts of a pass, packed: the rows of one follow those of the one before.

    Attributes:
        prompts: as given. rows: of all of them. longest: the most rows of one.
        starts: positions that were cached before each when the pass began (`begin`).
        fresh: whether nothing was cached then before any of them.
        logits, hidden: the rows of the pass whose logits or hidden states are wanted, ascending.
        kept: those of which anything is.
    """

    __slots__ = ("fresh", "hidden", "kept", "logits", "longest", "prompts", "rows", "starts")

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = prompts
        first = prompts[0]
        self.logits, self.hidden = first.logits, first.hidden
        self.rows = self.longest = len(first.ids)
        if len(prompts) > 1:
            lengths = [len(prompt.ids) for prompt in prompts]
            self.rows, self.longest = sum(lengths), max(lengths)
            firsts = list(accumulate(lengths, initial=0))
            self.logits = _of_pass([prompt.logits for prompt in prompts], firsts)
            self.hidden = _of_pass([prompt.hidden for prompt in prompts], firsts)
        self.kept = self.logits
        if len(self.hidden):
            self.kept = self.hidden
            if len(self.logits):
                self.kept = np.union1d(self.logits, self.hidden).astype(np.int32)

    @classmethod
    def of_one(cls, ids: Rows, cache: Any, logits: Literal["last", "all"]) -> Batch:
        """One prompt, and logits of its last row or of all."""
        if logits not in ("last", "all"):
            raise ValueError(f"logits={logits!r}: 'last' or 'all'")
        return cls(
            [Prompt(ids, cache, ascending(0 if logits == "all" else len(ids) - 1, len(ids)))]
        )

    def begin(self, check_cache: Callable[[Any], None]) -> None:
        """Says that the pass begins, after what its caches hold now.

        Raises ValueError: `check_cache` refuses one, it has no room, or two prompts share one.
        """
        starts: list[int] = []
        self.starts = starts
        for prompt in self.prompts:
            cache, rows = prompt.cache, len(prompt.ids)
            check_cache(cache)
            start = cache.length
            if start + rows > cache.capacity:
                require_room(cache, rows, start)
            starts.append(start)
        if len(starts) > 1 and len({id(prompt.cache) for prompt in self.prompts}) < len(starts):
            raise ValueError("two prompts of a pass share a cache")
        self.fresh = not any(starts)

    def store(self) -> None:
        """Says that the pass has been made: its tokens are now those of its caches, too."""
        for i, prompt in enumerate(self.prompts):
            prompt.cache.append(prompt.ids, self.starts[i])

    def kept_places(self, rows: Rows) -> Rows:
        """Where ascending `rows` are among those that are kept."""
        if len(rows) == len(self.kept):
            return ascending(0, len(rows))
        return np.searchsorted(self.kept, rows).astype(np.int32)


def _of_pass(rows: list[Rows], firsts: list[int]) -> Rows:
    """Rows of each prompt as rows of the pass, in which it begins at these."""
    return np.concatenate([own + np.int32(first) for own, first in zip(rows, firsts, strict=False)])


class Output(NamedTuple):
    """What a pass gives, in the order of its prompts.

    Attributes:
        logits: float32 [rows that logits are wanted of, vocab].
        sums: of each prompt that hidden states are wanted of, their sum: [prompts, hidden], on the
            host, float32 from a GPU and float64 from NumPy.
        token: of a greedy pass, which gives no logits, their argmax.
    """

    logits: Any
    sums: NDArray[np.floating[Any]]
    token: int | None = None


def runs(rows: Rows, most: int) -> list[tuple[int, int]]:
    """Ascending `rows` as (first, count) of those that follow each other, `most` at a time."""
    found: list[tuple[int, int]] = []
    for part in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        found += [(int(part[at]), min(most, len(part) - at)) for at in range(0, len(part), most)]
    return found
