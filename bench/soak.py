"""Mixed calls from many threads for minutes, with faults put in: no wrong row, and no leak.

    python bench/soak.py MODEL [--device cuda:0] [--minutes 4] [--threads 8] [--json FILE]

Every thread makes calls of all kinds at random: prompts, lists of them, continued caches, scores,
vectors, generated text, forks and hand-overs. What each should give was computed before, alone.
Meanwhile calls run out of memory or of time, threads are interrupted in the middle of a call, and
the engine is closed under them and loaded anew. Allowed is the error that belongs to the fault, and
nothing else.

At the end all engines are closed, and the memory of device and process is compared with that after
the first of them. Exit code 1: a row was wrong, an error was none of those, or memory was lost.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pyruntime import Engine
from pyruntime.errors import (
    BusyError,
    EngineError,
    OutOfMemoryError,
    PyruntimeError,
    WaitTimeoutError,
)

CLOSE_EVERY, INTERRUPT_EVERY = 10.0, 0.5  # seconds
TOLERANCE = 1e-2  # of the norm: fp16, another tile or division of the keys
# Bytes that may be missing at the end; the process's allocator keeps some for every thread.
DEVICE_SLACK, HOST_SLACK = 2 << 20, 256 << 20
HUGE = 1 << 40  # positions


class Cases:
    """Prompts, and what each of them gives when nothing else happens."""

    def __init__(self, engine: Engine) -> None:
        numbers = np.random.default_rng(0)
        longest = min(engine.kv_tokens, engine.config.context_length) - 8
        lengths = [1, 2, 17, *numbers.integers(3, longest, 13).tolist(), longest]
        vocab = engine.config.vocab
        self.prompts = [numbers.integers(0, vocab, n).tolist() for n in lengths]
        self.rows = [np.array(engine.prefill(ids).logits) for ids in self.prompts]
        self.vectors = engine.embed(self.prompts)
        self.tails = [ids[-3:] for ids in self.prompts[3:]]
        self.scores = engine.score([ids[:-3] for ids in self.prompts[3:]], self.tails)
        self.texts = [engine.generate(ids, 4) for ids in self.prompts[:4]]


class WrongRowError(Exception):
    """A call gave something else than before."""


def same(found: Any, expected: Any, what: str) -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    off = np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)
    if not off <= TOLERANCE:
        raise WrongRowError(f"{what}: off by {off:.3g} of its norm")


def one(engine: Engine, cases: Cases, rng: random.Random) -> None:
    i = rng.randrange(len(cases.prompts))
    same(engine.prefill(cases.prompts[i]).logits, cases.rows[i], f"prompt {i}")


def packed(engine: Engine, cases: Cases, rng: random.Random) -> None:
    chosen = rng.sample(range(len(cases.prompts)), rng.randint(1, 6))
    results = engine.prefill([cases.prompts[i] for i in chosen])
    for i, result in zip(chosen, results, strict=True):
        same(result.logits, cases.rows[i], f"prompt {i} of {chosen}")


def continued(engine: Engine, cases: Cases, rng: random.Random) -> None:
    i = rng.randrange(1, len(cases.prompts))
    ids, cache = cases.prompts[i], engine.new_cache(len(cases.prompts[i]))
    cut = rng.randrange(1, len(ids))
    engine.prefill(ids[:cut], cache=cache, logits="none")
    same(engine.prefill(ids[cut:], cache=cache).logits, cases.rows[i], f"prompt {i} cut at {cut}")
    cache.close()


def handed_over(engine: Engine, cases: Cases, rng: random.Random) -> None:
    i = rng.randrange(1, len(cases.prompts))
    ids, cache = cases.prompts[i], engine.new_cache(len(cases.prompts[i]))
    engine.prefill(ids[:-1], cache=cache, logits="none")
    other = engine.new_cache(len(ids))
    other.import_(cache.export())
    for copy in (cache.fork(), other):
        result = engine.prefill(ids, cache=copy, reuse=True)
        same(result.logits, cases.rows[i], f"prompt {i} in a copy of its cache")


def scored(engine: Engine, cases: Cases, rng: random.Random) -> None:
    i = rng.randrange(len(cases.tails))
    found = engine.score([cases.prompts[3 + i][:-3]], [cases.tails[i]])
    same(found[0].log_probs, cases.scores[i].log_probs, f"score {i}")


def embedded(engine: Engine, cases: Cases, rng: random.Random) -> None:
    i = rng.randrange(len(cases.prompts))
    same(engine.embed([cases.prompts[i]]), cases.vectors[i : i + 1], f"vector {i}")


def generated(engine: Engine, cases: Cases, rng: random.Random) -> None:
    i = rng.randrange(len(cases.texts))
    engine.generate(cases.prompts[i], 4)  # a near tie may fall otherwise: no text is compared


def out_of_memory(engine: Engine, cases: Cases, rng: random.Random) -> None:
    engine.new_cache(HUGE)


def out_of_time(engine: Engine, cases: Cases, rng: random.Random) -> None:
    i = rng.randrange(len(cases.prompts))
    timeout = rng.choice([0, 1e-4, 1e-3])
    same(engine.prefill(cases.prompts[i], timeout=timeout).logits, cases.rows[i], f"prompt {i}")


Kind = Callable[[Engine, Cases, random.Random], None]
KINDS: dict[Kind, int] = {
    one: 6, packed: 4, continued: 3, handed_over: 1, scored: 2, embedded: 2, generated: 1,
    out_of_memory: 1, out_of_time: 2,
}  # fmt: skip
OWN: dict[Kind, tuple[type[Exception], ...]] = {
    out_of_memory: (OutOfMemoryError,),
    out_of_time: (BusyError, WaitTimeoutError),
}


class Soak:
    """The threads, the engine they share at the time, and what has come of their calls."""

    def __init__(self, load: Callable[[], Engine], cases: Cases) -> None:
        self._load, self._cases = load, cases
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self._over = threading.Event()
        self._lock = threading.Lock()

    def run(self, seconds: float, threads: int) -> None:
        self.engine = self._load()
        workers = [threading.Thread(target=self._work, args=(seed,)) for seed in range(threads)]
        for worker in workers:
            worker.start()
        end, closed, rng = time.monotonic() + seconds, time.monotonic(), random.Random(0)
        times = 0
        try:
            while (time.monotonic() < end or not times) and not self.faults:
                time.sleep(min(INTERRUPT_EVERY, seconds / 8))
                _interrupt(rng.choice(workers))
                self._count("thread interrupted")
                if time.monotonic() - closed > min(CLOSE_EVERY, seconds / 3):
                    engine, self.engine = self.engine, self._load()
                    engine.close()
                    self._count("engine closed under its callers")
                    closed, times = time.monotonic(), times + 1
        finally:
            self._over.set()
            for worker in workers:
                worker.join(120)
                if worker.is_alive():
                    self.faults.append(f"{worker.name} hangs")
            self.engine.close()

    def _work(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._over.is_set():
            try:
                kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
                self._call(kind, rng)
            except KeyboardInterrupt:  # also between two calls
                self._count("call interrupted")

    def _call(self, kind: Kind, rng: random.Random) -> None:
        engine, name = self.engine, kind.__name__
        try:
            kind(engine, self._cases, rng)
        except OWN.get(kind, ()) as error:
            self._count(f"{name}: {type(error).__name__}")
        except EngineError as error:
            if engine is self.engine or "closed" not in str(error):
                self._fault(kind)
            self._count(f"{name}: refused by a closed engine")
        except (PyruntimeError, WrongRowError, ValueError, TypeError):
            self._fault(kind)
        else:
            self._count(name)

    def _fault(self, kind: Kind) -> None:
        with self._lock:
            self.faults.append(f"{kind.__name__}: {traceback.format_exc()}")

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1


def _interrupt(thread: threading.Thread) -> None:
    """Raises KeyboardInterrupt in it, at its next step in Python."""
    if thread.ident is not None:
        raised = ctypes.py_object(KeyboardInterrupt)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), raised)


def memory(device: str) -> dict[str, int]:
    """Bytes that the process holds, and that its device has free."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"host": 4096 * pages}
    if device.startswith("cuda"):
        from pyruntime.driver.device import Device

        opened = Device(int(device.partition(":")[2] or 0))
        found["device_free"] = opened.memory()[0]
        opened.close()
    return found


