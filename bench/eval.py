"""Requests per second of the lm-evaluation-harness's model `pyruntime`, tokenizer included.

    python bench/eval.py [MODEL] [--device cuda:0] [--nt 256] [--save OUT] [--json]

answers   `loglikelihood`: ANSWERS answers of several tokens to each prompt of `--nt` characters
texts     `loglikelihood_rolling`: texts of four times as many, read in windows
greedy    `generate_until`: answers of GENERATED tokens to the same prompts, side by side

Texts are random letters, the same in each run; kinds take turns, ROUNDS times each, after two
rounds that are not counted, as passes become graphs. Tokens are those that the engine was given.
Without MODEL a file of Qwen2.5-0.5B shapes is made up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pyruntime import Engine
from pyruntime.clients.lm_eval import PyruntimeLM
from pyruntime.measure.records import head_commit, identity, save_record
from pyruntime.model.gpu import GpuModel

PROMPTS, ANSWERS, GENERATED, ROUNDS, UNCOUNTED = 64, 4, 32, 5, 2


class Counting:
    """An engine, and how many tokens it was given."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.tokens = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, *args: Any, **options: Any) -> Any:
        results = self._engine.prefill(*args, **options)
        self.tokens += sum(result.tokens for result in results)
        return results

    def score(self, contexts: Any, continuations: Any) -> Any:
        pairs = zip(contexts, continuations, strict=True)
        self.tokens += sum(len(c) + len(more) - 1 for c, more in pairs)  # the last one is not run
        return self._engine.score(contexts, continuations)


def cases(prompts: int, nt: int, generated: int) -> dict[str, tuple[str, list[Any]]]:
    """By kind: the model's method, and requests as the harness makes them."""
    random = np.random.default_rng(0)

    def text(size: int) -> str:
        return "".join(random.choice(list("abcdefghij "), size))

    asked = [text(nt) for _ in range(prompts)]
    greedy = {"until": [], "max_gen_toks": generated}
    made = {
        "answers": ("loglikelihood", [(p, " " + text(8)) for p in asked for _ in range(ANSWERS)]),
        "texts": ("loglikelihood_rolling", [(text(4 * nt),) for _ in range(prompts)]),
        "greedy": ("generate_until", [(p, greedy) for p in asked]),
    }
    return {
        kind: (method, [SimpleNamespace(args=args) for args in requests])
        for kind, (method, requests) in made.items()
    }


def once(lm: PyruntimeLM, method: str, requests: list[Any]) -> dict[str, Any]:
    lm.engine = Counting(lm.engine)
    try:
        started = time.perf_counter()
        getattr(lm, method)(requests, disable_tqdm=True)
        seconds = time.perf_counter() - started
        return {"requests": len(requests), "tokens": lm.engine.tokens, "seconds": seconds}
    finally:
        lm.engine = lm.engine._engine


def per_second(rounds: list[dict[str, Any]], what: str) -> float:
    return statistics.median(r[what] / r["seconds"] for r in rounds)


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    lm = PyruntimeLM(engine)
    asked = cases(args.prompts, args.nt, args.generated)
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in asked}
    for turn in range(UNCOUNTED + args.rounds):
        for kind, (method, requests) in asked.items():
            found = once(lm, method, requests)
            if turn >= UNCOUNTED:
                runs[kind].append(found)
    if isinstance(engine.model, GpuModel):
        about = identity(engine.model.device, (), args.commit)
    else:
        about = {"commit": args.commit or head_commit(),
                 "date": datetime.now(UTC).isoformat(timespec="seconds")}  # fmt: skip
    return {
        **about,
        "device": engine.path,
        "model": engine.config.name,
        "nt": args.nt,
        "generated": args.generated,
        "max_tokens": engine.max_tokens,
        "cpus": len(os.sched_getaffinity(0)),
        "runs": runs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--nt", type=int, default=256, help="characters of a prompt")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--generated", type=int, default=GENERATED)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model
        if path is None:
            from pyruntime.tools.synth import main as synth

            path = str(Path(folder, "qwen2.5-0.5b.gguf"))
            with redirect_stdout(sys.stderr):
                synth(["qwen2.5-0.5b", path])
        with Engine.load(path, device=args.device) as engine:
            record = measure(engine, args)
    if args.save:
        save_record(args.save, "eval-bench", record)
    if args.json:
        print(json.dumps({"schema": "pyruntime.eval-bench/1", **record}))
        return 0
    print(f"{record['model']} on {record['device']}")
    print(f"{'':8}{'requests/s':>12}{'tok/s':>12}")
    for kind, rounds in record["runs"].items():
        requests, tokens = (per_second(rounds, what) for what in ("requests", "tokens"))
        print(f"{kind:<8}{requests:>12,.1f}{tokens:>12,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
