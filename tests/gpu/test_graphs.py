"""Captured passes on a GPU: the bits of those enqueued launch by launch, and nothing else."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from goldens import SMOLLM2, model_path
from numpy.typing import NDArray

from pyruntime import Engine
from pyruntime.driver import api
from pyruntime.driver.device import Device
from pyruntime.driver.graph import Graph
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.errors import CudaError, NumericalError
from pyruntime.model import replay
from pyruntime.model.decoder import Shape
from pyruntime.ops.norm import norm

TINY = "tiny-qwen2-q4_k_m"
STEMS = [
    SMOLLM2, TINY, "tiny-qwen3-q6_k", "tiny-gemma2-q8_0", "tiny-mistral-q8_0", "tiny-llama-q8_0",
]  # fmt: skip
HEADS = [SMOLLM2, "tiny-qwen3-q6_k", "tiny-gemma2-q8_0", TINY, "tiny-llama-q8_0"]  # 3 tied, 2 not
PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
WEIGHTS = pytest.mark.parametrize("weights", ["fp16", "per-layer", "int8"])


def load(stem: str = TINY, **options: Any) -> Engine:
    given = {"device": "cuda:0", "max_tokens": 256, "kv_tokens": 512, **options}
    return Engine.load(model_path(stem), **given)


def logits(engine: Engine, ids: Any, rows: Any = "last", **given: Any) -> NDArray[np.float32]:
    return np.asarray(engine.prefill(ids, logits=rows, **given).logits)


def poison(engine: Engine) -> None:
    """NaN in all activations."""
    for name, array in engine.model._decoder.activations.items():
        if name != "counts":
            array.fill(0xFF)


def check_poison(engine: Engine, rows: int) -> None:
    """It is still there past so many rows."""
    for name, array in engine.model._decoder.activations.items():
        if name != "counts" and not name.startswith("last_"):
            values = np.asarray(array)
            if name.endswith(("_scales", "_sums")):
                values = np.ascontiguousarray(values.swapaxes(0, 1))  # by rows of a plane
            assert (values[rows:].view(np.uint8) == 0xFF).all(), name


# The same bits


@pytest.mark.parametrize("overlap", ["auto", "off"])
@WEIGHTS
@pytest.mark.parametrize("stem", STEMS)
def test_replays_are_bit_equal(stem: str, weights: str, overlap: str) -> None:
    """Other prompts of the lengths that were captured, in turn, and prompts of two passes."""
    with (
        load(stem, weights=weights, overlap=overlap) as engine,
        load(stem, weights=weights, overlap=overlap, graphs="off") as eager,
    ):
        lengths = [n for n in (1, 250, 2, 129, 17, 64, 300) if n <= engine.config.context_length]
        cases = [(n, rows) for n in lengths for rows in ("last", "all")]
        random = np.random.default_rng(0)
        for _ in range(6):
            ids = random.integers(0, engine.config.vocab, max(lengths))
            for n, rows in cases:
                want, found = (logits(e, ids[:n], rows) for e in (eager, engine))
                assert want.any() and np.array_equal(want, found), (n, rows)
        assert engine.generate(ids[:40], 24) == eager.generate(ids[:40], 24)
        stats = engine.stats()
        assert stats.failures == 0 and stats.hits > 4 * stats.misses
        assert eager.stats().captures == eager.stats().hits == 0


@WEIGHTS
@pytest.mark.parametrize("stem", HEADS)
def test_what_is_generated_is_the_argmax_of_logits(
    monkeypatch: pytest.MonkeyPatch, stem: str, weights: str
) -> None:
    """Of the same pass, while its graphs, and those of prompts, take turns."""
    monkeypatch.setattr(Engine, "_stop_ids", frozenset())
    with load(stem, weights=weights) as engine:
        random = np.random.default_rng(8)
        for n in (1, 30, 5):
            ids = random.integers(0, engine.config.vocab, n)
            found, expected, step = engine.generate(ids, 24), list[int](), ids.tolist()
            cache = engine.new_cache(n + 24)
            for _ in found:
                (values,) = np.asarray(engine.prefill(step, cache=cache).logits)
                step = [int(values.argmax())]
                expected += step
            assert found == expected


@pytest.mark.parametrize("overlap", ["auto", "off"])
@WEIGHTS
@pytest.mark.parametrize("stem", HEADS)
def test_results_that_are_held_have_their_own_bits(stem: str, weights: str, overlap: str) -> None:
    """Logits of each call lie elsewhere, which graphs of all of a pass are told. In between there
    are heads of other rows, and hidden states, after the same body."""
    with (
        load(stem, weights=weights, overlap=overlap) as engine,
        load(stem, weights=weights, overlap=overlap, graphs="off") as eager,
    ):
        random = np.random.default_rng(6)
        held: list[tuple[Any, Any]] = []
        for n in (1, 5, 44, 5, 1, 44) * 2:
            ids = random.integers(0, engine.config.vocab, n)
            cases: list[tuple[Any, Any]] = [("last", None), ("all", None), ("last", "last")]
            cases += [([0], "mean"), ([0, n - 1], None)] if n > 1 else []
            for rows, hidden in (*cases, ("last", None)):
                asked = {"logits": rows, "hidden": hidden}
                held.append((engine.prefill(ids, **asked), eager.prefill(ids, **asked)))
        assert len({found.logits.ptr for found, _ in held}) == len(held)
        for found, want in held:
            assert np.asarray(want.logits).any() and np.array_equal(found.logits, want.logits)
            if want.hidden is not None:
                assert np.array_equal(found.hidden, want.hidden)
        # Two rows at a time, and a row that is left over alone, which lies scattered.
        ids = random.integers(0, engine.config.vocab, (6, 15))
        texts = [list(row[:2]) for row in ids[:3]], [list(row) for row in ids[3:]]
        for _ in range(3):
            for more in ({}, {"logits_bytes": 2 * 4 * engine.config.vocab}):
                scores = [e.score(*texts, **more) for e in (engine, eager)]
                for ours, theirs in zip(*scores, strict=True):
                    assert all(map(np.array_equal, ours.log_probs, theirs.log_probs))
            assert np.array_equal(engine.prefill(ids[0]).logits, eager.prefill(ids[0]).logits)
        assert engine.stats().failures == 0 and engine.stats().hits > 2 * engine.stats().misses


def test_logits_that_cannot_be_moved_are_made_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with load(graphs="off") as eager, load() as engine:
        random = np.random.default_rng(7)
        prompts = random.integers(0, engine.config.vocab, (6, 20))
        want = [logits(eager, ids) for ids in prompts]

        def refuse(graph: Graph) -> None:
            raise CudaError("refused", code=1, name="CUDA_ERROR_INVALID_VALUE", call="")

        monkeypatch.setattr(Graph, "update", refuse)
        found = [engine.prefill(ids) for ids in prompts]
        assert all(np.array_equal(x.logits, y) for x, y in zip(found, want, strict=True))
        stats = engine.stats()
        assert (stats.hits, stats.misses, stats.failures, stats.graphs) == (5, 1, 1, 1)


@pytest.mark.parametrize("kv_dtype", ["f16", "e4m3"])
@WEIGHTS
@pytest.mark.parametrize("stem", STEMS)
def test_one_graph_serves_its_bucket(stem: str, weights: str, kv_dtype: str) -> None:
    """All lengths, with the bits of passes launched one by one; rows that are not live stay."""
    with (
        load(stem, weights=weights, kv_dtype=kv_dtype) as engine,
        load(stem, weights=weights, kv_dtype=kv_dtype, graphs="off") as eager,
    ):
        most = engine.config.context_length
        buckets = [b for b in ((19, 20), (41, 44), (121, 128), (241, 250, 256)) if b[-1] <= most]
        random = np.random.default_rng(4)
        for lengths in buckets:
            before = engine.stats()
            for n in (*lengths, *lengths):
                ids = random.integers(0, engine.config.vocab, n)
                for rows in ("last", "all"):
                    found = []
                    for each in (eager, engine):
                        poison(each)
                        cache = each.new_cache(lengths[-1] + 3)
                        for array in cache.arrays[:2]:
                            array.fill(0xFF)
                        found.append(logits(each, ids, rows, cache=cache))
                        check_poison(each, n)
                        free = [np.asarray(array)[:, :, n:] for array in cache.arrays[:2]]
                        assert all((x.view(np.uint8) == 0xFF).all() for x in free)
                        cache.close()
                    assert np.isfinite(found[0]).all() and np.array_equal(*found), (n, rows)
            after = engine.stats()
            assert after.captures - before.captures == 2 == after.misses - before.misses
        assert engine.stats().failures == 0


@WEIGHTS
def test_warmed_lengths_are_replayed_the_first_time(weights: str) -> None:
    """Captured before any pass has run."""
    ids = np.random.default_rng(5).integers(0, 200, 200)
    with load(weights=weights, graphs="off") as eager:
        want = [logits(eager, ids[:n]) for n in (5, 43, 200)]
    with load(weights=weights) as engine:
        done = engine.warm([5, 42, 199])
        assert [(w.rows, w.captured) for w in done] == [(5, True), (44, True), (208, True)]
        assert sum(w.nbytes for w in done) == engine.stats().graph_bytes
        found = [logits(engine, ids[:n]) for n in (5, 43, 200)]
        assert all(map(np.array_equal, want, found))
        stats = engine.stats()
        assert (stats.hits, stats.misses, stats.captures, stats.failures) == (3, 0, 3, 0)


@pytest.mark.parametrize("kv_dtype", ["f16", "e4m3"])
@WEIGHTS
def test_one_graph_serves_every_cache(weights: str, kv_dtype: str) -> None:
    """Of any capacity, from any position on; and what lies past the rows of a pass stays."""
    with (
        load(weights=weights, kv_dtype=kv_dtype) as engine,
        load(weights=weights, kv_dtype=kv_dtype, graphs="off") as eager,
    ):
        ids = np.random.default_rng(1).integers(0, engine.config.vocab, 200)
        for capacity in (90, 137, 200, 200):
            held = []
            for each in (eager, engine):
                cache = each.new_cache(capacity)
                for array in cache.arrays[:2]:
                    array.fill(0xFF)
                for part in np.split(ids[:83], [40, 41, 42, 62]):
                    last = logits(each, part, cache=cache)
                held.append([last] + [np.asarray(a) for a in cache.arrays[:2]])
                cache.close()
            for want, found in zip(*held, strict=True):
                assert np.array_equal(want.view(np.uint8), found.view(np.uint8))
            free = held[1][1][:, :, 83:]
            assert free.size and (free.view(np.uint8) == 0xFF).all()
        assert engine.stats().hits > engine.stats().misses and engine.stats().failures == 0


@pytest.mark.smoke
@WEIGHTS
def test_small_replays(weights: str) -> None:
    with (
        load(weights=weights, max_tokens=40, kv_tokens=40) as engine,
        load(weights=weights, max_tokens=40, kv_tokens=40, graphs="off") as eager,
    ):
        ids = np.random.default_rng(2).integers(0, engine.config.vocab, 40)
        for n, rows in ((1, "last"), (17, "all")):
            for _ in range(3):
                assert np.array_equal(logits(engine, ids[:n], rows), logits(eager, ids[:n], rows))
        assert engine.stats().hits == 4


def test_rows_of_logits_past_those_wanted_stay() -> None:
    with load() as engine:
        model, vocab = engine.model, engine.config.vocab
        room = DeviceArray(model.device, (3, vocab), np.float32).fill(0xFF)
        cache = engine.new_cache(512)
        for _ in range(4):
            model.forward([1, 2, 3], cache, out=room.rows(1, 2))
        assert engine.stats().hits == 2  # of those that go on with a cache
        values = np.asarray(room)
        assert np.isfinite(values[1]).all() and np.isnan(values[[0, 2]]).all()
        cache.close()


# The same work


@WEIGHTS
def test_launches_are_counted(weights: str) -> None:
    counts = []
    for graphs in ("auto", "off"):
        with load(weights=weights, graphs=graphs) as engine:
            before = Counter(engine.launches())
            for n, rows in ((3, "last"), (100, "all"), (1, "last")) * 3:
                engine.prefill([1] * n, logits=rows)
            counts.append(Counter(engine.launches()) - before)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_launches_overlap_within_a_graph(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    """Edges between kernels are programmatic where launches may overlap, and full where not."""
    kinds: list[int] = []
    make = api.make

    def listen(name: str, undo: str, *given: Any) -> Any:
        if name == "cuGraphInstantiate":
            _, _, data, count = api.call("cuGraphGetEdges", given[0], 4096)
            kinds.extend(int(edge.type) for edge in data[:count])
        return make(name, undo, *given)

    monkeypatch.setattr(api, "make", listen)
    with load(overlap=overlap) as engine:
        for _ in range(2):
            engine.prefill([1, 2, 3])
        recorded = engine.model._decoder.recorded(Shape(3, 3, 1, 1, fresh=True))
        assert recorded.whole is not None and recorded.head is not None
        launches = recorded.body.launches + recorded.head.launches
    able = gpu.device.compute_capability >= (9, 0) and overlap == "auto"
    expected = [PROGRAMMATIC if able and x.kernel.spec.dependent else 0 for x in launches[1:]]
    expected += [0, 0]  # from the event to the upload, and from that to the first kernel
    expected += [0, 0]  # from the last kernel to the copy, and from that to the other event
    assert sorted(kinds) == sorted(expected)


def test_each_replay_has_its_own_time() -> None:
    """The event that it begins with is recorded each time."""
    with load() as engine:
        for n in (100, 3, 100, 3) * 3:
            time.sleep(0.01)
            timings = engine.prefill([1] * n).timings
            assert 0 < timings["gpu"] < timings["wall"]
        assert engine.stats().hits == 10 and engine.stats().failures == 0


def test_a_stream_of_the_caller(gpu: Any) -> None:
    ids = np.arange(100) % 200
    with load() as own:
        want = logits(own, ids, "all")
    with load(stream=int(gpu.stream.handle)) as engine:
        for _ in range(4):
            assert np.array_equal(logits(engine, ids, "all"), want)
        assert engine.stats().hits == 3 and engine.stats().failures == 0


# What goes wrong


def norms(gpu: Any) -> tuple[Program, DeviceArray]:
    """A small program, and what it writes."""
    x = gpu.upload(np.random.default_rng(3).standard_normal((4, 64), np.float32))
    y = gpu.empty((4, 64), np.float16)
    program = Program()
    for _ in range(3):
        norm(
            program, gpu.library, x=x, weight=gpu.upload(np.ones(64, np.float32)), y=y,
            rows=gpu.upload(np.array([4], np.int32)), max_rows=4, eps=1e-6,
            overflow=gpu.upload(np.array([2**31 - 1], np.int32)), site=0,
        )  # fmt: skip
    return program, y


def test_memory_freed_in_a_capture_does_not_end_it(gpu: Any) -> None:
    """As the garbage collector frees it; and the host may wait for other streams."""
    program, y = norms(gpu)
    gpu.run(program)
    want = gpu.download(y)
    aside = Stream(gpu.device, beside=gpu.stream)
    garbage = [gpu.empty((1 << 20,), np.uint8)]

    def enqueue() -> None:
        program.enqueue(aside)
        garbage.clear()
        gc.collect()
        gpu.empty((1 << 20,), np.uint8)  # filled and waited for, on another stream
        program.enqueue(aside)

    graph = Graph(aside, enqueue)
    y.fill(0)
    with gpu.device.current():
        graph.launch(gpu.stream)
        gpu.stream.synchronize()
    assert np.array_equal(gpu.download(y), want) and want.any()
    graph.close()
    graph.close()
    aside.close()


@pytest.mark.parametrize("how", ["raises", "waits for itself"])
def test_a_capture_that_fails_leaves_a_stream_that_works(gpu: Any, how: str) -> None:
    program, y = norms(gpu)
    aside = Stream(gpu.device)

    def enqueue() -> None:
        program.enqueue(aside)
        if how == "raises":
            raise KeyboardInterrupt
        aside.synchronize()

    with pytest.raises(KeyboardInterrupt if how == "raises" else CudaError):
        Graph(aside, enqueue)
    y.fill(0)
    with gpu.device.current():
        program.enqueue(aside)
        aside.synchronize()
    want = gpu.download(y)
    graph = Graph(aside, lambda: program.enqueue(aside))
    y.fill(0)
    with gpu.device.current():
        graph.launch(aside)
        aside.synchronize()
    assert want.any() and np.array_equal(gpu.download(y), want)
    graph.close()
    aside.close()


@WEIGHTS
def test_an_engine_whose_captures_fail_works_on(
    monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    """The driver ends the capture itself: a stream that is being captured cannot be waited for."""

    class Broken(Graph):
        def __init__(self, stream: Stream, enqueue: Any) -> None:
            def spoilt() -> None:
                enqueue()
                stream.synchronize()

            super().__init__(stream, spoilt)

    ids = np.arange(60)
    with load(weights=weights, graphs="off") as eager:
        want = logits(eager, ids)
    with load(weights=weights) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(replay, "Graph", Broken)
            assert all(np.array_equal(logits(engine, ids), want) for _ in range(4))
        stats = engine.stats()
        assert (stats.hits, stats.misses, stats.failures) == (0, 4, 1)
        for _ in range(3):
            logits(engine, ids[:50])
        assert engine.stats().hits == 2
        assert np.array_equal(logits(engine, ids), want)


@pytest.mark.parametrize("name", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
def test_another_threads_capture_is_its_own(gpu: Any, name: str) -> None:
    """It goes on while an engine loads, captures and replays, and gives its memory back."""
    program, y = norms(gpu)
    gpu.run(program)
    want = gpu.download(y)
    ready, over = threading.Event(), threading.Event()
    graphs: list[Any] = []
    mode = api.constant("CUstreamCaptureMode", f"CU_STREAM_CAPTURE_MODE_{name}")

    def capture() -> None:
        aside = Stream(gpu.device)
        with gpu.device.current():
            api.call("cuStreamBeginCapture", aside.handle, mode)
            program.enqueue(aside)
            ready.set()
            over.wait(60)
            program.enqueue(aside)
            graphs.append(api.call("cuStreamEndCapture", aside.handle))
        aside.close()

    thread = threading.Thread(target=capture)
    thread.start()
    try:
        assert ready.wait(60)
        with load() as engine:
            for _ in range(3):
                assert np.isfinite(logits(engine, [1, 2, 3])).all()
            assert engine.stats().hits == 2 and engine.stats().failures == 0
            assert [w.captured for w in engine.warm([2, 20])] == [True, True]
    finally:
        over.set()
        thread.join()
    y.fill(0)
    with gpu.device.current():
        graph = api.call("cuGraphInstantiate", graphs[0], 0)
        api.call("cuGraphLaunch", graph, gpu.stream.handle)
        gpu.stream.synchronize()
        api.call("cuGraphExecDestroy", graph)
        api.call("cuGraphDestroy", graphs[0])
    assert np.array_equal(gpu.download(y), want)


def test_an_overflow_in_a_replay_is_named_and_the_next_call_works() -> None:
    with load("tiny-llama-f16") as engine:
        want = [logits(engine, [1, 2, 3]) for _ in range(3)][-1]
        weights = engine.model._decoder._weights.layers[1]["ffn_norm"]
        kept = np.asarray(weights)
        weights.upload(np.full(weights.shape, 1e6))
        with pytest.raises(NumericalError, match="layer 1: the FFN norm"):
            engine.prefill([1, 2, 3])
        weights.upload(kept)
        assert np.array_equal(logits(engine, [1, 2, 3]), want)
        assert engine.stats().misses == 1


@WEIGHTS
def test_longer_tables_and_closing_give_graphs_back(weights: str) -> None:
    """Graphs hold addresses of tables that are made anew for a longer cache."""
    device = Device(0)

    def use() -> None:
        with load(weights=weights) as engine:
            want, *_ = (logits(engine, [1, 2, 3]) for _ in range(3))
            engine.new_cache(1000).close()
            assert engine.stats().graphs == 0
            assert all(np.array_equal(logits(engine, [1, 2, 3]), want) for _ in range(3))
            assert engine.stats().captures == 2

    use()  # what the driver keeps comes with the first
    free = device.memory()[0]
    for _ in range(20):
        use()
    assert abs(device.memory()[0] - free) < 2 << 20
    device.close()
