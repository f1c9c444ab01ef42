"""Prompts that are asked for together, through as many passes as they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyruntime.model.any_cache import AnyCache
from pyruntime.model.batch import NONE, Batch, Output, Prompt, Rows, ascending, require_room
from pyruntime.model.packing import Part, passes
from pyruntime.turns import Deadline

Hidden = Literal["last", "mean"] | None
T = TypeVar("T")
U = TypeVar("U")


class Model(Protocol):
    """What of a backend the passes depend on. `gpu_seconds`: what the last one took of a GPU."""

    gpu_seconds: float

    kv_dtype: str

    @property
    def max_prompts(self) -> int | None: ...

    @property
    def pass_positions(self) -> int | None: ...

    def check_cache(self, cache: Any) -> None: ...


@dataclass
class Call:
    """One prompt, and what is wanted of it.

    Attributes:
        ids: int32 [nt], nt >= 1, each below the vocabulary. cache: to be continued; None: nothing
            is left behind.
        logits, hidden: ascending rows, int32.
        reused: tokens that were taken off the front of `ids`, as the cache holds them.
        place: of the prompt in a list, by which an error names it; None: there is no list.
    """

    ids: Rows
    cache: Any
    logits: Rows = field(default_factory=lambda: NONE)
    hidden: Rows = field(default_factory=lambda: NONE)
    reused: int = 0
    place: int | None = None

    def reuse(self) -> None:
        """Keeps of the cache what `ids` begins with, and drops that from `ids`.

        What is left begins with the first row that something is wanted of, at the latest; a
        cache that begins otherwise is emptied.
        """
        held = self.cache.tokens
        most = min(
            len(held), len(self.ids) - 1, *self.logits[:1].tolist(), *self.hidden[:1].tolist()
        )
        differ = np.flatnonzero(held[:most] != self.ids[:most])
        self.reused = kept = int(differ[0]) if len(differ) else most
        self.cache.truncate(kept)
        self.ids = self.ids[kept:]
        self.logits, self.hidden = (rows - np.int32(kept) for rows in (self.logits, self.hidden))

    @property
    def start(self) -> int:
        """Positions that the cache holds before."""
        return self.cache.length if self.cache is not None else 0


def named(items: Iterable[T], make: Callable[[T], U]) -> list[U]:
    """`make` of each; what it refuses is named by its place.

    Raises ValueError.
    """
    made = []
    for place, item in enumerate(items):
        try:
            made.append(make(item))
        except ValueError as error:
            raise ValueError(f"prompt {place}: {error}") from None
    return made


def wanted_logits(logits: Any, nt: int) -> Rows:
    """The rows that `logits` of `Engine.prefill` stands for, of a prompt of `nt` tokens.

    Raises ValueError.
    """
    if isinstance(logits, str):
        match logits:
            case "none":
                return NONE
            case "last":
                return ascending(nt - 1, nt)
            case "all":
                return ascending(0, nt)
        raise ValueError(f"logits={logits!r}: 'none', 'last', 'all' or positions")
    rows = np.asarray(logits)
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or not rows.size:
        raise ValueError(
            f"logits={logits!r}: 'none', 'last', 'all' or positions, integers in a row"
        )
    if rows.min() < -nt or rows.max() >= nt:
        raise ValueError(f"logits={logits!r}: positions of a prompt of {nt} tokens")
    rows = rows.astype(np.int32)  # whatever it was: nt may be more than that holds
    rows = np.where(rows < 0, rows + np.int32(nt), rows)
    if (np.diff(rows) <= 0).any():
        raise ValueError(f"logits={logits!r}: positions must ascend")
    return rows


def wanted_hidden(hidden: Hidden, nt: int) -> Rows:
    """The rows that `hidden` of `Engine.prefill` is made of. Raises ValueError."""
    if hidden not in (None, "last", "mean"):
        raise ValueError(f"hidden={hidden!r}: None, 'last' or 'mean'")
    if hidden is None:
        return NONE
    return wanted_logits("all" if hidden == "mean" else "last", nt)


def check_room(
    model: Model, asked: Sequence[Call], context: int, *, most: int | None, reuse: bool = False
) -> None:
    """Refuses, before anything is computed, prompts that there is no room for.

    Args:
        context: positions of the model. most: tokens of a prompt without a cache; None: any number.
        reuse: prompts take the place of what the caches hold.

    Raises ValueError.
    """
    if len(asked) > 1:
        given = [id(call.cache) for call in asked if call.cache is not None]
        if len(set(given)) < len(given):
            raise ValueError("cache: two prompts share one")
    for call in asked:
        try:
            _check_room(model, call, context, most, reuse)
        except ValueError as error:
            if call.place is None:
                raise
            raise ValueError(f"prompt {call.place}: {error}") from None


def _check_room(model: Model, call: Call, context: int, most: int | None, reuse: bool) -> None:
    cache, start, tokens = call.cache, 0, len(call.ids)
    if cache is not None:
        if isinstance(cache, AnyCache) and cache.kv_dtype != model.kv_dtype:
            raise ValueError(
                f"this cache holds {cache.kv_dtype}; the engine was loaded with "
                f"kv_dtype={model.kv_dtype!r}"
            )
        model.check_cache(cache)
        start = 0 if reuse else call.start
        require_room(cache, tokens, start)
    elif most is not None and tokens > most:
        raise ValueError(
            f"{tokens} tokens without a cache; this engine was loaded with kv_tokens={most}"
        )
    if start + tokens > context:
        raise ValueError(
            f"{tokens} tokens after {start} exceed the model's context of {context} tokens"
        )


def run(
    model: Model,
    calls: Sequence[Call],
    step: Callable[[Batch, list[Part]], object],
    *,
    rows: int,
    scratch: Any,
    deadline: Deadline,
) -> float:
    """Runs the passes of all calls; their caches are filled for all of them, or for none.

    Args:
        step: makes a pass; `Part.prompt` is the place of its call.
        rows: of a pass at most.
        scratch: a cache for calls that have none, with room for each; None if there are no such.

    Returns: the seconds that they took of a GPU.

    Raises WaitTimeoutError: no time was left for a pass.
    """
    starts, done, seconds = [call.start for call in calls], 0, 0.0
    limits = [] if scratch is None else [scratch.capacity]
    if model.pass_positions is not None:
        limits.append(model.pass_positions)
    plan = passes(
        [len(call.ids) for call in calls],
        starts=starts,
        rows=rows,
        prompts=model.max_prompts,
        positions=min(limits, default=None),
    )
    caches = [call.cache for call in calls]
    try:
        for parts in plan:
            if deadline.work_left() == 0:
                count = sum(len(call.ids) for call in calls)
                raise deadline.over(f"{done} of {count} tokens were done")
            prompts = []
            for part in parts:
                call, cache = calls[part.prompt], caches[part.prompt]
                if cache is None:
                    cache = scratch.region(part.region, len(call.ids))
                    caches[part.prompt] = cache
                prompts.append(_prompt(call, part, cache))
            batch = Batch(prompts)
            step(batch, parts)
            done += batch.rows
            seconds += model.gpu_seconds
    except BaseException:
        for call, start in zip(calls, starts, strict=True):
            if call.cache is not None:
                call.cache.truncate(min(start, call.cache.length))  # less if a thread cut it
        raise
    return seconds


def _prompt(call: Call, part: Part, cache: Any) -> Prompt:
    if part.last - part.first == len(call.ids):
        return Prompt(call.ids, cache, call.logits, call.hidden)

    def within(rows: Rows) -> Rows:
        first, last = np.searchsorted(rows, (part.first, part.last))
        return rows[first:last] - np.int32(part.first)

    return Prompt(call.ids[part.first : part.last], cache, within(call.logits), within(call.hidden))


class Gathered:
    """Logits and pooled hidden states of `calls`, as their passes give them."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._logits: list[Any] = [None] * len(calls)
        self._sums: list[Any] = [0.0] * len(calls)

    def take(self, batch: Batch, parts: list[Part], given: Output) -> None:
        """What a pass gave."""
        row, sums = 0, iter(given.sums)
        for prompt, part in zip(batch.prompts, parts, strict=True):
            rows = len(prompt.logits)
            if rows:
                self._add(part, _rows(given.logits, row, row + rows, len(batch.logits)))
            if len(prompt.hidden):
                self._sums[part.prompt] += next(sums).astype(np.float64)
            row += rows

    def _add(self, part: Part, own: Any) -> None:
        """Of a prompt in one pass the array itself, of many passes all together on the host."""
        place, (rows, vocab) = part.prompt, own.shape
        wanted = self._calls[place].logits
        if rows == len(wanted):
            self._logits[place] = own
            return
        if self._logits[place] is None:
            self._logits[place] = np.empty((len(wanted), vocab), np.float32)
        first = int(np.searchsorted(wanted, part.first))
        self._logits[place][first : first + rows] = np.asarray(own)

    def logits(self, place: int) -> Any:
        """Float32 [rows, vocab] of a call, or None."""
        return self._logits[place]

    def hidden(self, place: int) -> NDArray[np.float32] | None:
        """Float32 [1, hidden] of a call, the mean of its rows, or None."""
        count = len(self._calls[place].hidden)
        if not count:
            return None
        mean: NDArray[np.float32] = (self._sums[place] / count).astype(np.float32)[None]
        return mean


def _rows(array: Any, first: int, last: int, count: int) -> Any:
    if last - first == count:
        return array
    return array[first:last] if isinstance(array, np.ndarray) else array.rows(first, last)


def several(ids: ArrayLike) -> bool:
    """Whether these are prompts and not the ids of one."""
    return isinstance(ids, (list, tuple)) and any(np.ndim(part) for part in ids[:1])
