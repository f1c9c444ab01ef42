"""Weights "int8" on a fake driver whose kernels are NumPy: planes, errors, what stays fp16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver
from goldens import GOLDEN, PACKED, model_path, prompts
from models import write_hollow_model, write_wide_model
from numpy_kernels import NumpyKernels

from pyruntime import Engine
from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.stream import Stream
from pyruntime.errors import NumericalError, UnsupportedModelError
from pyruntime.gguf import GGUFFile
from pyruntime.model import footprint, int8_layers, loader
from pyruntime.model.config import ModelConfig
from pyruntime.model.decoder import Decoder, Shape
from pyruntime.model.int8_layers import Int8Layers, Int8Options
from pyruntime.model.placements import PLANE_ROWS, placements, without_planes
from pyruntime.model.planes import PlaneMemo, Source
from pyruntime.model.replay import Replayer
from pyruntime.model.weights import Weights
from pyruntime.reference.model import ReferenceModel
from pyruntime.tools import synth

Load = Callable[..., Engine]
MANY = 8  # rows of a product that is no matrix-vector product


# Planes, as the launches of Qwen2.5-7B have them


@pytest.fixture(scope="module")
def qwen2_7b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 4.7 GB in its Q4_K_M mix, of which nothing but the header takes room on a disk."""
    path = tmp_path_factory.mktemp("synth") / "qwen2.5-7b.gguf"
    return write_hollow_model(path, "qwen2.5-7b")


@pytest.fixture
def decoder(driver: FakeDriver, qwen2_7b: Path) -> Iterator[Callable[[Int8Options], Decoder]]:
    """A decoder of such a model. Arrays of weights that are alike are one array."""
    driver.total = 1 << 34
    made: list[Any] = []
    device = Device(0)
    library = Library(device)
    stream = Stream(device)
    replayer = Replayer(stream, overlap=True, graphs=False)
    with GGUFFile.open(qwen2_7b) as file:
        config = ModelConfig.from_gguf(file)
        placed = placements(file, config, "int8")
        weights = Weights.__new__(Weights)
        weights.alike, weights.embedding_type = 0, "Q4_K"
        weights.planes = [
            {n: file.tensors[p.sources[0].tensor].type.name for n, p in g.items() if p.planes}  # type: ignore[union-attr]
            for g in placed
        ]
    arrays: dict[Any, DeviceArray] = {}
    groups = [
        {n: arrays.setdefault((p.shape, p.dtype), DeviceArray(device, p.shape, p.dtype))
         for n, p in group.items()} for group in placed
    ]  # fmt: skip
    weights.outer, weights.layers = groups[0], groups[1:]

    def make(options: Int8Options) -> Decoder:
        decoder = Decoder(library, config, weights, 2048, replayer, int8=options)
        made.append(decoder)
        decoder.reserve_positions(2048)
        return decoder

    yield make
    for thing in (*made, *arrays.values(), replayer, stream, library, device):
        thing.close()


# Options; how many planes are made, and products read them, of many rows and of a single one; and
# the kernels that make them, by what they do: alone, behind a norm, behind the gate.
COUNTS = [
    (Int8Options("separate", late=True), (193, 193), (3, 3), (168, 0, 28)),
    (Int8Options("memo", late=True), (110, 193), (2, 3), (84, 0, 28)),
    (Int8Options("folded", late=True), (110, 193), (2, 3), (28, 56, 28)),
    (Int8Options("folded", copy=True), (109, 192), (3, 4), (28, 56, 28)),
    (Int8Options(), (109, 192), (3, 4), (28, 56, 28)),
]


