"""Instructions: classes, control codes, loops; and `pyruntime sass` where nvdisasm is there."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyruntime.cli import main
from pyruntime.cubin import nvdisasm
from pyruntime.cubin.facts import KernelFacts
from pyruntime.cubin.installed import root
from pyruntime.cubin.loops import loops
from pyruntime.cubin.records import kernels_of, read_all
from pyruntime.cubin.sass import Instruction, mix
from pyruntime.cubin.waiting import unwaited
from pyruntime.errors import ToolError

DATA = Path(__file__).parents[1] / "data" / "cubins"
FILE = str(DATA / "nvcc-13.0-sm_90a.cubin")
# LDG.E R4,desc[UR4][R2.64] and FMUL R5,R4,R5 of the kernel `plain` in that file.
LOAD, USE = 0x000EA2000C1E19000000000402047981, 0x004FCA00004000000000000504057220


def instruction(text: str, offset: int = 0, encoding: int = 0) -> Instruction:
    """ "@P0 BRA 0x10" as an instruction."""
    predicate = text.split()[0] if text.startswith("@") else ""
    opcode, _, operands = text.removeprefix(predicate).strip().partition(" ")
    target = re.search(r"0x[0-9a-f]+$", operands)
    flow = opcode.split(".")[0] in ("BRA", "BSSY", "CALL", "WARPSYNC")
    place = int(target[0], 16) if target and flow else None
    return Instruction(offset, opcode, operands, predicate, place, encoding)


def program(*lines: str) -> list[Instruction]:
    return [instruction(line, 16 * i) for i, line in enumerate(lines)]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("HMMA.16816.F32 R0", "tensor"), ("HGMMA.64x64x16.F32 R0", "tensor"),
        ("IMMA.16832 R0", "tensor"), ("QGMMA R0", "tensor"), ("UTCHMMA gdesc[UR4]", "tensor"),
        ("FFMA R0", "fp32"),
        ("MUFU.EX2 R0", "special"), ("LDGSTS.E.BYPASS.128 [R1]", "async copy"),
        ("UTMALDG.2D [UR8]", "async copy"), ("LDSM.16.M88.4 R0", "ldmatrix"),
        ("LDS.128 R0", "shared"), ("STS [R0]", "shared"), ("LDG.E R0", "global"),
        ("STL [R1]", "local"), ("LDL.64 R0", "local"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "barrier"), ("IMAD.WIDE R0", "integer"),
        ("UIADD3 UR4", "uniform"), ("ULDC UR4", "constant"), ("UMOV UR4", "uniform"),
        ("SHFL.BFLY PT", "lanes"), ("BRA 0x0", "control"), ("USETMAXREG", "control"),
        ("NOP", "padding"), ("@!PT LDS RZ,[RZ]", "padding"), ("FROBNICATE R0", "other"),
    ],
)  # fmt: skip
def test_classes(text: str, kind: str) -> None:
    assert instruction(text).kind.name == kind


def test_control_codes() -> None:
    load, use = instruction("LDG.E R4", 0, LOAD), instruction("FMUL R5", 0, USE)
    assert load.control.writes == 2 and load.control.reads is None
    assert use.control.waits == 1 << 2 and use.control.writes is None
    assert str(use.control) == "B--2---:R-:W-:Y:S05"


def test_nested_loops() -> None:
    code = program(
        "MOV R0", "MOV R1", "FADD R1", "@P0 BRA 0x20", "IADD3 R0", "@P1 BRA 0x10",
        "@P2 BRA 0x60", "EXIT", "BRA 0x80",
    )  # fmt: skip
    found = loops(code)
    assert [(loop.name, loop.header, sorted(loop.body)) for loop in found] == [
        ("1", 0x10, [1, 2, 3, 4, 5]),
        ("1.1", 0x20, [2, 3]),
        ("2", 0x60, [6]),
    ]  # the branch to itself after EXIT is never reached
    assert [loop.depth for loop in found] == [1, 2, 1]
    assert mix(code[i] for i in found[1].body) == {"fp32": 1, "control": 1}


def test_a_slow_path_at_the_end_is_no_loop() -> None:
    code = program("@P0 BRA 0x40", "FMUL R0", "STG.E [R2]", "EXIT", "FADD R0", "BRA 0x20")
    assert loops(code) == ()


def test_branches_with_a_condition_of_their_own_fall_through() -> None:
    code = program("FADD R0", "BRA.DIV UR4,0x30", "BRA !P1,0x0", "EXIT")
    assert [(loop.header, sorted(loop.body)) for loop in loops(code)] == [(0, [0, 1, 2])]


def test_loops_in_called_functions() -> None:
    code = program("CALL.REL.NOINC 0x20", "EXIT", "FADD R0", "@P0 BRA 0x20", "RET.REL.NODEC R2,0x0")
    assert [loop.header for loop in loops(code)] == [0x20]


def test_two_back_edges_are_one_loop() -> None:
    code = program("FADD R0", "@P0 BRA 0x0", "FMUL R0", "@P1 BRA 0x0", "EXIT")
    (loop,) = loops(code)
    assert sorted(loop.body) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ("ACQBULK", "ACQBULK", []),
        ("ACQBULK", "@P1 EXIT", ["EXIT 0x50", "STG 0x60", "EXIT 0x70"]),
        ("@P2 ACQBULK", "ACQBULK", ["STG 0x60", "EXIT 0x70"]),
        ("EXIT", "ACQBULK", ["EXIT 0x30"]),
        ("ACQBULK", "RED.E [R2]", ["RED 0x50", "STG 0x60", "EXIT 0x70"]),
    ],
)
def test_every_path_has_to_wait(left: str, right: str, found: list[str]) -> None:
    code = program(
        "PREEXIT", "LDG.E R1", "@P0 BRA 0x50", left, "BRA 0x60", right, "STG.E R1", "EXIT",
        "BRA 0x80",
    )  # fmt: skip
    assert [f"{i.name} {i.offset:#x}" for i in unwaited(code)] == found


def test_no_code() -> None:
    assert loops([]) == () and mix([]) == {} and nvdisasm.disassemble([]) == []


@pytest.fixture
def tool() -> Path:
    try:
        return nvdisasm.find()
    except ToolError as error:
        pytest.skip(str(error))


def kernels(*paths: Path) -> list[KernelFacts]:
    return [kernel for _, kernel in kernels_of(read_all(paths)[0])]


def test_what_a_load_brings_is_waited_for(tool: Path) -> None:
    """The control codes of all fixtures, ABI 7 and 8, sm_80 to sm_120, make sense together."""
    chosen = kernels(DATA)
    seen = 0
    for code in nvdisasm.disassemble(chosen):
        for at, load in enumerate(code):
            register = re.match(r"R\d+", load.operands)
            if load.name not in ("LDG", "LDL") or load.predicate or not register:
                continue
            barrier, waited = load.control.writes, False
            assert barrier is not None
            for later in until_branch(code[at + 1 :]):
                waited |= bool(later.control.waits >> barrier & 1)
                if re.search(rf"\b{register[0]}\b", later.operands):
                    assert waited, (load, later)
                    seen += 1
                    break
    assert seen > 500


def until_branch(code: tuple[Instruction, ...]) -> Iterator[Instruction]:
    for i in code:
        yield i
        if i.target is not None or i.name in ("EXIT", "RET"):
            return


def test_counts_agree_with_the_spill_annotations(tool: Path) -> None:
    (spilling,) = (k for k in kernels(Path(FILE)) if k.name == "spilling")
    ((*code,),) = nvdisasm.disassemble([spilling])
    assert [i.name for i in code].count("STL") == 17
    assert [i.name for i in code].count("LDL") == 30


def test_kernels_of_one_run_keep_their_own_addresses(tool: Path) -> None:
    chosen = [k for k in kernels(Path(FILE)) if k.name in ("plain", "calling", "tile_t128")]
    together = nvdisasm.disassemble(chosen)
    assert together == [code for kernel in chosen for code in nvdisasm.disassemble([kernel])]
    assert all(i.target is None or 0 <= i.target < 16 * len(c) for c in together for i in c)


def test_installed_kernels_of_every_family_are_understood(tool: Path) -> None:
    chosen = {(k.name.split("_")[0], k.arch): k for k in kernels(root())}.values()
    for kernel, code in zip(chosen, nvdisasm.disassemble(chosen), strict=True):
        assert not [i.opcode for i in code if i.kind.name == "other"], kernel.name
        if kernel.name.startswith(("gemm", "attention")):
            products = [at for at, i in enumerate(code) if i.kind.name == "tensor"]
            looped = frozenset().union(*(loop.body for loop in loops(code)))
            assert looped.intersection(products), kernel.name


def test_the_command(tool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sass", "local_array", FILE]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "local_array (sm_90a): 104 instructions"
    assert any(line.startswith("local local memory (spills, arrays) ") for line in lines)
    assert main(["sass", "plain", FILE, "--json", "--listing"]) == 0
    record = json.loads(capsys.readouterr().out)
    (kernel,) = record["kernels"]
    assert record["schema"] == "pyruntime.sass/1" and kernel["instructions"] == 32
    assert sum(kernel["mix"].values()) == sum(kernel["opcodes"].values()) == 32
    load = next(i for i in kernel["listing"] if i["class"] == "global")
    assert load["control"]["writes"] is not None


def test_the_listing(tool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sass", "plain", FILE, "--listing"]) == 0
    out = capsys.readouterr().out
    assert "      000b0 B------:R-:W2:-:S01  LDG.E R4,desc[UR4][R2.64]\n" in out
    assert "      00120 B--2---:R-:W-:Y:S05  FMUL R5,R4,R5\n" in out


def test_other_architectures_are_named(tool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sass", "plain", FILE, "--arch", "sm_80"]) == 2
    assert "plain is not there for sm_80, only sm_90a" in capsys.readouterr().err


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An environment without nvdisasm; an empty folder that is its whole PATH."""
    from cuda import pathfinder

    monkeypatch.setattr(pathfinder, "find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    nvdisasm.find.cache_clear()
    yield tmp_path
    nvdisasm.find.cache_clear()


def test_without_nvdisasm(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sass", "plain", FILE]) == 2
    err = capsys.readouterr().err
    assert "the wheel nvidia-cuda-nvdisasm, CONDA_PREFIX" in err
    assert "CUDA_HOME (/nowhere), CUDA_PATH (not set), PATH" in err and "[sass]" in err


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'nvdisasm fatal : unknown option' >&2; exit 1", "unknown option"),
        ("exit 3", "exit code 3"),
        ("echo no json", "no JSON"),
        ("echo '[{}, [{\"sass-instructions\": []}]]'", "0 instructions in 512 bytes"),
    ],
)
def test_an_nvdisasm_that_does_not_help(
    nowhere: Path, capsys: pytest.CaptureFixture[str], script: str, reason: str
) -> None:
    path = nowhere / "nvdisasm"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    assert main(["sass", "plain", FILE]) == 2
    err = capsys.readouterr().err
    assert str(path) in err and reason in err
