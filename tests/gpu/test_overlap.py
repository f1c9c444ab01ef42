"""Kernels that start under the tail of the one before (cuda/core/spec.cuh): same bits, sooner."""

from __future__ import annotations

import statistics
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import SMOLLM2, model_path
from numpy.typing import NDArray

from pyruntime import Engine
from pyruntime.cli import main
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.measure.inplace import time_in_place
from pyruntime.measure.records import load_record
from pyruntime.model.live import NO_OVERFLOW
from pyruntime.ops.gemm import gemm
from pyruntime.ops.norm import norm

WIDTH = 512


class Chain:
    """x += down(swiglu(norm(x))) once for every row of both GEMMs: short kernels, each of which
    reads what the one before wrote, and writes what an earlier one read."""

    def __init__(self, gpu: Any, rng: np.random.Generator, live: int, rows: int) -> None:
        def normal(*shape: int) -> NDArray[np.float32]:
            return rng.standard_normal(shape, np.float32)

        self._gpu = gpu
        self._start = normal(rows, WIDTH)
        self._x = gpu.upload(self._start)
        y, h = (gpu.empty((rows, WIDTH), np.float16) for _ in range(2))
        count = gpu.upload(np.array([live], np.int32))
        self._overflow = gpu.upload(np.array([NO_OVERFLOW], np.int32))
        one = gpu.upload(np.ones(WIDTH, np.float32))
        up, down = (
            [gpu.upload((normal(n, WIDTH) / WIDTH**0.5).astype(np.float16)) for _ in range(3)]
            for n in (2 * WIDTH, WIDTH)
        )
        kernels = gpu.library.family("gemm")
        ups, downs = (
            [k for k in kernels if k.spec.tile["epilogue"] == e] for e in ("swiglu", "add")
        )
        self.program = Program()
        shared: dict[str, Any] = {"rows": count, "max_rows": rows}
        pairs = islice(zip(cycle(ups), cycle(downs), strict=False), max(len(ups), len(downs)))
        for i, (first, second) in enumerate(pairs):
            norm(
                self.program, gpu.library, x=self._x, weight=one, y=y, overflow=self._overflow,
                site=0, eps=1e-6, **shared,
            )  # fmt: skip
            gemm(
                self.program, gpu.library, a=y, w=up[i % 3], c=h, epilogue="swiglu", kernel=first,
                overflow=self._overflow, site=1, **shared,
            )  # fmt: skip
            gemm(
                self.program, gpu.library, a=h, w=down[i % 3], c=self._x, epilogue="add",
                kernel=second, **shared,
            )  # fmt: skip

    def run(self, *, overlap: bool) -> NDArray[np.float32]:
        """x at the end."""
        x: DeviceArray = self._x
        x.upload(self._start)
        with self._gpu.device.current():
            self.program.run(self._gpu.stream, overlap=overlap)
            self._gpu.stream.synchronize()
        assert self._gpu.download(self._overflow)[0] == NO_OVERFLOW
        end: NDArray[np.float32] = self._gpu.download(x)
        return end


@pytest.mark.smoke
def test_a_chain_of_every_gemm_row(gpu: Any, rng: np.random.Generator) -> None:
    chain = Chain(gpu, rng, 5, 130)
    apart = chain.run(overlap=False)
    assert np.isfinite(apart).all() and not np.array_equal(apart[:5], chain._start[:5])
    assert np.array_equal(apart[5:], chain._start[5:])
    assert np.array_equal(chain.run(overlap=True), apart)


@pytest.mark.parametrize(("live", "rows"), [(1, 1), (3, 700), (129, 200), (700, 700)])
def test_chains_give_the_same_bits_every_time(
    gpu: Any, rng: np.random.Generator, live: int, rows: int
) -> None:
    """Most blocks have nothing to do where few rows are live: they, too, have to wait."""
    chain = Chain(gpu, rng, live, rows)
    apart = chain.run(overlap=False)
    wrong = [i for i in range(200) if not np.array_equal(chain.run(overlap=True), apart)]
    assert not wrong


@pytest.mark.parametrize(
    "stem", [SMOLLM2, "tiny-qwen3-q6_k", "tiny-qwen2-q8_0", "tiny-gemma2-q8_0"]
)
def test_prefills_give_the_same_bits_every_time(stem: str) -> None:
    def load(overlap: str) -> Engine:
        return Engine.load(
            model_path(stem), device="cuda:0", max_tokens=1024, kv_tokens=1024, overlap=overlap
        )

    with load("auto") as engine, load("off") as apart:
        assert engine.model.overlap and not apart.model.overlap
        lengths = [n for n in (1, 250, 2, 129, 777, 17, 64) if n <= engine.config.context_length]
        ids = np.random.default_rng(0).integers(0, engine.config.vocab, max(lengths))

        def logits(engine: Engine, nt: int, which: Any) -> NDArray[np.float32]:
            return np.asarray(engine.prefill(ids[:nt], logits=which).logits)

        cases = [(nt, which) for nt in lengths for which in ("last", "all")]
        want = {case: logits(apart, *case) for case in cases}
        # The length changes with every call: kernels read it before they wait for one another.
        wrong = [
            (run, case)
            for run in range(20)
            for case in cases
            if not np.array_equal(logits(engine, *case), want[case])
        ]
        assert engine.generate(ids[:40], 24) == apart.generate(ids[:40], 24)
    assert not wrong


def test_short_kernels_take_less_time_where_they_overlap(
    gpu: Any, rng: np.random.Generator
) -> None:
    if gpu.device.compute_capability < (9, 0):
        pytest.skip("kernels overlap from sm_90 on")
    chain = Chain(gpu, rng, 64, 64)
    with gpu.device.current():
        timed = time_in_place(chain.program.launches, gpu.stream, rounds=9, rest=0.01, overlap=True)
    together, apart = statistics.median(timed.overlapped), statistics.median(timed.busy)
    count = len(chain.program.launches)
    print(f"{count} launches: {apart:.3f} ms apart, {together:.3f} overlapped")
    assert together < apart


def test_ab_of_overlapping_launches(tmp_path: Path) -> None:
    path = tmp_path / "ab.json"
    model = str(model_path("tiny-qwen2-q4_k_m"))
    main(["ab", "overlap=off", "default", model, "--nt", "200", "--save", str(path)])
    record = load_record(path, "ab")
    assert record["identical_code"] and record["faults"] == []
    assert record["gates"][0]["figures"]["bitwise"] and record["gates"][1]["passed"]
