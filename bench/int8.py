"""Weights "int8" on a GPU: prefills, greedy generation, and where the time goes, in one command.

    python bench/int8.py [--model FILE] [--arms int8 fp16 ...] [--nt 512 2048]
                         [--llama-bench PROGRAM] [--save OUT] [--json]

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

Rates are also given over llama.cpp's: --llama-bench runs its benchmark on the same file. Without
that, for made-up weights, the figures in cases.toml are quoted.
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
from peers import MODEL, llama_bench
from peers_cases import CASES
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


def measure(
    path: Path, arms: Sequence[str], lengths: Sequence[int], rounds: int, commit: str | None
) -> dict[str, Any]:
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
        about = identity(last.device, last.recorded(min(rows, last.max_tokens)), commit)
    return {**about, "file_bytes": path.stat().st_size, "arms": found, AGAIN: again}


def llama_cpp(
    program: Path | None, path: Path, lengths: Sequence[int], made_up: bool
) -> dict[str, Any]:
    """Tokens per second of llama.cpp by prompt length and in "generation", and their source.

    Args:
        program: llama-bench, to be run on the file at `path`. None: figures are quoted, if it is
            the `made_up` one.
    """
    counts = {str(nt): nt for nt in lengths} | {"generation": GENERATED}
    if program:
        found = llama_bench(program, path, list(lengths), GENERATED)
        if "failed" in found:
            return {"source": f"none: {found['failed']}"}
        rates = {key: 1e9 * n / statistics.median(found[key]) for key, n in counts.items()}
        return {"source": f"measured by {program}", "tok_per_s": rates, "llama_bench": found}
    if not made_up:
        return {"source": "none: of this file --llama-bench would have to measure it"}
    (quoted,) = (x for x in CASES["quoted"] if x["model"] == MODEL)
    rates = quoted["tokens_per_s"] | {"generation": quoted["generated_per_s"]}
    return {
        "source": f"quoted: {quoted['source']}",
        "tok_per_s": {key: rates[key] for key in counts if key in rates},
    }


def over(found: dict[str, Any], rates: dict[str, float]) -> dict[str, float]:
    """How many times as many tokens per second as llama.cpp an arm does."""
    ratios = {
        f"{name} {regime}": row["tok_per_s"] / rates[name.removeprefix("nt")]
        for name, by_regime in found.items() if name.startswith("nt")
        for regime, row in by_regime.items() if name.removeprefix("nt") in rates
    }  # fmt: skip
    return ratios | {"generation": found["generation"]["tok_per_s"] / rates["generation"]}


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
        if ratios := found.get("over_llama_cpp"):
            told = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
            print(f"  over llama.cpp: {told}")
        for nt, roles in found.get("roles_ms", {}).items():
            parts = sorted(roles.items(), key=lambda item: -item[1])
            print(f"  nt {nt}: " + ", ".join(f"{role} {ms:.3f}" for role, ms in parts) + " ms")
    print(f"llama.cpp: {record['llama_cpp']['source']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="instead of made-up weights")
    parser.add_argument("--arms", nargs="+", default=["int8"])
    parser.add_argument("--nt", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--llama-bench", type=Path, metavar="PATH", help="llama.cpp's llama-bench")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args()
    from pyruntime.tools.synth import main as synth

    with tempfile.TemporaryDirectory() as folder:
        path = args.model or Path(folder, f"{MODEL}.gguf")
        if args.model is None:
            stdout, sys.stdout = sys.stdout, sys.stderr
            synth([MODEL, str(path)])
            sys.stdout = stdout
        record = measure(path, args.arms, args.nt, args.rounds, args.commit)
        made_up = args.model is None
        record["llama_cpp"] = peer = llama_cpp(args.llama_bench, path, args.nt, made_up)
    for found in record["arms"].values() if "tok_per_s" in peer else ():
        found["over_llama_cpp"] = over(found, peer["tok_per_s"])
    if args.save:
        save_record(args.save, "int8", record)
    if args.json:
        print(json.dumps(record))
    else:
        report(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
