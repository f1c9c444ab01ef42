"""What the host does for a prefill, on a GPU: microseconds per pass, enqueued and replayed.

    python bench/host.py [--nt 1 16 128 512] [--weights fp16|per-layer] [--model FILE] [--save OUT]

For each length, after a rest ("burst": the host's caches have turned to other things by then, too)
and back to back ("sustained"), for both ways of `graphs`, one after the other in time:

before      until the first enqueue: ids are checked, the turn is taken
allocation  making the array for the logits: its memory is spare, or comes from the driver
enqueue     the rest until the host waits
wait        until the stream is done
after       from there until `prefill` returns
drop        of the result, whose logits are spare then, or freed

and, beside these, cpu: CPU time of the calling thread in `prefill`, the wait included (the driver
may spin there), and without it; gpu, wall: milliseconds, as `Result.timings` has them; what making
the graph took. Medians are shown; rounds of both ways alternate.

So each way finds the host's caches full of the other one's work. What a replay takes of the CPU
where replays follow one another, as in a service at work, is measured by itself ("in a row"). In
the milliseconds that such a replay waits, the caches turn to other things, too. So there is the
same of a model of two small layers ("hot"): the GPU is done with it at once, and it is with small
models that the host counts. In turn with the replays there are the same calls of the driver by
themselves: what is above that is ours. As a machine may be slow as a whole, at times, spells of hot
replays are spread over some seconds, the lowest tenth is shown besides the median, and a fixed
piece of Python (`yardstick`) is timed with each spell.

Apart from these, as watching takes time: how long each function of the driver takes in a prefill,
also where the result before is held, so that the logits lie elsewhere; what a launch takes, as a
bare call of the driver with all arguments made before, and through `Program.enqueue`; and what many
calls in a row allocate, on the device and on the host. The exit code is 1 if logits differ between
the ways or if such calls allocate device memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from pyruntime import Engine
from pyruntime.driver import api
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.measure.launches import gpu_model
from pyruntime.measure.records import identity, save_record
from pyruntime.measure.series import REGIMES

LENGTHS = (1, 16, 128, 512)
ROUNDS, CALLS = 21, 1000
ROW, SPELL, WARM_UP = 200, 20, 20  # replays in a row, those of a spell, and those before
HOT, PAUSE = 1000, 0.1  # hot replays, and seconds before each of their spells
WAYS = ("off", "auto")
MEMORY = "cuMemAlloc", "cuMemFree"  # calls that no replay should need
IN_A_ROW = ("host_us", "driver_us", "wait_us")
PARTS = ("before_us", "allocation_us", "enqueue_us", "wait_us", "after_us", "drop_us")
BESIDE = ("cpu_us", "cpu_without_wait_us", "gpu_ms", "wall_ms")


class Watch:
    """Within its block it times waits for streams, and the making of arrays.

    Attributes:
        began, ended: of the last wait (perf_counter). cpu: seconds of the thread in it.
        allocation: seconds that arrays took since this was set to 0.
    """

    def __init__(self) -> None:
        self.began = self.ended = self.cpu = self.allocation = 0.0
        self._patches = ExitStack()

    def __enter__(self) -> Watch:
        wait: Callable[[Stream, float | None], bool] = Stream.finish
        make: Callable[..., None] = DeviceArray.__init__

        def timed_wait(stream: Stream, seconds: float | None = None) -> bool:
            self.began, before = time.perf_counter(), time.thread_time()
            done = wait(stream, seconds)
            self.cpu, self.ended = time.thread_time() - before, time.perf_counter()
            return done

        def timed_make(array: DeviceArray, *args: Any, **options: Any) -> None:
            began = time.perf_counter()
            make(array, *args, **options)
            self.allocation += time.perf_counter() - began

        self._patches.enter_context(patch.object(Stream, "finish", timed_wait))
        self._patches.enter_context(patch.object(DeviceArray, "__init__", timed_make))
        return self

    def __exit__(self, *raised: object) -> None:
        self._patches.close()


class Timed:
    """The module of the driver.

    Attributes:
        spent: the seconds of each call, by function.
        made: the calls, in their order: the name of the function, itself, and what it was given.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.spent: dict[str, list[float]] = {}
        self.made: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        thing = getattr(self._driver, name)
        if not (name.startswith("cu") and name[2].isupper()):
            return thing

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            answer = thing(*args)
            self.spent.setdefault(name, []).append(time.perf_counter() - began)
            self.made.append((name, thing, args))
            return answer

        setattr(self, name, timed)
        return timed


