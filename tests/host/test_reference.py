"""The NumPy backend's functions against plain loops, and how it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import VOCAB, tensors, write_model

from pyruntime.errors import NumericalError, OutOfMemoryError
from pyruntime.gguf.reader import GGUFFile
from pyruntime.model.config import ModelConfig
from pyruntime.model.tokens import check_tokens
from pyruntime.reference import ReferenceModel, functions, memory


def load(path: Path, **options: Any) -> ReferenceModel:
    with GGUFFile.open(path) as file:
        return ReferenceModel(file, ModelConfig.from_gguf(file), **options)


@pytest.fixture
def model(tmp_path: Path) -> ReferenceModel:
    return load(write_model(tmp_path / "m.gguf"))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = normal(3, 8), normal(8)
    expected = [row / np.sqrt(sum(v * v for v in row) / 8 + 0.5) * weight for row in x]
    np.testing.assert_allclose(functions.rms_norm(x, weight, 0.5), expected, rtol=1e-6)


@pytest.mark.parametrize("style", ["interleaved", "neox"])
def test_rotate_multiplies_each_pair_by_a_complex_number(style: str) -> None:
    x, angle = normal(3, 2, 8), normal(3, 4)
    rotated = functions.rotate(x, np.cos(angle), np.sin(angle), style)  # type: ignore[arg-type]
    for pair in range(4):
        a, b = (2 * pair, 2 * pair + 1) if style == "interleaved" else (pair, pair + 4)
        z = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle[:, None, pair])
        np.testing.assert_allclose(rotated[..., a], z.real, atol=1e-6)
        np.testing.assert_allclose(rotated[..., b], z.imag, atol=1e-6)


def test_geglu_and_its_limits() -> None:
    gate = np.array([-1e30, -60, -3, -0.5, 0, 0.5, 3, 60, 1e30], np.float32)
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    out = functions.geglu(gate, np.full(9, 3, np.float32))
    np.testing.assert_allclose(out, 3 * wide * sigmoid, rtol=1e-4, atol=1e-6)
    exact = 0.5 * wide * (1 + np.array([math.erf(x / math.sqrt(2)) for x in wide]))
    np.testing.assert_allclose(out[1:-1], 3 * exact[1:-1], atol=3e-3)


def test_softcap() -> None:
    x = np.array([-1e30, -10, 0, 1e-3, 10, np.inf], np.float32)
    np.testing.assert_allclose(functions.softcap(x, 5.0), 5 * np.tanh(x / 5), rtol=1e-6)
    assert functions.softcap(x, None) is x


def test_swiglu_and_its_limits() -> None:
    gate = np.array([-1000.0, -1.0, 0.0, 2.0, 1000.0], np.float32)
    expected = np.array([0.0, -1 / (1 + np.e), 0.0, 2 / (1 + np.exp(-2.0)), 1000.0])
    np.testing.assert_allclose(functions.swiglu(gate, np.full(5, 3, np.float32)), 3 * expected)


@pytest.mark.parametrize(("nt", "start"), [(1, 0), (1, 9), (5, 3), (300, 0), (270, 30)])
def test_attention_sees_the_past_and_no_more(nt: int, start: int) -> None:
    d, heads, kv_heads = 4, 6, 2
    q, k, v = normal(nt, heads, d), normal(kv_heads, start + nt, d), normal(kv_heads, start + nt, d)
    out = functions.causal_attention(q, k, v, functions.exact, scale=0.5)
    for row in {0, nt // 2, min(nt - 1, functions.QUERY_ROWS - 1), nt - 1}:
        for head in range(heads):
            shared, seen = head // 3, start + row + 1
            scores = k[shared, :seen].astype(np.float64) @ q[row, head] / 2.0
            p = np.exp(scores - scores.max())
            np.testing.assert_allclose(out[row, head], p @ v[shared, :seen] / p.sum(), atol=1e-6)


@pytest.mark.parametrize("window", [1, 2, 40, 256, 257, 600])
@pytest.mark.parametrize(("nt", "start"), [(1, 0), (300, 0), (5, 70), (513, 40)])
def test_attention_within_windows_and_caps(nt: int, start: int, window: int) -> None:
    d, cap = 4, 1.5
    q, k, v = normal(nt, 2, d), normal(1, start + nt, d), normal(1, start + nt, d)
    out = functions.causal_attention(q, k, v, functions.exact, scale=0.7, window=window, cap=cap)
    for row in {0, nt // 2, min(nt - 1, functions.QUERY_ROWS), nt - 1}:
        end = start + row + 1
        seen = slice(max(end - window, 0), end)
        scores = cap * np.tanh(0.7 * k[0, seen].astype(np.float64) @ q[row, 1] / cap)
        p = np.exp(scores)
        np.testing.assert_allclose(out[row, 1], p @ v[0, seen] / p.sum(), atol=1e-6)


def test_fp16_is_a_cast_there_and_back() -> None:
    """For every fp16 number, every tie between two, and the float32 numbers next to those."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    numbers = np.unique(halves[np.isfinite(halves)])
    ties = (numbers[1:] + numbers[:-1]) / 2
    for x in (numbers, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)):
        x = x.astype(np.float32)
        rounded = functions.fp16(x, "x")
        assert rounded.dtype == np.float32
        np.testing.assert_array_equal(rounded, x.astype(np.float16))


