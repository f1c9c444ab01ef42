"""Weights that are dequantized a step ahead: nothing is read too early or overwritten too soon, and
what is read is what weights "fp16" hold. On a fake driver; the bits on a GPU: tests/gpu."""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import block_of, dequantized
from fake_driver import FakeDriver
from goldens import GOLDEN
from models import VOCAB, write_wide_model
from numpy.typing import NDArray
from order import Operation, Order, span

from pyruntime import Engine
from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.program import Launch
from pyruntime.driver.stream import Stream
from pyruntime.errors import EngineError, NumericalError
from pyruntime.gguf import GGUFFile
from pyruntime.measure.launches import describe
from pyruntime.model.config import ModelConfig
from pyruntime.model.weights import Weights
from pyruntime.ops.qkv import paired_rows
from pyruntime.reference.functions import rms_norm

Load = Callable[..., Engine]
MODELS = ("llama-q8_0", "qwen2-q4_k_m", "qwen3-q6_k", "gemma2-q4_0", "mistral-q8_0")


@pytest.fixture
def order(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Order:
    return Order(driver, monkeypatch)


def scratch(engine: Engine) -> Any:
    return span(engine.model.weights._slots[0]._base)


def prefills(engine: Engine) -> None:
    """Passes of all kinds."""
    cache = engine.new_cache(40)
    for ids, logits in (([1] * 16, "last"), ([1], "last"), ([1, 2], "all"), ([3] * 16, "all")):
        engine.prefill(ids, cache=cache, logits=logits)
    engine.prefill([1] * 40, logits="all")
    cache.close()


@pytest.fixture(params=[*MODELS, "many tokens", "many tokens, tied"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Small models; those with many tokens have output matrices of several blocks."""
    if request.param in MODELS:
        return GOLDEN / f"tiny-{request.param}.gguf"
    return write_wide_model(tmp_path / "wide.gguf", tied="tied" in request.param)


# The order of things


@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_fills_and_readers_of_a_slot_are_ordered(
    load: Load, order: Order, model: Path, overlap: str
) -> None:
    engine = load(model=model, weights="per-layer", overlap=overlap)
    before = len(order.operations)
    for _ in range(2):
        prefills(engine)
    assert (engine.stats().captures, engine.stats().hits) == (6, 8)
    roles = Counter(o.name for o in order.operations[before:])
    passes, layers = 14, engine.config.layers
    assert roles["gate_up"] == passes * layers
    # Those of a single row that are of the packed table have no block to dequantize.
    packed = sum(o.kernel.startswith("rows_logits_") for o in order.operations[before:])
    assert packed == (4 if engine.config.tied else 0)
    assert roles["dequantize"] == 7 * passes * layers + roles["head"] - packed
    assert roles["head"] > passes if "wide" in str(model) else roles["head"] == passes
    assert roles["copy"] >= 5  # those that want all rows
    assert order.races(scratch(engine), before) == []


@pytest.mark.parametrize("part", ["waits", "full waits", "_begun", "_free", "_filled"])
def test_what_the_order_rests_on_is_missed(
    load: Load, order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    engine = load(model=write_wide_model(tmp_path / "wide.gguf"), weights="per-layer")
    if part == "waits":
        monkeypatch.setattr(Stream, "wait", lambda stream, event: None)
    elif part == "full waits":
        monkeypatch.setattr(Launch, "config", property(lambda launch: launch.overlapping))
    else:
        events = getattr(engine.model.weights.pipeline, part)
        for event in events if isinstance(events, list) else [events]:
            monkeypatch.setattr(event, "record", lambda stream: None)
    before = len(order.operations)
    prefills(engine)
    assert order.races(scratch(engine), before) != []


# What is read


def memory(array: Any) -> NDArray[Any]:
    """The bytes of a fake device array, as what it holds."""
    array = getattr(array, "array", array)
    raw = (ctypes.c_uint8 * array.nbytes).from_address(array.ptr)
    return np.frombuffer(raw, array.dtype).reshape(array.shape)


class Arithmetic:
    """Does what dequantizing kernels, gathers of rows and products with output matrices do, as they
    are enqueued.

    `products`: role and kernel of each matrix product, and a hash of the weights it finds, but of
    those with blocks of output matrices, which are `blocks`.
    """

    def __init__(self, order: Order) -> None:
        self.products: list[tuple[str, ...]] = []
        self.blocks = 0
        order.also = self._do

    def _do(self, operation: Operation) -> None:
        given = operation.given
        if operation.kernel.startswith("dequant_"):
            rows, columns = given["rows"], given["columns"]
            name = operation.kernel.removeprefix("dequant_").upper()
            weights, size = block_of(name)
            packed = memory(given["source"]).ravel()[: rows * columns // weights * size]
            to = slice(given["row0"], given["row0"] + rows * given["row_step"], given["row_step"])
            values = dequantized(name, packed).reshape(rows, columns)
            memory(given["out"])[to] = np.clip(values, -65504, 65504)
            if np.abs(values).max() > 65504:
                word = memory(given["overflow"])
                word[0] = min(word[0], given["site"])
        elif "a_out" in given:  # rows of q/k/v, paired when loaded
            count = int(memory(given["wanted"])[0])
            memory(given["a_out"])[:count] = memory(given["a"])[memory(given["index"])[:count]]
        elif "table" in given and operation.name == "head":
            table, weight = memory(given["table"]), memory(given["weight"])
            name = operation.kernel.removeprefix("rows_logits_").removesuffix("_t256").upper()
            w = dequantized(name, table.ravel()).reshape(len(table), -1).astype(np.float64)
            y = rms_norm(memory(given["x"]), weight, given["eps"])
            memory(given["c"])[:] = y @ w.T
            self.products.append(("head", operation.kernel))
        elif operation.name == "head":
            a, w = (memory(given[name]).astype(np.float64) for name in ("a", "w"))
            live = int(memory(given["rows"])[0])
            memory(given["c"])[:live] = given["scale"] * (a[:live] @ w.T)
            self.products.append(("head", operation.kernel))
            self.blocks += 1
        elif operation.kernel.startswith("gemm_"):
            found = hashlib.sha256(memory(given["w"]).tobytes()).hexdigest()
            self.products.append((operation.name, operation.kernel, found))


def test_layers_and_logits_are_those_of_fp16(load: Load, order: Order, model: Path) -> None:
    """Every product meets the weights that "fp16" holds, by the same kernel."""
    arithmetic, seen, found = Arithmetic(order), [], list[Any]()
    for weights in ("fp16", "per-layer"):
        engine = load(model=model, weights=weights, max_tokens=260, kv_tokens=260)
        for name in ("normed", "x", "last_x"):
            array = engine.model._decoder.activations[name]
            array.upload(np.random.default_rng(1).standard_normal(array.shape))
        arithmetic.products, arithmetic.blocks = [], 0
        ids = np.arange(260) % VOCAB
        found.append([])
        cases: Any = (
            (16, "last"), (16, "all"), (1, "all"), (7, "all"), (7, [0, 2, 3, 5]),
            (260, [*range(257), 259]),  # too many to be gathered at once: as two runs
        )  # fmt: skip
        for n, rows in cases:  # those of 7 and 260 with all rows kept
            hidden = "mean" if n in (7, 260) else None
            result = engine.prefill(ids[:n], logits=rows, hidden=hidden)
            found[-1].append(np.asarray(result.logits))
        if weights == "per-layer" and "wide" in str(model):
            products = 3 if engine.config.tied else 4  # a single row's is of the packed table
            assert arithmetic.blocks >= products * 2
        seen.append(list(dict.fromkeys(arithmetic.products)))
        engine.close()
    assert seen[0] == seen[1] and len(seen[0]) >= 4 * engine.config.layers
    for wide, packed in zip(*found, strict=True):
        assert wide.any() and wide.shape == packed.shape
        np.testing.assert_allclose(packed, wide, rtol=1e-6)


@pytest.mark.parametrize("weights", ["fp16", "per-layer"])
@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "blk.0.attn_k.weight", "output.weight"])
def test_a_weight_beyond_fp16_is_named(
    driver: FakeDriver, load: Load, order: Order, tmp_path: Path, name: str, weights: str
) -> None:
    """When the model is loaded, not in the middle of a prompt."""
    path = write_wide_model(tmp_path / "m.gguf", spoilt=name)
    Arithmetic(order)
    with pytest.raises(NumericalError, match=rf"m\.gguf: tensor '{name}' holds a weight beyond"):
        load(model=path, weights=weights)
    assert driver.held() == {}


def test_packed_rows_are_paired_as_asked(driver: FakeDriver) -> None:
    with GGUFFile.open(GOLDEN / "tiny-llama-q4_k_m.gguf") as file:
        c, device = ModelConfig.from_gguf(file), Device(0)
        library = Library(device)
        plain, paired = (
            Weights(file, c, library, lambda _: None, alike, "per-layer") for alike in (0, 2)
        )
    index = paired_rows(
        heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim,
        interleaved=c.rope.style == "interleaved", alike=2,
    )  # fmt: skip
    for layer, (before, after) in enumerate(zip(plain.layers, paired.layers, strict=True)):
        names = [f"blk.{layer}.attn_{part}.weight" for part in "qkv"]
        fused = [
            [row.tobytes() for name in names for row in np.asarray(side[name])]
            for side in (before, after)
        ]
        assert fused[1] == [fused[0][i] for i in index] != fused[0]
        others = before.keys() - set(names)
        assert all(np.array_equal(np.asarray(before[x]), np.asarray(after[x])) for x in others)
    for thing in (plain, paired, library, device):
        thing.close()
    assert driver.held() == {}


def test_launches_of_packed_weights_are_told_and_not_timed(load: Load) -> None:
    engine = load(weights="per-layer")
    ids = np.array([1, 2, 3], np.int32)
    told = Counter(role for role, *_ in describe(engine, ids)["launches"])
    plain = Counter(role for role, *_ in describe(load(weights="fp16"), ids)["launches"])
    layers = engine.config.layers
    assert told - plain == {"dequantize": 7 * layers + 1} and not plain - told
    with (
        pytest.raises(EngineError, match="timed with weights='fp16'"),
        engine.model.staged(ids, engine.new_cache(3)),
    ):
        pass
