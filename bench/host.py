"""What the host does for a prefill, on a GPU: microseconds per pass, enqueued and replayed.

    python bench/host.py [--nt 1 16 128 512] [--weights fp16|per-layer] [--model FILE] [--json]

For each length and both ways of `graphs`:

enqueue   from the first call of the driver for a pass to its last: the time that a GPU may wait
cpu       CPU time of the calling thread in `prefill`, its wait for the GPU included (the driver
          may spin there), and without it
before    from the call to the first enqueue: token ids are checked, logits get their memory
gpu, wall milliseconds, as `Result.timings` has them
capture   what making the graph took

Medians; rounds of both ways alternate, and each rests before it. Every raw value goes into --json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pyruntime import Engine
from pyruntime.driver.stream import Stream
from pyruntime.measure.launches import gpu_model

LENGTHS = (1, 16, 128, 512)
ROUNDS, REST = 21, 0.03
WAYS = ("off", "auto")


class Waits:
    """When the last wait for a stream began, and the CPU time of the thread before and after."""

    def __init__(self) -> None:
        self.began = self.cpu = 0.0
        wait: Callable[[Stream], None] = Stream.synchronize

        def timed(stream: Stream) -> None:
            self.began, before = time.perf_counter(), time.thread_time()
            wait(stream)
            self.cpu = time.thread_time() - before

        Stream.synchronize = timed  # type: ignore[method-assign]


def call(engine: Engine, ids: Any, waits: Waits) -> dict[str, float]:
    time.sleep(REST)
    started, cpu = time.perf_counter(), time.thread_time()
    timings = engine.prefill(ids).timings
    cpu = time.thread_time() - cpu
    first, _ = gpu_model(engine).host_span
    return {
        "enqueue_us": 1e6 * (waits.began - first),
        "cpu_us": 1e6 * cpu,
        "cpu_without_wait_us": 1e6 * (cpu - waits.cpu),
        "before_us": 1e6 * (first - started),
        "gpu_ms": 1e3 * timings["gpu"],
        "wall_ms": 1e3 * timings["wall"],
    }


def measure(path: Path, lengths: list[int], weights: str) -> dict[str, Any]:
    waits, rows = Waits(), {}
    options: dict[str, Any] = {
        "device": "cuda:0", "weights": weights, "max_tokens": max(lengths),
        "kv_tokens": max(lengths),
    }  # fmt: skip
    engines = {way: Engine.load(path, graphs=way, **options) for way in WAYS}
    random = np.random.default_rng(0)
    for nt in lengths:
        ids = random.integers(0, engines["off"].config.vocab, nt)
        before = engines["auto"].stats()
        for engine in engines.values():
            for _ in range(4):
                engine.prefill(ids)
        after = engines["auto"].stats()
        samples: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way, engine in engines.items():
                samples[way].append(call(engine, ids, waits))
        same = [np.asarray(engine.prefill(ids).logits) for engine in engines.values()]
        rows[f"nt{nt}"] = {
            **{way: {k: [s[k] for s in found] for k in found[0]} for way, found in samples.items()},
            "launches": len(gpu_model(engines["auto"]).recorded(nt)),
            "capture_ms": after.capture_ms - before.capture_ms,
            "graph_bytes": after.graph_bytes - before.graph_bytes,
            "bit_equal": bool(np.array_equal(*same)),
        }
    stats = vars(engines["auto"].stats())
    for engine in engines.values():
        engine.close()
    return {"weights": weights, "lengths": rows, "stats": stats}


def report(figures: dict[str, Any]) -> None:
    print(f"weights {figures['weights']}")
    names = ("enqueue_us", "cpu_us", "cpu_without_wait_us", "before_us", "gpu_ms", "wall_ms")
    print(f"{'':12}" + "".join(f"{name:>21}" for name in names))
    for length, row in figures["lengths"].items():
        for way in WAYS:
            medians = "".join(f"{statistics.median(row[way][name]):21.2f}" for name in names)
            print(f"{length + ' ' + way:12}{medians}")
        print(
            f"{'':12}{row['launches']} launches, capture {row['capture_ms']:.2f} ms, "
            f"{row['graph_bytes']:,} bytes, bit-equal: {row['bit_equal']}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=Path, help="a Qwen2.5-7B shaped file, instead of a new one")
    parser.add_argument("--weights", default="fp16", help="fp16 (default) or per-layer")
    parser.add_argument("--nt", type=int, nargs="+", default=list(LENGTHS))
    args = parser.parse_args()
    from pyruntime.tools.synth import main as synth

    with tempfile.TemporaryDirectory() as folder:
        path = args.model or Path(folder, "qwen2.5-7b.gguf")
        if args.model is None:
            stdout, sys.stdout = sys.stdout, sys.stderr
            synth(["qwen2.5-7b", str(path)])
            sys.stdout = stdout
        figures = measure(path, args.nt, args.weights)
    if args.json:
        print(json.dumps(figures))
    else:
        report(figures)
    equal = all(row["bit_equal"] for row in figures["lengths"].values())
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
