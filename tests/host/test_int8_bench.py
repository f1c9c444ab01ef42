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
    program = tmp_path / "llama-bench"
    runs = [(3, 3_000_000), (9, 9_000_000), (0, 60_000_000)]
    report = [{"n_prompt": nt, "samples_ns": [ns]} for nt, ns in runs]
    program.write_text(f"#!/bin/sh\necho '{json.dumps(report)}'\n")
    program.chmod(0o755)
    command += ["--llama-bench", str(program)]
    monkeypatch.setattr(sys, "argv", command + (["--json"] if as_json else []))
    assert bench.main() == 0
    record, printed = load_record(out, "int8"), capsys.readouterr().out
    if as_json:
        assert {"schema": "pyruntime.int8/1", **json.loads(printed)} == record
    else:
        assert "nt9 burst" in printed and "of the GPU" in printed
        assert printed.count("over llama.cpp: nt3 burst") == len(arms)
        assert f"llama.cpp: measured by {program}" in printed
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
        burst, made = found["nt9"]["burst"]["tok_per_s"], found["generation"]["tok_per_s"]
        assert found["over_llama_cpp"]["nt9 burst"] == pytest.approx(burst / 1000)
        assert found["over_llama_cpp"]["generation"] == pytest.approx(made / 100)


LENGTHS = (512, 2048, 3000)
RUNS = [
    *({"n_prompt": nt, "samples_ns": [x * nt for x in (10**6, 10**5, 10**9)]} for nt in LENGTHS),
    {"n_prompt": 0, "samples_ns": [320_000_000]},
]


def test_llama_cpp_is_quoted_or_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import int8 as bench

    quoted = bench.llama_cpp(None, tmp_path, LENGTHS, made_up=True)
    assert quoted["source"].startswith("quoted: an H200")
    assert quoted["tok_per_s"] == {"512": 9800, "2048": 10700, "generation": 284}
    given = bench.llama_cpp(None, tmp_path, LENGTHS, made_up=False)
    assert given.keys() == {"source"} and given["source"].startswith("none: ")

    program, asked = tmp_path / "llama-bench", tmp_path / "asked"
    program.write_text(f"#!/bin/sh\necho $* > {asked}\necho '{json.dumps(RUNS)}'\n")
    program.chmod(0o755)
    model = tmp_path / "x.gguf"
    measured = bench.llama_cpp(program, model, LENGTHS, made_up=True)
    assert asked.read_text().split() == [
        "-m", str(model), "-p", "512,2048,3000", "-n", "64", "-fa", "1", "-o", "json",
    ]  # fmt: skip
    assert measured["source"] == f"measured by {program}"
    rates = measured["tok_per_s"]
    assert rates == {"512": 1000, "2048": 1000, "3000": 1000, "generation": 200}
    assert measured["llama_bench"]["report"] == RUNS
    program.write_text("#!/bin/sh\nexit 3\n")
    assert "exit code 3" in bench.llama_cpp(program, model, LENGTHS, made_up=True)["source"]

    arm = {"nt512": {"burst": {"tok_per_s": 25000}, "sustained": {"tok_per_s": 20000}},
           "nt9": {"burst": {"tok_per_s": 1}}, "generation": {"tok_per_s": 250}}  # fmt: skip
    ratios = {"nt512 burst": 25, "nt512 sustained": 20, "generation": 1.25}
    assert bench.over(arm, rates) == ratios


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
