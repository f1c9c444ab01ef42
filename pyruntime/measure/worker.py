"""One loaded engine that can be timed and questioned, here or in another build's process.

As a script it serves one line of JSON per request on standard input: {"call": name, "with": {…}} is
answered by {"ok": result} or {"error": text} on standard output. It is run by the interpreter of
the build that is measured, so it uses what every build of this package has, and treats what only
newer ones have (the clock, launches by role) as optional.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any, TextIO

import numpy as np


class Worker:
    """An engine with one prompt of `nt` random tokens; all arguments and results are JSON values.

    Args:
        options: keyword arguments of `Engine.load`.

    Raises:
        what `Engine.load` raises.
    """

    def __init__(self, model: str, nt: int, options: dict[str, Any], seed: int = 0) -> None:
        from pyruntime import Engine

        given = {"device": "cuda:0", "max_tokens": nt, **options}
        self._engine = Engine.load(model, **given)
        self._ids = np.random.default_rng(seed).integers(0, self._engine.config.vocab, nt)
        self._on_gpu = self._engine.path.startswith("cuda")
        self._probe = self._clock_probe() if self._on_gpu else None

    def _clock_probe(self) -> Any:
        try:
            from pyruntime.measure.clock import ClockProbe
            from pyruntime.measure.launches import gpu_model
        except ImportError:
            return None
        return ClockProbe(gpu_model(self._engine).library)

    def facts(self) -> dict[str, Any]:
        """What runs: build, device, launches of this prefill, figures and code of its kernels.

        `launches` ([role, kernel, grid] each) and `kernels` are None where a build cannot tell.
        """
        import pyruntime

        facts: dict[str, Any] = {
            "python": sys.executable,
            "version": pyruntime.__version__,
            "device": self._engine.path,
            "launches": None,
            "kernels": None,
        }
        try:
            from pyruntime.measure.launches import describe
        except ImportError:
            return facts
        return facts | describe(self._engine, self._ids) if self._on_gpu else facts

    def run(self) -> dict[str, float | None]:
        """One prefill: `wall` and `gpu` milliseconds; SM `clock` before and after in MHz."""
        before = self._probe.mhz() if self._probe else None
        timings = self._engine.prefill(self._ids).timings
        gpu = timings.get("gpu")
        return {
            "wall": 1e3 * timings["wall"],
            "gpu": None if gpu is None else 1e3 * gpu,
            "clock": before,
            "clock_after": self._probe.mhz() if self._probe else None,
        }

    def launched(self) -> dict[str, int] | None:
        """How often each kernel has been launched so far, where the build counts it."""
        count = getattr(self._engine, "launches", None)
        return None if count is None else dict(count())

    def slices(self, rounds: int) -> dict[str, float] | None:
        """Milliseconds of each role, timed in place; None where the build cannot."""
        try:
            from pyruntime.measure.launches import role_times
        except ImportError:
            return None
        return role_times(self._engine, self._ids, rounds) if self._on_gpu else None

    def logits(self) -> str:
        """Of the last row: float32 [vocab], little-endian, in base64."""
        values = np.asarray(self._engine.prefill(self._ids).logits)[-1]
        return base64.b64encode(values.astype("<f4").tobytes()).decode()

    def greedy(self, n: int) -> dict[str, list[Any]]:
        """`n` greedy `tokens` after the prompt, and the `gaps` from the best logit to the next."""
        cache = self._engine.new_cache(len(self._ids) + n)
        step: Any = self._ids
        tokens: list[int] = []
        gaps: list[float] = []
        for _ in range(n):
            logits = np.asarray(self._engine.prefill(step, cache=cache).logits)[-1]
            second, best = np.argpartition(logits, -2)[-2:]
            tokens.append(int(best))
            gaps.append(float(logits[best] - logits[second]))
            step = [tokens[-1]]
        return {"tokens": tokens, "gaps": gaps}

    def close(self) -> None:
        """Gives the memory back."""
        if self._probe:
            self._probe.close()
        self._engine.close()


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answers requests until the input ends; the first is "load", with `Worker`'s arguments."""
    worker: Worker | None = None
    for line in requests:
        request = json.loads(line)
        name, given = request["call"], request["with"]
        try:
            if name == "load":
                worker = Worker(**given)
                result: Any = None
            else:
                result = getattr(worker, name)(**given)
            answer = {"ok": result}
        except Exception as error:  # whatever it is, the other side has to hear of it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    if worker:
        worker.close()


if __name__ == "__main__":
    # Only answers may go to the pipe: whatever prints goes to standard error.
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, pipe)
