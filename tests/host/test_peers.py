"""bench/peers.py on a made-up GPU with a made-up torch, and its records and floors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_torch
import pytest
import timed_driver

from pyruntime.cubin.installed import manifest
from pyruntime.measure.records import load_record, save_record

Bench = Callable[[str], Any]
PRODUCT = {"name": "o", "n": 256, "k": 512, "epilogue": "add", "also": "adds"}
GATED = {"name": "gate_up", "n": 512, "k": 256, "epilogue": "swiglu", "also": "SwiGLU"}
MODEL = {"name": "tiny", "mix": "Q8_0", "tokens": [1, 100], "libraries": True}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    yield importlib.import_module
    for name in ("stopwatch", "contestants", "peers_contest"):  # they hold the made-up torch
        sys.modules.pop(name, None)


def test_cases(bench: Bench) -> None:
    cases = bench("peers_cases")
    found = {case.name: case for case in cases.cases()}
    assert len(found) == len(cases.cases()) == 29 and set(cases.QUICK) <= set(found)
    assert found["gemm down 512"].flop == 2 * 512 * 3584 * 18944
    assert [name for name, case in found.items() if case.mma] == [
        f"gemm {name} 4096" for name in ("qkv", "o", "gate_up", "down")
    ]
    assert cases.expected_seconds(found.values()) < 200
    assert cases.expected_seconds(cases.choose("", quick=True)) < 60
    assert [case.name for case in cases.choose("prefill.*0.5b 2048", quick=False)] == [
        "prefill qwen2.5-0.5b 2048"
    ]


def figure(ours: float, peers: dict[str, float], **more: Any) -> dict[str, Any]:
    """One with these medians in both regimes."""
    raw = {who: [9 * ms, ms, 0.1 * ms] for who, ms in {"ours": ours, **peers}.items()}
    both = {"burst": raw, "sustained": raw}
    return {"ms": both, "skipped": {}, **more}


def record(**cases: Any) -> dict[str, Any]:
    quoted = [{"model": "qwen2.5-0.5b", "tokens_per_s": {"512": 50000}}]
    return {"cases": cases, "failed": {}, "quoted": quoted, "llama_bench": {}}


def verdicts(bench: Bench, found: dict[str, Any]) -> dict[str, str]:
    told = {floor.quantity: floor.verdict(found) for floor in bench("peers_cases").floors()}
    return {quantity: verdict for quantity, verdict in told.items() if verdict}


def test_floors(bench: Bench) -> None:
    a = figure(1.0, {"cublas": 1.21, "mma": 2.0}, flop=8e11)
    b = figure(1.0, {"cublas": 0.85, "mma": 2.0}, flop=6e11)
    found = verdicts(bench, record(**{"gemm a 4096": a, "gemm b 4096": b}))
    assert found == {
        "cuBLAS over ours, mean": "MISSED: sustained",  # 1.014
        "mma.sync 4096: least TF": "MISSED: burst",  # 300
    }
    prefills = {
        "prefill qwen2.5-7b 512": figure(10.0, {"libraries": 9.6}, tokens=512),
        "prefill qwen2.5-7b 2048": figure(45.0, {"libraries": 44.0}, tokens=2048),
        "prefill qwen2.5-7b 128": figure(5.1, {}, tokens=128),
        "prefill qwen2.5-7b 1": figure(4.4, {}, tokens=1),
        "prefill qwen2.5-0.5b 512": figure(2.0, {}, tokens=512),
    }
    found = verdicts(bench, record(**prefills))
    assert found == {
        "7B 512: libraries over ours": "ok",
        "7B 2048: libraries over ours": "MISSED: burst, sustained",
        "7B 512: k tokens/s": "ok",
        "7B 2048: k tokens/s": "MISSED: burst, sustained",
        "7B 128: ms": "MISSED: burst",
        "7B 1: ms": "ok",
        "0.5B 512: times llama.cpp (quoted)": "ok",
    }


def test_a_record_is_shown(bench: Bench, tmp_path: Path, capsys: Any) -> None:
    main, path = bench("peers").main, tmp_path / "peers.json"
    good = record(**{"gemm a 512": figure(1.0, {"cublas": 1.1}, flop=5e11)})
    save_record(path, "peers", good)
    assert main(["--from", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| 1 ms 500 TF cublas 1.10x" in out and "1.100" in out and "MISSED" not in out
    save_record(path, "peers", good | {"failed": {"gemm b 512": "RuntimeError: x"}})
    assert main(["--from", str(path)]) == 1
    assert "FAILED gemm b 512: RuntimeError: x" in capsys.readouterr().out
    assert main(["--from", "/nowhere.json"]) == 2
    assert main(["--list", "--cases", "0.5b"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    for pattern in ("(", "no such"):
        with pytest.raises(SystemExit):
            main(["--cases", pattern])


@pytest.fixture
def peers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, of two small products and a tiny model, on a made-up GPU."""
    if "90a" not in manifest()["architectures"]:
        pytest.skip("no cubins for sm_90a are installed")
    fake_torch.install(monkeypatch, timed_driver.install(monkeypatch))
    # The module is imported before what is made up: it stays, and what it has of the cases with it.
    peers, regimes, cases = (bench(name) for name in ("peers", "regimes", "peers_cases"))
    for module in (regimes, cases):
        for name in ("REST", "PREFILL_REST"):
            monkeypatch.setattr(module, name, 0.0, raising=False)
        for name in ("SUSTAINED_MS", "LEAD_MS", "PRODUCT_MS"):
            monkeypatch.setattr(module, name, 2.0, raising=False)
    made_up = {
        "gemm": {"tokens": [64, 4096], "product": [PRODUCT, GATED]},
        "prefill": [MODEL],
    }
    monkeypatch.setattr(cases, "CASES", made_up)
    return peers


