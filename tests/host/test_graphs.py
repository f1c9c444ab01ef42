"""Passes that come again are captured and replayed, and whatever goes wrong, eager passes work."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from fake_driver import INVALID_VALUE, OUT_OF_MEMORY, RELAXED, FakeDriver, stream_of
from goldens import GOLDEN

from pyruntime import Engine
from pyruntime.driver import api
from pyruntime.driver.device import Device
from pyruntime.driver.graph import Graph
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.stream import Event, Stream
from pyruntime.errors import CudaError, EngineError, NumericalError
from pyruntime.model import decoder, gpu
from pyruntime.model.live import LiveBlock
from pyruntime.model.replay import Replayer

ILLEGAL_ADDRESS = 700
DEPENDENT = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"

Load = Callable[..., Engine]
WEIGHTS = pytest.mark.parametrize("weights", ["fp16", "per-layer", "int8"])


def graph_of(driver: FakeDriver) -> list[tuple[str, tuple[Any, ...]]]:
    """The calls in the only graph there is."""
    (handle,) = driver.live["execs"]
    return driver.graphs[handle].calls


# When


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_what_a_graph_would_serve_is_refused_as_without_one(load: Load, graphs: str) -> None:
    engine, other = load(max_tokens=64, kv_tokens=50, graphs=graphs), load()
    long, short, closed = (engine.new_cache(tokens) for tokens in (5000, 2, 8))
    long.append(np.zeros(4094, np.int32), 0)
    closed.close()
    engine.warm([3, 50])
    engine.warm([3], continues=True)
    refused: list[tuple[int, Any, str]] = [
        (51, None, "51 tokens without a cache"),
        (3, long, "3 tokens after 4094 exceed the model's context of 4096"),
        (3, short, "3 tokens after 0 exceed the cache's 2 positions"),
        (3, closed, "this cache has been closed"),
        (3, other.new_cache(8), "this cache belongs to another model"),
        (3, "cache", "this cache belongs to another model"),
    ]
    for tokens, cache, text in refused:
        with pytest.raises(ValueError, match=text):
            engine.prefill([0] * tokens, cache=cache)
    assert (long.length, short.length) == (4094, 0)
    long.truncate(4093)
    for tokens, cache in ((50, None), (3, long)):
        engine.prefill([0] * tokens, cache=cache)
    assert long.length == 4096
    assert engine.stats().hits == (2 if graphs == "auto" else 0)
    several = engine.prefill([[0] * 3, [0] * 3])
    assert all(result.logits is not None for result in several)


@WEIGHTS
def test_a_length_that_comes_again_is_replayed(
    driver: FakeDriver, load: Load, weights: str
) -> None:
    engine = load(weights=weights)
    found = []
    for _ in range(4):
        before = driver.calls.copy()
        engine.prefill([1, 2, 3])
        added = driver.calls - before
        found.append((added["cuStreamBeginCapture"], added["cuGraphLaunch"]))
    assert found == [(0, 0), (1, 1), (0, 1), (0, 1)]
    if weights != "per-layer":  # nothing is launched apart
        assert added["cuLaunchKernelEx"] == 0
    stats = engine.stats()
    assert (stats.hits, stats.misses, stats.captures, stats.failures) == (3, 1, 1, 0)
    assert stats.graphs == 1 and stats.capture_ms > 0
    assert driver.held()["execs"] == 1
    whole = weights != "per-layer"  # whose nodes may be updated
    assert driver.held().get("graphs", 0) == whole
    engine.close()
    assert driver.held() == {}


def test_each_kind_of_pass_has_a_graph_of_its_own(driver: FakeDriver, load: Load) -> None:
    engine = load()
    cache = engine.new_cache(64)
    for n, logits in ((1, "last"), (2, "last"), (2, "all")) * 2:
        engine.prefill([1] * n, logits=logits)
    engine.prefill([1, 2], cache=cache)  # another cache and the same graph
    assert engine.stats().captures == 3 and engine.stats().hits == 4
    for _ in range(4):
        engine.prefill([1, 2], cache=cache)  # goes on with what is there
    assert engine.stats().captures == 4 and engine.stats().hits == 7
    engine.generate([1, 2], 5)
    assert driver.held()["execs"] == engine.stats().graphs == 5


def test_a_graph_serves_all_lengths_of_its_bucket(driver: FakeDriver, load: Load) -> None:
    engine = load(max_tokens=64, kv_tokens=64)
    for n in (41, 44, 42, 43, 41):
        engine.prefill([1] * n)
    stats = engine.stats()
    assert (stats.captures, stats.hits, stats.misses) == (1, 4, 1)
    for n in (40, 45):  # the buckets beside it
        engine.prefill([1] * n)
    assert engine.stats().misses == 3


@pytest.mark.parametrize("weights", ["fp16", "per-layer", "int8"])
def test_eager_passes_have_the_plan_of_a_bucket(load: Load, weights: str) -> None:
    """So that a graph, which is of the bucket, has the same bits."""
    engine = load(graphs="off", weights=weights, max_tokens=64, kv_tokens=64)
    counts = []
    for n in (41, 44):
        before = Counter(engine.launches())
        engine.prefill([1] * n)
        counts.append(Counter(engine.launches()) - before)
    assert counts[0] == counts[1]
    low, high, other = (
        [(x.kernel.name, x.grid) for x in engine.model.recorded(n)] for n in (41, 44, 45)
    )
    assert low == high != other


# Ahead of time


@WEIGHTS
def test_warm_lengths_are_replayed_the_first_time(
    driver: FakeDriver, load: Load, weights: str
) -> None:
    engine = load(weights=weights, max_tokens=64, kv_tokens=200)
    before = driver.calls.copy()
    (first, last) = engine.warm([41, 44, 3])
    added = driver.calls - before
    assert (added["cuStreamBeginCapture"], added["cuGraphLaunch"]) == (2, 0)
    assert [(w.rows, w.kept, w.fresh, w.captured) for w in (first, last)] == [
        (44, 1, True, True), (3, 1, True, True),
    ]  # fmt: skip
    stats = engine.stats()
    assert (stats.captures, stats.graphs, stats.hits, stats.misses) == (2, 2, 0, 0)
    assert first.nbytes + last.nbytes == stats.graph_bytes
    assert stats.capture_ms <= first.ms + last.ms
    for n in (3, 42):
        engine.prefill([1] * n)
    assert (engine.stats().hits, engine.stats().misses) == (2, 0)
    assert [w.captured for w in engine.warm([43, 3])] == [False, False]
    assert engine.stats().captures == 2 and driver.misuse == []


def test_each_pass_of_a_long_prompt_is_warmed(load: Load) -> None:
    engine = load(max_tokens=16, kv_tokens=200)
    for logits, kept in (("last", (0, 0, 1)), ("none", (0, 0, 0)), ("all", (16, 16, 9))):
        found = [(w.rows, w.kept, w.fresh) for w in engine.warm([41], logits=logits)]
        expected = list(zip((16, 16, 9), kept, (True, False, False), strict=True))
        assert found == expected, logits
        engine.prefill([1] * 41, logits=logits)
    assert (engine.stats().hits, engine.stats().misses) == (9, 0)


def test_warm_steps_of_generate_are_replayed(load: Load) -> None:
    engine = load()
    assert [w.fresh for w in engine.warm([1], logits="greedy", continues=True)] == [False]
    engine.generate([1], 3)
    assert (engine.stats().hits, engine.stats().misses) == (2, 1)
    assert [w.kept for w in engine.warm([40], logits="greedy")] == [0, 0, 1]
    engine.generate([1] * 40, 2)
    assert (engine.stats().hits, engine.stats().misses) == (6, 1)


def test_warming_makes_the_cache_that_would_drop_the_graphs(driver: FakeDriver, load: Load) -> None:
    engine = load(max_tokens=16, kv_tokens=None)
    longest = engine.model._decoder.positions
    engine.warm([4, longest])
    assert engine._cache.capacity >= longest
    graphs = engine.stats().graphs
    engine.prefill([1] * 4)
    assert engine.stats().hits == 1 and engine.stats().graphs == graphs > 1


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("lengths", [[0], [-1], [10**6], [True], [2.0], ["3"]])
def test_lengths_that_no_prompt_has_are_refused(load: Load, device: str, lengths: Any) -> None:
    engine = load(device=device)
    with pytest.raises(ValueError, match=r"lengths: .* is not one of 1 to \d+ tokens"):
        engine.warm([1, *lengths])
    with pytest.raises(ValueError, match="logits='some'"):
        engine.warm([1], logits="some")
    assert engine.stats().captures == 0


def test_more_than_is_kept_is_not_warmed(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PASSES", 3)
    engine = load()
    with pytest.raises(ValueError, match="4 kinds of passes; 3 are kept"):
        engine.warm([1, 2, 3, 4])
    assert engine.stats().captures == 0
    assert len(engine.warm(iter([1, 2, 3, 2]))) == 3


def test_without_graphs_warming_captures_nothing(driver: FakeDriver, load: Load) -> None:
    assert load(device="cpu").warm([1, 2]) == []
    engine = load(graphs="off")
    assert [w.captured for w in engine.warm([1, 2])] == [False, False]
    assert not any("Graph" in name or "BeginCapture" in name for name in driver.calls)
    assert engine.warm([]) == []
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.warm([1])


def test_a_capture_that_fails_ahead_of_time_is_counted(driver: FakeDriver, load: Load) -> None:
    engine = load()
    driver.fail["cuGraphInstantiate"] = (0, OUT_OF_MEMORY)
    first, _ = engine.warm([1, 2])
    assert (first.captured, first.nbytes) == (False, 0)
    assert (engine.stats().failures, engine.stats().captures) == (1, 1)
    engine.prefill([1])
    engine.prefill([1, 2])
    assert (engine.stats().hits, engine.stats().misses) == (1, 1)
    driver.fail["cuGraphInstantiate"] = (0, ILLEGAL_ADDRESS)
    with pytest.raises(CudaError, match="cuGraphInstantiate"):
        engine.warm([3])
    with pytest.raises(EngineError, match="lost by an earlier failure"):
        engine.warm([4])


def test_off_makes_no_graphs(driver: FakeDriver, load: Load) -> None:
    engine = load(graphs="off")
    for _ in range(3):
        engine.prefill([1, 2])
    assert not any("Graph" in name or "BeginCapture" in name for name in driver.calls)
    stats = engine.stats()
    assert (stats.hits, stats.misses, stats.captures, stats.capture_ms) == (0, 3, 0, 0)


def test_numpy_counts_no_passes(load: Load) -> None:
    engine = load(device="cpu")
    engine.prefill([1])
    assert engine.stats() == type(engine.stats())()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.stats()


# What


@WEIGHTS
@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_a_graph_has_the_launches_and_edges_of_the_pass(
    driver: FakeDriver, load: Load, weights: str, overlap: str
) -> None:
    eager: list[tuple[Any, ...]] = []
    after: list[tuple[Any, ...]] = []  # a graph

    def told(config: Any, kernel: str, arguments: int) -> tuple[Any, ...]:
        ids = [a.id.name for a in config.attrs[: config.numAttrs]]
        return kernel, arguments, ids, (config.gridDimX, config.gridDimY, config.gridDimZ)

    engine = load(weights=weights, overlap=overlap)

    def listen(found: list[tuple[Any, ...]]) -> None:
        driver.hook = lambda name, given: (
            found.append(told(*given[:3])) if name == "cuLaunchKernelEx" else None
        )
        engine.prefill([1, 2, 3])
        driver.hook = lambda name, given: None

    listen(eager)
    engine.prefill([1, 2, 3])
    listen(after)
    calls = graph_of(driver)
    captured = [told(*given[:3]) for name, given in calls if name == "cuLaunchKernelEx"]
    assert captured == eager[: len(captured)] and len(captured) > 15
    assert len(captured) + len(after) == len(eager)  # what is not captured is enqueued
    if weights == "fp16":
        able = driver.attributes["COMPUTE_CAPABILITY_MAJOR"] >= 9 and overlap == "auto"
        dependent = [DEPENDENT in ids for _, _, ids, _ in captured]
        assert dependent == [False] + [able] * (len(captured) - 1)
        assert after == []
    streams = {stream_of(name, given) for name, given in calls}
    assert len(streams) == (2 if (weights, overlap) == ("per-layer", "auto") else 1)


@WEIGHTS
def test_launches_are_counted_as_if_they_were_enqueued(load: Load, weights: str) -> None:
    counts = []
    for graphs in ("auto", "off"):
        engine = load(graphs=graphs, weights=weights)
        loading = Counter(engine.launches())
        for n, logits in ((3, "last"), (16, "all"), (1, "last")) * 3:
            engine.prefill([1] * n, logits=logits)
        counts.append(Counter(engine.launches()) - loading)
    assert counts[0] == counts[1] and sum(counts[0].values()) > 100


@pytest.mark.parametrize("logits", ["last", "all"])
@pytest.mark.parametrize("name", ["llama-q8_0", "gemma2-q8_0"])
def test_logits_go_where_each_result_is(
    driver: FakeDriver, load: Load, name: str, logits: Any
) -> None:
    """By the product with the output matrix, and where they are capped, by that, too."""
    engine = load(model=GOLDEN / f"tiny-{name}.gguf")
    library = engine.model.library
    targets: list[int] = []

    def note(called: str, given: tuple[Any, ...]) -> None:
        assert called != "cuLaunchKernelEx"
        if called == "cuGraphExecKernelNodeSetParams":
            block = ctypes.c_uint64.from_address(given[2].kernelParams).value
            spec = library[given[2].func].spec
            wanted = "x" if spec.family == "softcap" else "c"
            (at,) = (p.offset for p in spec.params if p.name == wanted)
            targets.append(ctypes.c_uint64.from_address(block + at).value)

    engine.prefill([1, 2], logits=logits)
    captured = engine.prefill([1, 2], logits=logits)
    driver.hook = note
    results = [engine.prefill([3, 4], logits=logits) for _ in range(3)]
    capped = engine.config.logit_cap is not None
    assert targets == [r.logits.ptr for r in results for _ in range(1 + capped)]
    assert len({*targets, captured.logits.ptr}) == 4


def test_the_memory_of_logits_that_are_gone_needs_no_update(driver: FakeDriver, load: Load) -> None:
    engine = load()
    for _ in range(4):
        engine.prefill([1, 2])
    assert driver.calls["cuGraphLaunch"] == 3
    assert driver.calls["cuGraphExecKernelNodeSetParams"] == 0


def test_what_comes_after_a_body_decides_which_graph_is_replayed(
    driver: FakeDriver, load: Load
) -> None:
    """Logits of what is kept are part of it; hidden states, scores and other rows follow it. Each
    graph is made when it is needed."""
    engine = load()
    for asked, graphs in (
        ({}, 0), ({}, 1), ({"hidden": "last"}, 2), ({}, 2), ({"logits": [0]}, 2),
        ({"logits": "none", "hidden": "last"}, 2), ({"logits": [0, 2]}, 2), ({"logits": [0, 2]}, 3),
        ({"logits": "all"}, 3), ({"logits": [0], "hidden": "mean"}, 4), ({"logits": "all"}, 5),
        ({"logits": "none"}, 5), ({"logits": "none"}, 6),
    ):  # fmt: skip
        engine.prefill([1, 2, 3], **asked)
        assert engine.stats().graphs == engine.stats().captures == graphs, asked
        assert driver.held().get("execs", 0) == graphs
    assert (engine.stats().hits, engine.stats().misses) == (9, 4)


def test_a_bucket_of_several_counts_of_rows_has_one_graph(driver: FakeDriver, load: Load) -> None:
    """Before heads of any size."""
    engine = load(max_tokens=64, kv_tokens=64)
    for n in (44, 43, 44, 41):
        engine.prefill([1] * n, logits="all")
    assert (engine.stats().captures, engine.stats().hits) == (1, 3)


def test_a_warm_pass_is_captured_at_once_for_what_else_comes_of_it(load: Load) -> None:
    engine = load()
    engine.warm([3])
    engine.prefill([1, 2, 3], hidden="last")
    assert (engine.stats().captures, engine.stats().hits, engine.stats().misses) == (2, 1, 0)


@WEIGHTS
def test_all_buckets_share_the_buffers(driver: FakeDriver, load: Load, weights: str) -> None:
    engine = load(weights=weights, max_tokens=64, kv_tokens=64)
    engine.prefill([1] * 64)  # makes its cache, and logits of one row
    before = driver.held()["arrays"], engine.model.device.allocated
    engine.warm(range(1, 65))
    assert engine.stats().graphs > 30
    assert (driver.held()["arrays"], engine.model.device.allocated) == before


def test_a_recorded_head_keeps_no_logits(driver: FakeDriver, load: Load) -> None:
    engine = load()
    engine.prefill([1, 2])  # makes its cache
    before = driver.held()["arrays"]
    for _ in range(3):
        engine.prefill([1, 2])
        assert driver.held()["arrays"] == before


@pytest.mark.parametrize("spoil", ["shape", "type", "place"])
def test_logits_that_do_not_fit_are_refused(load: Load, spoil: str) -> None:
    engine = load()
    model, vocab = engine.model, engine.config.vocab
    cache = engine.new_cache(32)
    if spoil == "place":
        out = DeviceArray(model.device, (4 * vocab + 4,), np.uint8).view(4, (1, vocab), np.float32)
    else:
        shape = (1, vocab - 1) if spoil == "shape" else (1, vocab)
        out = DeviceArray(model.device, shape, np.int32 if spoil == "type" else np.float32)
    for _ in range(3):
        with pytest.raises(ValueError, match=rf"logits of shape \[1, {vocab}\] do not go to"):
            model.forward([1, 2], cache, out=out)
        model.forward([1, 2], cache)


def test_a_value_out_of_range_shows_in_a_replay(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    cache = engine.new_cache(64)
    with monkeypatch.context() as patch:
        engine.prefill([1, 2])
        engine.prefill([1, 2])
        patch.setattr(LiveBlock, "overflow_site", 4)
        with pytest.raises(NumericalError, match="layer 0: the FFN norm"):
            engine.prefill([1, 2], cache=cache)
        assert cache.length == 0
    engine.prefill([1, 2], cache=cache)
    assert cache.length == 2 and engine.stats().hits == 3


def test_a_value_out_of_range_ends_what_is_generated(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    expected = engine.generate([1, 2], 6)
    with monkeypatch.context() as patch:
        patch.setattr(LiveBlock, "overflow_site", 4)
        with pytest.raises(NumericalError, match="layer 0: the FFN norm"):
            engine.generate([1, 2], 6)
    assert engine.generate([1, 2], 6) == expected


@WEIGHTS
def test_a_graph_runs_on_the_callers_stream(driver: FakeDriver, load: Load, weights: str) -> None:
    """It is captured on one of the engine's, which others cannot have work on."""
    device = Device(0)
    theirs = Stream(device)
    driver.answers["cuStreamGetPriority"] = -3
    engine = load(stream=theirs.handle, weights=weights)
    seen: dict[str, Any] = {}
    driver.hook = lambda name, given: seen.update({name: given})
    for _ in range(2):
        engine.prefill([1, 2])
    assert seen["cuGraphLaunch"][1] == theirs.handle
    assert seen["cuStreamBeginCapture"][0] != theirs.handle
    driver.hook = lambda name, given: None
    engine.close()
    theirs.close()
    device.close()


