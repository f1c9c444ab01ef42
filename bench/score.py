"""How fast a GPU scores answers to choose from, as the lm-evaluation-harness asks for them.

    python bench/score.py [--model FILE] [--max-tokens N] [--json FILE]

For prompts of several lengths with four answers each, of one token (which are run once) or of
eight: requests per second, rows of passes per second, and of the time the part that the GPU was
at work in passes; the rest is the output matrix, the scores, and what the host does in between.
Without --model a file of Qwen2.5-0.5B shapes is made up. Medians of ROUNDS, all raw values in
--json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from pyruntime import Engine

PROMPTS, ANSWERS, ROUNDS = 64, 4, 5
LENGTHS, ANSWER_LENGTHS = (64, 256, 1024), (1, 8)


def cases(vocab: int) -> dict[str, tuple[list[Any], list[Any], int]]:
    """By name: prompts, continuations, and the rows that are run for them."""
    random, found = np.random.default_rng(0), {}
    for length in LENGTHS:
        for answer in ANSWER_LENGTHS:
            each = random.integers(0, vocab, (PROMPTS, length))
            prompts = [prompt for prompt in each for _ in range(ANSWERS)]
            answers = list(random.integers(0, vocab, (len(prompts), answer)))
            runs = PROMPTS if answer == 1 else len(prompts)
            found[f"{length}+{answer}"] = prompts, answers, runs * (length + answer - 1)
    return found


def measure(engine: Engine) -> dict[str, Any]:
    results = {}
    for name, (prompts, answers, rows) in cases(engine.config.vocab).items():
        engine.score(prompts, answers)  # twice, as passes become graphs
        engine.score(prompts, answers)
        wall = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            engine.score(prompts, answers)
            wall.append(time.perf_counter() - started)
        seconds = statistics.median(wall)
        ids = [[*p, *a[:-1]] for p, a in zip(prompts, answers, strict=True)]
        ids = ids[:: ANSWERS if len(answers[0]) == 1 else 1]
        passes = [engine.prefill(ids, logits="none")[0].timings["gpu"] for _ in range(ROUNDS)]
        results[name] = {
            "rows": rows,
            "requests_per_s": len(prompts) / seconds,
            "rows_per_s": rows / seconds,
            "of_it_in_passes": statistics.median(passes) / seconds,
            "wall_s": wall,
            "passes_s": passes,
        }
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model
        if path is None:
            from pyruntime.tools.synth import main as synth

            path = Path(folder) / "model.gguf"
            synth(["qwen2.5-0.5b", str(path)])
        with Engine.load(path, device="cuda:0", max_tokens=args.max_tokens) as engine:
            results = {
                "schema": "pyruntime.score-bench/1", "path": engine.path,
                "model": engine.config.name, "cases": measure(engine),
            }  # fmt: skip
    print(f"{results['model']} on {results['path']}")
    print(f"{'prompt+answer':>14} {'requests/s':>11} {'rows/s':>10} {'in passes':>10}")
    for name, case in results["cases"].items():
        print(
            f"{name:>14} {case['requests_per_s']:>11,.0f} {case['rows_per_s']:>10,.0f} "
            f"{case['of_it_in_passes']:>10.0%}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
