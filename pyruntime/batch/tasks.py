"""What is done with rows: scores of continuations, or vectors of texts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pyruntime.engine import Engine
from pyruntime.errors import NumericalError, TokenizerError

Ids = NDArray[np.int32]
_SHOWN = 40  # characters of a value that is no text


@dataclass
class Item:
    """What comes of a row: the ids that were made of it, and values by column, or an error."""

    ids: tuple[Ids, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


class Task(Protocol):
    """Attributes: name; columns of the input; results, "number" or "numbers" by column."""

    name: ClassVar[str]
    results: ClassVar[dict[str, str]]

    @property
    def columns(self) -> tuple[str, ...]: ...
    def ids(self, engine: Engine, values: dict[str, Any]) -> tuple[Ids, ...]:
        """Of a row. Raises ValueError, TokenizerError: why it cannot be run."""

    def run(self, engine: Engine, asked: Sequence[tuple[Ids, ...]]) -> list[dict[str, Any]]:
        """The results of rows, packed."""


@dataclass(frozen=True)
class Score:
    """Log-probabilities (natural) of the tokens of `continuation` after `prompt`.

    Results: `logprobs` of each token, None for one that nothing precedes, and their sum `logprob`.
    """

    name: ClassVar[str] = "score"
    results: ClassVar[dict[str, str]] = {"logprob": "number", "logprobs": "numbers"}
    prompt: str = "prompt"
    continuation: str = "continuation"

    @property
    def columns(self) -> tuple[str, ...]:
        return self.prompt, self.continuation

    def ids(self, engine: Engine, values: dict[str, Any]) -> tuple[Ids, ...]:
        for name in self.columns:
            _check(engine, name, values[name])
        context, rest = engine.tokenize_pair(values[self.prompt], values[self.continuation])
        if not len(rest):
            raise ValueError(f"{self.continuation} is empty")
        _check_length(engine, len(context) + len(rest) - 1)  # the last one is not run
        return context, rest

    def run(self, engine: Engine, asked: Sequence[tuple[Ids, ...]]) -> list[dict[str, Any]]:
        found = engine.score([ids[0] for ids in asked], [ids[1] for ids in asked])
        return [{"logprob": float(each.total), "logprobs": each.log_probs} for each in found]


@dataclass(frozen=True)
class Embed:
    """A vector of `text`, `embedding`: see `Engine.embed`."""

    name: ClassVar[str] = "embed"
    results: ClassVar[dict[str, str]] = {"embedding": "numbers"}
    text: str = "text"
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = False

    def __post_init__(self) -> None:
        if self.pooling not in ("mean", "last"):
            raise ValueError(f"pooling={self.pooling!r}: 'mean' or 'last'")

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text,)

    def ids(self, engine: Engine, values: dict[str, Any]) -> tuple[Ids, ...]:
        _check(engine, self.text, values[self.text])
        found = engine.tokenize(values[self.text], ends=True)
        if values[self.text] == "" or not len(found):
            raise ValueError(f"{self.text} is empty")
        _check_length(engine, len(found))
        return (found,)

    def run(self, engine: Engine, asked: Sequence[tuple[Ids, ...]]) -> list[dict[str, Any]]:
        texts = [ids[0] for ids in asked]
        vectors = engine.embed(texts, pooling=self.pooling, normalize=self.normalize)
        return [{"embedding": vector} for vector in vectors.tolist()]


def _check(engine: Engine, name: str, value: Any) -> None:
    """Refuses what is neither a text that the model can read nor a list, of token ids.

    Raises ValueError, TokenizerError.
    """
    if value is None:
        raise ValueError(f"no {name}")
    if isinstance(value, str):
        if not engine.has_vocabulary:
            raise TokenizerError(f"{name}: this model has no vocabulary: give token ids instead")
    elif not isinstance(value, list):
        raise ValueError(f"{name} is {repr(value)[:_SHOWN]}: neither a text nor token ids")


def _check_length(engine: Engine, tokens: int) -> None:
    if tokens > engine.config.context_length:
        raise ValueError(
            f"{tokens} tokens exceed the model's context of {engine.config.context_length}"
        )


def results(
    task: Task,
    engine: Engine,
    rows: Sequence[tuple[dict[str, Any], str | None]],
    most: int,
) -> list[Item]:
    """What comes of each row: its values, or the error that it has already.

    Args:
        most: tokens of the rows that the engine is given at once; a longer row goes alone.
    """
    items = []
    for values, error in rows:
        item = Item(error=error)
        if error is None:
            try:
                item.ids = task.ids(engine, values)
            except (ValueError, TokenizerError) as refused:
                item.error = str(refused)
        items.append(item)
    for batch in batches([item for item in items if item.error is None], most):
        _run(task, engine, batch)
    return items


def batches(items: Sequence[Item], most: int) -> Iterator[list[Item]]:
    """The items in their order, at most so many tokens at a time."""
    held: list[Item] = []
    tokens = 0
    for item in items:
        if held and tokens + item.tokens > most:
            yield held
            held, tokens = [], 0
        held.append(item)
        tokens += item.tokens
    if held:
        yield held


def _run(task: Task, engine: Engine, batch: list[Item]) -> None:
    try:
        found = task.run(engine, [item.ids for item in batch])
    except NumericalError as error:
        if len(batch) == 1:
            batch[0].error = str(error)
        else:  # it names no row: they are found one by one
            for item in batch:
                _run(task, engine, [item])
        return
    for item, values in zip(batch, found, strict=True):
        if all(map(_finite, values.values())):
            item.values = values
        else:
            item.error = "the result is not finite"


def _finite(value: Any) -> bool:
    """Of a number, or of numbers and None."""
    return math.isfinite(value if isinstance(value, float) else sum(x for x in value if x))