def test_nodes_have_the_priority_of_the_stream(driver: FakeDriver) -> None:
    device = Device(0)
    stream = Stream(device)
    driver.answers["cuStreamGetPriority"] = -3
    made: list[int] = []
    driver.hook = lambda name, given: (
        made.append(given[1]) if name == "cuStreamCreateWithPriority" else None
    )
    aside = Stream(device, beside=stream)
    flags: list[Any] = []
    driver.hook = lambda name, given: (
        flags.append(given[1].name) if name == "cuGraphInstantiate" else None
    )
    Graph(aside, lambda: None).close()
    assert made == [-3]
    assert flags == ["CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY"]
    for thing in (aside, stream, device):
        thing.close()


# Logits that lie elsewhere


def test_logits_that_cannot_be_moved_are_made_apart(
    driver: FakeDriver, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, counted, and not tried again; the body has a graph, and others all of theirs."""
    engine = load()
    engine.prefill([1, 2])
    held = [engine.prefill([1, 2])]
    driver.fail["cuGraphExecKernelNodeSetParams"] = (0, INVALID_VALUE)
    with caplog.at_level(logging.WARNING, "pyruntime"):
        held += [engine.prefill([1, 2]) for _ in range(3)]
    (record,) = caplog.records
    assert "cuGraphExecKernelNodeSetParams failed" in record.message
    assert "apart from its graph" in record.message
    stats = engine.stats()
    assert (stats.hits, stats.misses, stats.captures, stats.failures) == (4, 1, 2, 1)
    assert driver.held()["execs"] == stats.graphs == 1 and "graphs" not in driver.held()
    assert [w.captured for w in engine.warm([2, 3])] == [False, True]
    before = driver.calls["cuLaunchKernelEx"]
    held += [engine.prefill([1, 2, 3]) for _ in range(2)]
    assert driver.calls["cuLaunchKernelEx"] == before and engine.stats().hits == 6


def test_a_context_lost_by_an_update_is_remembered(driver: FakeDriver, load: Load) -> None:
    engine = load()
    engine.prefill([1, 2])
    held = engine.prefill([1, 2])
    driver.fail["cuGraphExecKernelNodeSetParams"] = (0, ILLEGAL_ADDRESS)
    with pytest.raises(CudaError, match="cuGraphExecKernelNodeSetParams"):
        engine.prefill([1, 2])
    with pytest.raises(EngineError, match="lost by an earlier failure: cuGraphExecKernelNodeSet"):
        engine.prefill([1, 2])
    del held


def test_a_node_that_cannot_be_read_is_no_graph(driver: FakeDriver, load: Load) -> None:
    engine = load()
    engine.prefill([1, 2])
    driver.fail["cuGraphKernelNodeGetParams"] = (0, INVALID_VALUE)
    engine.prefill([1, 2])
    assert (engine.stats().failures, engine.stats().graphs) == (1, 0)
    assert not {"graphs", "execs"} & driver.held().keys()


# How long


def test_graphs_go_with_the_passes_that_are_dropped(
    driver: FakeDriver, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "PASSES", 3)
    engine = load()
    for n in (1, 2, 3, 4, 5):
        for _ in range(2):
            engine.prefill([1] * n)
    assert driver.held()["execs"] == engine.stats().graphs == 3
    assert engine.stats().captures == 5
    engine.prefill([1] * 4)  # still there
    assert engine.stats().captures == 5
    engine.new_cache(100)  # longer tables, at other addresses
    assert "execs" not in driver.held() and engine.stats().graphs == 0
    for _ in range(2):
        engine.prefill([1] * 4)
    assert engine.stats().captures == 6
    engine.close()
    assert driver.held() == {}


def test_a_graph_that_cannot_be_destroyed_keeps_no_other(driver: FakeDriver, load: Load) -> None:
    driver.cuDevicePrimaryCtxRetain(0)  # somebody else's, so that the context stays
    engine = load()
    for n in (1, 1, 2, 2):
        engine.prefill([1] * n)
    driver.fail["cuGraphExecDestroy"] = (0, INVALID_VALUE)
    with pytest.raises(CudaError, match="cuGraphExecDestroy"):
        engine.close()
    assert driver.held() == {"execs": 1, "contexts": 1}


# What goes wrong


@WEIGHTS
@pytest.mark.parametrize(
    ("function", "calls", "code"),
    [
        ("cuStreamBeginCapture", 0, INVALID_VALUE), ("cuStreamEndCapture", 0, INVALID_VALUE),
        ("cuGraphInstantiate", 0, OUT_OF_MEMORY), ("cuMemGetInfo", 1, INVALID_VALUE),
        ("cuLaunchKernelEx", 0, INVALID_VALUE), ("cuLaunchKernelEx", 9, INVALID_VALUE),
    ],
)  # fmt: skip
def test_a_pass_that_cannot_be_captured_is_enqueued(
    driver: FakeDriver, load: Load, weights: str, function: str, calls: int, code: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It is said, counted, and not tried again; other lengths get their graphs."""
    engine = load(weights=weights)
    cache = engine.new_cache(64)
    engine.prefill([1, 2])
    driver.fail[function] = (calls, code)
    with caplog.at_level(logging.WARNING, "pyruntime"):
        engine.prefill([1, 2], cache=cache)
    (record,) = caplog.records
    assert f"{function} failed" in record.message and "without a graph" in record.message
    assert driver.fail == {} and driver.captures == []
    cache.length = 0
    for _ in range(2):
        engine.prefill([1, 2], cache=cache)
        cache.length = 0
    stats = engine.stats()
    assert (stats.hits, stats.misses, stats.captures, stats.failures) == (0, 4, 0, 1)
    for _ in range(2):
        engine.prefill([1, 2, 3])
    assert engine.stats().hits == 1
    cache.close()
    engine.close()
    assert driver.held() == {}


@WEIGHTS
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_capture_leaves_an_engine_that_works(
    driver: FakeDriver, load: Load, late: bool, weights: str
) -> None:
    """In its middle, or when all has been captured."""
    engine = load(weights=weights)
    engine.prefill([1, 2])

    def interrupt(name: str, given: tuple[Any, ...]) -> None:
        middle = driver.captures and len(driver.captures[0].calls) == 12
        if name == "cuStreamEndCapture" if late else middle:
            driver.hook = lambda name, given: None
            raise KeyboardInterrupt

    driver.hook = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.prefill([1, 2])
    assert driver.captures == [] and not {"graphs", "execs"} & driver.held().keys()
    engine.prefill([1, 2])
    assert engine.stats().captures == engine.stats().hits == 1


def test_an_interrupt_behind_a_capture_leaves_counts_that_are_right(
    driver: FakeDriver, load: Load
) -> None:
    """At the line after the one that has made the graph."""
    engine = load()
    engine.prefill([1, 2])
    recorded = engine.model._decoder.recorded(decoder.Shape(2, 2, 1, 1, fresh=True))

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is not Replayer._capture.__code__:
            return trace if event == "call" else None
        if event == "line" and recorded.graphs:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.prefill([1, 2])
    finally:
        sys.settrace(None)
    stats = engine.stats()
    assert (stats.graphs, stats.captures, driver.held()["execs"]) == (1, 1, 1)
    engine.prefill([1, 2])
    engine.new_cache(100)  # which drops it
    stats = engine.stats()
    assert (stats.graphs, stats.graph_bytes, stats.captures, stats.hits) == (0, 0, 1, 1)


@pytest.mark.parametrize("kind", ["arrays", "graphs", "execs"])
def test_what_the_driver_makes_during_an_interrupt_goes_back(
    driver: FakeDriver, load: Load, kind: str
) -> None:
    """It shows when the driver returns."""
    engine = load()
    engine.warm([2])  # makes its cache
    things = driver.live[kind]
    held = len(things)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is not api.make.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and len(things) > held:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.warm([4], logits="all")
    finally:
        sys.settrace(None)
    assert len(things) == held
    (warmed,) = engine.warm([4], logits="all")
    assert warmed.captured


def test_a_context_lost_by_a_capture_is_remembered(driver: FakeDriver, load: Load) -> None:
    engine = load()
    engine.prefill([1, 2])
    driver.fail["cuGraphInstantiate"] = (0, ILLEGAL_ADDRESS)
    with pytest.raises(CudaError, match="cuGraphInstantiate"):
        engine.prefill([1, 2])
    with pytest.raises(EngineError, match="lost by an earlier failure: cuGraphInstantiate failed"):
        engine.prefill([1, 2])


def test_a_replay_that_fails_is_named_and_the_next_one_works(
    driver: FakeDriver, load: Load
) -> None:
    engine = load()
    for _ in range(2):
        engine.prefill([1, 2])
    cache, ran, waits = engine.new_cache(8), engine.launches(), driver.calls["cuStreamSynchronize"]
    driver.fail["cuGraphLaunch"] = (0, INVALID_VALUE)
    with pytest.raises(CudaError, match="cuGraphLaunch failed"):
        engine.prefill([1, 2], cache=cache)
    assert cache.length == 0 and engine.launches() == ran
    assert driver.calls["cuStreamSynchronize"] == waits + 1  # for whatever it did start
    engine.prefill([1, 2], cache=cache)
    assert engine.stats().hits == 2 and engine.stats().misses == 1


@pytest.mark.parametrize("what", ["logits", "engine"])
def test_what_is_freed_in_a_capture_does_not_end_it(
    driver: FakeDriver, load: Load, what: str
) -> None:
    """As by the garbage collector, which comes when it likes, be it another engine with its graphs:
    captures are in the mode that allows it, to other threads, too."""
    engine, other = load(), load()
    for _ in range(2):
        other.prefill([1, 2])
    garbage: list[Any] = [engine.prefill([1, 2]) if what == "logits" else other]
    del other
    engine.prefill([1, 2, 3])
    destroyed, modes = driver.calls["cuGraphExecDestroy"], []

    def collect(name: str, given: tuple[Any, ...]) -> None:
        if name == "cuStreamBeginCapture":
            modes.append(given[1])
        if driver.captures and garbage:
            garbage.clear()

    driver.hook = collect
    engine.prefill([1, 2, 3])
    assert not garbage and engine.stats().captures == 1 and modes == [RELAXED]
    assert driver.calls["cuGraphExecDestroy"] - destroyed == (what == "engine")


def test_a_stream_that_does_not_come_back_is_no_graph(driver: FakeDriver) -> None:
    """What the fake driver asks of captures, as a real one does."""
    device = Device(0)
    origin, side = Stream(device), Stream(device)
    begun, ended, outside = (Event(device, timed=False) for _ in range(3))
    array = DeviceArray(device, (4,), np.uint8)
    outside.record(side)

    def fork(*, back: bool) -> None:
        begun.record(origin)
        side.wait(begun)
        side.fill(array.ptr, 0, 4)
        if back:
            ended.record(side)
            origin.wait(ended)

    with pytest.raises(CudaError, match="UNJOINED"):
        Graph(origin, lambda: fork(back=False))
    with pytest.raises(CudaError, match="ISOLATION"):
        Graph(origin, lambda: origin.wait(outside))
    Graph(origin, lambda: fork(back=True)).close()
    for thing in (array, begun, ended, outside, origin, side, device):
        thing.close()
    assert driver.held() == {}
