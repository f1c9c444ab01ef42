"""What an e4m3 K/V cache costs in accuracy: NumPy against float32 values of others, on a CPU.

    python bench/kv_accuracy.py [--save bench/results/kv-accuracy.json]

Every prompt of tests/data/golden runs with both kinds of cache, in float32 and with the roundings
of a GPU (fp16). Of the last position: the largest and the root mean square difference of a logit,
the KL divergence, and whether the likeliest token is the same. Of all positions: the mean loss of
the log-probability of the token that follows. SmolLM2 is left out where its file has not been
fetched (`pyruntime info smollm2`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from goldens import SMOLLM2, TINY, Prompt, kl, log_sum_exp, prompts  # noqa: E402

from pyruntime.gguf import GGUFFile  # noqa: E402
from pyruntime.hub import cached  # noqa: E402
from pyruntime.model.config import KV_DTYPES, ModelConfig  # noqa: E402
from pyruntime.reference import ReferenceModel  # noqa: E402
from pyruntime.reference.model import ROUNDINGS  # noqa: E402


def measure(path: Path, found: list[Prompt], precision: Any, kv_dtype: str) -> list[dict[str, Any]]:
    """One entry per prompt."""
    with GGUFFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        model = ReferenceModel(file, config, precision=precision, kv_dtype=kv_dtype)
    return [compare(model, prompt) for prompt in found]


def compare(model: ReferenceModel, prompt: Prompt) -> dict[str, Any]:
    logits = model.forward(prompt.ids, model.new_cache(len(prompt.ids)), logits="all")
    last, truth = logits[-1], prompt.last_logits
    followed = np.take_along_axis(logits[:-1], prompt.ids[1:, None].astype(np.int64), axis=1)[:, 0]
    losses = prompt.logprobs - (followed - log_sum_exp(logits[:-1]))
    return {
        "prompt": prompt.name,
        "tokens": len(prompt.ids),
        "logit": float(np.abs(last - truth).max()),
        "logit_rms": float(np.sqrt(((last - truth) ** 2).mean())),
        "kl": kl(truth, last),
        "same_token": bool(last.argmax() == truth.argmax()),
        "logprob_loss": float(losses.sum()),  # over tokens - 1 positions
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    paths = {stem: ROOT / f"tests/data/golden/{stem}.gguf" for stem in TINY}
    if smollm2 := cached("smollm2"):
        paths[SMOLLM2] = smollm2
    figures: dict[str, Any] = {}
    for stem, path in paths.items():
        found = prompts(stem)
        figures[stem] = {
            f"{precision} {kv}": measure(path, found, precision, kv)
            for precision in ROUNDINGS
            for kv in KV_DTYPES
        }
        print(stem, file=sys.stderr)
    report(figures)
    if args.save:
        record = {"schema": "pyruntime.kv_accuracy/1", "numpy": np.__version__, "models": figures}
        args.save.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def report(figures: dict[str, Any]) -> None:
    """A table, the tiny models of an architecture together."""
    groups: dict[str, list[str]] = {}
    for stem in figures:
        groups.setdefault(group_of(stem), []).append(stem)
    print("| model | arithmetic, cache | max \\|Δlogit\\| | rms Δlogit | KL | same token | loss |")
    print("|---|---|---|---|---|---|---|")
    for name, stems in groups.items():
        for kind in figures[stems[0]]:
            rows = [row for stem in stems for row in figures[stem][kind]]
            scored = sum(row["tokens"] - 1 for row in rows)
            print(
                f"| {name} | {kind.replace(' ', ', ')} | {max(r['logit'] for r in rows):.4f} "
                f"| {max(r['logit_rms'] for r in rows):.4f} | {max(r['kl'] for r in rows):.1e} "
                f"| {sum(r['same_token'] for r in rows)} of {len(rows)} "
                f"| {sum(r['logprob_loss'] for r in rows) / scored:+.5f} |"
            )


def group_of(stem: str) -> str:
    """The tiny models of an architecture differ in quantization and rotary scaling alone."""
    if stem == SMOLLM2:
        return "SmolLM2-135M"
    others = ("gemma2", "gemma3", "mistral", "qwen2", "qwen3")
    return next((f"tiny {arch}" for arch in others if arch in stem), "tiny llama")


if __name__ == "__main__":
    sys.exit(main())
