"""`pyruntime diff`: what changed between two builds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pyruntime.cli import main

DATA = Path(__file__).parents[1] / "data" / "cubins"


def test_the_same_build(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(DATA / "host.o"), str(DATA / "libhost.so")]) == 0
    assert "same machine code in all 4 kernels" in capsys.readouterr().out


def test_two_toolkits(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(DATA / f"{name}-sm_90a.cubin") for name in ("nvcc-13.0", "nvrtc-12.9")]
    assert main(["diff", *files]) == 1
    out = capsys.readouterr().out
    assert "- tile_t128" in out and "fixed_shared (sm_90a)" in out
    assert "static_shared 1,024 -> 400 (-624)" in " ".join(out.split())


def test_machine_code_is_compared_not_files(capsys: pytest.CaptureFixture[str]) -> None:
    """13.0 and 13.5 write other files for the same code; only what differs is listed."""
    files = [str(DATA / f"nvcc-{version}-sm_90a.cubin") for version in ("13.0", "13.5")]
    code = main(["diff", *files, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == "pyruntime.diff/1" and len(record["common"]) == 9
    same = [k["name"] for k in record["common"] if k["same_code"]]
    assert {"plain", "tile_t128", "spilling"} <= set(same)
    assert code == (0 if len(same) == 9 else 1)


def test_other_architectures_are_matched_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(DATA / f"nvcc-13.0-sm_{arch}.cubin") for arch in ("80", "120")]
    assert main(["diff", *files]) == 1
    out = capsys.readouterr().out
    assert "+ clustered" in out and "8 changed" in out
    spilling = " ".join(out[out.index("~ spilling") :].split("~")[1].split())
    assert "registers 32 -> 64 (+32)" in spilling
    assert "spill_stores 116 -> 8 (-108)" in spilling


def test_folders_with_several_architectures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for side, archs in (("a", ("80", "90a")), ("b", ("90a", "120"))):
        (tmp_path / side).mkdir()
        for arch in archs:
            shutil.copy(DATA / f"nvcc-13.0-sm_{arch}.cubin", tmp_path / side)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert "- plain (sm_80)" in out and "+ plain (sm_120)" in out
    assert "9 of 9 in both have the same machine code" in out


def test_unreadable_input() -> None:
    assert main(["diff", str(DATA / "host.o"), str(DATA / "expected.json")]) == 2