def lost(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What of the memory did not come back."""
    found = []
    if (more := after["host"] - before["host"]) > HOST_SLACK:
        found.append(f"the process holds {more:,} bytes more than before")
    if (less := before.get("device_free", 0) - after.get("device_free", 0)) > DEVICE_SLACK:
        found.append(f"the device has {less:,} bytes less free than before")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def load() -> Engine:
        return Engine.load(args.model, device=args.device, max_tokens=256, kv_tokens=512)

    with load() as engine:
        cases = Cases(engine)
        path = engine.path
    Soak(load, cases).run(1, args.threads)  # what is made once and kept is there
    soak = Soak(load, cases)
    before = memory(args.device)
    soak.run(60 * args.minutes, args.threads)
    after = memory(args.device)
    faults = [*soak.faults, *lost(before, after)]
    record = {
        "schema": "pyruntime.soak/1", "path": path, "minutes": args.minutes,
        "threads": args.threads, "outcomes": dict(sorted(soak.outcomes.items())),
        "before": before, "after": after, "faults": faults,
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{path}: {args.minutes:g} minutes, {args.threads} threads")
    for outcome, count in record["outcomes"].items():
        print(f"{count:>8} {outcome}")
    for kind, value in after.items():
        print(f"{kind}: {before[kind]:,} bytes before, {value:,} after")
    print("\n".join(faults) or "no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
