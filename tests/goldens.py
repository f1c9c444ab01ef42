"""Other programs' values for the models in `tests/data/golden`: where they are, how to read them.

They come from llama.cpp on float32 weights, and those of tiny-gemma2, tiny-gemma3 and tiny-mistral
from transformers (`data/golden/make_windows.py`), so they are the truth for every backend.
SmolLM2's model file is not in the tree; tests use the one that PYRUNTIME_TEST_SMOLLM2 names, or the
one that `pyruntime` has fetched into its cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).parent / "data" / "golden"
TINY = sorted(path.stem for path in GOLDEN.glob("tiny-*.gguf"))
SMOLLM2 = "smollm2-135m-f32"
# Models with matrices that products with int8 activations take, as those of SmolLM2.
PACKED = [stem for stem in TINY if not stem.endswith(("-f16", "-bf16"))]
# What int8 activations cost llama.cpp on SmolLM2 (llama-cpp-python 0.3.36, on a CPU): the KL
# divergence of the last logits of each prompt from the truth.
LLAMA_CPP_INT8 = {
    "one": 1.9965e-3, "short": 1.5893e-3, "unicode": 7.9825e-3, "code": 4.7538e-3,
    "chat": 1.2920e-3, "long": 6.0340e-3,
}  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """One prompt of nt tokens. Position i's logits predict token i + 1."""

    name: str
    ids: np.ndarray  # int32 [nt]
    last_logits: np.ndarray  # f32 [vocab]
    logprobs: np.ndarray  # f64 [nt - 1]: of ids[i + 1] given ids[:i + 1]
    lse: np.ndarray  # [nt]: log-sum-exp of each position's logits
    top10_ids: np.ndarray  # [nt, 10]
    top10_logits: np.ndarray  # [nt, 10]
    greedy: np.ndarray  # int32 [n]: argmax continuation
    greedy_gap: np.ndarray  # f32 [n]: largest minus second largest logit at each step


def prompts(stem: str) -> list[Prompt]:
    """The prompts of one golden file, shortest first."""
    fields = [field for field in Prompt.__dataclass_fields__ if field != "name"]
    with np.load(GOLDEN / f"{stem}.npz") as values:
        names = {key.split("/")[0] for key in values.files}
        found = [Prompt(n, **{f: values[f"{n}/{f}"] for f in fields}) for n in names]
    return sorted(found, key=lambda prompt: len(prompt.ids))


def model_path(stem: str) -> Path:
    """The GGUF file of one golden file; skips the test if it is SmolLM2's and not there."""
    if stem != SMOLLM2:
        return GOLDEN / f"{stem}.gguf"
    if given := os.environ.get("PYRUNTIME_TEST_SMOLLM2"):
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "pyruntime" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip(f"{path} is not there; `pyruntime info smollm2` fetches it")
    return path


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    return logits.astype(np.float64) - log_sum_exp(logits)[..., None]


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    largest = logits.max(axis=-1, keepdims=True).astype(np.float64)
    return largest[..., 0] + np.log(np.exp(logits - largest).sum(axis=-1))


def kl(reference: np.ndarray, logits: np.ndarray) -> float:
    """KL divergence of softmax(logits) from softmax(reference), in nats; both [vocab]."""
    p, q = log_softmax(reference), log_softmax(logits)
    return float((np.exp(p) * (p - q)).sum())