@pytest.mark.parametrize("value", [65520.0, -65520.0, np.inf, np.nan, -np.nan])
def test_fp16_names_what_overflows(value: float) -> None:
    functions.fp16(np.array([65519.0], np.float32), "x")
    with pytest.raises(NumericalError, match=r"layer 3: Q reaches (65520|inf|nan), .* 65504"):
        functions.fp16(np.array([1.0, value], np.float32), "layer 3: Q")


def test_logits_of_the_last_row_are_the_last_of_all(model: ReferenceModel) -> None:
    ids = np.arange(9, dtype=np.int32)
    every = model.forward(ids, model.new_cache(9), logits="all")
    last = model.forward(ids, model.new_cache(12))
    assert every.shape == (9, VOCAB) and last.shape == (1, VOCAB)
    assert every.dtype == last.dtype == np.float32
    np.testing.assert_allclose(last[0], every[-1], atol=1e-5)


def test_what_lies_beyond_the_cache_length_is_never_read(model: ReferenceModel) -> None:
    clean, dirty = model.new_cache(8), model.new_cache(8)
    dirty.k[:] = dirty.v[:] = np.nan
    np.testing.assert_array_equal(model.forward([1, 2], dirty), model.forward([1, 2], clean))


def test_fp16_stores_fp16_numbers(tmp_path: Path) -> None:
    model = load(write_model(tmp_path / "m.gguf", "qwen2"), precision="fp16")
    cache = model.new_cache(3)
    model.forward([1, 2, 3], cache)
    for array in (cache.k, cache.v):
        np.testing.assert_array_equal(array, array.astype(np.float16))
        assert np.all(array.any(axis=-1))


