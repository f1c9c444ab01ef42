"""The two ways to reach a `Worker`: in this process, or in that of another build."""

from __future__ import annotations

import base64
import json
import select
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyruntime.errors import EngineError
from pyruntime.measure import worker
from pyruntime.measure.series import Sample

WAIT = 600.0  # seconds for an answer


class WorkerArm:
    """A worker behind `call(name, arguments)`."""

    def __init__(
        self, call: Callable[[str, dict[str, Any]], Any], close: Callable[[], None]
    ) -> None:
        self._call = call
        self.close = close
        self.facts: dict[str, Any] = call("facts", {})

    def run(self) -> Sample:
        """One timed prefill."""
        return Sample(**self._call("run", {}))

    def launched(self) -> dict[str, int] | None:
        """How often each kernel has been launched; None if the build does not count."""
        found: dict[str, int] | None = self._call("launched", {})
        return found

    def slices(self, rounds: int) -> dict[str, float] | None:
        """Milliseconds by role; None if the build cannot tell."""
        found: dict[str, float] | None = self._call("slices", {"rounds": rounds})
        return found

    def logits(self) -> NDArray[np.float32]:
        """Of the last row, float32 [vocab]."""
        return np.frombuffer(base64.b64decode(self._call("logits", {})), "<f4")

    def greedy(self, n: int) -> tuple[list[int], list[float]]:
        """Tokens, and the gap between the two best logits at each."""
        found = self._call("greedy", {"n": n})
        return found["tokens"], found["gaps"]


def open_here(model: str, nt: int, options: dict[str, Any]) -> WorkerArm:
    """An engine of this build. Raises what `Engine.load` raises."""
    here = worker.Worker(model, nt, options)
    return WorkerArm(lambda name, given: getattr(here, name)(**given), here.close)


def open_build(python: str, model: str, nt: int, options: dict[str, Any]) -> WorkerArm:
    """An engine of the build that the interpreter `python` finds, in a process of its own.

    Raises:
        EngineError: the interpreter cannot be run, or its engine not be loaded.
    """
    process = _Process(python)
    try:
        process.call("load", {"model": model, "nt": nt, "options": options})
        return WorkerArm(process.call, process.close)
    except BaseException:
        process.close()
        raise


class _Process:
    """A worker at the other end of two pipes."""

    def __init__(self, python: str) -> None:
        self._python = python
        try:
            # -P: that build's package is meant, not the folder of this script.
            self._process = subprocess.Popen(
                [python, "-P", str(Path(worker.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        except OSError as error:
            raise EngineError(f"{python}: {error.strerror}") from None

    def call(self, name: str, given: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        request = json.dumps({"call": name, "with": given})
        try:
            self._process.stdin.write(request.encode() + b"\n")
        except BrokenPipeError:
            raise EngineError(f"{self._python} has ended (its reason is above)") from None
        answer = json.loads(self._line())
        if "error" in answer:
            raise EngineError(f"{self._python}: {answer['error']}")
        return answer["ok"]

    def _line(self) -> bytes:
        pipe = self._process.stdout
        assert pipe
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], WAIT)
            if not ready:
                raise EngineError(f"{self._python}: no answer within {WAIT:g} s")
            part = pipe.read(1 << 16)
            if not part:
                raise EngineError(f"{self._python} has ended (its reason is above)")
            line += part
        return line

    def close(self) -> None:
        """Ends the process: at once if it does not end on its own. Idempotent."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