@pytest.mark.parametrize(("options", "many", "single", "kernels"), COUNTS)
def test_planes_of_qwen2_7b(
    decoder: Callable[[Int8Options], Decoder],
    options: Int8Options,
    many: tuple[int, int],
    single: tuple[int, int],
    kernels: tuple[int, int, int],
) -> None:
    """A prefill that wants the last row's logits: q, k and v share a plane, and so do gate and up.

    In the last layer, products behind the gathering of that row are of a single one. llama.cpp
    gathers it behind the product with attn_output: there 193 products are of many rows.
    """
    of = decoder(options)
    program, layers = of.recorded(Shape.single(512, 2048)).body.programs[0], of.layers
    assert isinstance(layers, Int8Layers)
    for few, counts in ((False, many), (True, single)):
        made, read = (
            sum((source.rows <= MANY) == few for source in sources)
            for sources in (layers.memo.made, layers.memo.read)
        )
        assert (made, read) == counts
    roles = Counter(launch.role for launch in program.launches)
    assert sum(roles[x] for x in ("q", "k", "v", "o", "gate", "up", "down")) == 7 * 28
    tiles = [x.kernel.spec.tile for x in program.launches if x.kernel.spec.family == "quantize"]
    found = Counter(tile["op"] for tile in tiles)
    assert tuple(found[op] for op in ("quantize", "norm", "gated")) == kernels
    assert sum(kernels) == many[0] + single[0] == len(tiles)
    assert {tile["copy"] for tile in tiles if "copy" in tile} == {int(options.copy)}
    plain = sum(launch.kernel.spec.family == "norm" for launch in program.launches)
    assert plain == (1 if options.planes == "folded" else 57)


@pytest.mark.parametrize(("rows", "held"), [(1, 4096), (128, 4096), (136, 0), (2048, 0)])
def test_norms_of_few_rows_hold_them(
    decoder: Callable[[Int8Options], Decoder], rows: int, held: int
) -> None:
    """Of no more than there are multiprocessors; all but the last layer's second one."""
    program = decoder(Int8Options()).recorded(Shape.single(rows, 2048)).body.programs[0]
    tiles = [x.kernel.spec.tile for x in program.launches if x.kernel.spec.family == "quantize"]
    found = [int(tile.get("held", 0)) for tile in tiles if tile["op"] == "norm"]
    assert found == [held] * 55 + [4096]


def test_7b_takes_what_was_promised(qwen2_7b: Path) -> None:
    """5.3 GB, a cache of 4096 tokens included, for passes of 2048 rows; weights as in the file."""
    plan = Engine.plan(qwen2_7b, weights="int8")
    with GGUFFile.open(qwen2_7b) as file:
        assert plan.nbytes["weights"] == sum(t.nbytes for t in file.tensors.values())
        assert without_planes(file, ModelConfig.from_gguf(file)) == {}
    assert plan.max_tokens == 2048 and plan.total <= 5.3e9


@pytest.mark.parametrize("weights", ["fp16", "per-layer", "int8"])
def test_7b_never_takes_more_than_planned(
    driver: FakeDriver, load: Load, monkeypatch: pytest.MonkeyPatch, qwen2_7b: Path, weights: str
) -> None:
    """Nor while it is loaded: staging buffers are gone when what else it needs is allocated."""
    driver.total = 1 << 36
    driver.answers["cuMemcpyHtoDAsync"] = None
    monkeypatch.setattr(GGUFFile, "read_into", lambda *arguments: None)
    options = {"model": qwen2_7b, "weights": weights, "max_tokens": 2048, "kv_tokens": 2048}
    engine, planned = load(**options), Engine.plan(**options)
    del driver.answers["cuMemcpyHtoDAsync"]
    device = engine.model.device
    assert planned.nbytes["weights"] + 8 * loader.SLOT_BYTES < device.peak <= planned.total
    for _ in range(3):
        engine.prefill([1] * 2048)
        engine.prefill([1])
    assert device.peak == device.allocated == planned.total
    monkeypatch.setattr(Engine, "_stop_ids", frozenset())
    engine.generate([1] * 32, 64)  # in a cache of its own
    more = footprint.cache_bytes(engine.config, 32 + 64)["kv_cache"]
    assert device.peak == planned.total + more
    assert weights != "int8" or device.peak <= 5.3e9


def test_a_plane_is_read_while_it_holds_its_source(driver: FakeDriver, load: Load) -> None:
    engine = load(weights="int8")
    layers: Any = engine.model._decoder.layers
    plane, other = layers._plane("hidden"), layers._plane("ffn")
    first, second = Source(0, "attn_norm", 16, 256), Source(1, "attn_norm", 16, 256)
    memo = PlaneMemo()
    with pytest.raises(RuntimeError, match=r"tensor='attn_norm', .*reads None"):
        memo.use(plane, first)
    memo.note(plane, first)
    memo.use(plane, first)
    memo.note(other, second)
    for wrong in (second, first._replace(rows=32), first._replace(columns=128)):
        assert not memo.holds(plane, wrong)
    memo.note(plane, second)
    with pytest.raises(RuntimeError, match=r"layer=0, .* reads Source\(layer=1"):
        memo.use(plane, first)
    assert (memo.made, memo.read) == ([first, second, second], [first])


