"""Prompts that are asked for together, through as many passes as they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyruntime.model.batch import NONE, Batch, Output, Prompt, Rows, ascending, require_room
from pyruntime.model.packing import Part, passes
from pyruntime.turns import Deadline

Hidden = Literal["last", "mean"] | None
Step = Callable[["Model", Sequence["Call"], Batch, Sequence[Part]], object]
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
    def run(self, batch: Batch, *, greedy: bool = False) -> Output: ...
    def replay(self, call: Call, *, greedy: bool = False) -> bool: ...


class Call(Prompt):
    """One prompt, and what is wanted of it.

    Attributes:
        ids: int32 [nt], nt >= 1, each below the vocabulary. logits, hidden: ascending rows, int32.
        given: the cache to be continued; None: nothing is left behind. cache: that one, or what
            its passes are given instead, None until they begin.
        place: of the prompt in a list, by which an error names it; None: there is no list.
        reused: tokens that were taken off the front of `ids`, as the cache holds them.
        found: float32 [rows, vocab], the logits of its passes so far, or the token that `greedy`
            found; None: nothing.
        total: float64 [hidden], the sum of the hidden states of its passes so far.
    """

    reused = 0
    found: Any = None
    total: Any = 0.0

    def __init__(
        self, ids: Rows, given: Any, logits: Rows, hidden: Rows = NONE, place: int | None = None
    ) -> None:
        self.ids = ids
        self.given = self.cache = given
        self.logits = logits
        self.hidden = hidden
        self.place = place

    def reuse(self) -> None:
        """Keeps of the cache what `ids` begins with, and drops that from `ids`.

        What is left begins with the first row that something is wanted of, at the latest; a
        cache that begins otherwise is emptied.
        """
        held = self.given.tokens
        most = min(
            len(held), len(self.ids) - 1, *self.logits[:1].tolist(), *self.hidden[:1].tolist()
        )
        differ = np.flatnonzero(held[:most] != self.ids[:most])
        self.reused = kept = int(differ[0]) if len(differ) else most
        self.given.truncate(kept)
        self.ids = self.ids[kept:]
        self.logits, self.hidden = (rows - np.int32(kept) for rows in (self.logits, self.hidden))

    def take(self, first: int, own: Any) -> None:
        """Logits of rows from `first` on: of a prompt in one pass the array itself, of many all
        together on the host."""
        rows, vocab = own.shape
        if rows == len(self.logits):
            self.found = own
            return
        if self.found is None:
            self.found = np.empty((len(self.logits), vocab), np.float32)
        at = int(np.searchsorted(self.logits, first))
        self.found[at : at + rows] = np.asarray(own)

    def pooled(self) -> NDArray[np.float32]:
        """Float32 [1, hidden], the mean of its hidden states, of which there are some."""
        mean: NDArray[np.float32] = (self.total / len(self.hidden)).astype(np.float32)[None]
        return mean


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
        if logits == "last":
            return _last(nt)
        if logits == "none":
            return NONE
        if logits == "all":
            return ascending(0, nt)
        raise ValueError(f"logits={logits!r}: 'none', 'last', 'all' or positions")
    rows = np.array(logits)  # a copy, as another thread may change what was given
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


@lru_cache(64)
def _last(nt: int) -> Rows:
    return ascending(nt - 1, nt)


def wanted_hidden(hidden: Hidden, nt: int) -> Rows:
    """The rows that `hidden` of `Engine.prefill` is made of. Raises ValueError."""
    if hidden not in (None, "last", "mean"):
        raise ValueError(f"hidden={hidden!r}: None, 'last' or 'mean'")
    if hidden is None:
        return NONE
    return wanted_logits("all" if hidden == "mean" else "last", nt)


def check_room(
    model: Model, asked: Sequence[Call], context: int, *, most: int | None, reuse: bool = False
) -> int:
    """Refuses, before anything is computed, prompts that there is no room for.

    Returns the tokens of the longest prompt without a cache, 0 if there is none.

    Args:
        context: positions of the model. most: tokens of a prompt without a cache; None: any number.
        reuse: prompts take the place of what the caches hold.

    Raises ValueError.
    """
    if len(asked) > 1:
        given = [id(call.given) for call in asked if call.given is not None]
        if len(set(given)) < len(given):
            raise ValueError("cache: two prompts share one")
    longest = 0
    for call in asked:
        cache, start, tokens = call.given, 0, len(call.ids)
        try:
            if cache is not None:
                _check_cache(model, cache)
                start = 0 if reuse else cache.length
                require_room(cache, tokens, start)
            elif most is not None and tokens > most:
                raise ValueError(
                    f"{tokens} tokens without a cache; this engine was loaded with kv_tokens={most}"
                )
            elif tokens > longest:
                longest = tokens
            if start + tokens > context:
                raise ValueError(
                    f"{tokens} tokens after {start} exceed the model's context of {context} tokens"
                )
        except ValueError as error:
            if call.place is None:
                raise
            raise ValueError(f"prompt {call.place}: {error}") from None
    return longest


def _check_cache(model: Model, cache: Any) -> None:
    kv_dtype = getattr(cache, "kv_dtype", model.kv_dtype)
    if kv_dtype != model.kv_dtype:
        raise ValueError(
            f"this cache holds {kv_dtype}; the engine was loaded with kv_dtype={model.kv_dtype!r}"
        )
    model.check_cache(cache)


def run(
    model: Model,
    calls: Sequence[Call],
    step: Step,
    *,
    rows: int,
    scratch: Any,
    deadline: Deadline,
) -> float:
    """Runs the passes of all calls; their caches are filled for all of them, or for none.

    Args:
        step: makes a pass of calls; `Part.prompt` is the place of one.
        rows: of a pass at most.
        scratch: a cache for calls that have none, with room for each; None if there are no such.

    Returns: the seconds that they took of a GPU.

    Raises WaitTimeoutError: no time was left for a pass.
    """
    starts: list[int] = []
    for call in calls:  # no comprehension: each is a call of its own
        starts.append(0 if call.given is None else call.given.length)
    done, seconds = 0, 0.0
    try:
        for parts in _plan(model, calls, starts, rows, scratch):
            if deadline.timeout and deadline.left() == 0:
                count = sum(len(call.ids) for call in calls)
                raise deadline.over(f"{done} of {count} tokens were done")
            prompts: list[Prompt] = []
            for place, first, last, region in parts:
                call = calls[place]
                if call.cache is None:
                    call.cache = scratch.region(region, len(call.ids)) if region else scratch
                    call.cache.clear()
                whole = last - first == len(call.ids)
                prompts.append(call if whole else _cut(call, first, last))
            batch = Batch(prompts)
            step(model, calls, batch, parts)
            done += batch.rows
            seconds += model.gpu_seconds
    except BaseException:
        for call, start in zip(calls, starts, strict=True):
            if call.given is not None:
                call.given.truncate(min(start, call.given.length))  # less if a thread cut it
        raise
    return seconds


def _plan(
    model: Model, calls: Sequence[Call], starts: list[int], rows: int, scratch: Any
) -> Iterable[list[Part]]:
    lengths = [len(call.ids) for call in calls]
    limits = [] if scratch is None else [scratch.capacity]
    if model.pass_positions is not None:
        limits.append(model.pass_positions)
    positions = min(limits, default=None)
    return passes(lengths, starts=starts, rows=rows, prompts=model.max_prompts, positions=positions)


def _cut(call: Call, first: int, last: int) -> Prompt:
    """Tokens [first, last) of a call."""

    def within(rows: Rows) -> Rows:
        begin, end = np.searchsorted(rows, (first, last))
        return rows[begin:end] - np.int32(first)

    return Prompt(call.ids[first:last], call.cache, within(call.logits), within(call.hidden))


def prefill(model: Model, calls: Sequence[Call], batch: Batch, parts: Sequence[Part]) -> None:
    """Makes a pass, and hands each call its own of what that gives."""
    given, row, summed = model.run(batch), 0, 0
    for i, prompt in enumerate(batch.prompts):
        place, first, _, _ = parts[i]
        call, rows = calls[place], len(prompt.logits)
        if rows:
            all_of_it = rows == len(batch.logits)
            own = given.logits if all_of_it else _rows(given.logits, row, row + rows)
            call.take(first, own)
            row += rows
        if len(prompt.hidden):
            call.total += given.sums[summed].astype(np.float64)
            summed += 1


def greedy(model: Model, calls: Sequence[Call], batch: Batch, parts: Sequence[Part]) -> None:
    """Makes a pass of a call that wants one row's logits, and finds their argmax instead."""
    calls[0].found = model.run(batch, greedy=len(batch.logits) > 0).token


def _rows(array: Any, first: int, last: int) -> Any:
    return array[first:last] if isinstance(array, np.ndarray) else array.rows(first, last)


def several(ids: ArrayLike) -> bool:
    """Whether these are prompts and not the ids of one."""
    if not isinstance(ids, (list, tuple)) or not ids or isinstance(ids[0], int):
        return False
    return np.ndim(ids[0]) > 0
