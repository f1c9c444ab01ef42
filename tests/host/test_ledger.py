"""`pyruntime ledger` for built kernels and for designs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyruntime.cli import main

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data/cubins"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["ledger", *map(str, arguments)])
    return code, capsys.readouterr().out


def record(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    return json.loads(run(capsys, *arguments, "--json")[1])


def test_a_kernel_with_planes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "tile*", DATA / "nvcc-13.0-sm_90a.cubin", "--device", "sm_90")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert "rows 64 x 80 2 - 128 5,120" in lines
    assert "tail 32 x 192 4 - 128 6,144 on rows" in lines
    assert lines[5].startswith("6,272 B asked for (5,120 saved by reuse, 116 lost to alignment)")
    assert lines[-1] == "sm_90 (H100, H200) 14 128 16 64/64 100% warps 32 fewer threads"


def test_each_device_gets_the_cubin_that_it_would_load(capsys: pytest.CaptureFixture[str]) -> None:
    files = [DATA / f"nvcc-13.0-sm_{arch}.cubin" for arch in ("80", "90a", "120")]
    (kernel,) = record(capsys, "tile_t128", *files)["kernels"]
    loaded = {d["device"]: (d["cubin"], d["runs"]) for d in kernel["devices"]}
    assert loaded["sm_89"] == ("sm_80", True)
    assert loaded["sm_90"] == ("sm_90a", True)
    assert loaded["sm_121"] == ("sm_120", True)
    assert loaded["sm_100"] == ("sm_80", False)
    assert kernel["ledger"]["holes"] == [{"offset": 12, "bytes": 116}]


def test_a_foreign_kernel_is_not_guessed_at(capsys: pytest.CaptureFixture[str]) -> None:
    file = DATA / "triton-sm_90a.cubin"
    code, out = run(capsys, "row_sum", file)
    assert code == 0 and "blocks per SM unknown: give --dynamic BYTES" in out
    (kernel,) = record(capsys, "row_sum", file, "--dynamic", "50176", "--device", "90")["kernels"]
    assert [d["blocks"] for d in kernel["devices"]] == [4]
    code, out = run(capsys, "plain", DATA / "nvcc-13.0-sm_80.cubin")
    assert "give --dynamic BYTES and --threads N" in out


@pytest.mark.parametrize("command", ["ledger", "audit"])
def test_what_a_kernel_fixes_is_not_asked_for(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tile = [command, "tile_t128", str(DATA / "nvcc-13.0-sm_90a.cubin")]
    for option, fixed in (("--dynamic", 6272), ("--threads", 128)):
        assert main([*tile, option, "5"]) == 2
        told = f"pyruntime {command}: {option} 5: tile_t128 fixes it itself, at {fixed:,}\n"
        assert capsys.readouterr().err == told
        assert main([*tile, option, str(fixed)]) == 0
    assert main(["ledger", "*", tile[2], "--dynamic", "5"]) == 0  # some need it


def test_an_unknown_kernel_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "nope", str(DATA / "triton-sm_90a.cubin")]) == 2
    assert "no kernel nope; there are: row_sum" in capsys.readouterr().err


def test_names_near_an_unknown_one_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(DATA / "nvcc-13.0-sm_90a.cubin")
    for given, told in (
        ("tile", "no kernel tile, but tile* names 1; there are: tile_t128, "),
        ("_t128*", "no kernel _t128*, but *_t128* names 1; there are: tile_t128, "),
        ("*", ""),
    ):
        assert main(["ledger", given, file]) == (2 if told else 0)
        assert told in capsys.readouterr().err
    assert main(["ledger", "gemm_add"]) == 2
    names = capsys.readouterr().err.split("there are: ")[1].split(", ")
    assert len(names) == 21 and names[-1] == "…\n" and all("gemm_add" in n for n in names[:2])


def test_an_audit_of_many_lists_some(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(DATA / "nvcc-13.0-sm_90a.cubin")
    assert main(["audit", "*", file]) == 2
    told = capsys.readouterr().err.removeprefix("pyruntime audit: * names 9 kernels: ").split(", ")
    assert len(told) == 9 and told[-1] == "…\n"


def test_r46_shows_the_forgotten_pad(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "--geometry", ROOT / "bench/geometries/r46.toml")
    assert code == 1
    assert "45,824 B asked for (10,240 saved by reuse" in out
    assert "asks 43,776 B of 45,824, 2,048 short: the pad of S" in out


def test_the_base_launcher_has_counter_examples(capsys: pytest.CaptureFixture[str]) -> None:
    devices = ("--device", "sm_90", "--device", "sm_121")
    code, out = run(capsys, "--geometry", ROOT / "bench/geometries/r46-base.toml", *devices)
    assert code == 1
    under = out.index("TQ=16 TKV=32 hd=128: asks 15,296 B of 24,000, 8,704 short")
    over = out.index("TQ=64 TKV=32 hd=128: asks 61,184 B where 43,776 do")
    assert under < over
    assert "5 -> 3 blocks/SM on sm_90; 2 -> 1 blocks/SM on sm_121" in out
    table = {line.split()[0]: line.split() for line in out.splitlines() if " shared " in line}
    assert table["sm_90"][3] == "3" and table["sm_121"][4] == "1"


def test_geometry_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, "--geometry", ROOT / "bench/geometries/r46-base.toml")
    assert found["schema"] == "pyruntime.ledger/1"
    geometry = found["geometry"]
    assert geometry["ledger"]["dynamic_shared"] == 69_376
    wrong = geometry["launcher"]["mismatches"]
    assert len(wrong) == 120 and {m["kind"] for m in wrong} == {"under", "over"}
    (point,) = (m for m in wrong if m["values"] == {"TQ": 64, "TKV": 32, "hd": 128})
    assert point["blocks"]["sm_120"] == [2, 1]


def test_right_designs_pass(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("r48", "r50", "r57"):
        code, out = run(capsys, "--geometry", ROOT / f"bench/geometries/{name}.toml")
        assert code == 0 and "right for all 144 combinations" in out


def test_one_input_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["ledger"])
    assert main(["ledger", "--geometry", "missing.toml"]) == 2
    assert "missing.toml" in capsys.readouterr().err
