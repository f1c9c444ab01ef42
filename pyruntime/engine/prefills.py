"""Prompts through the passes of a backend, in calls that take turns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, overload

import numpy as np

from pyruntime.engine.interface import Ids, Logits, Model, Result, Timeout
from pyruntime.errors import EngineError
from pyruntime.model import calls
from pyruntime.model.any_cache import AnyCache
from pyruntime.model.batch import NONE
from pyruntime.model.calls import Call, Hidden, named
from pyruntime.model.packing import passes
from pyruntime.model.stats import Stats, Warmed
from pyruntime.model.tokens import check_count, check_list, check_tokens
from pyruntime.turns import NEVER, Deadline


class Prefills:
    """A backend, the cache behind calls without one, and whose turn it is.

    Args:
        path: see `Result`.
        kv_limit: the most tokens of a prompt without a cache; None: any number.
    """

    def __init__(
        self, model: Model, path: str, max_tokens: int, kv_tokens: int, kv_limit: int | None
    ) -> None:
        self._model = model
        self._kv_limit = kv_limit
        self._cache: Any = None
        self._closed = False
        self.config = model.config
        self.path = path
        self.max_tokens = max_tokens
        self.kv_tokens = kv_tokens

    @property
    def model(self) -> Model:
        """The backend; on a GPU a `pyruntime.model.gpu.GpuModel`, which measurements go into."""
        return self._model

    @property
    def fingerprint(self) -> str:
        """By which to tell models apart, see `GGUFFile.fingerprint`."""
        return self._model.fingerprint

    def new_cache(self, tokens: int, *, timeout: Timeout = None) -> Any:
        """An empty K/V cache for `tokens` positions, see `AnyCache`.

        Args:
            timeout: seconds to wait for its turn, as of `AnyCache.fork`.

        Raises: ValueError, OutOfMemoryError; BusyError, EngineError and CudaError as `prefill`.
        """
        tokens = check_count("tokens", tokens)  # no longer one of NumPy's, which may overflow
        self._check_closed()
        with self._model.turns.turn(timeout):
            self._check_closed()
            return self._model.new_cache(tokens)

    @overload
    def prefill(
        self,
        ids: Ids,
        *,
        cache: AnyCache | None = ...,
        reuse: bool = ...,
        logits: Logits = ...,
        hidden: Hidden = ...,
        timeout: Timeout = ...,
    ) -> Result: ...

    @overload
    def prefill(
        self,
        ids: Sequence[Ids],
        *,
        cache: Sequence[AnyCache] | None = ...,
        reuse: bool = ...,
        logits: Logits | Sequence[Logits] = ...,
        hidden: Hidden = ...,
        timeout: Timeout = ...,
    ) -> list[Result]: ...

    def prefill(
        self,
        ids: Any,
        *,
        cache: Any = None,
        reuse: bool = False,
        logits: Any = "last",
        hidden: Hidden = None,
        timeout: Timeout = None,
    ) -> Result | list[Result]:
        """Runs a prompt, or a list of prompts packed into as few passes as they fit, unpadded.

        Args:
            ids: token ids, a sequence or int array of shape [nt], nt >= 1; or a list or tuple of
                such prompts, of any lengths: then the results are a list, in their order.
            cache: continue this cache; without one the call leaves no state behind. For a list of
                prompts a list of as many different caches.
            reuse: `ids` is not what comes after the cache's tokens, but all of the prompt: what the
                cache holds of its beginning is kept, the rest forgotten, and only what is missing
                is run, from the first row on that something is wanted of. See `Result.reused`.
            logits: of the "last" row, of "all", of "none", or of the rows at these positions of
                `ids` (ascending; negative ones count from the end). For a list of prompts
                positions are a list with those of each.
            hidden: also the hidden state: see `Result`.
            timeout: seconds that the call may take, waiting for its turn and then for the GPU;
                NumPy looks at the time between passes. None: as long as it takes. 0: it does not
                wait for other calls, and may then take as long as it takes. A
                `pyruntime.turns.Deadline` is one timeout for several calls.

        Raises:
            BusyError: the time ran out before the call's turn came.
            WaitTimeoutError: it ran out later. What the GPU still does is waited for by the next
                call, within its own timeout.
            ValueError: bad ids, a timeout that is none, a cache of another engine or kv_dtype, more
                than the cache (or `kv_tokens`) holds, or more than the model's context length.
            NumericalError: a value left its range; the text names layer and tensor.
            CudaError, EngineError: see `pyruntime.errors`.

        Whatever is raised, all caches are as long as before, or with `reuse` as what was kept; or
        all are filled, where an interrupt comes when the passes are over.
        """
        deadline = NEVER if timeout is None else Deadline.of(timeout)
        if isinstance(ids, (list, tuple)) and calls.several(ids):
            return self._prefill(ids, cache, logits, hidden, deadline, reuse)
        started, asked = time.perf_counter(), [self._call(ids, cache, logits, None, hidden)]
        timings = self._run(asked, calls.prefill, deadline, reuse)
        timings["wall"] = time.perf_counter() - started
        return self._result(asked[0], timings)

    def _prefill(
        self,
        prompts: Any,
        cache: Any,
        logits: Any,
        hidden: Hidden,
        deadline: Deadline,
        reuse: bool = False,
    ) -> list[Result]:
        """Of several prompts."""
        started, count = time.perf_counter(), len(prompts)
        each = logits if isinstance(logits, (list, tuple)) else [logits] * count
        caches = [None] * count if cache is None else cache
        for name, given in (("cache", caches), ("logits", each)):
            if not isinstance(given, (list, tuple)) or len(given) != count:
                raise ValueError(f"{name}: a list of {count} is needed, one for each prompt")
        parts = zip(prompts, caches, each, range(count), strict=True)
        asked = named(parts, lambda part: self._call(*part, hidden))
        timings = self._run(asked, calls.prefill, deadline, reuse)
        timings["wall"] = time.perf_counter() - started
        return [self._result(call, dict(timings)) for call in asked]

    def _call(self, ids: Any, cache: Any, logits: Any, place: int | None, hidden: Hidden) -> Call:
        tokens = check_tokens(ids, self.config.vocab)
        nt = len(tokens)
        rows = calls.wanted_logits(logits, nt)
        states = NONE if hidden is None else calls.wanted_hidden(hidden, nt)
        return Call(tokens, cache, rows, states, place)

    def _result(self, call: Call, timings: dict[str, float]) -> Result:
        """What came of a call."""
        hidden = call.pooled() if len(call.hidden) else None
        return Result(
            call.found, hidden, call.given, len(call.ids), call.reused, timings, self.path
        )

    def _run(
        self,
        asked: Sequence[Call],
        step: calls.Step,
        deadline: Deadline,
        reuse: bool = False,
    ) -> dict[str, float]:
        """Makes the passes of all calls, and returns the seconds that the GPU took, if one did."""
        if reuse and any(call.given is None for call in asked):
            raise ValueError("reuse=True: there is no cache to reuse")
        model, scratch = self._model, None
        if self._closed:
            self._check_closed()
        with model.turns.turn(deadline):
            if self._closed:
                self._check_closed()
            if not reuse and self._replay(asked, step, deadline):
                return {"gpu": model.gpu_seconds}
            longest = calls.check_room(
                model, asked, self.config.context_length, most=self._kv_limit, reuse=reuse
            )
            for call in asked if reuse else ():
                call.reuse()
            if longest:
                scratch = self._scratch(longest)
            seconds = calls.run(
                model, asked, step, rows=self.max_tokens, scratch=scratch, deadline=deadline
            )
        return {"gpu": seconds} if seconds else {}

    def _replay(self, asked: Sequence[Call], step: calls.Step, deadline: Deadline) -> bool:
        """Makes the only pass of the only call, in its turn, if the model has a graph of all of it.

        False if it has none, or if there is anything else to do: then nothing has been done.
        """
        call, greedy = asked[0], step is calls.greedy
        if len(asked) > 1 or len(call.hidden) or not (greedy or step is calls.prefill):
            return False
        if deadline.timeout and deadline.left() == 0:
            return False
        cache = call.given
        if cache is None:
            call.cache = cache = self._cache
            if cache is None:
                return False
            cache.clear()
        elif getattr(cache, "owner", None) is not self._model or cache.closed:
            return False
        room = self.config.context_length - cache.length
        if len(call.ids) <= room and self._model.replay(call, greedy=greedy):
            return True
        call.cache = call.given
        return False

    def warm(
        self,
        lengths: Iterable[int],
        *,
        logits: Literal["none", "last", "all", "greedy"] = "last",
        continues: bool = False,
        timeout: Timeout = None,
    ) -> list[Warmed]:
        """Makes single prompts of these lengths ready: records their passes and captures them.

        Nothing is run. A length serves all of its bucket (docs/embedding.md), a longer one than
        `max_tokens` gets each of its passes. The cache behind calls without one is made, too: a
        `new_cache` that is longer than it drops all graphs, so make that first.

        Args:
            logits: that the prompts will be asked for, as of `prefill`; "greedy": what `generate`
                asks for, the likeliest token by those of the last row.
            continues: they go on with a cache that holds something, as the steps of `generate` do.
            timeout: see `prefill`; captures are not interrupted.

        Returns: what was done, by kind of pass, in the order in which the lengths need them. On
            the CPU nothing is.

        Raises: as `prefill`; ValueError also for lengths of more kinds than are kept.
        """
        deadline = Deadline.of(timeout)
        wanted = check_list("lengths", lengths, "length")
        most = self.config.context_length
        if not continues:
            most = min(most, self._kv_limit or most)
        for n in wanted:
            if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 1 <= n <= most:
                raise ValueError(f"lengths: {n!r} is not one of 1 to {most} tokens")
        if logits not in ("none", "last", "all", "greedy"):
            raise ValueError(f"logits={logits!r}: 'none', 'last', 'all' or 'greedy'")
        kinds = []
        for n in map(int, wanted):
            for (part,) in passes([n], rows=self.max_tokens):
                rows, ends = part.last - part.first, part.last == n
                kept = {"none": 0, "all": rows}.get(logits, int(ends))
                greedy = ends and logits == "greedy"
                kinds.append((rows, kept, not (continues or part.first), greedy))
        self._check_closed()
        with self._model.turns.turn(deadline):
            self._check_closed()
            if wanted and not continues:
                self._scratch(max(wanted))
            return self._model.warm(kinds)

    def launches(self) -> dict[str, int]:
        """How often each kernel was launched since `load` began; empty on the CPU.

        A kernel that is absent never ran.
        """
        self._check_open()
        return self._model.launches()

    def stats(self) -> Stats:
        """How passes were run since `load`: as graphs, or launch by launch. On the CPU all zero."""
        self._check_open()
        return self._model.stats()

    def _scratch(self, tokens: int) -> Any:
        """The cache behind calls without one."""
        if self._cache is None or self._cache.capacity < tokens:
            self._cache = None  # give the smaller one back first
            self._cache = self._model.new_cache(max(tokens, self.kv_tokens))
        return self._cache

    def _check_closed(self) -> None:
        if self._closed:
            raise EngineError("this engine has been closed")

    def _check_open(self) -> None:
        self._check_closed()
        self._model.turns.check_process()

    def close(self) -> None:
        """Gives all memory back, after the call that is served now. Idempotent.

        Calls that wait for their turn are refused. Results and caches in use keep their memory.
        """
        if self._model.turns.forked:
            return
        self._closed = True
        with self._model.turns.turn():
            self._cache = None
            self._model.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Engine {self.config.name} on {self.path}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
