"""Who is served when: packing, queues, time limits, clients that leave, and prompts that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from goldens import GOLDEN
from serving import NAME, need, serving

from pyruntime import Engine
from pyruntime.errors import NumericalError, OutOfMemoryError

need()

from pyruntime.serve.sequence import Sequence  # noqa: E402
from pyruntime.serve.texts import Texts  # noqa: E402
from pyruntime.serve.worker import Job, QueueFullError, StoppedError, Worker  # noqa: E402

ROWS = 32  # of a pass
PROMPTS = [[1, 2, 3], [7] * 11, [5], list(range(40, 62))]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    path = GOLDEN / "tiny-llama-q4_k_m.gguf"
    with Engine.load(path, device="cpu", max_tokens=ROWS) as engine:
        yield engine


class Gate:
    """Holds the engine before each call of a worker, and keeps the lengths of the prompts in it."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[int]] = []
        self.began = threading.Event()
        self.open = threading.Event()
        self.before: Callable[[list[list[int]]], object] = lambda prompts: None
        score_rows = engine.score_rows

        def held(prompts: Any, *given: Any, **options: Any) -> Any:
            self.began.set()
            assert self.open.wait(60)
            self.before([ids.tolist() for ids in prompts])
            self.calls.append([len(ids) for ids in prompts])
            return score_rows(prompts, *given, **options)

        monkeypatch.setattr(engine, "score_rows", held)


@pytest.fixture
def gate(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(engine, monkeypatch)
    yield gate
    gate.open.set()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def job(engine: Engine, *prompts: list[int], **options: Any) -> Job:
    texts = Texts(engine)
    return Job([Sequence(np.array(ids, np.int32), texts, **options) for ids in prompts])


# Packing


def test_what_waits_goes_into_the_next_call(engine: Engine, gate: Gate) -> None:
    worker = Worker(engine)
    jobs = [job(engine, [9])]
    worker.submit(jobs[0])
    assert gate.began.wait(30)
    for some in (PROMPTS[:2], PROMPTS[2:3], PROMPTS[3:], [[4] * 40]):  # 3 + 11 + 1, 22, 40 rows
        jobs.append(job(engine, *some))
        worker.submit(jobs[-1])
    gate.open.set()
    for each in jobs:
        each.done.result(30)
    worker.close()
    assert gate.calls == [[1], [3, 11, 1], [22], [40]]
    assert worker.counts.calls == 4 and worker.counts.sequences == 6
    for each in jobs:
        for s in each.sequences:
            assert s.tokens == engine.generate(s.prompt, 1) and s.finish == "length"


def test_continuations_go_on_beside_new_prompts(engine: Engine, gate: Gate) -> None:
    worker = Worker(engine)
    first, second = job(engine, *PROMPTS[:2], max_tokens=6), job(engine, [8, 8, 8], max_tokens=3)
    scored = job(engine, PROMPTS[3], scored=True, max_tokens=0)
    for each in (first, second, scored):
        worker.submit(each)
    gate.open.set()
    for each in (first, second, scored):
        each.done.result(30)
    worker.close()
    for each in (first, second):
        for s in each.sequences:
            assert s.tokens == engine.generate(s.prompt, s.max_tokens)
    (s,) = scored.sequences
    (expected,) = engine.score([s.prompt[:1]], [s.prompt[1:]])
    np.testing.assert_allclose(s.scores.log_probs, expected.log_probs, atol=1e-5)


def test_caches_have_room_for_one_after_the_other(engine: Engine, gate: Gate) -> None:
    gate.open.set()
    worker = Worker(engine, cache_tokens=20)
    jobs = [job(engine, [n + 1] * 10, max_tokens=4) for n in range(3)]
    for each in jobs:
        worker.submit(each)
    for each in jobs:
        each.done.result(30)
    worker.close()
    assert gate.calls == [[10], [1], [1], [1]] * 3
    assert all(s.cache is None for each in jobs for s in each.sequences)


@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_logits_are_made_few_rows_at_a_time(engine: Engine, rows: int, max_tokens: int) -> None:
    worker = Worker(engine, logits_bytes=4 * engine.config.vocab * rows)
    asked = job(engine, *PROMPTS, scored=True, top=3, max_tokens=max_tokens)
    worker.submit(asked)
    asked.done.result(60)
    worker.close()
    for s in asked.sequences:
        whole = [*s.prompt.tolist(), *s.tokens]
        assert s.tokens == engine.generate(s.prompt, max_tokens)
        wide = np.asarray(engine.prefill(whole, logits="all").logits, np.float64)
        wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
        at = np.arange(len(whole) - 1)
        np.testing.assert_allclose(s.scores.log_probs, wide[at, whole[1:]], atol=1e-4)
        np.testing.assert_allclose(s.scores.values, -np.sort(-wide[at])[:, :3], atol=1e-4)


# Limits


def test_a_full_queue(engine: Engine, gate: Gate) -> None:
    fields = {"model": NAME, "prompt": [1, 2], "max_tokens": 1}
    with serving(engine, max_queue=2) as (client, worker), ThreadPoolExecutor() as pool:
        asked = [pool.submit(client.call, "/v1/completions", fields) for _ in range(2)]
        until(lambda: worker.record()["open"] == 2)
        status, headers, record = client.call("/v1/completions", fields)
        assert status == 429 and headers["retry-after"] == "1"
        assert record["error"]["code"] == "queue_full" and "--max-queue" in str(record)
        assert client.call("/health")[0] == 200
        gate.open.set()
        assert [future.result()[0] for future in asked] == [200, 200]
        assert client.call("/v1/completions", fields)[0] == 200
        assert worker.counts.refused == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_limit(engine: Engine, gate: Gate, stream: bool) -> None:
    fields = {"model": NAME, "prompt": [1, 2], "max_tokens": 3, "stream": stream}
    with serving(engine, seconds=1) as (client, worker):
        status, _, record = client.call("/v1/completions", fields)
        assert status == (200 if stream else 504) and "within 1 s (--timeout)" in str(record)
        until(lambda: worker.record()["dropped"] == 1)
        gate.open.set()
    assert gate.calls == [[2]], "what was given up is not continued"


@pytest.mark.parametrize("stream", [False, True])
def test_the_work_of_a_client_that_leaves_is_dropped(
    engine: Engine, gate: Gate, stream: bool
) -> None:
    fields = {"model": NAME, "prompt": [1, 2], "max_tokens": 50, "stream": stream}
    with serving(engine) as (client, worker):
        connections = [client.open("/v1/completions", fields) for _ in range(3)]
        until(lambda: worker.record()["open"] == 3)
        for connection in connections[:2]:
            if stream:
                connection.getresponse().close()
            connection.close()
        until(lambda: worker.record()["dropped"] == 2)
        gate.open.set()
        response = connections[2].getresponse()
        assert response.status == 200 and response.read()
        connections[2].close()
        until(lambda: worker.record()["open"] == 0)
    assert len(gate.calls) <= 51 and worker.counts.answered == 1


def test_a_job_that_was_dropped_makes_room(engine: Engine, gate: Gate) -> None:
    worker = Worker(engine, max_queue=1)
    first, second = job(engine, [1]), job(engine, [2])
    worker.submit(first)
    with pytest.raises(QueueFullError, match="1 requests wait"):
        worker.submit(second)
    worker.drop(first)
    worker.submit(second)
    gate.open.set()
    second.done.result(30)
    worker.close()
    assert not first.done.done() and worker.counts.dropped == 1


# Failures


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NumericalError("made up"), 500),
        (OutOfMemoryError("made up"), 503),
        (KeyError("made up"), 500),
    ],
)
def test_a_prompt_that_fails_fails_alone(
    engine: Engine, gate: Gate, error: Exception, status: int
) -> None:
    def fail(prompts: list[list[int]]) -> None:
        if [6, 6] in prompts:
            raise error

    gate.before = fail
    with serving(engine) as (client, worker), ThreadPoolExecutor() as pool:
        prompts = [[1, 2], [6, 6], [3, 4]]
        fields = [{"model": NAME, "prompt": ids, "max_tokens": 1} for ids in prompts]
        asked = [pool.submit(client.call, "/v1/completions", f) for f in fields]
        until(lambda: worker.record()["open"] == 3)
        gate.open.set()
        assert [future.result()[0] for future in asked] == [200, status, 200]
        assert "made up" in asked[1].result()[2]["error"]["message"]
        assert worker.counts.failed == 1 and worker.counts.answered == 2


