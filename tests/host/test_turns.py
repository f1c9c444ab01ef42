"""Turns: first come, first served; for a limited time; and nobody is stuck after an interrupt."""

from __future__ import annotations

import dis
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fractions import Fraction
from itertools import count
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from threads import LONG, NotedQueue, finish, start

from pyruntime import turns as module
from pyruntime.errors import BusyError, EngineError, WaitTimeoutError
from pyruntime.turns import Deadline, Turns


@contextmanager
def taken(turns: Turns) -> Iterator[threading.Event]:
    """Another thread has the turn until the event is set, or the block ends."""
    inside, over = threading.Event(), threading.Event()

    def hold() -> None:
        with turns.turn():
            inside.set()
            over.wait(LONG)

    thread = start(hold)
    try:
        assert inside.wait(LONG)
        yield over
    finally:
        over.set()
        finish(thread)


def assert_free(turns: Turns) -> None:
    """Another thread gets a turn without waiting."""
    served: list[bool] = []

    def ask() -> None:
        with turns.turn(0):
            served.append(True)

    finish(start(ask))
    assert served and not turns._queue


def test_threads_are_served_in_the_order_in_which_they_came() -> None:
    turns, joined = Turns(), threading.Semaphore(0)
    turns._queue = NotedQueue(joined.release)
    served: list[int] = []

    def ask(number: int) -> None:
        with turns.turn(LONG if number % 2 else None):
            served.append(number)

    with taken(turns) as over:
        threads = []
        for number in range(30):
            threads.append(start(ask, number))
            assert joined.acquire(timeout=LONG)
        over.set()
        finish(*threads)
    assert served == list(range(30))


def test_who_asks_again_at_once_comes_after_those_who_wait() -> None:
    turns, others = Turns(), threading.Event()
    served: list[str] = []

    def other() -> None:
        with turns.turn():
            served.append("other")

    with turns.turn():
        turns._queue = NotedQueue(others.set)
        thread = start(other)
        assert others.wait(LONG)
    with turns.turn():
        served.append("again")
    finish(thread)
    assert served == ["other", "again"]


def test_one_at_a_time() -> None:
    turns, inside, most = Turns(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with turns.turn():
                inside += 1
                most = max(most, inside)
                inside -= 1

    finish(*(start(work) for _ in range(8)))
    assert (inside, most) == (0, 1)


def test_who_has_the_turn_may_ask_again_and_has_it_until_the_outermost_block_ends() -> None:
    turns = Turns()
    with turns.turn(LONG):
        deadline = turns.deadline
        with turns.turn(0):
            assert turns.deadline is deadline
        with ThreadPoolExecutor() as pool, pytest.raises(BusyError):
            pool.submit(turn_and_go, turns, 0).result(LONG)
    assert_free(turns)


def test_an_error_in_the_block_ends_the_turn() -> None:
    turns = Turns()
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), turns.turn():
            raise error
        assert_free(turns)


@pytest.mark.parametrize("timeout", [0, 0.001])
def test_busy_says_how_long_it_waited_and_how_many_were_before(timeout: float) -> None:
    turns, joined = Turns(), threading.Semaphore(0)
    turns._queue = NotedQueue(joined.release)
    with taken(turns):
        waiting = []
        for before in (1, 2, 3):
            text = rf"^busy: waited \d+\.\d{{3}} s for this call's turn; calls before it: {before}$"
            with pytest.raises(BusyError, match=text), turns.turn(timeout):
                raise AssertionError
            joined.acquire()
            waiting.append(start(turn_and_go, turns))
            joined.acquire()
    finish(*waiting)
    assert_free(turns)


def turn_and_go(turns: Turns, timeout: float | None = None) -> None:
    with turns.turn(timeout):
        pass


def test_busy_is_a_timeout() -> None:
    assert issubclass(BusyError, WaitTimeoutError)
    assert issubclass(WaitTimeoutError, EngineError) and issubclass(WaitTimeoutError, TimeoutError)