@contextmanager
def timed_driver() -> Iterator[Timed]:
    timed = Timed(api.bindings())
    with patch.object(api, "_driver", timed):
        yield timed


def call(engine: Engine, ids: Any, watch: Watch, rest: float) -> dict[str, float]:
    if rest:
        time.sleep(rest)
    watch.allocation = 0.0
    started, cpu = time.perf_counter(), time.thread_time()
    result = engine.prefill(ids)
    cpu = time.thread_time() - cpu
    returned = time.perf_counter()
    timings, allocation = result.timings, watch.allocation
    dropped = time.perf_counter()
    del result
    gone = time.perf_counter()
    first, _ = gpu_model(engine).host_span
    return {
        "before_us": 1e6 * (first - started),
        "allocation_us": 1e6 * allocation,
        "enqueue_us": 1e6 * (watch.began - first - allocation),
        "wait_us": 1e6 * (watch.ended - watch.began),
        "after_us": 1e6 * (returned - watch.ended),
        "drop_us": 1e6 * (gone - dropped),
        "cpu_us": 1e6 * cpu,
        "cpu_without_wait_us": 1e6 * (cpu - watch.cpu),
        "gpu_ms": 1e3 * timings["gpu"],
        "wall_ms": 1e3 * timings["wall"],
    }


def in_a_row(engine: Engine, ids: Any, calls: int, pause: float = 0.0) -> dict[str, Any]:
    """What so many replays, one right after the other, take the host, each result dropped at once.

    They come in spells, in turn with spells of the same calls of the driver without anything else.

    Returns: for each call `wait_us`, until the stream is done, and `host_us`, all the rest of it;
    `cpu_us`: CPU time of the thread for a call on average, the waits included (the driver spins);
    `driver_us`: of the calls of the driver by themselves, but for the wait; `yardstick_us`: of a
    fixed piece of Python, once for each spell.
    """
    wait: Callable[[Stream, float | None], bool] = Stream.finish
    found: dict[str, Any] = {name: [] for name in (*IN_A_ROW, "yardstick_us")} | {"cpu_us": 0.0}

    def timed(stream: Stream, seconds: float | None = None) -> bool:
        began = time.perf_counter()
        done = wait(stream, seconds)
        found["wait_us"].append(1e6 * (time.perf_counter() - began))
        return done

    for _ in range(WARM_UP):
        engine.prefill(ids)
    with timed_driver() as watched:
        engine.prefill(ids)
    for spell in range(0, calls, SPELL):
        time.sleep(pause)
        found["yardstick_us"].append(1e6 * min(yardstick() for _ in range(5)))
        engine.prefill(ids)
        with patch.object(Stream, "finish", timed):
            cpu = time.thread_time()
            for at in range(spell, spell + SPELL):
                began = time.perf_counter()
                engine.prefill(ids)
                ended = time.perf_counter()
                found["host_us"].append(1e6 * (ended - began) - found["wait_us"][at])
            found["cpu_us"] += 1e6 * (time.thread_time() - cpu) / calls
        found["driver_us"] += [1e6 * bare(watched) for _ in range(SPELL)]
    return found


def yardstick() -> float:
    """Seconds of a piece of Python that needs nothing but a processor."""
    began, total = time.perf_counter(), 0
    for i in range(200):
        total += len(str(i))
    return time.perf_counter() - began


def bare(watched: Timed) -> float:
    """Makes the calls that were watched again; the seconds that they take but for the wait."""
    calls = [call for call in watched.made if not call[0].startswith(MEMORY)]
    waited, began = 0.0, time.perf_counter()
    for name, function, args in calls:
        if name == "cuStreamSynchronize":
            since = time.perf_counter()
            function(*args)
            waited += time.perf_counter() - since
        else:
            function(*args)
    return time.perf_counter() - began - waited


def hot(path: Path, prompts: dict[int, Any], weights: str) -> dict[str, Any]:
    """`in_a_row` of a small model in `path`, by length."""
    longest = max(prompts)
    with Engine.load(
        path, device="cuda:0", weights=weights, max_tokens=longest, kv_tokens=longest
    ) as engine:
        vocab = engine.config.vocab
        return {f"nt{nt}": in_a_row(engine, x % vocab, HOT, PAUSE) for nt, x in prompts.items()}


