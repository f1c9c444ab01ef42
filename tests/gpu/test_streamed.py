"""Weights that are dequantized a step ahead give the bits of those dequantized when loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import SMOLLM2, TINY, model_path
from models import write_wide_model
from numpy.typing import NDArray

from pyruntime import Engine
from pyruntime.errors import NumericalError
from pyruntime.model import pipeline

CASES = [(n, rows) for n in (1, 2, 17, 64, 129, 300) for rows in ("last", "all")]

Find = Callable[[str], Path]


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """The file of a model by name; those called "wide" have output matrices of several blocks."""

    def find(name: str) -> Path:
        if name.startswith("wide"):
            return write_wide_model(tmp_path / "wide.gguf", tied=name.endswith("tied"))
        return model_path(name)

    return find


def load(path: Path, weights: str, **options: Any) -> Engine:
    given = {"device": "cuda:0", "max_tokens": 200, "kv_tokens": 300, **options}
    return Engine.load(path, weights=weights, **given)


def logits(engine: Engine, ids: NDArray[Any], rows: Any) -> NDArray[np.float32]:
    return np.asarray(engine.prefill(ids, logits=rows).logits)


@pytest.mark.parametrize("overlap", ["auto", "off"])
@pytest.mark.parametrize("name", [*TINY, SMOLLM2, "wide", "wide, tied"])
def test_logits_and_caches_are_bit_equal(find: Find, name: str, overlap: str) -> None:
    """In one pass and in two, for the last row and for all, and what the cache holds after."""
    path = find(name)
    with load(path, "fp16") as plain, load(path, "per-layer", overlap=overlap) as packed:
        assert (plain.weights, packed.weights) == ("fp16", "per-layer")
        assert packed.path.endswith(", weights per-layer")
        ids = np.random.default_rng(0).integers(0, plain.config.vocab, 300)
        for n, rows in CASES:
            want, found = (logits(engine, ids[:n], rows) for engine in (plain, packed))
            assert want.any() and np.array_equal(want, found), (n, rows)
        caches = [engine.new_cache(120) for engine in (plain, packed)]
        for engine, cache in zip((plain, packed), caches, strict=True):
            for part in np.split(ids[:120], [70, 71]):
                engine.prefill(part, cache=cache)
        for kind in ("k", "v"):
            want, found = (np.asarray(getattr(cache, kind)) for cache in caches)
            assert np.array_equal(want.view(np.uint16), found.view(np.uint16)), kind
        for cache in caches:
            cache.close()
        assert plain.generate(ids[:40], 12) == packed.generate(ids[:40], 12)


@pytest.mark.parametrize("urgent_fills", [True, False])
@pytest.mark.parametrize("name", [SMOLLM2, "tiny-qwen2-q4_k_m", "tiny-gemma2-q4_0", "wide"])
def test_the_same_bits_every_time(
    find: Find, monkeypatch: pytest.MonkeyPatch, name: str, urgent_fills: bool
) -> None:
    """A slot that is read too early or overwritten too soon shows sooner or later."""
    monkeypatch.setattr(pipeline, "URGENT_FILLS", urgent_fills)
    path = find(name)
    with load(path, "fp16") as plain, load(path, "per-layer") as packed:
        ids = np.random.default_rng(1).integers(0, plain.config.vocab, 300)
        want = {case: logits(plain, ids[: case[0]], case[1]) for case in CASES}
        wrong = [
            (run, case)
            for run in range(20)
            for case in CASES
            if not np.array_equal(logits(packed, ids[: case[0]], case[1]), want[case])
        ]
    assert not wrong


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["tiny-qwen2-q4_k_m", "wide"])
def test_small_prompts(find: Find, name: str) -> None:
    path = find(name)
    with (
        load(path, "fp16", max_tokens=40, kv_tokens=40) as plain,
        load(path, "per-layer", max_tokens=40, kv_tokens=40) as packed,
    ):
        ids = np.random.default_rng(2).integers(0, plain.config.vocab, 40)
        for n, rows in ((1, "last"), (17, "last"), (40, "all")):
            want, found = (logits(engine, ids[:n], rows) for engine in (plain, packed))
            assert want.any() and np.array_equal(want, found), (n, rows)


def test_a_stream_of_the_caller(gpu: Any) -> None:
    path = model_path("tiny-llama-q8_0")
    ids = np.arange(100) % 200
    with load(path, "fp16") as plain:
        want = logits(plain, ids, "all")
    with load(path, "per-layer", stream=int(gpu.stream.handle)) as packed:
        assert np.array_equal(logits(packed, ids, "all"), want)


def test_auto_is_what_fits() -> None:
    path = model_path("tiny-qwen3-q4_k_m")
    sizes: dict[str, Any] = {"max_tokens": 16, "kv_tokens": 16}
    wide = Engine.plan(path, weights="fp16", **sizes).total
    for budget, expected in ((wide, "fp16"), (wide - 1, "per-layer")):
        assert Engine.plan(path, memory_budget=budget, **sizes).weights == expected
        with Engine.load(path, device="cuda:0", memory_budget=budget, **sizes) as engine:
            assert engine.weights == expected
            assert np.isfinite(np.asarray(engine.prefill([1, 2, 3]).logits)).all()
    assert Engine.plan(path, device="cuda:0", **sizes).weights == "fp16"  # what is free suffices


@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "output.weight"])
def test_a_weight_beyond_fp16_is_named(tmp_path: Path, name: str) -> None:
    path = write_wide_model(tmp_path / "m.gguf", spoilt=name)
    with pytest.raises(NumericalError, match=rf"m\.gguf: tensor '{name}' holds a weight beyond"):
        load(path, "per-layer")