def test_a_signal_takes_a_thread_out_of_the_queue() -> None:
    """One that is between two others."""
    turns, joined = Turns(), threading.Semaphore(0)
    turns._queue = NotedQueue(joined.release)
    main, threads = threading.get_ident(), []

    def interrupt() -> None:
        joined.acquire()  # this is main's place
        threads.append(start(turn_and_go, turns))
        joined.acquire()
        signal.pthread_kill(main, signal.SIGINT)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with taken(turns):
            threads.append(start(turn_and_go, turns))
            joined.acquire()
            threads.append(start(interrupt))
            with pytest.raises(KeyboardInterrupt), turns.turn():
                raise AssertionError
            threads[1].join(LONG)
            assert len(turns._queue) == 2
    finally:
        signal.signal(signal.SIGINT, usual)
    finish(*threads)
    assert_free(turns)


class Interrupter:
    """Raises KeyboardInterrupt at the `at`-th place of some code where an interrupt may show.

    Those are where a function begins and where a call has returned. Attributes: places, how many
    were passed.
    """

    def __init__(self, at: int, *functions: Callable[..., object]) -> None:
        self.places, self._at = 0, at
        self._codes = {function.__code__ for function in functions}
        self._last: defaultdict[FrameType, str] = defaultdict(str)

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != module.__file__ and frame.f_code not in self._codes:
            return None
        frame.f_trace_opcodes = True
        if event == "call" or (event == "opcode" and self._last[frame].startswith("CALL")):
            self.places += 1
            if self.places == self._at:
                raise KeyboardInterrupt
        if event == "opcode":
            self._last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return self


@pytest.mark.parametrize("timeout", [None, 0])
@pytest.mark.parametrize("ahead", [None, 0, 1])
def test_an_interrupt_wherever_it_comes_leaves_nobody_stuck(
    ahead: int | None, timeout: float | None
) -> None:
    """A call that is alone, or has the one at work, `ahead` others and then one behind."""
    for at in count(1):
        turns = Turns()
        interrupter = Interrupter(at, turn_and_go)
        if ahead is None:
            interrupted = run_interrupted(interrupter, turns, timeout)
        else:
            interrupted = run_between(interrupter, turns, timeout, ahead)
        assert_free(turns)
        if not interrupted:
            break
    assert interrupter.places == at - 1 > 5


def run_interrupted(interrupter: Interrupter, turns: Turns, timeout: float | None) -> bool:
    usual = sys.gettrace()
    sys.settrace(interrupter)
    try:
        with suppress(BusyError):
            turn_and_go(turns, timeout)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(usual)
    return False


def run_between(interrupter: Interrupter, turns: Turns, timeout: float | None, ahead: int) -> bool:
    joined, me = threading.Semaphore(0), threading.get_ident()
    others: list[threading.Thread] = []

    def join() -> None:
        joined.release()
        if threading.get_ident() == me:
            follow()
            if timeout is None:
                over.set()

    def follow() -> None:
        others.append(start(turn_and_go, turns))
        assert joined.acquire(timeout=LONG)

    with taken(turns) as over:
        turns._queue = NotedQueue(join)
        for _ in range(ahead):
            follow()
        interrupted = run_interrupted(interrupter, turns, timeout)
    finish(*others)
    return interrupted


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_does_not_touch_the_lock() -> None:
    turns = Turns()
    with taken(turns):
        child = os.fork()
        if not child:
            try:
                turns.turn()
            except EngineError as error:
                os._exit(0 if "parent process" in str(error) else 1)
            os._exit(2)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# Deadlines


@pytest.mark.parametrize("timeout", [-1, -1e-9, float("nan"), "1", [], 1j])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout="):
        Deadline(timeout)
    with pytest.raises(ValueError, match="timeout="):
        Turns().turn(timeout)


@pytest.mark.parametrize("timeout", [float("inf"), 10**400, Fraction(10**30)])
def test_any_length_will_do(timeout: Any) -> None:
    turns = Turns()
    with turns.turn(timeout):
        assert turns.deadline.left() > 1e6


def test_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    limited, patient, hasty = Deadline(3), Deadline(), Deadline(0)
    assert Deadline.of(limited) is limited and Deadline.of(2.0).timeout == 2.0
    now = 102.0
    assert (limited.left(), limited.work_left()) == (1.0, 1.0)
    now = 104.0
    assert (limited.left(), limited.work_left()) == (0.0, 0.0)
    assert (patient.left(), patient.work_left()) == (None, None)
    assert (hasty.left(), hasty.work_left()) == (0.0, None)
    assert str(limited.over("4 of 5")) == "the timeout of 3 s ran out: 4 of 5"