# Errors, against those of the NumPy model of the same arithmetic


def reference(path: Path, precision: Any) -> ReferenceModel:
    with GGUFFile.open(path) as file:
        return ReferenceModel(file, ModelConfig.from_gguf(file), precision=precision)


# Pooled over a file's prompts; 0.89 to 1.1 are seen: ties fall either way.
FACTOR = 1.3


@pytest.mark.parametrize("stem", PACKED)
def test_errors_are_those_of_int8(
    driver: FakeDriver, load: Load, monkeypatch: pytest.MonkeyPatch, stem: str
) -> None:
    """To the float32 values of other programs: no larger than NumPy's, nor smaller."""
    NumpyKernels(driver, monkeypatch)
    path = model_path(stem)
    engine = load(model=path, weights="int8", max_tokens=256, kv_tokens=512)
    model = reference(path, "int8")
    ours, theirs = [], []
    for prompt in prompts(stem):
        logits = np.asarray(engine.prefill(prompt.ids, logits="all").logits)
        numpys = model.forward(prompt.ids, model.new_cache(len(prompt.ids)), logits="all")
        for errors, found in ((ours, logits), (theirs, numpys)):
            top10 = np.take_along_axis(found, prompt.top10_ids.astype(np.int64), axis=1)
            errors += [found[-1] - prompt.last_logits, (top10 - prompt.top10_logits).ravel()]
    mine, bound = (np.sqrt(np.mean(np.concatenate(x) ** 2)) for x in (ours, theirs))
    assert bound / FACTOR <= mine <= bound * FACTOR


@pytest.mark.parametrize("stem", ["llama-q4_k_m", "qwen3-q6_k", "gemma2-q8_0"])
def test_every_way_to_make_planes(
    driver: FakeDriver, load: Load, monkeypatch: pytest.MonkeyPatch, stem: str
) -> None:
    """Those that quantize the same numbers give the same bits; folded ones round once less."""
    NumpyKernels(driver, monkeypatch)
    ids = np.random.default_rng(4).integers(0, 250, 29)

    def logits(*options: Any, **more: Any) -> np.ndarray:
        monkeypatch.setattr(int8_layers, "OPTIONS", Int8Options(*options, **more))
        engine = load(model=GOLDEN / f"tiny-{stem}.gguf", weights="int8", max_tokens=32)
        return np.asarray(engine.prefill(ids, logits=[3, 28]).logits)

    folded, memo = logits(), logits("memo")
    np.testing.assert_array_equal(logits("folded", copy=True), folded)
    np.testing.assert_array_equal(logits("separate"), memo)
    np.testing.assert_allclose(logits("folded", late=True), folded, atol=1e-5)  # sums of BLAS
    off = np.linalg.norm(memo - folded) / np.linalg.norm(folded)
    assert 0 < off < 0.03


# Loading


@pytest.mark.parametrize("slot_bytes", [1, 5000, 1 << 20])
def test_tensors_arrive_whole_and_apart(
    driver: FakeDriver, load: Load, monkeypatch: pytest.MonkeyPatch, slot_bytes: int
) -> None:
    """In pieces of some rows; in the NumPy kernels planes are the file's bytes."""
    NumpyKernels(driver, monkeypatch)
    monkeypatch.setattr(loader, "SLOT_BYTES", slot_bytes)
    path = GOLDEN / "tiny-llama-q4_k_m.gguf"
    engine = load(model=path, weights="int8")
    weights: Any = engine.model.weights
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "attn_output": "attn_output",
             "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}  # fmt: skip
    with GGUFFile.open(path) as file:
        for layer, (arrays, types) in enumerate(
            zip(weights.layers, weights.planes[1:], strict=True)
        ):
            assert types.keys() == names.keys()
            for name, tensor in names.items():
                info = file.tensors[f"blk.{layer}.{tensor}.weight"]
                held = bytearray(info.nbytes)
                file.read_into(info, 0, memoryview(held))
                assert np.asarray(arrays[name]).tobytes() == bytes(held)
                assert info.type is not None and types[name] == info.type.name


# The output matrix


