"""Requests per second of the scoring service, against a bare loop over the engine.

    python bench/serve.py MODEL [--nt 512] [--clients 1 8 64] [--parts] [--save OUT] [--json]

next    the likeliest next token after a prompt (max_tokens 1). The loop: `Engine.prefill` of as
        many prompts as there are clients, and the argmax of each.
score   what lm-evaluation-harness asks for: echo, logprobs 1, max_tokens 1. The loop:
        `Engine.score` of all tokens but the first, of as many prompts.

The service is a process of its own, each client a thread here with one connection, which asks again
as soon as it is answered. Both have their engine loaded, and take turns: ROUNDS times each. Prompts
are random token ids, all different, of `--nt` tokens.

A record also has, and `--parts` prints, where the time of a served request went, in ms: in calls of
the engine (those of several requests are shared out), from there to the scores of each, in reading
bodies and in writing them. These may overlap.

On a GPU the exit code is 1 if the service reaches less than FLOOR of the loop.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from pyruntime import Engine
from pyruntime.measure.records import head_commit, identity, save_record
from pyruntime.model.gpu import GpuModel

ROUNDS, SECONDS, FLOOR = 3, 5.0, 0.9
MOST = 200  # requests per second of all clients together that are made up before the clock runs
NAME = "model"
PARTS = ("engine", "score", "read", "write")
FIELDS: dict[str, dict[str, Any]] = {
    "next": {"max_tokens": 1},
    "score": {"max_tokens": 1, "echo": True, "logprobs": 1},
}


@contextmanager
def service(model: str, options: list[str]) -> Iterator[int]:
    """The port of a service of `model`."""
    command = [sys.executable, "-P", "-m", "pyruntime", "serve", model, "--name", NAME]
    with subprocess.Popen([*command, "--port", "0", *options], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            found = re.search(r":(\d+)$", line.strip())
            if not found:
                raise RuntimeError(f"the service did not start: {line!r}")
            yield int(found[1])
        finally:
            process.terminate()


class Prompts:
    """Random ids, no two prompts alike: lists of `nt` ids each."""

    def __init__(self, vocab: int, nt: int) -> None:
        self._random = np.random.default_rng(0)
        self._vocab, self._nt = vocab, nt
        self._lock = threading.Lock()

    def next(self, count: int) -> list[list[int]]:
        with self._lock:
            found: list[list[int]] = self._random.integers(
                0, self._vocab, (count, self._nt)
            ).tolist()
        return found


def bare(engine: Engine, kind: str, prompts: list[list[int]]) -> None:
    """What the service has to do for these prompts, at once."""
    if kind == "score":
        engine.score([ids[:1] for ids in prompts], [ids[1:] for ids in prompts])
    else:
        for result in engine.prefill(prompts):
            int(np.asarray(result.logits)[0].argmax())


def loop(engine: Engine, kind: str, prompts: Prompts, count: int, seconds: float) -> dict[str, Any]:
    """Calls with `count` prompts each for so long, one at least."""
    calls: list[float] = []
    began = time.perf_counter()
    while not calls or time.perf_counter() - began < seconds:
        some = prompts.next(count)
        started = time.perf_counter()
        bare(engine, kind, some)
        calls.append(time.perf_counter() - started)
    return {"requests": count * len(calls), "seconds": sum(calls), "latency_ms": _ms(calls)}


def spent(port: int) -> dict[str, float]:
    """Seconds of the service since it began, by what was done, and the requests answered."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", "/metrics")
    record = json.load(connection.getresponse())
    connection.close()
    return {"requests": record["answered"], **{part: record[f"{part}_seconds"] for part in PARTS}}