def test_a_stream_that_fails_says_so(engine: Engine, gate: Gate) -> None:
    def fail(prompts: list[list[int]]) -> None:
        if len(gate.calls) == 2:
            raise NumericalError("made up")

    gate.before = fail
    gate.open.set()
    with serving(engine) as (client, _):
        fields = {"model": NAME, "prompt": [1, 2], "max_tokens": 5, "stream": True}
        events = client.call("/v1/completions", fields)[2].split("\n\n")
    assert len(events) == 4 and "made up" in events[2] and "[DONE]" not in events[2]


def test_a_worker_that_stops_lets_nobody_wait(
    engine: Engine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(Sequence, "take", lambda *arguments: 1 // 0)
    with serving(engine) as (client, worker):
        assert client.call("/health")[0] == 200
        fields = {"model": NAME, "prompt": [1, 2], "max_tokens": 1}
        gate.open.set()
        status, _, record = client.call("/v1/completions", fields)
        assert status == 503 and "worker has stopped: ZeroDivisionError" in str(record)
        assert client.call("/health")[0] == 503
        assert client.call("/v1/completions", fields)[0] == 503
    assert len(failed) == 1 and worker.record()["open"] == 0


# The end


def test_what_was_taken_is_answered_before_the_end(engine: Engine, gate: Gate) -> None:
    worker = Worker(engine)
    jobs = [job(engine, [n + 1, 2], max_tokens=3) for n in range(4)]
    for each in jobs:
        worker.submit(each)
    assert gate.began.wait(30)
    closing = threading.Thread(target=worker.close)
    closing.start()
    until(lambda: worker._closing)
    with pytest.raises(StoppedError, match="shutting down"):
        worker.submit(job(engine, [1]))
    gate.open.set()
    closing.join(30)
    assert all(len(s.tokens) == 3 for each in jobs for s in each.sequences)
    worker.close()


def test_many_clients_at_once(engine: Engine) -> None:
    """All get what they would get alone."""
    random = np.random.default_rng(5)
    prompts = [random.integers(0, engine.config.vocab, n).tolist() for n in range(1, 41)]
    expected = [engine.generate(ids, 3) for ids in prompts]
    with serving(engine) as (client, worker), ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda ids: client.choice(ids, max_tokens=3), prompts))
        assert [c["text"] for c in found] == ["".join(f" {t}" for t in ids) for ids in expected]
        assert worker.counts.answered == 40 and worker.counts.calls < 120
