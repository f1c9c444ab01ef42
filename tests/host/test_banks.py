"""Bank conflicts: the rules on known strides, and `pyruntime banks`."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pyruntime.cli import main
from pyruntime.cubin.banks import (
    ACCESSES,
    BANKS,
    SWIZZLES,
    WORD,
    Served,
    in_rows,
    picture,
    serve,
    swizzled,
)
from pyruntime.cubin.layouts import uses
from pyruntime.cubin.spec import Plane
from pyruntime.errors import InputError

DATA = Path(__file__).parents[1] / "data" / "cubins"
LDMATRIX = ACCESSES["ldmatrix.x4"]


@pytest.mark.parametrize(
    ("stride", "ways"),
    [(128, 8), (144, 1), (160, 2), (192, 4), (256, 8), (272, 1), (288, 2), (320, 4), (528, 1)],
)
@pytest.mark.parametrize("kind", ["ldmatrix.x1", "ldmatrix.x2", "ldmatrix.x4", "ld16", "st16"])
def test_rows_of_16_bytes(kind: str, stride: int, ways: int) -> None:
    served = in_rows(ACCESSES[kind], stride)
    assert set(served.ways) == {ways}
    assert served.wavefronts == ways * served.ideal


def test_a_padded_row_of_floats_depends_on_the_access() -> None:
    """Rows of 32 floats and 8 more (160 B): not free for 16-byte reads, free for fragments."""
    assert in_rows(LDMATRIX, 160).wavefronts == 8
    assert in_rows(ACCESSES["st8"], 160, lanes_per_row=4).wavefronts == 2


def test_phases() -> None:
    ideals = {n: serve(a, lambda i, a=a: i * a.bytes).wavefronts for n, a in ACCESSES.items()}
    assert ideals == {
        "ldmatrix.x1": 1, "ldmatrix.x2": 2, "ldmatrix.x4": 4, "ld1": 1, "st1": 1, "ld2": 1,
        "st2": 1, "ld4": 1, "st4": 1, "ld8": 2, "st8": 2, "ld16": 4, "st16": 4,
    }  # fmt: skip


def test_equal_words_are_free_and_equal_banks_are_not() -> None:
    load = ACCESSES["ld4"]
    assert serve(load, lambda i: 4096).wavefronts == 1
    assert serve(load, lambda i: i // 8 * 4).wavefronts == 1
    assert serve(load, lambda i: i % 2 * 128).wavefronts == 2
    assert serve(load, lambda i: i * 128).wavefronts == 32
    assert serve(ACCESSES["ld1"], lambda i: i).conflicts == ()


def test_conflicts_name_lanes_and_banks() -> None:
    (conflict, *_) = served = in_rows(LDMATRIX, 288).conflicts
    assert (conflict.phase, conflict.banks, conflict.groups) == (0, (0, 1, 2, 3), ((0,), (4,)))
    assert len(served) == 16


def test_lanes_that_take_no_part() -> None:
    served = Served(ACCESSES["ld8"], (0, None, 256, *[None] * 14))
    assert served.ways == (2, 0) and served.ideal == 1
    assert served.wavefront_of(1, 0) is None


@pytest.mark.parametrize("addresses", [(2,), (-4,), tuple(range(0, 132, 4))])
def test_bad_addresses(addresses: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="ld4"):
        Served(ACCESSES["ld4"], addresses)


@pytest.mark.parametrize("kind", ACCESSES)
def test_random_addresses_against_a_count_of_bytes(kind: str) -> None:
    rng = np.random.default_rng(0)
    access = ACCESSES[kind]
    for span in (8, 64, 512):
        addresses = rng.integers(0, span, access.lanes) * access.bytes
        expected = 0
        for first in range(0, access.lanes, access.phase):
            touched = {
                int(address + byte) // WORD
                for address in addresses[first : first + access.phase]
                for byte in range(access.bytes)
            }
            expected += max(Counter(word % BANKS for word in touched).values())
        assert Served(access, tuple(map(int, addresses))).wavefronts == expected


@pytest.mark.parametrize("width", SWIZZLES)
def test_swizzles_free_rows_of_their_width(width: int) -> None:
    assert in_rows(LDMATRIX, width, swizzle=width).wavefronts == 4
    line = 8 * width
    assert {swizzled(a, width) for a in range(0, line, 16)} == set(range(0, line, 16))
    assert all(swizzled(a, 0) == a for a in range(0, line, 16))


def test_uses_of_a_plane() -> None:
    def kinds(stride: int, rows: int, element: int) -> list[str]:
        plane = Plane("p", 0, stride * rows, stride, element, None)
        return [use.access.name for use in uses(plane)]

    assert kinds(272, 64, 2) == ["ldmatrix.x4", "st16", "st4"]
    assert kinds(160, 64, 4) == ["st16", "st8", "ld4"]
    assert kinds(272, 4, 2) == [] and kinds(0, 1, 4) == []
    assert kinds(66, 64, 2) == []  # rows that are not aligned for anything


def test_pads_and_swizzles_that_free_a_use() -> None:
    copied = {s: next(uses(Plane("p", 0, 64 * s, s, 2, None))) for s in (64, 128, 256, 272)}
    assert {s: (u.pad, u.swizzle) for s, u in copied.items()} == {
        64: (16, 64), 128: (16, 128), 256: (16, None), 272: (0, None),
    }  # fmt: skip


def test_the_picture() -> None:
    lines = picture(in_rows(ACCESSES["ldmatrix.x1"], 256))
    assert lines[0] == "bank      0       8       16      24"
    assert [line[10:15] for line in lines[1:]] == [f"{i}{i}{i}{i}." for i in range(1, 9)]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["banks", *arguments])
    return code, capsys.readouterr().out


def test_the_command_on_rows(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "--stride", "256")
    assert code == 1
    assert out.startswith(
        "ldmatrix.x4, rows of 256 B: 8-way, 32 wavefronts where 4 would do\n"
        "  phase 0, banks 0-3: lanes 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7\n"
    )
    assert out.endswith("free with: 16 B more per row\n")
    code, out = run(capsys, "--stride", "256", "--pad", "16")
    assert code == 0 and out.startswith("ldmatrix.x4, rows of 272 B: no conflicts, 4 wavefronts")
    code, out = run(capsys, "--stride", "160", "--access", "st8", "--lanes-per-row", "4")
    assert code == 0 and "rows of 160 B, 4 lanes in each: no conflicts" in out


def test_the_command_on_a_formula(capsys: pytest.CaptureFixture[str]) -> None:
    formula = "lane % 16 * 128 + (lane // 16 ^ lane % 8) * 16"
    code, out = run(capsys, "--address", formula, "--json")
    record = json.loads(out)
    assert code == 0 and record["schema"] == "pyruntime.banks/1"
    assert record["wavefronts"] == record["ideal"] == 4 and record["addresses"][17] == 128


def test_the_command_on_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(DATA / "nvcc-13.0-sm_90a.cubin")
    code, out = run(capsys, "*", file)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert "rows 64 x 80 2 16x16 operand ldmatrix.x4 4 of 4 1" in lines
    assert "tail 32 x 192 4 a row per lane ld4 16 of 1 16 4 B more per row" in lines
    (kernel,) = json.loads(run(capsys, "*", file, "--json")[1])["kernels"]
    assert [p["name"] for p in kernel["planes"]][1:] == ["rows", "tail"]
    assert main(["banks", "plain", file]) == 2
    assert "plain exports no planes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--stride", "24"],
        ["--stride", "-16"],
        ["--stride", "16", "--access", "ld4", "--lanes-per-row", "0"],
        ["--address", "lane ** 2"],
        ["--address", "row * 16"],
        ["--address", "lane // 0"],
    ],
)
def test_what_cannot_be_simulated(arguments: list[str]) -> None:
    assert main(["banks", *arguments]) == 2


@pytest.mark.parametrize("arguments", [[], ["x", "--stride", "16"]])
def test_one_pattern_is_needed(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["banks", *arguments])


def test_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "banks.png"
    assert run(capsys, "--stride", "288", "--png", str(path))[0] == 1
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    assert [p.name for p in tmp_path.iterdir()] == ["banks.png"]
    kernels = ["tile*", str(DATA / "nvcc-13.0-sm_90a.cubin"), "--png", str(path)]
    assert run(capsys, *kernels)[0] == 0


def test_png_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing, raising=True)
    from pyruntime.tools.banks import main as banks

    with pytest.raises(InputError, match=r"pyruntime-cuda\[plot\]"):
        banks(["--stride", "288", "--png", str(tmp_path / "x.png")])