def driver_calls(
    engine: Engine, ids: Any, rounds: int, *, held: bool = False
) -> dict[str, dict[str, Any]]:
    """Of a prefill and the drop of a result: calls by function, and us of all together.

    Back to back. The result is dropped before the next prefill, or `held` until that is over.
    """
    found: dict[str, dict[str, Any]] = {}
    result = None
    with timed_driver() as timed:
        for number in range(-2, rounds):
            timed.spent.clear()
            if not held:
                result = None
            result = engine.prefill(ids)
            if number < 0:
                continue  # until there is memory for the logits
            for name, seconds in timed.spent.items():
                row = found.setdefault(name, {"calls": [], "us": []})
                row["calls"].append(len(seconds))
                row["us"].append(1e6 * sum(seconds))
        del result
    return found


def launch_costs(engine: Engine, ids: Any, rounds: int) -> dict[str, list[float]]:
    """Microseconds that a launch takes the host, on average over those of a prefill."""
    model = gpu_model(engine)
    with model.staged(ids, engine.new_cache(len(ids))) as (launches, stream):
        program, launch_kernel = Program(launches), api.bindings().cuLaunchKernelEx

        def bare() -> None:
            for arguments in made:
                launch_kernel(*arguments)

        def enqueue() -> None:
            program.enqueue(stream, overlap=model.overlap)

        enqueue()
        stream.synchronize()
        made = [
            (x.overlapping if i and model.overlap else x.config, x.function, x.arguments, 0)
            for i, x in enumerate(launches)
        ]
        ways, us = {"bare": bare, "program": enqueue}, {"bare": [], "program": []}
        for _ in range(rounds):
            for name, run in ways.items():
                began = time.perf_counter()
                run()
                us[name].append(1e6 * (time.perf_counter() - began) / len(made))
                stream.synchronize()
    return us


def steady(engine: Engine, ids: Any, calls: int) -> dict[str, Any]:
    """What so many calls in a row allocate, each result living until the next one is there.

    `growth_bytes`: of Python's memory, in as many calls again.
    """
    for _ in range(4):
        result = engine.prefill(ids)
    with timed_driver() as timed:
        for _ in range(calls):
            result = engine.prefill(ids)
    made = {name: len(seconds) for name, seconds in timed.spent.items()}
    tracemalloc.start()
    for count in (4, calls):
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(count):
            result = engine.prefill(ids)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    memory = {n: count for n, count in made.items() if n.startswith(MEMORY)}
    return {"calls": calls, "device_memory_calls": memory, "growth_bytes": after - before}


