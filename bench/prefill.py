"""Whole prefills on a GPU: Qwen2.5-7B shapes in the Q4_K_M mix (synthesized), and SmolLM2.

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
from pathlib import Path
from typing import Any

import numpy as np

from pyruntime import Engine

LENGTHS = {"qwen2.5-7b": (1, 128, 512, 2048, 3325), "smollm2": (128, 512, 2048)}
ROUNDS = 9


def measure(model: str, path: Path) -> dict[str, Any]:
    started = time.perf_counter()
    engine = Engine.load(path, device="cuda:0", max_tokens=max(LENGTHS[model]))
    load_seconds = time.perf_counter() - started
    rng = np.random.default_rng(0)
    rows: dict[str, Any] = {"load_seconds": load_seconds, "file_bytes": path.stat().st_size}
    with engine:
        for nt in LENGTHS[model]:
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
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=Path, help="a Qwen2.5-7B shaped file, instead of a new one")
    args = parser.parse_args()
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
        figures["qwen2.5-7b"] = measure("qwen2.5-7b", path)
    if smollm2 := os.environ.get("PYRUNTIME_TEST_SMOLLM2"):
        figures["smollm2"] = measure("smollm2", Path(smollm2))
    if args.json:
        print(json.dumps(figures))
        return 0
    for model, rows in figures.items():
        if isinstance(rows, dict):
            report(model, rows)
    return 0


def report(model: str, rows: dict[str, Any]) -> None:
    print(f"{model}: loaded {rows['file_bytes']:,} bytes in {rows['load_seconds']:.2f} s")
    for name, row in rows.items():
        if isinstance(row, dict):
            gpu, wall = (statistics.median(row[key]) for key in ("gpu_ms", "wall_ms"))
            rate = row["tok_per_s"]
            print(f"  {name:<18} {rate:>10,.0f} tok/s  wall {wall:.2f} gpu {gpu:.2f} ms")


if __name__ == "__main__":
    sys.exit(main())
