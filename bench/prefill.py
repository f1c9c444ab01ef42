"""Whole prefills on a GPU: Qwen2.5-7B shapes in the Q4_K_M mix (synthesized), and SmolLM2.

Beside speed: the most that the engine's own arrays held at a time, staging buffers of loading
included, and what `Engine.plan` said. Both count room for the longest prompt measured.

Each figure is the median of interleaved rounds; every raw value is kept. `burst` rests 30 ms before
each call, so that clocks are high as for a single prompt; `sustained` runs back to back.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyruntime import Engine
from pyruntime.measure.launches import gpu_model
from pyruntime.model import pipeline

LENGTHS = {"qwen2.5-7b": (1, 128, 512, 2048, 3325), "smollm2": (128, 512, 2048)}
ROUNDS = 9


def measure(path: Path, lengths: Sequence[int], weights: str) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": max(lengths), "weights": weights}
    options["kv_tokens"] = max(lengths)
    started = time.perf_counter()
    engine = Engine.load(path, device="cuda:0", **options)
    load_seconds = time.perf_counter() - started
    rng = np.random.default_rng(0)
    device = gpu_model(engine).device
    rows: dict[str, Any] = {
        "weights": engine.weights,
        "load_seconds": load_seconds,
        "file_bytes": path.stat().st_size,
        "load_peak_bytes": device.peak,
        "planned_bytes": Engine.plan(path, **options | {"weights": engine.weights}).total,
    }
    with engine:
        for nt in lengths:
            ids = rng.integers(0, engine.config.vocab, nt)
            for _ in range(3):
                engine.prefill(ids)
            for regime, rest in (("burst", 0.03), ("sustained", 0.0)):
                results = []
                for _ in range(ROUNDS):
                    time.sleep(rest)
                    results.append(engine.prefill(ids).timings)
                wall = [1e3 * r["wall"] for r in results]
                rows[f"nt{nt}_{regime}"] = {
                    "tok_per_s": nt / statistics.median(wall) * 1e3,
                    "wall_ms": wall,
                    "gpu_ms": [1e3 * r["gpu"] for r in results],
                }
        rows["peak_bytes"] = device.peak
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=Path, help="a Qwen2.5-7B shaped file, instead of a new one")
    parser.add_argument("--weights", default="auto", help="fp16, per-layer, int8 or auto (default)")
    parser.add_argument(
        "--nt", type=int, nargs="+", help="lengths of prompts, instead of the usual"
    )
    parser.add_argument(
        "--urgent", choices=("fills", "pass"), default="fills",
        help="with per-layer: the stream that dequantizes (default), or the one that computes",
    )  # fmt: skip
    args = parser.parse_args()
    pipeline.URGENT_FILLS = args.urgent == "fills"
    from pyruntime.tools.synth import main as synth

    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or Path(folder, "qwen2.5-7b.gguf")
        if args.model is None:
            started = time.perf_counter()
            stdout, sys.stdout = sys.stdout, sys.stderr
            synth(["qwen2.5-7b", str(path)])
            sys.stdout = stdout
            figures["synth_seconds"] = time.perf_counter() - started
        figures["qwen2.5-7b"] = measure(path, args.nt or LENGTHS["qwen2.5-7b"], args.weights)
    if smollm2 := os.environ.get("PYRUNTIME_TEST_SMOLLM2"):
        figures["smollm2"] = measure(Path(smollm2), args.nt or LENGTHS["smollm2"], args.weights)
    if args.json:
        print(json.dumps(figures))
        return 0
    for model, rows in figures.items():
        if isinstance(rows, dict):
            report(model, rows)
    return 0


def report(model: str, rows: dict[str, Any]) -> None:
    print(f"{model}: loaded {rows['file_bytes']:,} bytes in {rows['load_seconds']:.2f} s")
    held = ("load_peak_bytes", "peak_bytes", "planned_bytes")
    loading, peak, planned = (f"{rows[name]:,}" for name in held)
    print(f"  weights {rows['weights']}: peak {peak} bytes, planned {planned}, loading {loading}")
    for name, row in rows.items():
        if isinstance(row, dict):
            gpu, wall = (statistics.median(row[key]) for key in ("gpu_ms", "wall_ms"))
            rate = row["tok_per_s"]
            print(f"  {name:<18} {rate:>10,.0f} tok/s  wall {wall:.2f} gpu {gpu:.2f} ms")


if __name__ == "__main__":
    sys.exit(main())