def measure(
    path: Path,
    small: Path,
    lengths: list[int],
    weights: str,
    rounds: int,
    calls: int,
    commit: str | None,
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    options: dict[str, Any] = {
        "device": "cuda:0", "weights": weights, "max_tokens": max(lengths),
        "kv_tokens": max(lengths),
    }  # fmt: skip
    engines = {way: Engine.load(path, graphs=way, **options) for way in WAYS}
    replaying = engines["auto"]
    random = np.random.default_rng(0)
    prompts = {nt: random.integers(0, replaying.config.vocab, nt) for nt in lengths}
    for nt, ids in prompts.items():
        before = replaying.stats()
        for engine in engines.values():
            for _ in range(4):
                engine.prefill(ids)
        after = replaying.stats()
        samples: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
        with Watch() as watch:
            for name, regime in REGIMES.items():
                for _ in range(rounds):
                    for way, engine in engines.items():
                        samples[name, way].append(call(engine, ids, watch, regime.rest))
        same = [np.asarray(engine.prefill(ids).logits) for engine in engines.values()]
        rows[f"nt{nt}"] = {
            "samples": [
                {"regime": name, "graphs": way} | {k: [x[k] for x in found] for k in found[0]}
                for (name, way), found in samples.items()
            ],
            "in_a_row": in_a_row(replaying, ids, ROW),
            "driver": driver_calls(replaying, ids, rounds),
            "driver_held": driver_calls(replaying, ids, rounds, held=True),
            "launches": len(gpu_model(replaying).recorded(nt)),
            "capture_ms": after.capture_ms - before.capture_ms,
            "graph_bytes": after.graph_bytes - before.graph_bytes,
            "bit_equal": bool(np.array_equal(*same)),
        }
    model, longest = gpu_model(replaying), max(lengths)
    record = identity(model.device, model.recorded(longest), commit) | {
        "weights": weights,
        "lengths": rows,
        "hot": hot(small, prompts, weights),
        "steady": steady(replaying, prompts[min(lengths)], calls),
        "stats": vars(replaying.stats()),
    }
    if weights == "fp16":  # others run on two streams
        record["launch_us"] = launch_costs(engines["off"], prompts[longest], rounds)
    for engine in engines.values():
        engine.close()
    return record


def row_text(found: dict[str, Any]) -> str:
    """What `in_a_row` found."""
    host, driver, wait = (np.percentile(found[name], (50, 10)) for name in IN_A_ROW)
    fast, slow = np.percentile(found["yardstick_us"], (10, 90))
    return (
        f"{len(found['host_us'])} replays in a row: {host[0]:.1f} us of the host for one (lowest "
        f"tenth {host[1]:.1f}), the driver's calls alone {driver[0]:.1f} ({driver[1]:.1f}); "
        f"{wait[0]:.1f} us of waiting, {found['cpu_us']:.1f} us of CPU with that; the yardstick "
        f"{fast:.1f} to {slow:.1f} us"
    )


def report(record: dict[str, Any]) -> None:
    print(f"{record['device']}, weights {record['weights']}")
    for names in (PARTS, BESIDE):
        print(f"{'':22}" + "".join(f"{name:>21}" for name in names))
        for length, row in record["lengths"].items():
            for found in row["samples"]:
                medians = "".join(f"{statistics.median(found[name]):21.2f}" for name in names)
                print(f"{length:6} {found['regime']:9} {found['graphs']:5}{medians}")
    for length, row in record["lengths"].items():
        print(f"{length}: {row_text(row['in_a_row'])}")
        print(f"{length}, a small model, hot: {row_text(record['hot'][length])}")
        print(
            f"{length}: {row['launches']} launches, capture {row['capture_ms']:.2f} ms, "
            f"{row['graph_bytes']:,} bytes, bit-equal: {row['bit_equal']}; a replay's driver "
            "calls, and with the result before held:"
        )
        for name in row["driver"] | row["driver_held"]:
            line = f"  {name:<32}"
            for found in (row["driver"].get(name), row["driver_held"].get(name)):
                calls, us = (statistics.median(found[x]) if found else 0 for x in ("calls", "us"))
                line += f"{calls:>5.0f}{us:>10.2f} us"
            print(line)
    if costs := record.get("launch_us"):
        bare, ours = (statistics.median(costs[name]) for name in ("bare", "program"))
        print(f"a launch: {bare:.2f} us bare, {ours:.2f} us by Program.enqueue, {ours / bare:.2f}x")
    found = record["steady"]
    print(
        f"{found['calls']} calls in a row: device memory {found['device_memory_calls'] or 'kept'}, "
        f"Python's grew by {found['growth_bytes']:,} bytes"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--commit", help="recorded instead of asking git")
    parser.add_argument("--model", type=Path, help="a Qwen2.5-7B shaped file, instead of a new one")
    parser.add_argument("--weights", default="fp16", help="fp16 (default) or per-layer")
    parser.add_argument("--nt", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--calls", type=int, default=CALLS, help="in a row")
    args = parser.parse_args()
    from pyruntime.tools.synth import main as synth

    with tempfile.TemporaryDirectory() as folder:
        small, path = Path(folder, "tiny.gguf"), args.model or Path(folder, "qwen2.5-7b.gguf")
        with redirect_stdout(sys.stderr):
            synth(["tiny", str(small)])
            if args.model is None:
                synth(["qwen2.5-7b", str(path)])
        record = measure(path, small, args.nt, args.weights, args.rounds, args.calls, args.commit)
    if args.save:
        save_record(args.save, "host", record)
    if args.json:
        print(json.dumps(record))
    else:
        report(record)
    equal = all(row["bit_equal"] for row in record["lengths"].values())
    return 0 if equal and not record["steady"]["device_memory_calls"] else 1


if __name__ == "__main__":
    sys.exit(main())
