"""Copies of a K/V cache go on with the bits of the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from goldens import model_path

from pyruntime import Engine, Exported
from pyruntime.model.any_cache import AnyCache
from pyruntime.model.config import KV_DTYPES

BEFORE, ALL, CAPACITY = 70, 100, 103
FP16_LOGIT = 0.05  # more than fp16's rounding moves a logit of these models: docs/kv-cache.md


def load(device: str, kv_dtype: str = "f16") -> Engine:
    options = {"attention": "invariant"} if device != "cpu" else {}
    path = model_path("tiny-llama-q8_0")
    return Engine.load(path, device=device, kv_dtype=kv_dtype, max_tokens=64, **options)


def filled(engine: Engine) -> tuple[np.ndarray, AnyCache]:
    """Tokens, of which the first fill the cache: in two passes."""
    ids = np.random.default_rng(0).integers(0, engine.config.vocab, ALL)
    cache = engine.new_cache(CAPACITY)
    engine.prefill(ids[:BEFORE], cache=cache)
    return ids, cache


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_copies_go_on_as_the_original(kv_dtype: str, tmp_path: Path) -> None:
    """Those of other capacities, too, in another engine, and where something else was forgotten;
    also where the whole prompt is given."""
    with load("cuda:0", kv_dtype) as engine, load("cuda:0", kv_dtype) as other:
        ids, cache = filled(engine)
        cache.export().save(tmp_path / "kv")
        short, long, reused = cache.fork(ALL), cache.fork(331), cache.fork()
        engine.prefill(ids[: ALL - BEFORE], cache=reused)
        reused.truncate(BEFORE)
        whole_prompt, new = cache.fork(), list(range(BEFORE, ALL))
        taken = other.new_cache(211)
        taken.import_(Exported.load(tmp_path / "kv"))
        want = np.asarray(engine.prefill(ids[BEFORE:], cache=cache, logits="all").logits)
        whole = cache.export()
        assert want.any() and all(array.any() for array in whole.arrays.values())
        for runner, copy in (engine, short), (engine, long), (engine, reused), (other, taken):
            found = runner.prefill(ids[BEFORE:], cache=copy, logits="all").logits
            assert np.array_equal(found, want)
            assert np.array_equal(copy.tokens, ids)
            for name, array in copy.export().arrays.items():
                assert array.tobytes() == whole.arrays[name].tobytes(), name
        result = engine.prefill(ids, cache=whole_prompt, reuse=True, logits=new)
        assert result.reused == BEFORE and np.array_equal(result.logits, want)


def test_numpy_goes_on_where_a_gpu_began() -> None:
    with load("cuda:0") as engine, load("cpu") as numpy:
        ids, cache = filled(engine)
        taken = numpy.new_cache(ALL)
        taken.import_(cache.export().astype("float32"))
        want = np.asarray(engine.prefill(ids[BEFORE:], cache=cache, logits="all").logits)
        found = numpy.prefill(ids[BEFORE:], cache=taken, logits="all").logits
    assert np.abs(found - want).max() < FP16_LOGIT
