"""The NumPy backend against other programs on float32 weights, for every prompt of every file."""

from __future__ import annotations

import numpy as np
import pytest
from goldens import (
    LLAMA_CPP_INT8,
    PACKED,
    SMOLLM2,
    TINY,
    Prompt,
    kl,
    log_softmax,
    log_sum_exp,
    model_path,
    prompts,
)

from pyruntime.gguf.reader import GGUFFile
from pyruntime.model.config import ModelConfig
from pyruntime.reference import ReferenceModel

# Largest difference of a logit, a log-sum-exp or a log-probability in float32.
TOLERANCE = 2e-3

# What rounding weights, GEMM inputs, Q, K, V and P to fp16 may cost: largest logit difference at
# the last position, and KL. An ideal fp16 path is noise of this size, so these are no targets.
FP16_TOLERANCE, FP16_KL = 0.1, 1e-4

# What an e4m3 cache may cost: twice the largest of docs/kv-cache.md, as which way a tie falls, and
# with it the error, depends on the last bits of a product. The root mean square over a file's
# prompts is steadier, and shows that something was rounded at all.
E4M3_LOGIT, E4M3_KL, E4M3_RMS = 2.3, 7e-2, (0.04, 0.35)


def load(stem: str, precision: str, kv_dtype: str = "f16") -> ReferenceModel:
    with GGUFFile.open(model_path(stem)) as file:
        config = ModelConfig.from_gguf(file)
        return ReferenceModel(file, config, precision=precision, kv_dtype=kv_dtype)


def check_prompt(model: ReferenceModel, prompt: Prompt, chunk: int) -> None:
    """All positions of the prompt, then its greedy continuation, `chunk` tokens at a time."""
    cache = model.new_cache(len(prompt.ids) + len(prompt.greedy))
    logits = model.forward(prompt.ids, cache, logits="all")
    lse = log_sum_exp(logits)
    top10 = np.take_along_axis(logits, prompt.top10_ids.astype(np.int64), axis=1)
    scored = np.take_along_axis(logits[:-1], prompt.ids[1:, None].astype(np.int64), axis=1)[:, 0]
    errors = {
        "last_logits": logits[-1] - prompt.last_logits,
        "top10_logits": top10 - prompt.top10_logits,
        "lse": lse - prompt.lse,
        "logprobs": scored - lse[:-1] - prompt.logprobs,
    }
    for name, error in errors.items():
        assert np.abs(error).max(initial=0) <= TOLERANCE, (prompt.name, name)
    rows = [logits[-1:]]
    for first in range(0, len(prompt.greedy) - 1, chunk):
        tokens = prompt.greedy[:-1][first : first + chunk]
        rows.append(model.forward(tokens, cache, logits="all"))
    wrong = np.flatnonzero(np.concatenate(rows).argmax(axis=1) != prompt.greedy)
    # Two tokens closer than the tolerance may change places.
    assert np.all(prompt.greedy_gap[wrong] < 2 * TOLERANCE), (prompt.name, wrong)


@pytest.mark.parametrize("stem", [*TINY, SMOLLM2])
def test_logits_and_greedy_text_are_those_of_others(stem: str) -> None:
    model = load(stem, "f32")
    for prompt in prompts(stem):
        check_prompt(model, prompt, chunk=8 if stem == SMOLLM2 else 1)


@pytest.mark.parametrize("stem", [*TINY, SMOLLM2])
def test_fp16_costs_what_rounding_costs(stem: str) -> None:
    model = load(stem, "fp16")
    for prompt in prompts(stem)[:5]:  # SmolLM2's long one would take most of the time
        logits = model.forward(prompt.ids, model.new_cache(len(prompt.ids)))[0]
        error = np.abs(logits - prompt.last_logits).max()
        assert 5e-4 < error < FP16_TOLERANCE, prompt.name
        assert kl(prompt.last_logits, logits) < FP16_KL, prompt.name


def test_int8_activations_cost_what_they_cost_llamacpp() -> None:
    """Also less than half of it would be another computation."""
    model, found = load(SMOLLM2, "int8"), {}
    for prompt in prompts(SMOLLM2)[:5]:  # the long one would take most of the time
        logits = model.forward(prompt.ids, model.new_cache(len(prompt.ids)))[0]
        assert logits.argmax() == prompt.last_logits.argmax(), prompt.name
        found[prompt.name] = kl(prompt.last_logits, logits)
    theirs = np.mean([LLAMA_CPP_INT8[name] for name in found])
    assert theirs / 2 < np.mean([*found.values()]) <= theirs


@pytest.mark.parametrize("stem", PACKED)
def test_int8_activations_cost_some_hundredths(stem: str) -> None:
    """Of the logits of random models."""
    model = load(stem, "int8")
    for prompt in prompts(stem):
        logits = model.forward(prompt.ids, model.new_cache(len(prompt.ids)))[0]
        error = np.linalg.norm(logits - prompt.last_logits) / np.linalg.norm(prompt.last_logits)
        assert 4e-3 < error < 6e-2, prompt.name


@pytest.mark.parametrize("precision", ["f32", "fp16"])
@pytest.mark.parametrize("stem", [*TINY, SMOLLM2])
def test_an_e4m3_cache_costs_what_the_docs_say(stem: str, precision: str) -> None:
    model = load(stem, precision, "e4m3")
    squares = []
    for prompt in prompts(stem)[:5]:
        logits = model.forward(prompt.ids, model.new_cache(len(prompt.ids)))[0]
        error = logits - prompt.last_logits
        assert np.abs(error).max() < E4M3_LOGIT, prompt.name
        assert kl(prompt.last_logits, logits) < E4M3_KL, prompt.name
        squares.append((error**2).mean())
    low, high = E4M3_RMS
    assert low < np.sqrt(np.mean(squares)) < high


def test_a_shifted_row_would_be_noticed() -> None:
    """The prompts tell neighbouring positions apart by far more than the tolerance."""
    prompt = prompts(TINY[0])[-1]
    model = load(TINY[0], "f32")
    logits = model.forward(prompt.ids, model.new_cache(len(prompt.ids)), logits="all")
    assert np.abs(log_softmax(logits[-2]) - log_softmax(prompt.last_logits)).max() > 0.1


@pytest.mark.parametrize(
    "stem",
    ["tiny-llama-q4_k_m", "tiny-qwen3-q6_k", "tiny-rope-yarn4-q8_0", "tiny-gemma2-q8_0",
     "tiny-gemma3-q5_1", "tiny-mistral-q8_0"],
)  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_in_chunks_is_the_whole_prompt(stem: str, chunk: int) -> None:
    model = load(stem, "f32")
    ids = prompts(stem)[-1].ids
    whole = model.forward(ids, model.new_cache(len(ids)), logits="all")
    cache = model.new_cache(len(ids))
    rows = [
        model.forward(ids[first : first + chunk], cache, logits="all")
        for first in range(0, len(ids), chunk)
    ]
    np.testing.assert_allclose(np.concatenate(rows), whole, rtol=0, atol=1e-4)
