"""The benchmark of the host runs from end to end on a fake driver; its times are not looked at."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver
from goldens import GOLDEN

from pyruntime.driver.allocation import Spare
from pyruntime.measure.records import load_record
from pyruntime.measure.series import Regime

ROOT = Path(__file__).parents[2]
PATH = GOLDEN / "tiny-qwen2-q8_0.gguf"


@pytest.fixture
def bench(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import host

    monkeypatch.setattr(host, "REGIMES", {name: Regime(0.0, 0.0) for name in host.REGIMES})
    monkeypatch.setattr(host, "PAUSE", 0.0)
    return host


def run(bench: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> int:
    options = ["--model", str(PATH), "--nt", "1", "3", "--rounds", "2", "--calls", "30"]
    options += ["--save", str(out), "--commit", "abc", *more]
    monkeypatch.setattr(sys, "argv", ["host.py", *options])
    return int(bench.main())


@pytest.mark.parametrize("weights", ["fp16", "per-layer"])
@pytest.mark.parametrize("as_json", [False, True])
def test_host_bench(
    driver: FakeDriver,
    bench: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    as_json: bool,
    weights: str,
) -> None:
    out = tmp_path / "host.json"
    more = ["--weights", weights, *(["--json"] if as_json else [])]
    assert run(bench, monkeypatch, out, *more) == 0
    record = load_record(out, "host")
    printed = capsys.readouterr().out
    if as_json:
        assert {"schema": "pyruntime.host/1", **json.loads(printed)} == record
    else:
        assert (
            "nt3    sustained auto" in printed
            and "30 calls in a row: device memory kept" in printed
            and "nt3, a small model, hot: 1000 replays in a row: " in printed
        )
    assert record["lengths"].keys() == record["hot"].keys() == {"nt1", "nt3"}
    rows = [(row["in_a_row"], bench.ROW) for row in record["lengths"].values()]
    for row, calls in rows + [(row, bench.HOT) for row in record["hot"].values()]:
        times = [row[name] for name in bench.IN_A_ROW]
        assert np.shape(times) == (3, calls)
        assert len(row["yardstick_us"]) == calls / bench.SPELL
        assert np.min(times) > 0 < min(row["cpu_us"], *row["yardstick_us"])
    for row in record["lengths"].values():
        ways = [(found["regime"], found["graphs"]) for found in row["samples"]]
        assert ways == list(product(("burst", "sustained"), bench.WAYS))
        for found in row["samples"]:
            values = np.array([found[name] for name in (*bench.PARTS, *bench.BESIDE)])
            assert values.shape == (10, 2) and (values >= 0).all()
            parts = values[: len(bench.PARTS)].sum(0)
            assert (1e3 * np.array(found["wall_ms"]) < parts).all()
        assert row["driver"]["cuGraphLaunch"]["calls"] == [1, 1]
        assert "cuGraphExecKernelNodeSetParams" not in row["driver"]
        if weights == "fp16":
            assert row["driver_held"]["cuGraphExecKernelNodeSetParams"]["calls"] == [1, 1]
    assert record["steady"]["device_memory_calls"] == {}
    assert abs(record["steady"]["growth_bytes"]) < 30 * 100
    assert ("launch_us" in record) == (weights == "fp16")
    assert any(name.startswith("gemm_") for name in record["kernels"])
    assert driver.held() == {}


def test_calls_that_allocate_are_a_finding(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Spare, "put", lambda spare, address, nbytes: False)
    assert run(bench, monkeypatch, tmp_path / "host.json") == 1
    assert "device memory {'cuMemAlloc': 30, 'cuMemFree': 30}" in capsys.readouterr().out