@pytest.mark.parametrize("tied", [False, True])
def test_an_output_matrix_of_planes(
    driver: FakeDriver, load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tied: bool
) -> None:
    """Logits of one row, of all, of some, and scores of some at a time."""
    NumpyKernels(driver, monkeypatch)
    path, shape = tmp_path / "m.gguf", replace(synth.MODELS["tiny"], tied=tied)
    synth.write(path, "tiny", shape)
    options = {"model": path, "max_tokens": 32, "kv_tokens": 128}
    engine, cpu = load(**options, weights="int8"), load(**options, device="cpu")
    with GGUFFile.open(path) as file:
        assert without_planes(file, cpu.config) == {}
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 512, 70)
    for wanted in ("last", "all", [2, 40, 41, 60]):
        for _ in range(2):
            found = np.asarray(engine.prefill(ids, logits=wanted, hidden="mean").logits)
        expected = cpu.prefill(ids, logits=wanted).logits
        assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)
    more = rng.integers(0, 512, 20)
    for nbytes in (3 * 4 * 512, 1 << 20):
        texts: Any = [ids[:30]], [more]
        (score,), (other,) = engine.score(*texts, logits_bytes=nbytes), cpu.score(*texts)
        found, expected = np.array(score.log_probs), np.array(other.log_probs)
        assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)
    ran = Counter(name.split("_")[0] for name in engine.launches())
    assert any(name.startswith("rows_logits_") for name in engine.launches()) == tied
    assert ran["dequant"] == 0 and not any(n.startswith("gemm_") for n in engine.launches())


# What stays fp16, what is refused


def test_what_has_no_planes_stays_fp16(
    driver: FakeDriver, load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """With what is multiplied with the same activations, in one layer and not in another."""
    caplog.set_level("INFO", "pyruntime")
    NumpyKernels(driver, monkeypatch)
    wide = ("blk.0.attn_k.weight", "blk.1.attn_output.weight", "blk.1.ffn_down.weight")
    path = write_wide_model(tmp_path / "m.gguf", half=wide)
    engine, cpu = load(model=path, weights="int8"), load(model=path, device="cpu")
    names = [set(layer) & {"qkv", "q", "gate_up", "gate", "down"} for layer in
             engine.model.weights.layers]  # fmt: skip
    assert names == [{"qkv", "gate", "down"}, {"q", "gate_up", "down"}]
    told = next(r.message for r in caplog.records if "stay fp16" in r.message)
    assert "blk.0.attn_k.weight is F16" in told and "output.weight has 3001 rows" in told
    ids = np.random.default_rng(6).integers(0, 3001, 30)
    for wanted in ("last", "all"):
        found, expected = (np.asarray(e.prefill(ids, logits=wanted).logits) for e in (engine, cpu))
        assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("stem", ["llama-f16", "llama-bf16"])
def test_a_file_without_packed_matrices_is_refused(load: Load, stem: str) -> None:
    text = rf"tiny-{stem}\.gguf: weights='int8' .*: tensor 'blk\.0\.attn_q\.weight' is B?F16"
    with pytest.raises(UnsupportedModelError, match=text):
        load(model=GOLDEN / f"tiny-{stem}.gguf", weights="int8")
    with pytest.raises(UnsupportedModelError, match=text):
        Engine.plan(GOLDEN / f"tiny-{stem}.gguf", weights="int8")


def test_int8_is_not_invariant(load: Load) -> None:
    with pytest.raises(ValueError, match="exact='invariant' goes with no weights 'int8'"):
        load(weights="int8", exact="invariant")


def test_rows_of_planes_are_what_kernels_ask_for(driver: FakeDriver) -> None:
    device = Device(0)
    library = Library(device)
    assert {int(k.spec.tile["n"]) for k in library.family("repack")} == {PLANE_ROWS}
    library.close()
    device.close()


@pytest.mark.parametrize("name", ["gate", "up"])
def test_a_value_beyond_fp16_is_named(
    driver: FakeDriver, load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Weights may be beyond it, what is stored may not."""
    NumpyKernels(driver, monkeypatch)
    path = write_wide_model(tmp_path / "m.gguf", spoilt=f"blk.1.ffn_{name}.weight")
    engine = load(model=path, weights="int8")
    text = f"layer 1: the output of ffn_{name} holds a value"
    with np.errstate(all="ignore"), pytest.raises(NumericalError, match=text):
        engine.prefill([1, 2, 3])