def test_a_run(peers: Any, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "peers.json"
    peers.main(["--save", str(path), "--commit", "abc"])
    found = load_record(path, "peers")
    assert found["failed"] == {} and found["commit"] == "abc"
    assert list(found["cases"]) == [
        "gemm o 64", "gemm o 4096", "gemm gate_up 64", "gemm gate_up 4096",
        "prefill tiny 1", "prefill tiny 100",
    ]  # fmt: skip
    small, large = (found["cases"][f"gemm gate_up {nt}"] for nt in (64, 4096))
    assert set(small["ms"]["burst"]) == {"ours", "cublas", "fused"}
    assert set(large["ms"]["burst"]) == {"ours", "cublas", "fused", "mma"}
    assert set(large["ms"]["sustained"]) == {"ours", "cublas", "mma"}
    assert {len(raw) for raw in large["ms"]["burst"].values()} == {9}
    assert {len(raw) for raw in large["mhz"]["sustained"].values()} == {3}
    assert large["notes"]["ours"].startswith("gemm_wgmma_f16")
    assert large["notes"]["fused"].startswith("gemm_wgmma_swiglu") and small["also"] == "SwiGLU"
    assert large["notes"]["mma"].startswith("gemm_f16")
    prefill = found["cases"]["prefill tiny 100"]
    for unit in ("ms", "gpu_ms", "mhz"):
        assert {len(raw) for raw in prefill[unit]["burst"].values()} == {7}
        assert set(prefill[unit]["sustained"]) == {"ours", "libraries"}
    assert prefill["skipped"] == {} and prefill["tokens"] == 100
    kernels = {name for figure in found["cases"].values() for name in figure["kernels"]}
    assert set(found["kernels"]) == kernels and any("attention" in name for name in kernels)
    assert "prefill tiny 100" in capsys.readouterr().out


def refuse(*arguments: Any, **more: Any) -> Any:
    raise RuntimeError("not here\nnor there")


REFUSED = "RuntimeError: not here"


def measured(peers: Any, tmp_path: Path, *options: str) -> dict[str, Any]:
    """The record of a run."""
    path = tmp_path / "peers.json"
    peers.main(["--save", str(path), *options])
    return load_record(path, "peers")


def test_a_failed_case_loses_no_other(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contestants = importlib.import_module("contestants")
    monkeypatch.setattr(contestants, "TOLERANCE", -1.0)
    found = measured(peers, tmp_path)
    assert len(found["failed"]) == 4 and "ArithmeticError" in found["failed"]["gemm o 64"]
    assert list(found["cases"]) == ["prefill tiny 1", "prefill tiny 100"]


def test_a_contestant_that_fails_is_named_and_loses_no_other(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """Whether when it is built, for some length, or in the middle of being timed."""
    contestants = importlib.import_module("contestants")
    monkeypatch.setattr(contestants, "scaled_dot_product_attention", refuse)
    monkeypatch.setitem(PRODUCT, "epilogue", "sine")
    contest = importlib.import_module("peers_contest")

    class Tires:
        readings = 0

        def reading(self, ms: float, lead: float = 0.0) -> tuple[float, float, float]:
            self.readings += 1
            return (1.0, 1.0, 1500.0) if self.readings < 5 else refuse()

    def transformers(*_: Any) -> Any:
        return lambda nt: Tires() if nt > 1 else refuse()

    monkeypatch.setattr(contest, "transformers_prefill", transformers)
    found = measured(peers, tmp_path, "--transformers")
    assert found["failed"] == {} and len(found["cases"]) == 6
    for nt in (1, 100):
        prefill = found["cases"][f"prefill tiny {nt}"]
        assert prefill["skipped"] == {"libraries": REFUSED, "transformers": REFUSED}
        assert {who for raw in prefill["ms"].values() for who in raw} == {"ours"}
    product = found["cases"]["gemm o 4096"]
    assert product["skipped"].keys() == {"fused"}
    assert set(product["ms"]["burst"]) == {"ours", "cublas", "mma"}
    out = capsys.readouterr().out
    assert f"libraries: {REFUSED}" in out and f"transformers: {REFUSED}" in out
    assert "fused: CubinError" in out

    monkeypatch.setattr(contest, "transformers_prefill", refuse)
    found = measured(peers, tmp_path, "--transformers", "--cases", "prefill")
    assert found["cases"]["prefill tiny 1"]["skipped"]["transformers"] == REFUSED


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo loading >&2; echo no such model >&2; exit 3", "exit code 3; no such model"),
        ("echo nonsense", "JSONDecodeError: "),
        ("echo '[{}]'", "KeyError: 'n_prompt'"),
        (None, "FileNotFoundError: "),
    ],
)
def test_a_llama_bench_that_fails_loses_nothing(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, script: str | None,
    told: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(peers, "MODEL", "tiny")
    program = tmp_path / "llama-bench"
    if script:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    options = ["--llama-bench", str(program), "--cases", "prefill"]
    found = measured(peers, tmp_path, *options)
    assert found["llama_bench"]["failed"].startswith(f"{program}: {told}")
    assert len(found["cases"]) == 2 and "seconds" in found
    assert f"llama-bench: {program}: {told}" in capsys.readouterr().out


def test_what_llama_bench_found_is_shown(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(peers, "MODEL", "tiny")
    program = tmp_path / "llama-bench"
    program.write_text("""#!/bin/sh\necho '[{"n_prompt": 100, "samples_ns": [2000000]}]'\n""")
    program.chmod(0o755)
    found = measured(peers, tmp_path, "--llama-bench", str(program), "--cases", "prefill")
    assert found["llama_bench"]["100"] == [2000000]
    assert "llama-bench     100 tokens: 50,000 tok/s" in capsys.readouterr().out
