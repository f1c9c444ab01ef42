"""`pyruntime gate`: rules and baselines, loud when they pass and exact when they do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pyruntime.cli import main
from pyruntime.cubin import nvdisasm
from pyruntime.cubin.installed import manifest, root
from pyruntime.errors import ToolError

DATA = Path(__file__).parents[1] / "data" / "cubins"
FILE = str(DATA / "nvcc-13.0-sm_90a.cubin")


def test_passing_is_loud(capsys: pytest.CaptureFixture[str]) -> None:
    rules = ["--rule", "registers <= 40", "--rule", "spill_bytes == 0 or name == 'spilling'"]
    assert main(["gate", FILE, *rules]) == 0
    out = capsys.readouterr().out
    assert "pass: 9 kernel(s), 2 rule(s)" in out
    assert "closest to its limit: registers of spilling sm_90a, margin 8" in out


def test_failing_names_kernel_figure_and_limit(capsys: pytest.CaptureFixture[str]) -> None:
    rule = "spill_bytes == 0 and registers <= 31"
    assert main(["gate", FILE, "--rule", rule]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"FAIL spilling sm_90a: registers 32, spill_bytes 248  [{rule}]"
    assert lines[-1] == "1 finding(s): 9 kernel(s), 1 rule(s)"


def test_what_is_unknown_does_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", FILE, "--rule", "dynamic_shared < 10000"]) == 1
    out = capsys.readouterr().out
    assert "FAIL plain sm_90a: cannot be decided: dynamic_shared unknown" in out
    assert "tile_t128" not in out  # its contract says 6,272
    assert main(["gate", FILE, "--rule", "dynamic_shared < 10000", "--kernel", "tile*"]) == 0


def test_nothing_to_gate_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", FILE, "--rule", "registers < 1", "--kernel", "x*"]) == 2
    assert "nothing to gate" in capsys.readouterr().err


@pytest.mark.parametrize("rule", ["regs < 3", "params == 3", "registers <", "open('x')", ""])
def test_bad_rules(rule: str) -> None:
    assert main(["gate", FILE, "--rule", rule]) == 2


def test_one_of_the_options_is_needed() -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["gate", FILE])


def test_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = tmp_path / "resources.toml"
    assert main(["gate", FILE, "--write-baseline", str(baseline)]) == 0
    assert main(["gate", FILE, "--baseline", str(baseline)]) == 0
    text = baseline.read_text()
    capsys.readouterr()

    baseline.write_text(text.replace("registers = 14", "registers = 13"))
    assert main(["gate", FILE, "--baseline", str(baseline)]) == 1
    assert "FAIL tile_t128 sm_90a: registers 14, was 13  [baseline]" in capsys.readouterr().out

    baseline.write_text(text.replace('"plain sm_90a"', '"gone sm_90a"'))
    assert main(["gate", FILE, "--baseline", str(baseline)]) == 1
    out = capsys.readouterr().out
    assert "FAIL plain sm_90a: is not in the baseline" in out
    assert "FAIL gone sm_90a: is in the baseline but not here" in out


def test_fewer_registers_pass_a_baseline(tmp_path: Path) -> None:
    baseline = tmp_path / "resources.toml"
    assert main(["gate", FILE, "--write-baseline", str(baseline)]) == 0
    baseline.write_text(baseline.read_text().replace("registers = 14", "registers = 99"))
    assert main(["gate", FILE, "--baseline", str(baseline)]) == 0


@pytest.mark.parametrize("text", ["", "x", "schema = 'pyruntime.resources/1'\na = 3\n"])
def test_bad_baselines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "resources.toml"
    path.write_text(text)
    assert main(["gate", FILE, "--baseline", str(path)]) == 2


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", FILE, "--rule", "stack <= 100", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == "pyruntime.gate/1" and record["kernels"] == 9
    (finding,) = record["findings"]
    assert finding == {"kernel": "spilling sm_90a", "rule": "stack <= 100", "text": "stack 128"}


# Figures of machine code


@pytest.fixture
def products() -> str:
    """The installed products of 8-bit integers of one architecture."""
    try:
        nvdisasm.find()
    except ToolError as error:
        pytest.skip(str(error))
    return str(root() / f"sm_{manifest()['architectures'][0]}" / "gemm_int8.cubin")


ONE = ["--kernel", "int8_q4_k_m64_n128_k1_s2_b2"]


def test_issue_slots(products: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", products, *ONE, "--rule", "slots_per_mma <= 20", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    ((kernel, figures),) = record["code"].items()
    slots = figures["slots_per_mma"]
    assert kernel.startswith(f"{ONE[1]} sm_") and figures["mma"] == "IMMA" and 8 < slots < 20
    assert record["margins"]["slots_per_mma"] == {"margin": 20 - slots, "kernel": kernel}

    assert main(["gate", products, *ONE, "--rule", f"slots_per_mma <= {slots}"]) == 0
    assert f"{kernel}: {slots:.3f} issue slots per IMMA in the main loop" in capsys.readouterr().out
    assert main(["gate", products, *ONE, "--rule", f"slots_per_mma < {slots}"]) == 1
    assert f"FAIL {kernel}: slots_per_mma {slots:.3f}  [" in capsys.readouterr().out


def test_kernels_without_products_have_no_slots(
    products: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = ["--rule", "slots_per_mma <= 20", "--kernel", "plain"]
    assert main(["gate", FILE, *rule]) == 1
    assert "cannot be decided: slots_per_mma unknown" in capsys.readouterr().out
    assert main(["gate", FILE, "--rule", "mma == 'none' or slots_per_mma <= 20"]) == 0
    assert "issue slots" not in capsys.readouterr().out


def test_a_rule_on_machine_code_needs_nvdisasm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nowhere() -> Path:
        raise ToolError("nvdisasm was not found. pip install 'pyruntime-cuda[sass]' brings it")

    monkeypatch.setattr(nvdisasm, "find", nowhere)
    for rule in ("slots_per_mma <= 20", "mma == 'none'", "registers < 1 or mma == 'none'"):
        assert main(["gate", FILE, "--rule", rule]) == 2
        assert "pyruntime-cuda[sass]" in capsys.readouterr().err
    assert main(["gate", FILE, "--rule", "registers <= 40"]) == 0


def test_nothing_is_written_but_the_baseline(tmp_path: Path) -> None:
    shutil.copy(FILE, tmp_path / "a.cubin")
    before = sorted(p.name for p in tmp_path.iterdir())
    assert main(["gate", str(tmp_path), "--rule", "registers < 99"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == before
