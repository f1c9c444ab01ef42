"""wall and ab on a GPU, on a model small enough to be quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from goldens import GOLDEN

from pyruntime.cli import main
from pyruntime.measure.clock import ClockProbe
from pyruntime.measure.records import load_record
from pyruntime.measure.roofline import roofline

MODEL = str(GOLDEN / "tiny-qwen2-q4_k_m.gguf")
NT = 200


def ab(tmp_path: Path, a: str, b: str, *options: str) -> dict[str, Any]:
    path = tmp_path / "ab.json"
    main(["ab", a, b, MODEL, "--nt", str(NT), "--save", str(path), *options])
    return load_record(path, "ab")


def test_wall_accounts_for_every_launch(tmp_path: Path) -> None:
    command = ["wall", MODEL, "--nt", str(NT), "--rounds", "5", "--save", str(tmp_path / "w")]
    assert main(command) == 0
    record = load_record(tmp_path / "w.json", "wall")
    assert all(s["launches"] == s["launches_expected"] for s in record["slices"])
    # One launch of a microsecond is less than an event's own cost is known to.
    assert all(-0.01 < s["ms"] < 5 for s in record["slices"])
    assert 0 <= record["event_us"] < 10
    # Launches of a few microseconds: the events weigh more than in a long prefill's 2 %.
    total, busy = sum(s["ms"] for s in record["slices"]), np.median(record["busy_ms"])
    assert 0.7 < total / busy < 1.3
    assert main(["wall", MODEL, "--check", str(tmp_path / "w.json")]) == 0


def test_the_roofs_are_those_of_a_gpu(gpu: Any) -> None:
    roof = roofline(gpu.library, again=True)
    assert roof == roofline(gpu.library)
    assert 1e11 < roof.bytes_per_s < 2e13 and 5e12 < roof.flop_per_s < 5e15


def test_the_probe_reads_a_clock(gpu: Any) -> None:
    probe = ClockProbe(gpu.library)
    readings = [probe.mhz() for _ in range(5)]
    probe.close()
    highest = gpu.device.attribute("CLOCK_RATE") / 1e3  # kHz to MHz
    assert all(100 < mhz < 1.02 * highest for mhz in readings)


def test_ab_of_the_same(tmp_path: Path) -> None:
    record = ab(tmp_path, "default", f"kv_tokens={2 * NT}")
    assert record["identical_code"] and record["resources"] == [] and record["faults"] == []
    assert record["gates"][0]["figures"]["bitwise"] and record["gates"][1]["passed"]
    assert all(p[arm]["gpu"] > 0 for p in record["pairs"] for arm in ("a", "b"))


def test_ab_of_a_build_in_its_own_process(tmp_path: Path) -> None:
    record = ab(tmp_path, "default", f"python:{sys.executable}", "--pairs", "8")
    assert record["identical_code"] and record["faults"] == []
    assert record["gates"][0]["figures"]["bitwise"]
    assert record["b"]["kernels"] == record["a"]["kernels"]


def test_ab_of_two_attention_variants(tmp_path: Path) -> None:
    record = ab(tmp_path, "attention=r46_base", "attention=r48")
    assert record["faults"] == [] and record["identical_code"] is False
    (changed,) = record["resources"]
    assert changed["role"] == "attention"
    assert changed["fields"]["dynamic_shared"][0] > changed["fields"]["dynamic_shared"][1]
    assert [gate["passed"] for gate in record["gates"]] == [True, True]
