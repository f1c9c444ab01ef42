"""The benchmark of weights "int8" runs from end to end on a fake driver; its times are made up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver
from goldens import GOLDEN

from pyruntime.measure.launches import describe
from pyruntime.measure.records import load_record
from pyruntime.measure.series import Regime
from pyruntime.model import int8_layers
from pyruntime.model.int8_layers import Int8Options

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("as_json", [False, True])
def test_int8_bench(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    as_json: bool,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import int8 as bench

    def times(engine: Any, ids: Any, rounds: int) -> dict[str, float]:
        return dict.fromkeys((launch[0] for launch in describe(engine, ids)["launches"]), 0.1)

    monkeypatch.setattr(bench, "role_times", times)
    monkeypatch.setattr(bench, "REGIMES", {name: Regime(0.0, 0.0) for name in bench.REGIMES})
    monkeypatch.setattr(bench, "GENERATED", 6)
    monkeypatch.setattr(bench.ClockProbe, "mhz", lambda _: 1980.0)
    made: list[Int8Options] = []
    generation = bench.generation

    def note(engine: Any, rounds: int) -> Any:
        made.append(getattr(engine.model._decoder.layers, "options", None))
        return generation(engine, rounds)

    monkeypatch.setattr(bench, "generation", note)
    out, arms = tmp_path / "int8.json", ["int8", "fp16", "int8:memo", "int8:copy"]
    command = ["int8.py", "--model", str(GOLDEN / "tiny-qwen2-q4_k_m.gguf"), "--arms", *arms]
    command += ["--nt", "3", "9", "--rounds", "2", "--save", str(out)]
    monkeypatch.setattr(sys, "argv", command + (["--json"] if as_json else []))
    assert bench.main() == 0
    record, printed = load_record(out, "int8"), capsys.readouterr().out
    if as_json:
        assert {"schema": "pyruntime.int8/1", **json.loads(printed)} == record
    else:
        assert "nt9 burst" in printed and "of the GPU" in printed
    assert list(record["arms"]) == arms
    ways = [Int8Options(), None, Int8Options("memo"), Int8Options(copy=True)]
    assert made == ways and Int8Options() == int8_layers.OPTIONS
    for found in (*record["arms"].values(), record["again"]):
        for figures in (found[nt][regime] for nt in ("nt3", "nt9") for regime in bench.REGIMES):
            assert {len(figures[key]) for key in ("wall_ms", "gpu_ms", "mhz")} == {2}
    for arm, found in record["arms"].items():
        assert found["generation"]["tokens"] == [6, 6]
        assert ("gate" in found["roles_ms"]["9"]) == arm.startswith("int8")
        assert found["planned_bytes"] > 0


def test_gemm_int8_bench(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every row that is installed, levers among them, and the choice twice."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import gemm_int8 as bench

    monkeypatch.setattr(bench, "SHAPES", {"small": (256, 512)})
    monkeypatch.setattr(bench, "LENGTHS", (9, 130))
    monkeypatch.setattr(bench, "ROTATED", 1 << 18)
    out = tmp_path / "gemm-int8.json"
    monkeypatch.setattr(sys, "argv", ["gemm_int8.py", "--rounds", "3", "--save", str(out)])
    assert bench.main() == 0
    figures = load_record(out, "gemm-int8")["figures"]
    assert set(figures) == {f"{name} small {m}" for name in ("Q4_K", "Q6_K") for m in (9, 130)}
    for figure in figures.values():
        assert figure["choice"] in figure["ms"] and len(figure["ms"]) > 4
        assert {len(raw) for raw in (figure["again"], *figure["ms"].values())} == {3}