def clients(port: int, kind: str, prompts: Prompts, count: int, seconds: float) -> dict[str, Any]:
    """`count` clients for so long, until the last of them is answered; each asks at least once.

    Requests are made up before, as prompts are for the loop, whose time is that of its calls.
    """

    def request() -> str:
        return json.dumps({"model": NAME, "prompt": prompts.next(1)[0], **FIELDS[kind]})

    times: list[float] = []
    faults: list[BaseException] = []
    requests = deque(request() for _ in range(count + int(MOST * seconds)))
    ends = time.perf_counter() + seconds

    def ask() -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=600)
        try:
            asks = True
            while asks and not faults:
                try:
                    asked = requests.popleft()
                except IndexError:
                    asked = request()
                started = time.perf_counter()
                connection.request("POST", "/v1/completions", asked)
                response = connection.getresponse()
                body = response.read()
                times.append(time.perf_counter() - started)
                if response.status != 200:
                    raise RuntimeError(f"status {response.status}: {body[:200]!r}")
                asks = time.perf_counter() < ends
        except BaseException as error:
            faults.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=ask) for _ in range(count)]
    before = spent(port)
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    seconds, after = time.perf_counter() - began, spent(port)
    answered = after["requests"] - before["requests"]
    parts = {part: 1e3 * (after[part] - before[part]) / answered for part in PARTS}
    latency = _ms(times)
    return {"requests": len(times), "seconds": seconds, "latency_ms": latency, "parts_ms": parts}


def _ms(seconds: list[float]) -> dict[str, float]:
    low, *_, high = np.quantile(seconds, (0.5, 0.9, 0.99)) * 1e3
    return {"median": float(low), "p99": float(high)}


def per_second(rounds: list[dict[str, Any]]) -> float:
    return statistics.median(r["requests"] / r["seconds"] for r in rounds)


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    options = ["--device", args.device, "--max-queue", str(2 * max(args.clients))]
    with (
        Engine.load(args.model, device=args.device) as engine,
        service(args.model, options) as port,
    ):
        prompts = Prompts(engine.config.vocab, args.nt)
        rows: dict[str, Any] = {}
        for kind in args.kinds:
            for count in args.clients:
                loop(engine, kind, prompts, count, args.seconds / 5)  # both warm up
                clients(port, kind, prompts, count, args.seconds / 5)
                row: dict[str, list[dict[str, Any]]] = {"bare": [], "served": []}
                for _ in range(args.rounds):
                    row["bare"].append(loop(engine, kind, prompts, count, args.seconds))
                    row["served"].append(clients(port, kind, prompts, count, args.seconds))
                ratio = per_second(row["served"]) / per_second(row["bare"])
                rows[f"{kind} {count}"] = {"kind": kind, "clients": count, "ratio": ratio, **row}
                say(line(rows[f"{kind} {count}"], args.nt))
                if args.parts:
                    say(parts_line(row["served"]))
        about: dict[str, Any] = {
            "commit": args.commit or head_commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": engine.path,
        }
        if isinstance(engine.model, GpuModel):
            about = identity(engine.model.device, (), args.commit)
        return {
            **about,
            "model": engine.config.name,
            "nt": args.nt,
            "cpus": len(os.sched_getaffinity(0)),
            "on_gpu": isinstance(engine.model, GpuModel),
            "rows": rows,
        }


def line(row: dict[str, Any], nt: int) -> str:
    figures = "".join(
        f"{per_second(row[way]):>11.1f}{nt * per_second(row[way]):>11,.0f}"
        f"{statistics.median(r['latency_ms']['median'] for r in row[way]):>10.1f}"
        for way in ("bare", "served")
    )
    return f"{row['kind']:<6}{row['clients']:>8}{figures}{row['ratio']:>8.2f}"


def parts_line(served: list[dict[str, Any]]) -> str:
    parts = ((part, statistics.median(r["parts_ms"][part] for r in served)) for part in PARTS)
    return " " * 14 + "  ".join(f"{part} {ms:.2f} ms" for part, ms in parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--nt", type=int, default=512)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--kinds", nargs="+", choices=list(FIELDS), default=list(FIELDS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement")
    parser.add_argument("--parts", action="store_true", help="print where served requests spent")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args()

    def say(text: str) -> None:
        if not args.json:
            print(text, flush=True)

    say(f"{'':14}{'bare: req/s':>11}{'tok/s':>11}{'ms':>10}{'served:':>11}{'tok/s':>11}{'ms':>10}"
        f"{'ratio':>8}")  # fmt: skip
    record = measure(args, say)
    if args.save:
        save_record(args.save, "serve-bench", record)
    if args.json:
        print(json.dumps(record))
    missed = [name for name, row in record["rows"].items() if row["ratio"] < FLOOR]
    if record["on_gpu"] and missed:
        say(f"less than {FLOOR} of the loop: {', '.join(missed)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
