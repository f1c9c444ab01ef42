"""Calls from many threads: whose turn it is, and for how long a call may wait.

A `threading.RLock` lets in whom it likes: a thread that asks again at once may get it many times
while others wait. `Turns` serves threads in the order in which they came.

An interrupt (KeyboardInterrupt) shows in Python code where a function begins, where a call has
returned and where a loop goes back; one call into C is whole. So each step here that others depend
on is one such call, and the one that must follow it is the first of a `finally` or `except`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from numbers import Real

from pyruntime.errors import BusyError, EngineError, WaitTimeoutError


class Deadline:
    """The end of a call's `timeout`, which begins now; several calls may share one.

    Args:
        timeout: seconds. None: there is no end. 0: nobody else is waited for, but what the call
            itself does may take as long as it takes.

    Raises:
        ValueError: it is neither None nor a number of at least 0.
    """

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None:
            if not isinstance(timeout, Real) or not timeout >= 0:
                raise ValueError(f"timeout={timeout!r}: seconds, at least 0, or None")
            timeout = float(min(timeout, threading.TIMEOUT_MAX))
        self.timeout = timeout
        self._began = time.monotonic()

    @classmethod
    def of(cls, timeout: float | Deadline | None) -> Deadline:
        """The deadline itself, or that of a number of seconds."""
        if timeout is None or timeout is NEVER:
            return NEVER
        return timeout if isinstance(timeout, Deadline) else cls(timeout)

    def left(self) -> float | None:
        """Seconds that are left to wait for others, not below 0; None: for ever."""
        if self.timeout is None:
            return None
        return max(self._began + self.timeout - time.monotonic(), 0.0)

    def work_left(self) -> float | None:
        """Seconds that are left for what the call itself does, likewise."""
        return self.left() if self.timeout else None

    def over(self, done: str) -> WaitTimeoutError:
        """The error of a call whose time ran out when this much was `done`."""
        return WaitTimeoutError(f"the timeout of {self.timeout:g} s ran out: {done}")


NEVER = Deadline()
_forks = 0  # that this process has come of, since the module was loaded


def _note_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # where processes fork; asking for an id is a system call
    os.register_at_fork(after_in_child=_note_fork)


class Turns:
    """A lock that threads get in the order in which they ask; who has it may ask again.

    Attributes:
        deadline: of the call whose turn it is.
    """

    def __init__(self) -> None:
        self.deadline = NEVER
        self._forks = _forks
        self._lock = threading.RLock()  # of the thread whose turn it is
        is_owned = self._lock._is_owned  # type: ignore[attr-defined]  # as Condition asks it
        self._mine: Callable[[], bool] = is_owned
        self._end: Callable[..., None] = self._lock.__exit__
        self._endless = _Turn(self, NEVER)  # it holds nothing of a turn: all threads may share it
        # A locked gate for each thread that waits. The first one waits for `_lock`, the others wait
        # for their gates, and who leaves the queue opens the gate that is the first then.
        self._queue: deque[threading.Lock] = deque()

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that made this object."""
        return self._forks != _forks

    def check_process(self) -> None:
        """Raises EngineError in a forked child: a thread that the child lacks may have the lock."""
        if self.forked:
            raise EngineError("this engine belongs to the parent process: each has to load its own")

    def turn(self, timeout: float | Deadline | None = None) -> AbstractContextManager[object]:
        """Waits for the turn of a `with` block, which ends with it however that ends.

        An interrupt while it waits takes the thread out of the queue. A block within a block has
        the outer one's turn, and its deadline.

        Raises:
            BusyError: the time ran out first. EngineError: see `check_process`. ValueError: see
            `Deadline`.
        """
        if self._forks != _forks:
            self.check_process()
        if self._mine():
            return self._lock  # which its thread may get again
        if timeout is None or timeout is NEVER:
            return self._endless
        return _Turn(self, Deadline.of(timeout))


class _Turn:
    """A block's turn. Its exit is the lock's: no Python function whose begin an interrupt meets."""

    __slots__ = ("__exit__", "_deadline", "_turns")

    __exit__: Callable[..., None]

    def __init__(self, turns: Turns, deadline: Deadline) -> None:
        self._turns, self._deadline = turns, deadline
        self.__exit__ = turns._end

    def __enter__(self) -> None:
        turns = self._turns
        lock = turns._lock
        try:
            if turns._queue or not lock.acquire(False):
                self._join()
            turns.deadline = self._deadline
        except BaseException:
            try:  # noqa: SIM105 (a call of `suppress` could be interrupted)
                lock.release()
            except RuntimeError:
                pass  # it had not been got
            raise

    def _join(self) -> None:
        """Waits in the queue until the thread has the lock."""
        lock, queue, began = self._turns._lock, self._turns._queue, time.monotonic()
        gate = threading.Lock()
        gate.acquire()
        try:
            queue.append(gate)
            if not ((queue[0] is gate or self._got(gate)) and self._got(lock)):
                waited = f"waited {time.monotonic() - began:.3f} s for this call's turn"
                raise BusyError(f"busy: {waited}; calls before it: {queue.index(gate) + 1}")
        finally:
            try:
                queue.remove(gate)
            finally:
                try:  # noqa: SIM105
                    queue[0].release()
                except (IndexError, RuntimeError):
                    pass  # nobody waits, or the first one's gate is open already

    def _got(self, lock: threading.Lock | threading.RLock) -> bool:
        left = self._deadline.left()
        return lock.acquire(timeout=-1 if left is None else left)
