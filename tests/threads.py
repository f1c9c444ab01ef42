"""Threads and processes of tests, and queues that tell who has joined: none sleeps for others."""

from __future__ import annotations

import multiprocessing
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

LONG = 60.0  # seconds: more than anything takes


class NotedQueue(deque[Any]):
    """For `Turns._queue`: calls `joined` in each thread that has joined."""

    def __init__(self, joined: Callable[[], object]) -> None:
        super().__init__()
        self._joined = joined

    def append(self, gate: Any) -> None:
        super().append(gate)
        self._joined()


def start(target: Callable[..., object], *arguments: Any) -> threading.Thread:
    """A thread that runs, and that does not keep the process from ending."""
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def finish(*threads: threading.Thread) -> None:
    """Waits for all."""
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()


def exit_code(child: Callable[[], object]) -> int | None:
    """Of a forked process that calls it, which is killed if it hangs."""
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(LONG)
    process.kill()
    process.join()
    return process.exitcode
