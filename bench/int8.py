"""Weights "int8" on a GPU: prefills, greedy generation, and where the time goes, in one command.

    python bench/int8.py [--model FILE] [--arms int8 fp16 ...] [--nt 512 2048] [--save OUT] [--json]

Without --model a file of Qwen2.5-7B shapes in the Q4_K_M mix is made up. Arms are engines, all of
which run in each round, in an order that is drawn anew: "int8", "fp16", "per-layer", and other ways
to make planes of activations than the default (model/int8_layers.py): "int8:separate", one for each
product, "int8:memo", one for all products that read it, both from fp16, "int8:copy", folded as in
"int8", but fp16 is written besides, and "int8:late", whose last layer gathers the wanted row behind
the product with attn_output.

Of each arm: tokens per second of prefills in bursts and back to back, tokens per second of
generation at batch 1 (`Engine.generate`, and of the GPU alone), milliseconds of each role, bytes.
All raw values are kept. Where there are several arms, the first is loaded twice, as AGAIN: what it
differs from itself is noise.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from regimes import interleaved

from pyruntime import Engine
from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.measure.clock import ClockProbe
from pyruntime.measure.launches import gpu_model, role_times
from pyruntime.measure.records import identity, save_record
from pyruntime.measure.series import REGIMES
from pyruntime.model import int8_layers
from pyruntime.model.int8_layers import Int8Options

ROUNDS, GENERATED, PROMPT = 9, 64, 32
AGAIN = "again"
WAYS = {
    "separate": Int8Options("separate"), "memo": Int8Options("memo"),
    "copy": Int8Options("folded", copy=True), "late": Int8Options(late=True), "": Int8Options(),
}  # fmt: skip


def load(path: Path, arm: str, rows: int) -> Engine:
    """The engine of an arm, for prompts of so many tokens."""
    weights, _, way = arm.partition(":")
    int8_layers.OPTIONS = WAYS[way]
    try:
        return Engine.load(path, device="cuda:0", weights=weights, max_tokens=rows, kv_tokens=rows)
    finally:
        int8_layers.OPTIONS = WAYS[""]


def prefills(engines: dict[str, Engine], nt: int, rounds: int, probe: ClockProbe) -> dict[str, Any]:
    """Milliseconds, and the SM clock before them, by arm and regime."""
    ids = np.random.default_rng(nt).integers(0, next(iter(engines.values())).config.vocab, nt)
    found: dict[str, Any] = {arm: {} for arm in engines}
    for engine in engines.values():
        for _ in range(3):  # recorded, captured, replayed
            seconds = engine.prefill(ids).timings["wall"]

    def timed(engine: Engine) -> tuple[float, float, float]:
        mhz, timings = probe.mhz(), engine.prefill(ids).timings
        return 1e3 * timings["wall"], 1e3 * timings["gpu"], mhz

    for name, regime in REGIMES.items():
        warm_up = math.ceil(regime.warm_up / (len(engines) * (regime.rest + seconds)))
        raw = interleaved(engines, timed, rounds=rounds, rest=regime.rest, warm_up=warm_up)
        for arm, readings in raw.items():
            wall, gpu, mhz = map(list, zip(*readings, strict=True))
            rate = nt / statistics.median(wall) * 1e3
            found[arm][name] = {"tok_per_s": rate, "wall_ms": wall, "gpu_ms": gpu, "mhz": mhz}
    return found


def generation(engine: Engine, rounds: int) -> dict[str, Any]:
    """Seconds of generating GENERATED tokens, and milliseconds of the GPU for each of one more."""
    ids = np.random.default_rng(1).integers(0, engine.config.vocab, PROMPT)
    engine.generate(ids, 8)
    seconds, counts = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        counts.append(len(engine.generate(ids, GENERATED)))
        seconds.append(time.perf_counter() - started)
    cache = engine.new_cache(PROMPT + GENERATED)
    engine.prefill(ids, cache=cache)
    gpu = [1e3 * engine.prefill([1], cache=cache).timings["gpu"] for _ in range(GENERATED)]
    cache.close()
    rates = [count / s for count, s in zip(counts, seconds, strict=True)]
    return {
        "tok_per_s": statistics.median(rates),
        "gpu_tok_per_s": 1e3 / statistics.median(gpu[4:]),
        "tokens": counts,
        "seconds": seconds,
        "step_gpu_ms": gpu,
    }


def measure(path: Path, arms: Sequence[str], lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """What each arm does, and the bytes that it holds."""
    found: dict[str, Any] = {arm: {} for arm in arms}
    again: dict[str, Any] = {}
    rows = max(lengths)
    with ExitStack() as stack:
        engines = {arm: stack.enter_context(load(path, arm, rows)) for arm in arms}
        # Of its own device, as what it takes of the GPU's memory is no arm's.
        device = stack.enter_context(closing(Device(0)))
        probe = stack.enter_context(
            closing(ClockProbe(stack.enter_context(closing(Library(device)))))
        )
        with load(path, arms[0], rows) if len(arms) > 1 else nullcontext() as twin:
            for nt in lengths:
                timed = prefills(engines | ({AGAIN: twin} if twin else {}), nt, rounds, probe)
                if twin:
                    again[f"nt{nt}"] = timed.pop(AGAIN)
                for arm, by_regime in timed.items():
                    found[arm][f"nt{nt}"] = by_regime
        for arm, engine in engines.items():
            device = gpu_model(engine).device
            found[arm]["generation"] = generation(engine, rounds)
            found[arm]["peak_bytes"] = device.peak  # before buffers that are there for timing
            if engine.weights != "per-layer":  # that runs on two streams
                roles = {nt: np.zeros(nt, np.int32) for nt in (1, *lengths)}
                found[arm]["roles_ms"] = {nt: role_times(engine, x, 5) for nt, x in roles.items()}
            options = {"weights": engine.weights, "max_tokens": rows, "kv_tokens": rows}
            found[arm] |= {
                "planned_bytes": Engine.plan(path, **options).total,
                "max_tokens": engine.max_tokens,
            }
        last = gpu_model(engines[arms[0]])
        about = identity(last.device, last.recorded(min(rows, last.max_tokens)), None)
    return {**about, "file_bytes": path.stat().st_size, "arms": found, AGAIN: again}


def report(record: dict[str, Any]) -> None:
    """A table for people."""
    print(f"{record['device']}, commit {record['commit']}")
    for arm, found in record["arms"].items():
        rates = [
            f"{name} {regime} {row['tok_per_s']:,.0f} tok/s (gpu "
            f"{statistics.median(row['gpu_ms']):.2f} ms)"
            for name, by_regime in found.items() if name.startswith("nt")
            for regime, row in by_regime.items()
        ]  # fmt: skip
        made = found["generation"]
        rates.append(
            f"generate {made['tok_per_s']:,.0f} tok/s, of the GPU {made['gpu_tok_per_s']:,.0f}"
        )
        print(f"{arm}: planned {found['planned_bytes']:,} bytes, peak {found['peak_bytes']:,}")
        print("  " + "\n  ".join(rates))
        for nt, roles in found.get("roles_ms", {}).items():
            parts = sorted(roles.items(), key=lambda item: -item[1])
            print(f"  nt {nt}: " + ", ".join(f"{role} {ms:.3f}" for role, ms in parts) + " ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="instead of made-up weights")
    parser.add_argument("--arms", nargs="+", default=["int8"])
    parser.add_argument("--nt", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    from pyruntime.tools.synth import main as synth

    with tempfile.TemporaryDirectory() as folder:
        path = args.model or Path(folder, "qwen2.5-7b.gguf")
        if args.model is None:
            stdout, sys.stdout = sys.stdout, sys.stderr
            synth(["qwen2.5-7b", str(path)])
            sys.stdout = stdout
        record = measure(path, args.arms, args.nt, args.rounds)
    if args.save:
        save_record(args.save, "int8", record)
    if args.json:
        print(json.dumps(record))
    else:
        report(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
