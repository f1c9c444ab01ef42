"""`pyruntime inspect` as it is used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from work import calls

from pyruntime.cli import main
from pyruntime.cubin.installed import manifest, root

DATA = Path(__file__).parents[1] / "data" / "cubins"


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(DATA / "nvcc-13.0-sm_90a.cubin")]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith("sm_90a, 9 kernels  CUDA 13.0  ptxas V13.0.88  -v -arch sm_90a -m 64")
    assert columns.split()[:4] == ["kernel", "regs", "static", "dynamic"]
    cells = {row.split()[0]: " ".join(row.split()[1:]) for row in rows}
    assert cells["tile_t128"] == "14 0 6,272 0 0/0 1 24 128 - 16 1,024"
    assert cells["spilling"].startswith("32 0 ? 128 124/124 1 16 <=1024 - ? ")
    assert " 2x1x1 " in cells["clustered"]


def test_json_is_strict_and_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", str(DATA / "libhost.so"), "--kernel", "*sum*"]) == 0
    record = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert record["schema"] == "pyruntime.inspect/1" and record["unread"] == []
    assert [c["arch"] for c in record["cubins"]] == ["sm_80", "sm_90"]
    (kernel,) = record["cubins"][1]["kernels"]
    assert kernel["name"] == "_Z3sumPfi" and kernel["static_shared"] == 1024
    assert kernel["dynamic_shared"] is None and kernel["blocks"] is None  # honest unknowns
    assert {"registers", "stack", "spill_bytes", "barriers", "params", "code_sha256"} <= set(kernel)


def test_details_show_signature_and_planes(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(DATA / "nvcc-13.5-sm_90a.cubin")
    assert main(["inspect", "-v", file, "--kernel", "tile*"]) == 0
    out = capsys.readouterr().out
    assert "signature: x:P@0, y:P@8, columns:i@16" in out
    assert "plane tail on rows: 6,144 B at 128, rows of 192 B, elements of 4 B" in out
    assert "0x6d=0x0" in out and "\nplain" not in out


def test_what_cannot_be_read_is_said_and_the_rest_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(DATA / "triton-sm_90a.cubin", tmp_path / "good.cubin")
    (tmp_path / "bad.cubin").write_text(".version 9.0\n.target sm_90\n")
    assert main(["inspect", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "row_sum" in captured.out
    assert "bad.cubin: PTX text, not a cubin" in captured.err


def test_a_file_without_device_code_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "/bin/sh"]) == 2
    assert capsys.readouterr().err.startswith("pyruntime inspect: /bin/sh: no device code")


def test_a_folder_of_cubins_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, lacks in (
        (tmp_path / "x", "no such folder"),
        (tmp_path, "there is no manifest.json"),
    ):
        monkeypatch.setenv("PYRUNTIME_CUBINS", str(folder))
        assert main(["inspect"]) == 2
        assert f": PYRUNTIME_CUBINS={folder}: {lacks}\n" in capsys.readouterr().err


def test_the_installed_cubins_on_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json"]) == 0
    cubins = json.loads(capsys.readouterr().out)["cubins"]
    assert {c["arch"] for c in cubins} == {f"sm_{a}" for a in manifest()["architectures"]}
    assert len(cubins) == len(list(root().rglob("*.cubin")))
    for kernel in (k for c in cubins for k in c["kernels"]):
        spec = kernel["spec"]
        assert spec["threads"] == kernel["max_threads"] == kernel["threads"]
        assert spec["param_bytes"] == sum(p["size"] for p in kernel["params"])


def test_many_files_take_no_more_each_than_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = DATA / "nvcc-13.0-sm_90a.cubin"
    for i in range(56):  # 9 kernels each
        shutil.copy(file, tmp_path / f"{i:02}.cubin")
    main(["inspect", str(file)])  # imports what it needs
    one, many = (calls(lambda x=x: main(["inspect", str(x)])) for x in (file, tmp_path))
    assert capsys.readouterr().out.count("tile_t128") == 58
    assert many < 56 * one < 56 * 10_000


def test_no_numpy_or_cuda_is_imported() -> None:
    code = (
        "import sys; from pyruntime.cli import main; assert main(sys.argv[1:]) == 0;"
        "print({m.split('.')[0] for m in sys.modules} & {'numpy', 'cuda'})"
    )
    command = [sys.executable, "-P", "-c", code, "inspect", DATA / "nvcc-13.0-sm_90a.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_pattern_that_matches_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--kernel", "nosuch", str(DATA / "nvcc-13.0-sm_90a.cubin")]) == 2
    assert capsys.readouterr().err == "pyruntime inspect: no kernel matches nosuch\n"
