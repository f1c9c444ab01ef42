"""torch takes logits and K/V over where they lie, in NumPy; tests/gpu/test_dlpack.py on a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from goldens import model_path

from pyruntime import Engine
from pyruntime.hub import cached

torch = pytest.importorskip("torch", reason="torch is not installed (.ci/run installs it)")

PAGE = Path(__file__).parents[2] / "docs" / "clients" / "serve.md"
IDS = [1, 2, 3, 4, 5]


def test_the_page() -> None:
    """With SmolLM2."""
    if cached("smollm2") is None:
        pytest.skip("smollm2 is not in the cache; `pyruntime info smollm2` fetches it")
    _, section = PAGE.read_text().split("\n## Without a server: torch\n")
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", section, re.DOTALL)
    assert found is not None
    code, printed = found.groups()
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout == printed, done.stderr


def test_arrays_are_shared_not_copied() -> None:
    """What one side writes the other reads; a tensor of a part is that part."""
    with Engine.load(model_path("tiny-llama-q4_k_m"), device="cpu") as engine:
        cache = engine.new_cache(8)
        result = engine.prefill(IDS, cache=cache, logits="all")
        for array in (result.logits, cache.k, cache.v):
            shared = torch.from_dlpack(array)
            assert (shared.data_ptr(), tuple(shared.shape)) == (array.ctypes.data, array.shape)
            assert str(shared.dtype) == f"torch.{array.dtype}"
            assert shared.any() and np.array_equal(shared.numpy(), array)
        keys = torch.from_dlpack(cache.k)[:, :, : cache.length]
        keys.zero_()
        assert not cache.k[:, :, : len(IDS)].any()
        again = np.array(engine.prefill([6], cache=cache).logits)
        fresh = engine.new_cache(8)
        engine.prefill(IDS, cache=fresh)
        assert not np.array_equal(again, engine.prefill([6], cache=fresh).logits), "keys were read"


def test_a_tensor_outlives_engine_and_result() -> None:
    with Engine.load(model_path("tiny-llama-q4_k_m"), device="cpu") as engine:
        result = engine.prefill(IDS)
        shared, expected = torch.from_dlpack(result.logits), np.array(result.logits)
        del result
    assert np.array_equal((shared * 2).numpy(), expected * 2)
