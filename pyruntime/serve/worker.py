"""One thread that owns the engine, and packs into each of its calls whatever waits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from pyruntime.engine import LOGITS_BYTES, Engine
from pyruntime.errors import PyruntimeError
from pyruntime.model.scores import TokenScores
from pyruntime.serve.sequence import Sequence, Step


class QueueFullError(PyruntimeError):
    """No more requests are taken for the time being."""


class StoppedError(PyruntimeError):
    """No more requests are taken, or answered."""


@dataclass
class Counts:
    """What a worker has done.

    Attributes:
        requests: taken; refused: not taken, the queue being full; answered, failed, dropped: what
            became of those taken.
        calls: of the engine; sequences: steps of prompts that these calls ran, so that
            sequences / calls is how well they were packed.
        prompt_tokens, completion_tokens: of requests that were answered.
        engine_seconds: within calls of the engine; score_seconds: from there until all
            sequences of a call have what they asked for.
        read_seconds, write_seconds: from bodies of completions to jobs, and from scores to bodies
            of answers that are whole.
    """

    requests: int = 0
    refused: int = 0
    answered: int = 0
    failed: int = 0
    dropped: int = 0
    calls: int = 0
    sequences: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    engine_seconds: float = 0.0
    score_seconds: float = 0.0
    read_seconds: float = 0.0
    write_seconds: float = 0.0


@dataclass(eq=False)
class Job:
    """A request: its prompts, or a task that has the engine for itself.

    Attributes:
        done: gets the task's result, or None once all sequences are over.
        progress: called by the worker when a step of a sequence is over.
        timings: seconds: "queued", and of all calls that it took part in "engine", on a GPU also
            "gpu" (which is a part of it), and "scores".
    """

    sequences: Items[Sequence] = ()
    task: Callable[[Engine], Any] | None = None
    progress: Callable[[Sequence], object] | None = None
    done: Future[Any] = field(default_factory=Future)
    timings: dict[str, float] = field(default_factory=dict)
    submitted: float = 0.0


@dataclass(eq=False)
class _Turn:
    """A sequence of a job."""

    job: Job
    sequence: Sequence


class Worker:
    """Serves jobs first come, first served; `close` answers what was taken before it returns.

    Args:
        max_queue: jobs that are taken and not yet over, at most.
        cache_tokens: positions of all caches together, at most; one is made whatever it takes.
        logits_bytes: see `Engine.score`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_queue: int = 256,
        cache_tokens: int = 32768,
        logits_bytes: int = LOGITS_BYTES,
    ) -> None:
        self.engine = engine
        self.counts = Counts()
        self._max_queue = max_queue
        self._cache_tokens = cache_tokens
        self._logits_bytes = logits_bytes
        self._changed = threading.Condition()
        self._open: set[Job] = set()
        self._tasks: deque[Job] = deque()
        self._waiting: deque[_Turn] = deque()
        self._active: list[_Turn] = []
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="pyruntime-worker", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Takes a job.

        Raises QueueFullError: too many are open. StoppedError: `close` was called.
        """
        with self._changed:
            if self._closing:
                raise StoppedError("the server is shutting down")
            if len(self._open) >= self._max_queue:
                self.counts.refused += 1
                raise QueueFullError(f"{self._max_queue} requests wait already (--max-queue)")
            self.counts.requests += 1
            self._open.add(job)
            job.submitted = time.perf_counter()
            job.done.set_running_or_notify_cancel()  # only the worker ends it from now on
            if job.task:
                self._tasks.append(job)
            self._waiting.extend(_Turn(job, s) for s in job.sequences if not s.finish)
            self._changed.notify()

    def drop(self, job: Job) -> None:
        """Spends no more time on a job, unless it is over or a task that has begun."""
        with self._changed:
            if job in self._open:
                self._open.remove(job)
                self.counts.dropped += 1
                self._forget(job)

    @property
    def alive(self) -> bool:
        """Whether it serves anyone."""
        return self._thread.is_alive() and not self._closing

    def record(self) -> dict[str, Any]:
        """The counts, and how many jobs are open now."""
        with self._changed:
            return {"open": len(self._open), **asdict(self.counts)}

    def close(self) -> None:
        """Takes no more jobs, ends those that were taken, and stops the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:  # a fault of ours: nobody must wait for what will not come
            with self._changed:
                self._closing = True
                left = list(self._open)
            for job in left:
                self._end(job, error=StoppedError(f"the server's worker has stopped: {error!r}"))
            raise

    def _round(self) -> bool:
        """Waits for jobs and makes one step for them; False once there are none to come."""
        with self._changed:
            self._release()
            while not (self._open or self._closing):
                self._changed.wait()
            if not self._open:
                return False
            task = self._tasks.popleft() if self._tasks else None
            steps = self._steps()
        if task:
            self._perform(task)
        self._advance(steps)
        self._settle()
        return True

    def _release(self) -> None:
        """Gives up the caches of sequences that are over or dropped."""
        for turn in self._active:
            sequence = turn.sequence
            if sequence.cache and (sequence.finish or turn.job not in self._open):
                with suppress(PyruntimeError):  # a lost device has freed it
                    sequence.cache.close()
                sequence.cache = None
        self._active = [t for t in self._active if t.job in self._open and not t.sequence.finish]

    def _perform(self, job: Job) -> None:
        assert job.task is not None
        try:
            result = job.task(self.engine)
        except Exception as error:  # the one who asked is told
            self._end(job, error=error)
        else:
            self._end(job, result=result)

    def _steps(self) -> list[tuple[_Turn, Step]]:
        """The steps of the next call: those begun, then of whoever waits longest."""
        steps = [(turn, turn.sequence.step()) for turn in self._active]
        rows = sum(len(step.ids) for _, step in steps)
        reserved = sum(turn.sequence.capacity for turn in self._active)
        while self._waiting:
            turn = self._waiting[0]
            step, capacity = turn.sequence.step(), turn.sequence.capacity
            full = rows + len(step.ids) > self.engine.max_tokens
            if (steps and full) or (reserved and reserved + capacity > self._cache_tokens):
                break
            self._waiting.popleft()
            self._active.append(turn)
            steps.append((turn, step))
            rows += len(step.ids)
            reserved += capacity
        return steps

    def _advance(self, steps: list[tuple[_Turn, Step]]) -> None:
        """Makes the calls of these steps: those with caches, and those without."""
        now = time.perf_counter()
        for turn, _ in steps:
            turn.job.timings.setdefault("queued", now - turn.job.submitted)
        for cached in (True, False):
            if some := [x for x in steps if bool(x[0].sequence.capacity) == cached]:
                self._call(some)

    def _call(self, steps: list[tuple[_Turn, Step]]) -> None:
        """One call of the engine. Where it fails each step has one of its own, to find whose."""
        began = time.perf_counter()
        try:
            found, timings = self._scored(steps)
        except Exception as error:  # as it comes; who asked is told
            if len(steps) > 1:
                for one in steps:
                    self._call([one])
            else:
                self._end(steps[0][0].job, error=error)
            return
        ran = time.perf_counter()
        for (turn, step), part in zip(steps, found, strict=True):
            turn.sequence.take(step, part)
        spent = {"engine": ran - began, "scores": time.perf_counter() - ran}
        self.counts.calls += 1
        self.counts.sequences += len(steps)
        self.counts.engine_seconds += spent["engine"]
        self.counts.score_seconds += spent["scores"]
        if "gpu" in timings:
            spent["gpu"] = timings["gpu"]
        for job in {turn.job for turn, _ in steps}:
            for name, seconds in spent.items():
                job.timings[name] = job.timings.get(name, 0.0) + seconds
        for turn, _ in steps:
            if turn.job.progress:
                turn.job.progress(turn.sequence)

    def _scored(
        self, steps: list[tuple[_Turn, Step]]
    ) -> tuple[list[TokenScores], dict[str, float]]:
        """Of steps that all have a cache, or all none."""
        sequences = [turn.sequence for turn, _ in steps]
        for s in sequences:
            if s.capacity and s.cache is None:
                s.cache = self.engine.new_cache(s.capacity)
        return self.engine.score_rows(
            [step.ids for _, step in steps],
            [step.rows for _, step in steps],
            [step.targets for _, step in steps],
            top=min(max(1, *(s.top for s in sequences)), self.engine.config.vocab),
            cache=[s.cache for s in sequences] if sequences[0].capacity else None,
            logits_bytes=self._logits_bytes,
        )

    def _settle(self) -> None:
        """Answers the jobs that are over."""
        with self._changed:
            waited_for = [job for job in self._open if not job.task]
        for job in waited_for:
            if all(sequence.finish for sequence in job.sequences):
                self._end(job)

    def _end(self, job: Job, *, result: Any = None, error: Exception | None = None) -> None:
        with self._changed:
            if job not in self._open:
                return
            self._open.remove(job)
            self._forget(job)
            counts = self.counts
            counts.failed += error is not None
            if error is None:
                counts.answered += 1
                counts.prompt_tokens += sum(len(s.prompt) for s in job.sequences)
                counts.completion_tokens += sum(len(s.tokens) for s in job.sequences)
        with suppress(RuntimeError):  # whoever waits for it may have left with its event loop
            if error is None:
                job.done.set_result(result)
            else:
                job.done.set_exception(error)

    def _forget(self, job: Job) -> None:
        self._waiting = deque(turn for turn in self._waiting if turn.job is not job)
        self._tasks = deque(task for task in self._tasks if task is not job)