def test_tied_output_is_the_embedding(tmp_path: Path) -> None:
    embedding = tensors("llama")["token_embd.weight"]
    tied = load(write_model(tmp_path / "tied.gguf", set_tensors={"output.weight": None}))
    both = load(write_model(tmp_path / "both.gguf", set_tensors={"output.weight": embedding}))
    np.testing.assert_array_equal(
        tied.forward([5, 6], tied.new_cache(2)), both.forward([5, 6], both.new_cache(2))
    )


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([3, -1], r"token id -1 at position 1 is outside \[0, 48\)"),
        ([48], r"token id 48 at position 0 is outside \[0, 48\)"),
        (np.array([1 << 40]), "1099511627776"),
        ([1.0], "integers, not float64"),
        ([True], "integers, not bool"),
        (["a"], "integers"),
        ([], "empty"),
        ([[1, 2]], r"one-dimensional, not of shape \[1, 2\]"),
        (3, r"one-dimensional, not of shape \[\]"),
    ],
)
def test_bad_ids(model: ReferenceModel, ids: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        model.forward(ids, model.new_cache(4))


def test_ids_of_any_integer_type() -> None:
    for kind in (np.uint8, np.int64, np.uint64):
        assert check_tokens(np.array([3, 4], kind), VOCAB).dtype == np.int32


def test_more_tokens_than_the_cache_holds(model: ReferenceModel) -> None:
    cache = model.new_cache(4)
    model.forward([1, 2, 3], cache)
    with pytest.raises(ValueError, match="2 tokens after 3 exceed the cache's 4 positions"):
        model.forward([4, 5], cache)
    assert cache.length == 3
    model.forward([4], cache)
    with pytest.raises(ValueError, match="cache for 0 tokens"):
        model.new_cache(0)


def test_unknown_modes(model: ReferenceModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'first': 'last' or 'all'"):
        model.forward([1], model.new_cache(1), logits="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'bf16'; known: f32, fp16"):
        load(write_model(tmp_path / "n.gguf"), precision="bf16")


@pytest.mark.parametrize(
    ("name", "where"),
    [("blk.1.ffn_up.weight", "output of layer 1"), ("output.weight", "logits")],
)
def test_values_that_are_not_finite_are_named(tmp_path: Path, name: str, where: str) -> None:
    weight = tensors("llama")[name]
    weight[0, 0] = np.nan
    model = load(write_model(tmp_path / "m.gguf", set_tensors={name: weight}))
    cache = model.new_cache(2)
    with pytest.raises(NumericalError, match=where):
        model.forward([1, 2], cache)
    assert cache.length == 0


def test_large_activations_fit_because_down_inputs_are_scaled(tmp_path: Path) -> None:
    """SwiGLU outputs of some 1e5 overflow fp16; scaled by 2^-5 they do not."""
    weights = tensors("llama")
    large = {
        f"blk.0.{n}.weight": 300 * weights[f"blk.0.{n}.weight"] for n in ("ffn_gate", "ffn_up")
    }
    path = write_model(tmp_path / "m.gguf", set_tensors=large)
    exact, rounded = load(path), load(path, precision="fp16")
    a, b = exact.forward([1], exact.new_cache(1)), rounded.forward([1], rounded.new_cache(1))
    np.testing.assert_allclose(a, b, atol=0.05)
    huge = {name: 100 * value for name, value in large.items()}
    model = load(write_model(tmp_path / "h.gguf", set_tensors=huge), precision="fp16")
    with pytest.raises(NumericalError, match="layer 0: the input of ffn_down reaches"):
        model.forward([1], model.new_cache(1))


def test_a_model_beyond_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  999999 kB\nMemFree:  1 kB\nMemAvailable:     50 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    with GGUFFile.open(write_model(tmp_path / "m.gguf")) as file:
        config = ModelConfig.from_gguf(file)
        monkeypatch.setattr(file, "dequantize", None)
        elements = sum(weight.size for weight in tensors("llama").values())
        with pytest.raises(OutOfMemoryError, match=rf"{4 * elements:,} bytes .* 51,200"):
            ReferenceModel(file, config)


def test_a_cache_beyond_memory_is_refused(model: ReferenceModel) -> None:
    with pytest.raises(OutOfMemoryError, match="cache for 1000000000000 tokens"):
        model.new_cache(10**12)


def test_memory_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "missing")
    assert memory.available_memory() > 1 << 28


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    seen: list[int] = []
    load(write_model(tmp_path / "m.gguf"), progress=seen.append)
    weights = tensors("llama")
    assert len(seen) == len(weights) and sum(seen) == sum(w.nbytes for w in weights.values())
