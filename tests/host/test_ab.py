"""`pyruntime ab` on a driver that only keeps time, and against a build in its own process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timed_driver
from goldens import GOLDEN, prompts

from pyruntime import Engine
from pyruntime.cli import main
from pyruntime.errors import CudaError, EngineError
from pyruntime.measure import ab as procedure
from pyruntime.measure import builds
from pyruntime.measure.arms import open_build
from pyruntime.measure.records import load_record
from pyruntime.measure.series import REGIMES, Regime
from pyruntime.measure.worker import Worker
from pyruntime.tools.arms import ArmSpec, parse_arm, parse_options
from pyruntime.tools.charts import pairs_svg

TINY = "tiny-llama-q4_k_m"
MODEL = str(GOLDEN / f"{TINY}.gguf")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> timed_driver.TimedDriver:
    monkeypatch.setitem(REGIMES, "burst", Regime(rest=0.0, warm_up=0.0))
    return timed_driver.install(monkeypatch)


def run(tmp_path: Path, *options: str, a: str = "default", b: str = "default") -> dict[str, Any]:
    path = tmp_path / "ab.json"
    code = main(["ab", a, b, MODEL, "--nt", "40", *options, "--save", str(path)])
    record = load_record(path, "ab")
    expected = bool(record["faults"]) or record["verdict"]["outcome"] == "worse"
    assert code == expected
    return record


def test_two_option_sets_that_launch_the_same(
    driver: timed_driver.TimedDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run(tmp_path, b="max_tokens=64")
    assert record["identical_code"] and record["resources"] == []
    assert "same machine code on the same grids, byte for byte" in capsys.readouterr().out
    assert len(record["pairs"]) == len(record["noise"]["pairs"]) == 9
    assert record["times"]["gpu"]["gain"] == pytest.approx(0, abs=1e-6)
    assert record["pairs"][0]["a"]["clock"] == timed_driver.MHZ
    assert record["roles_ms"]["a"]["qkv"] == pytest.approx(0.02, abs=1e-4)
    assert [g["passed"] for g in record["gates"]] == [True, True]
    assert record["gates"][0]["figures"]["bitwise"]
    assert record["b"]["options"] == {"max_tokens": 64} and record["b"]["label"] == "max_tokens=64"
    others = set(driver.launched) - (used := set(record["b"]["kernels"]))
    assert used <= set(driver.launched)  # the others are of loading, and of the greedy gate's steps
    known = ("clock", "dequant", "rows_gather", "schedule", "attention", "rope", "gemm")
    assert all(n.startswith(known) for n in others)
    assert "<circle" in pairs_svg(record)


def test_a_launch_that_fails_voids(
    driver: timed_driver.TimedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Worker.run

    def failing(worker: Worker) -> Any:
        if len(driver.launched) > 900:
            raise CudaError("cuLaunchKernel failed", code=1, name="X", call="cuLaunchKernel")
        return runs(worker)

    monkeypatch.setattr(Worker, "run", failing)
    record = run(tmp_path)
    assert record["verdict"]["outcome"] == "no verdict"
    assert "cuLaunchKernel failed" in record["faults"][0]


def test_nan_logits_void(
    driver: timed_driver.TimedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procedure.WorkerArm, "logits", lambda _: np.full(9, np.nan, np.float32))
    record = run(tmp_path)
    assert "void: parity gate: a logit is NaN" in record["verdict"]["rule"]


def test_a_variant_that_never_launched_is_a_fault(driver: timed_driver.TimedDriver) -> None:
    arm = procedure.WorkerArm(
        lambda name, _: (
            {"launches": [["attention", "fast", [1]]]} if name == "facts" else {"slow": 3}
        ),
        lambda: None,
    )
    assert builds.never_launched("B", arm) == ["B: fast was never launched"]
    facts = {"launches": [["attention", "fast", [1]]], "kernels": {}}
    asked = builds.same_attention(facts, facts, {}, {"attention": "r48"})
    assert asked == ["attention auto and r48 both launched ['fast']"]
    assert builds.same_attention(facts, facts, {}, {}) == []


def figures(**changes: Any) -> dict[str, Any]:
    return {"code_sha256": "a", "registers": 124, "dynamic_shared": 34816, "blocks": 4} | changes


def test_resources_stand_side_by_side() -> None:
    a = {"launches": [["attention", "r46", [1]], ["qkv", "g", [2]]], "kernels": {}}
    b = {"launches": [["attention", "r48", [1]], ["qkv", "g", [2]]], "kernels": {}}
    a["kernels"] = {"r46": figures(code_sha256="b", dynamic_shared=69376), "g": figures()}  # type: ignore[assignment]
    b["kernels"] = {"r48": figures(), "g": figures()}  # type: ignore[assignment]
    assert builds.resources(a, b) == [
        {"role": "attention", "a": "r46", "b": "r48", "fields": {"dynamic_shared": [69376, 34816]}}
    ]
    assert builds.identical_code(a, b) is False and builds.identical_code(a, a)
    assert builds.identical_code(a, {"launches": None, "kernels": None}) is None


def test_another_build_answers_from_its_own_process() -> None:
    ids = prompts(TINY)[0].ids
    arm = open_build(sys.executable, MODEL, len(ids), {"device": "cpu"})
    try:
        assert arm.facts["python"] == sys.executable and arm.facts["launches"] is None
        sample = arm.run()
        assert sample.wall > 0 and sample.gpu is None and sample.clock is None
        assert arm.slices(1) is None and arm.launched() == {}
        logits = arm.logits()
        tokens, gaps = arm.greedy(4)
        assert int(logits.argmax()) == tokens[0] and min(gaps) >= 0
        with Engine.load(MODEL, device="cpu") as engine:
            seeded = np.random.default_rng(0).integers(0, engine.config.vocab, len(ids))
            assert np.array_equal(np.asarray(engine.prefill(seeded).logits)[0], logits)
            assert engine.generate(seeded, 4) == tokens
        with pytest.raises(EngineError, match="greedy"):
            arm._call("greedy", {"m": 4})
    finally:
        arm.close()


@pytest.mark.parametrize(
    ("python", "text"),
    [("/no/such/python", "No such file"), ("/bin/false", "has ended"), (sys.executable, "nope")],
)
def test_a_build_that_cannot_be_run_is_named(python: str, text: str) -> None:
    with pytest.raises(EngineError, match=text):
        open_build(python, "/nope.gguf", 4, {"device": "cpu"})


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("default", ArmSpec("default", {}, None)),
        ("attention=r48", ArmSpec("attention=r48", {"attention": "r48"}, None)),
        ("python:/x/python", ArmSpec("python:/x/python", {}, "/x/python")),
        ("python:/p,max_tokens=5", ArmSpec("python:/p,max_tokens=5", {"max_tokens": 5}, "/p")),
    ],
)
def test_arms_are_named(text: str, arm: ArmSpec) -> None:
    assert parse_arm(text) == arm


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_arm, "r48"), (parse_arm, "python:"), (parse_options, "a="), (parse_options, "1=2")],
)
def test_bad_arms_are_refused(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"key=value|interpreter"):
        parse(text)


def test_a_design_that_can_see_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["ab", "default", "default", MODEL, "--nt", "4", "--pairs", "5"])
    assert exit_.value.code == 2
    assert "5 pairs can never reach p <= 0.01" in capsys.readouterr().err


def test_json_is_strict(
    driver: timed_driver.TimedDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["ab", "default", "default", MODEL, "--nt", "4", "--pairs", "8", "--json"])
    record = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert record["schema"] == "pyruntime.ab/1" and record["plan"]["pairs"] == 8
