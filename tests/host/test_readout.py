"""What scores and means take of a device beside their kernels: copies, memory, time, and order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_driver import CAPTURED, FakeDriver, stream_of
from order import DEPENDENT

from pyruntime import Engine
from pyruntime.model.live import RESULT_BYTES

Load = Callable[..., Engine]
WEIGHTS = pytest.mark.parametrize("weights", ["fp16", "per-layer", "int8"])
TEXTS = [[1, 2, 3], [4] * 7, [5]], [[6, 7], [8], [9, 10, 11]]
TARGETS = 6


def calls_of(driver: FakeDriver, work: Callable[[], object]) -> list[tuple[str, tuple[Any, ...]]]:
    """The calls that `work` makes, the second time that it is done."""
    seen: list[tuple[str, tuple[Any, ...]]] = []
    work()
    driver.hook = lambda name, given: seen.append((name, given))
    work()
    driver.hook = lambda name, given: None
    return seen


def copied_back(calls: list[tuple[str, tuple[Any, ...]]]) -> int:
    """Bytes that came to the host."""
    return sum(given[2] for name, given in calls if name.startswith("cuMemcpyDtoH"))


@WEIGHTS
def test_a_score_brings_three_numbers_per_target(
    driver: FakeDriver, load: Load, weights: str
) -> None:
    """And the word that tells of an overflow; what it allocates is logits, but those of one row."""
    engine = load(weights=weights)
    for rows in (1, 4, 16):
        nbytes = rows * 4 * engine.config.vocab
        calls = calls_of(driver, lambda n=nbytes: engine.score(*TEXTS, logits_bytes=n))
        assert copied_back(calls) == 12 * TARGETS + RESULT_BYTES
        made = [given[0] for name, given in calls if name == "cuMemAlloc"]
        assert made == [min(rows, TARGETS) * 4 * engine.config.vocab][: rows > 1]


@WEIGHTS
@pytest.mark.parametrize("top", [1, 2, 30])
def test_no_logits_are_brought_for_the_likeliest_tokens(
    driver: FakeDriver, load: Load, weights: str, top: int
) -> None:
    engine = load(weights=weights)
    rows, tokens = [[0, 2], [6], [0]], [[5, -1], [-1], [7]]
    calls = calls_of(driver, lambda: engine.score_rows(TEXTS[0], rows, tokens, top=top))
    assert copied_back(calls) == 4 * (1 + 2 * top) * 4 + RESULT_BYTES


@WEIGHTS
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_vector_is_all_that_is_brought(
    driver: FakeDriver, load: Load, weights: str, pooling: Any
) -> None:
    engine = load(weights=weights)
    calls = calls_of(driver, lambda: engine.embed(TEXTS[0], pooling=pooling))
    assert copied_back(calls) == 4 * engine.config.hidden * len(TEXTS[0]) + RESULT_BYTES
    assert not [name for name, _ in calls if name == "cuMemAlloc"]


def test_seconds_of_the_gpu_count_scores(driver: FakeDriver, load: Load) -> None:
    """The time between events (a millisecond here) around all launches, for each part of the
    targets."""
    for answers, parts in ((2, 1), (9, 3)):
        engine = load(max_tokens=4)
        texts = [[1, 2]] * answers, [[3 + i] for i in range(answers)]
        # The pass is captured, and its graph begins with the first event.
        names = [name for name, _ in calls_of(driver, lambda t=texts, e=engine: e.score(*t))]
        events = ("cuEventRecordWithFlags", "cuEventRecord")
        work = [n for n in names if n in (*events, "cuLaunchKernelEx", "cuGraphLaunch")]
        assert (work[0], work[-1]) == events and work.count(events[0]) == 1
        assert work.count(events[1]) == 2 * parts - 1
        assert engine.model.gpu_seconds == pytest.approx(1e-3 * parts)


@WEIGHTS
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_what_overlaps_follows_a_launch(
    driver: FakeDriver, load: Load, weights: str, graphs: str
) -> None:
    """Not a copy, nor a graph, nor a wait for another stream."""
    engine = load(weights=weights, graphs=graphs)
    overlapping, nbytes = 0, 4 * 4 * engine.config.vocab  # of four rows at a time, which are copied
    for work in (
        lambda: engine.score(*TEXTS, logits_bytes=1),
        lambda: engine.score(*TEXTS, logits_bytes=nbytes),
        lambda: engine.embed(TEXTS[0]),
    ):
        last: dict[int, str] = {}
        for name, given in calls_of(driver, work):
            if name == "cuGraphLaunch":
                last[int(given[1])] = name
            elif name in CAPTURED:
                stream = stream_of(name, given)
                if name == "cuLaunchKernelEx":
                    config = given[0]
                    attributes = [a.id.name for a in config.attrs[: config.numAttrs]]
                    if DEPENDENT in attributes:
                        overlapping += 1
                        assert last.get(stream) == name
                last[stream] = name
    assert overlapping > 10
