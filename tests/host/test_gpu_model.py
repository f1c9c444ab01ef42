"""A whole model on a fake driver whose kernels are NumPy: results are those of the NumPy backend.

What is tested is all that the host prepares for kernels, see `numpy_kernels`. The kernels' own
results: tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver
from goldens import GOLDEN
from models import HEAD_DIM_64, HIDDEN, VOCAB, write_model, write_wide_model
from numpy.typing import DTypeLike
from numpy_kernels import NumpyKernels

from pyruntime import Engine
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import CubinError
from pyruntime.model.batch import REGION, ascending
from pyruntime.model.cache import Cache, Region
from pyruntime.model.live import LiveBlock
from pyruntime.ops.rows import has_packed_logits, packed_logits
from pyruntime.reference.functions import rms_norm

Load = Callable[..., Engine]
# Of norms. The largest seen are 4.4e-3 and 4e-2; the faults below are off by 0.6 and more. Kernels
# round to fp16 what they hand on; codes of an e4m3 cache are then other ones here and there.
TOLERANCES = {"f16": 1e-2, "e4m3": 0.1}
INT8 = 0.1  # more with weights "int8", whose activations have 8 bits; see test_int8_model.py
# Golden model, weights, kv_dtype, attention, exact.
CONFIGURATIONS = (
    ("llama-q8_0", "fp16", "f16", "auto"),
    ("llama-q8_0", "per-layer", "e4m3", "fast"),
    ("llama-f16", "per-layer", "f16", "auto"),  # whose matrices are copied, not dequantized
    ("qwen2-q8_0", "per-layer", "f16", "auto"),  # biases
    ("gemma2-q8_0", "fp16", "f16", "auto"),  # windows, caps of scores and logits, norms of branches
    ("gemma2-q4_0", "per-layer", "e4m3", "auto"),
    ("gemma2-q4_0", "per-layer", "f16", "fast"),
    ("qwen3-q6_k", "fp16", "f16", "fast"),  # q/k norms
    ("qwen2-q8_0", "per-layer", "f16", "auto", "invariant"),
    ("llama-q4_k_m", "int8", "f16", "auto"),
    ("qwen2-q4_k_m", "int8", "e4m3", "fast"),
    ("qwen3-q6_k", "int8", "f16", "auto"),
    ("gemma2-q8_0", "int8", "f16", "fast"),
)
LENGTHS = (7, 1, 40, 3, 20, 12)  # of prompts: more than a pass has rows, also in one of them


@pytest.fixture
def kernels(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> NumpyKernels:
    return NumpyKernels(driver, monkeypatch)


class Pair:
    """An engine on the fake driver and one on the NumPy backend, asked for the same."""

    def __init__(
        self, load: Load, stem: str, weights: str, kv_dtype: str, attention: str,
        exact: str = "fast", max_tokens: int = 32,
    ) -> None:  # fmt: skip
        both = {"model": GOLDEN / f"tiny-{stem}.gguf", "kv_dtype": kv_dtype, "kv_tokens": 96}
        self.options = {
            **both, "weights": weights, "attention": attention, "exact": exact,
            "max_tokens": max_tokens,
        }  # fmt: skip
        self.gpu = load(**self.options)
        self.cpu = load(**both, device="cpu")
        self.tolerance = TOLERANCES[kv_dtype] + (INT8 if weights == "int8" else 0)
        self._rng = np.random.default_rng(1)

    def prompts(self, *lengths: int) -> list[np.ndarray]:
        return [self._rng.integers(0, self.cpu.config.vocab, n, np.int32) for n in lengths]

    def caches(self, *capacities: int) -> tuple[list[Any], list[Any]]:
        """Of both; None for 0."""
        made = [[e.new_cache(n) if n else None for n in capacities] for e in (self.gpu, self.cpu)]
        return made[0], made[1]

    def prefill(
        self, ids: Any, caches: tuple[Any, Any] = (None, None), repeats: int = 1, **options: Any
    ) -> None:
        """Compares logits and hidden states; with `repeats` those of the last prefill."""
        for _ in range(repeats):
            self.poison()
            found = self.gpu.prefill(ids, cache=caches[0], **options)
        expected = self.cpu.prefill(ids, cache=caches[1], **options)
        if not isinstance(found, list):
            found, expected = [found], [expected]
        for ours, theirs in zip(found, expected, strict=True):
            for name in ("logits", "hidden"):
                self.compare(getattr(ours, name), getattr(theirs, name))

    def poison(self) -> None:
        """Nothing is left of an earlier pass in the activations, but NaN."""
        model: Any = self.gpu.model
        for name, array in model._decoder.activations.items():
            if name != "counts":
                array.fill(0xFF)

    def compare(self, found: Any, expected: Any) -> None:
        if expected is None:
            assert found is None
            return
        found, expected = (np.asarray(x, np.float64) for x in (found, expected))
        assert found.shape == expected.shape
        off = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert off <= self.tolerance, f"off by {off:.2g} of the norm"  # NaN is no less, either


@pytest.fixture(params=CONFIGURATIONS, ids=" ".join)
def pair(request: pytest.FixtureRequest, kernels: NumpyKernels, load: Load) -> Pair:
    return Pair(load, *request.param)


@pytest.fixture
def llama(kernels: NumpyKernels, load: Load) -> Pair:
    return Pair(load, *CONFIGURATIONS[0])


def test_prompts(pair: Pair) -> None:
    """Single ones, from the second time on as replays, and longer ones than a pass."""
    for length, logits in ((1, "last"), (11, "last"), (11, "all"), (11, [2, 3, 9]), (70, [1, -2])):
        (ids,) = pair.prompts(length)
        pair.prefill(ids, logits=logits)
        pair.prefill(ids, logits=logits, hidden="last", repeats=2)
    stats = pair.gpu.stats()
    assert stats.hits and stats.graphs and not stats.failures


def test_what_is_generated_is_the_argmax_of_logits(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of passes launched one by one and replayed, and of prompts of several."""
    monkeypatch.setattr(Engine, "_stop_ids", frozenset())
    engine = pair.gpu
    for ids in pair.prompts(1, 11, 70):
        found, expected, step = engine.generate(ids, 6), list[int](), ids.tolist()
        cache = engine.new_cache(76)
        for _ in range(6):
            (logits,) = np.asarray(engine.prefill(step, cache=cache).logits)
            step = [int(logits.argmax())]
            expected += step
        assert found == expected == engine.generate(ids, 6, cache=engine.new_cache(80))
    assert any(name.startswith("scores_") for name in engine.launches())


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_of_equal_logits_the_first_is_generated(
    kernels: NumpyKernels, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(Engine, "_stop_ids", frozenset())
    tensors = {"output.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    path = write_model(tmp_path / "m.gguf", set_tensors=tensors, head_dim=64, set_keys=HEAD_DIM_64)
    assert load(model=path, device=device).generate([5, 6], 4) == [0] * 4


def test_logits_of_a_graph_are_those_of_launches(pair: Pair, load: Load) -> None:
    """Bit by bit, while all results are held; heads of other rows come in between."""
    eager = load(**pair.options, graphs="off")
    found, expected = [], []
    for ids in pair.prompts(*[6] * 5):
        for asked in ("last", "all", [1, 4], [0, 1], "last"):
            for engine, results in ((pair.gpu, found), (eager, expected)):
                results.append(engine.prefill(ids, logits=asked).logits)
    assert len({logits.ptr for logits in found}) == len(found)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.isfinite(ours).all() and np.array_equal(ours, theirs)
    assert pair.gpu.stats().hits > 15 and pair.gpu.stats().failures == 0


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    ("stem", "node"), [("llama-q8_0", 0), ("gemma2-q8_0", 0), ("gemma2-q8_0", 1)]
)
def test_an_interrupted_update_leaves_no_logits_elsewhere(
    driver: FakeDriver, kernels: NumpyKernels, load: Load, stem: str, node: int, back: bool
) -> None:
    """Before it, or between the nodes of a product and of the cap: the next call's go where they
    should, to another array or `back` to where those before went."""
    pair = Pair(load, stem, "fp16", "f16", "auto")
    first, second = pair.prompts(5, 5)
    pair.gpu.prefill(first)
    held = pair.gpu.prefill(first)
    kept, updates = np.asarray(held.logits), []

    def interrupt(name: str, given: tuple[Any, ...]) -> None:
        if name == "cuGraphExecKernelNodeSetParams":
            updates.append(name)
            if len(updates) > node:
                raise KeyboardInterrupt

    driver.hook = interrupt
    with pytest.raises(KeyboardInterrupt):
        pair.gpu.prefill(second)
    driver.hook = lambda name, given: None
    if back:
        model: Any = pair.gpu.model
        found = model.forward(second, pair.gpu.new_cache(8), out=held.logits)
    else:
        found = pair.gpu.prefill(second).logits
        assert np.array_equal(held.logits, kept)
    pair.compare(found, pair.cpu.prefill(second).logits)
    assert pair.gpu.stats().captures == 1 and pair.gpu.stats().failures == 0


@pytest.mark.parametrize("logits", ["last", "all"])
def test_a_graph_serves_its_bucket_and_no_row_past_the_live_ones(pair: Pair, logits: Any) -> None:
    """Lengths that share it, in turn; what is not live keeps its poison."""
    model: Any = pair.gpu.model
    for n in (31, 32, 31, 32, 31):
        (ids,) = pair.prompts(n)
        pair.prefill(ids, logits=logits)
        for name, array in model._decoder.activations.items():
            values = np.asarray(array)
            if name.endswith(("_scales", "_sums")):
                values = np.ascontiguousarray(values.swapaxes(0, 1))  # by rows of a plane
            past = values[1 if name.startswith("last_") else n :]
            untouched = (past.view(np.uint8) == 0xFF).all()
            assert untouched or name == "counts", name
    stats = pair.gpu.stats()
    assert (stats.captures, stats.hits, stats.misses) == (1, 4, 1)


def test_lists(pair: Pair) -> None:
    prompts = pair.prompts(*LENGTHS)
    some = [sorted({0, n // 2, n - 1}) for n in LENGTHS]
    each = [("none", "last", "all")[i % 3] for i in range(len(LENGTHS))]
    for logits, hidden in (("last", None), ("all", None), (some, "mean"), (each, "last")):
        pair.prefill(prompts, logits=logits, hidden=hidden)


def test_caches_are_continued(pair: Pair) -> None:
    """Beside prompts without one."""
    caches = pair.caches(*(n + 12 if i % 3 else 0 for i, n in enumerate(LENGTHS)))
    for lengths in (LENGTHS, [3] * len(LENGTHS), [1, 2, 9, 4, 5, 6]):
        pair.prefill(pair.prompts(*lengths), caches)
    (ids,) = pair.prompts(15)
    single = tuple(c for (c,) in pair.caches(40))
    for part in (ids, ids[:1], ids[:1]):
        pair.prefill(part, single)


def test_kinds_of_passes_take_turns(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the live block keeps from one single fresh prompt to the next is that prompt's."""
    cache = tuple(c for (c,) in llama.caches(64))
    (first, *_), (other,) = llama.prompts(9), llama.prompts(5)
    llama.prefill(first, cache)
    for ids, caches in (
        (first, (None, None)),
        (other, cache),  # goes on
        (first, (None, None)),
        (llama.prompts(4, 12, 3), (None, None)),
        (other, (None, None)),
        (first, (None, None)),
    ):
        llama.prefill(ids, caches)

    def interrupted(first: int, last: int) -> np.ndarray:
        if last == 1:  # the third prompt
            raise KeyboardInterrupt
        return ascending(first, last)

    with monkeypatch.context() as patch:
        patch.setattr("pyruntime.model.live.ascending", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llama.gpu.prefill(llama.prompts(2, 7, 1))
    llama.prefill(first)


@pytest.mark.parametrize("top", [1, 7])
@pytest.mark.parametrize("cached", [False, True])
def test_rows_of_prompts_and_the_likeliest_tokens(pair: Pair, top: int, cached: bool) -> None:
    """Some prompts go through several passes; -1 stands for the likeliest."""
    prompts, before = pair.prompts(*LENGTHS), pair.prompts(*[3] * len(LENGTHS))
    rows = [np.unique(np.linspace(0, len(ids) - 1, 5).astype(np.int32)) for ids in prompts]
    tokens = [np.where(np.arange(len(own)) % 2, -1, 5 + own) for own in rows]
    for rows_at_once in (1, 7, 1 << 10):
        pair.poison()
        found = []
        for engine in (pair.gpu, pair.cpu):
            caches = [engine.new_cache(3 + len(ids)) for ids in prompts] if cached else None
            if caches:
                engine.prefill(before, cache=caches, logits="none")
            nbytes = rows_at_once * 4 * engine.config.vocab
            more = {"top": top, "cache": caches, "logits_bytes": nbytes}
            found.append(engine.score_rows(prompts, rows, tokens, **more)[0])
        for ours, theirs, given in zip(*found, tokens, strict=True):
            pair.compare(ours.values, theirs.values)
            pair.compare(ours.log_probs, theirs.log_probs)
            likeliest = np.where(given < 0, ours.best[:, 0], given)
            np.testing.assert_array_equal(ours.tokens, likeliest)
            assert ours.best.shape == ours.values.shape == (len(given), top)


def test_scores_and_embeddings(pair: Pair) -> None:
    prompts, more = pair.prompts(*LENGTHS), pair.prompts(*reversed(LENGTHS))
    expected = pair.cpu.score(prompts, more)
    for rows in (7, 1 << 10):  # of logits at a time
        pair.poison()
        nbytes = rows * 4 * pair.cpu.config.vocab
        found = pair.gpu.score(prompts, more, logits_bytes=nbytes)
        for ours, theirs in zip(found, expected, strict=True):
            pair.compare(ours.log_probs, theirs.log_probs)
    pair.compare(pair.gpu.embed(prompts), pair.cpu.embed(prompts))


def test_more_targets_than_a_pass_has_rows(pair: Pair) -> None:
    """Many answers to choose from; some are two tokens long, so rows before the last have several
    targets, too."""
    texts: list[tuple[np.ndarray, np.ndarray]] = []
    for ids in pair.prompts(9, 20, 9):
        texts += [(ids, token) for token in pair.prompts(*[1] * 30)]
        texts += [(ids[:-1], np.append(ids[-1:], token)) for token in pair.prompts(*[1] * 7)]
    prompts, more = zip(*texts, strict=True)
    expected = pair.cpu.score(prompts, more)
    for rows in (1, 3, 1 << 10):  # of logits at a time
        pair.poison()
        found = pair.gpu.score(prompts, more, logits_bytes=rows * 4 * pair.cpu.config.vocab)
        for ours, theirs in zip(found, expected, strict=True):
            pair.compare(ours.log_probs, theirs.log_probs)
    ids, best = prompts[0], int(np.asarray(pair.gpu.prefill(prompts[0]).logits).argmax())
    found = pair.gpu.score([ids] * 50, [[(best + i) % pair.cpu.config.vocab] for i in range(50)])
    assert [score.greedy for score in found] == [[True], *[[False]] * 49]


# Logits of one row, where the output matrix is a packed embedding

EXACT = 1e-6  # of the largest logit: what float32 sums differ by. Rounding to fp16 costs some 1e-4.
TIED = [c for c in CONFIGURATIONS if c[0].startswith(("gemma2", "qwen3"))]


@pytest.mark.parametrize("configuration", TIED, ids=" ".join)
def test_a_single_row_meets_the_matrix_unrounded(
    kernels: NumpyKernels, load: Load, configuration: tuple[str, ...]
) -> None:
    """Of several it is rounded to fp16, which tells that this looks at the right thing."""
    pair = Pair(load, *configuration)
    act, cpu = pair.gpu.model._decoder.activations, pair.cpu.model

    def error(n: int, x: str, row: int, **asked: Any) -> float:
        (ids,) = pair.prompts(n)
        pair.poison()
        found = np.asarray(pair.gpu.prefill(ids, **asked).logits)[-1]
        residual = np.asarray(act[x])[row : row + 1]
        (exact,) = cpu._logits(rms_norm(residual, cpu._output_norm, pair.cpu.config.eps))
        return float(np.abs(found - exact).max() / np.abs(exact).max())

    for _ in range(2):  # the second time as a replay
        assert error(11, "last_x", 0) <= EXACT
        assert error(1, "x", 0) <= EXACT
        assert error(11, "x", 10, hidden="mean") <= EXACT
        assert error(11, "last_x", 1, logits=[4, 10]) > 30 * EXACT


@pytest.mark.parametrize("configuration", TIED, ids=" ".join)
def test_a_single_row_that_is_left_over_is_the_one_that_was_asked_for(
    kernels: NumpyKernels, load: Load, configuration: tuple[str, ...]
) -> None:
    """All rows are kept but for a few, and logits made of two at a time, the last one alone."""
    pair = Pair(load, *configuration, max_tokens=48)
    prompts, more = pair.prompts(2, 2, 2), pair.prompts(15, 15, 15)
    pair.poison()
    found = pair.gpu.score(prompts, more, logits_bytes=2 * 4 * pair.cpu.config.vocab)
    for ours, theirs in zip(found, pair.cpu.score(prompts, more), strict=True):
        for mine, own in zip(ours.log_probs, theirs.log_probs, strict=True):
            pair.compare([mine], [own])
    assert any(name.startswith("rows_logits_") for name in pair.gpu.launches())


@pytest.mark.parametrize(("packed", "tied"), [(True, True), (True, False), (False, True)])
def test_which_models_have_it(load: Load, tmp_path: Path, packed: bool, tied: bool) -> None:
    """Not those whose matrix is another tensor, or not quantized."""
    path = tmp_path / "m.gguf"
    if packed:
        write_wide_model(path, tied=tied)
    else:
        write_model(path, head_dim=64, set_keys=HEAD_DIM_64, set_tensors={"output.weight": None})
    engine = load(model=path)
    engine.prefill([1, 2, 3])
    ran = [name for name in engine.launches() if name.startswith("rows_logits_")]
    assert ran == (["rows_logits_q8_0_t256"] if packed and tied else [])


def test_what_packed_logits_refuses(load: Load, driver: FakeDriver) -> None:
    engine = load()
    device, library = engine.model.device, engine.model.library

    def array(*shape: int, dtype: DTypeLike = np.float32) -> DeviceArray:
        return DeviceArray(device, shape, dtype)

    good: dict[str, Any] = {
        "rows": array(1, dtype=np.int32), "x": array(1, 64), "weight": array(64), "eps": 1e-5,
        "table": array(10, 68, dtype=np.uint8), "type_name": "Q8_0", "c": array(1, 10),
    }  # fmt: skip
    packed_logits(Program(), library, **good)
    for name, bad in {
        "x": array(2, 64), "weight": array(32), "table": array(10, 64, dtype=np.uint8),
        "c": array(1, 11), "type_name": "Q4_0", "rows": array(1),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match="packed_logits"):
            packed_logits(Program(), library, **{**good, name: bad})
    wide = {"x": array(1, 8224), "weight": array(8224), "table": array(10, 8738, dtype=np.uint8)}
    with pytest.raises(ValueError, match="packed_logits"):
        packed_logits(Program(), library, **{**good, **wide})
    assert has_packed_logits(library, "Q8_0", 8192)
    assert not has_packed_logits(library, "Q8_0", 8224)
    assert not any(has_packed_logits(library, name, 64) for name in ("F32", "F16", "BF16"))
    with pytest.raises(CubinError, match="no logits kernel for type f16"):
        packed_logits(Program(), library, **{**good, "type_name": "F16"})


# What makes it fail

WRONG = r"off by .* of the norm"


def off_by_one(monkeypatch: pytest.MonkeyPatch, name: str, place: tuple[int, ...]) -> None:
    """One number, or byte, that is uploaded of a part of the live block is one more or less."""
    fill = LiveBlock.fill

    def wrong(live: LiveBlock, *arguments: Any) -> None:
        fill(live, *arguments)
        part, block = getattr(live, name), live.live
        host = live._host.array[part.ptr - block.ptr :][: part.nbytes]
        host.view(part.dtype).reshape(part.shape)[place] ^= 1

    monkeypatch.setattr(LiveBlock, "fill", wrong)


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        ("live", (0,), r"embed, kernel .*: 28 blocks of 1 in x for 29"),
        ("sequences", (0, 8), r"kernel .*: sequence 0, .* is not that of rows 0 to 20"),
        ("ids", (19,), WRONG),
        ("wanted_rows", (0,), WRONG),
    ],
    ids=["rows", "start", "ids", "wanted rows"],
)
def test_a_wrong_live_block_is_found(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, name: str, place: tuple[int, ...], message: str
) -> None:
    prompts = llama.prompts(20, 8)
    llama.prefill(prompts)
    off_by_one(monkeypatch, name, place)
    with pytest.raises(AssertionError, match=message):
        llama.prefill(prompts)


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        ("targets", 1, WRONG),  # where the second row's begin
        ("targets", 6, WRONG),  # the first one's token
        ("spans", (0, 1), WRONG),
        ("spans", (1, 0), WRONG),
    ],
)
def test_a_wrong_readout_is_found(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, name: str, place: Any, message: str
) -> None:
    prompts, more = llama.prompts(6, 5), llama.prompts(2, 3)
    model: Any = llama.gpu.model
    array = model._decoder.activations[name]
    upload = DeviceArray.upload

    def wrong(to: DeviceArray, values: np.ndarray) -> DeviceArray:
        if to.ptr == array.ptr:
            values = values.copy()
            values[place] ^= 1
        return upload(to, values)

    def differ() -> None:
        found, expected = (e.score(prompts, more) for e in (llama.gpu, llama.cpu))
        for ours, theirs in zip(found, expected, strict=True):
            llama.compare(ours.log_probs, theirs.log_probs)
        llama.compare(llama.gpu.embed(prompts), llama.cpu.embed(prompts))

    differ()
    monkeypatch.setattr(DeviceArray, "upload", wrong)
    with pytest.raises(AssertionError, match=message):
        differ()


def test_regions_that_overlap_are_found(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(cache: Cache, first: int, tokens: int) -> Region:
        return Region(cache, max(first - REGION, 0), tokens)

    prompts = llama.prompts(20, 8)
    llama.prefill(prompts)
    monkeypatch.setattr(Cache, "region", before)
    with pytest.raises(AssertionError, match=WRONG):
        llama.prefill(prompts)
