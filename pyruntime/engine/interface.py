"""What a backend offers an engine, and what a prefill gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pyruntime.model import calls
from pyruntime.model.any_cache import AnyCache
from pyruntime.model.batch import Batch, Output
from pyruntime.model.config import ModelConfig
from pyruntime.model.scores import Targets, TokenScores
from pyruntime.model.stats import Stats, Warmed
from pyruntime.turns import Deadline, Turns

Ids = Sequence[int] | NDArray[np.integer[Any]]
Logits = Literal["none", "last", "all"] | Sequence[int] | NDArray[np.integer[Any]]
Timeout = float | Deadline | None


class Model(calls.Model, Protocol):
    """What a backend offers."""

    config: ModelConfig
    fingerprint: str
    turns: Turns
    gpu_seconds: float

    def new_cache(self, tokens: int) -> Any: ...
    def run(self, batch: Batch, *, greedy: bool = False) -> Output: ...
    def score(
        self, batch: Batch, targets: Targets, *, most_bytes: int, top: int = 1
    ) -> TokenScores: ...
    def launches(self) -> dict[str, int]: ...
    def stats(self) -> Stats: ...
    def warm(self, passes: Sequence[tuple[int, int, bool, bool]]) -> list[Warmed]: ...
    def close(self) -> None: ...


@dataclass(eq=False)  # not frozen: that takes a call for each attribute
class Result:
    """What a prefill gives for a prompt.

    Attributes:
        logits: float32 [rows, vocab] for the rows that were asked for, complete, None for "none"; a
            NumPy array, or an array in device memory that `np.asarray` copies and any
            `from_dlpack` shares.
        hidden: float32 [1, hidden], a NumPy array: the state after the output norm of the last row
            ("last"), or the mean over all rows ("mean"); None if it was not asked for.
        cache: the cache that was passed in, or None.
        tokens: how many ids were processed. reused: how many before them the cache held already.
        timings: seconds of the whole call, all its prompts included: "wall", and on a GPU "gpu"
            (between events around the passes).
        path: the backend and device that did it, such as "cuda:0 (NVIDIA H200)" or "cpu (NumPy)",
            the attention kernel, exact and kv_dtype where others than the default were asked for,
            and weights where they are not "fp16".
    """

    logits: Any
    hidden: Any
    cache: AnyCache | None
    tokens: int
    reused: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    path: str = ""
