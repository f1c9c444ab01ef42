"""Facts read from cubins of four toolkits, against what ptxas, cuobjdump and pyelftools say."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from pyruntime.cubin.elf import Elf
from pyruntime.cubin.facts import CubinFacts, KernelFacts, Parameter, Spills, read_cubin

DATA = Path(__file__).parents[1] / "data" / "cubins"
EXPECTED: dict[str, dict[str, dict[str, dict[str, int]]]] = json.loads(
    (DATA / "expected.json").read_text()
)
KERNELS = [(file, kernel) for file, said in EXPECTED.items() for kernel in said["cuobjdump"]]


def read(name: str) -> CubinFacts:
    return read_cubin((DATA / name).read_bytes(), name)


def kernel_of(name: str, kernel: str) -> KernelFacts:
    (found,) = (k for k in read(name).kernels if k.name == kernel)
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_no_kernel_is_missed_or_invented(name: str) -> None:
    assert {k.name for k in read(name).kernels} == set(EXPECTED[name]["cuobjdump"])


@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_equals_what_the_tools_say(name: str, kernel: str) -> None:
    found = kernel_of(name, kernel)
    dump = EXPECTED[name]["cuobjdump"][kernel]
    assert (found.registers, found.stack, found.constant_bytes) == (
        dump["REG"], dump["STACK"], dump["CONSTANT0"],
    )  # fmt: skip
    # cuobjdump counts the driver's reserve as the kernel's own from sm_90 on; ptxas does not.
    reserve = 1024 if int(found.arch[3:].rstrip("a")) >= 90 and dump["SHARED"] else 0
    assert found.static_shared == dump["SHARED"] - reserve
    assert found.spills is not None
    ours = {
        "stack": found.stack, "registers": found.registers, "barriers": found.barriers,
        "static_shared": found.static_shared, "spill_stores": found.spills.stores,
        "spill_loads": found.spills.loads,
    }  # fmt: skip
    assert ours == EXPECTED[name]["ptxas"].get(kernel, ours)


def test_ptxas_figures_cover_what_they_should() -> None:
    """The fixtures hold spills, barriers, stacks and shared memory, so that equality means much."""
    figures = EXPECTED["nvcc-13.0-sm_90a.cubin"]["ptxas"]
    assert figures["spilling"]["spill_stores"] == 124
    assert figures["local_array"]["spill_stores"] == 0 < figures["local_array"]["stack"]
    assert figures["chosen_shared"]["barriers"] == 6
    assert figures["calling"]["stack"] == 32
    assert EXPECTED["nvrtc-12.9-sm_90a.cubin"]["ptxas"]["fixed_shared"]["static_shared"] == 400


@pytest.mark.parametrize(
    ("name", "arch", "abi", "toolkit", "tool", "options"),
    [
        ("nvcc-13.0-sm_80", "sm_80", 8, "13.0", "ptxas V13.0.88", "-v -arch sm_80 -m 64"),
        ("nvcc-13.0-sm_90a", "sm_90a", 8, "13.0", "ptxas V13.0.88", "-v -arch sm_90a -m 64"),
        ("nvcc-13.0-sm_100a", "sm_100a", 8, "13.0", "ptxas V13.0.88", "-v -arch sm_100a -m 64"),
        ("nvcc-13.0-sm_120", "sm_120", 8, "13.0", "ptxas V13.0.88", "-v -arch sm_120 -m 64"),
        ("nvcc-13.5-sm_90a", "sm_90a", 8, "13.5", "ptxas V13.5.37", "-v -arch sm_90a -m 64"),
        ("nvrtc-12.9-sm_90a", "sm_90a", 7, "12.9", None, None),
        ("nvrtc-12.9-sm_100a", "sm_100a", 8, "12.9", "ptxas V12.9.86", "-v -arch sm_100a"),
        ("triton-sm_90a", "sm_90a", 8, "13.4", "ptxas-blackwell V13.4.59", None),
    ],
)
def test_provenance(
    name: str, arch: str, abi: int, toolkit: str, tool: str | None, options: str | None
) -> None:
    found = read(f"{name}.cubin")
    assert (found.arch, found.abi, found.toolkit, found.tool) == (arch, abi, toolkit, tool)
    assert options is None or found.options == options
    assert not found.remarks


@pytest.mark.parametrize(
    ("name", "flags", "arch"),
    [
        # What CUDA 12.9 writes for sm_90, sm_80 and sm_100 without the suffix.
        ("nvrtc-12.9-sm_90a.cubin", 0x5A055A, "sm_90"),
        ("nvrtc-12.9-sm_90a.cubin", 0x500550, "sm_80"),
        ("nvrtc-12.9-sm_100a.cubin", 0x6006402, "sm_100"),
    ],
)
def test_the_suffix_in_the_flags(name: str, flags: int, arch: str) -> None:
    data = bytearray((DATA / name).read_bytes())
    data[0x30:0x34] = flags.to_bytes(4, "little")
    assert read_cubin(bytes(data), name).arch == arch


@pytest.mark.parametrize("name", EXPECTED)
def test_elf_structure_equals_pyelftools(name: str) -> None:
    data = (DATA / name).read_bytes()
    ours, theirs = Elf(data, name), ELFFile(io.BytesIO(data))
    assert ours.flags == theirs.header["e_flags"]
    expected: list[Any] = [
        (s.name, s["sh_flags"], s["sh_size"], s["sh_link"], s["sh_info"], _bytes(s))
        for s in theirs.iter_sections()
    ]
    assert expected == [
        (s.name, s.flags, s.size, s.link, s.info, bytes(s.data)) for s in ours.sections
    ]
    table = theirs.get_section_by_name(".symtab")
    assert [(s.name, s["st_value"], s["st_size"]) for s in table.iter_symbols()] == [
        (s.name, s.value, s.size) for s in ours.symbols()
    ]


def _bytes(section: Any) -> bytes:
    data: bytes = section.data()
    return b"" if section["sh_type"] in ("SHT_NULL", "SHT_NOBITS") else data


@pytest.mark.parametrize("name", EXPECTED)
def test_code_is_the_text_section(name: str) -> None:
    elf = ELFFile(io.BytesIO((DATA / name).read_bytes()))
    for kernel in read(name).kernels:
        assert kernel.code == elf.get_section_by_name(f".text.{kernel.name}").data()


@pytest.mark.parametrize("name", [n for n in EXPECTED if not n.startswith("triton")])
def test_parameters_and_bounds(name: str) -> None:
    assert kernel_of(name, "fixed_shared").params == (
        Parameter(0, 0, 8), Parameter(1, 8, 4), Parameter(2, 16, 8),
    )  # fmt: skip
    wide = kernel_of(name, "wide_params")  # more than 4 KB: the second form of the attribute
    assert [(p.offset, p.size) for p in wide.params] == [(0, 6000), (6000, 4), (6008, 8)]
    assert wide.param_bytes == 6016
    fixed = kernel_of(name, "fixed_shared")
    assert (fixed.max_threads, fixed.register_cap) == (256, 128)
    plain = kernel_of(name, "plain")
    assert (plain.max_threads, plain.register_cap, plain.threads) == (None, None, None)
    assert plain.dynamic_shared is None
    assert kernel_of(name, "calling").calls == ("_Z6helperfi",)
    assert read(name).constant_bytes == 400
    if "sm_80" not in name:
        assert kernel_of(name, "clustered").cluster == (2, 1, 1)


def test_triton_fixes_the_block() -> None:
    (kernel,) = read("triton-sm_90a.cubin").kernels
    assert (kernel.required_threads, kernel.threads) == ((128, 1, 1), 128)


@pytest.mark.parametrize("arch", ["80", "90a", "100a", "120"])
def test_the_contract_makes_launch_facts_known(arch: str) -> None:
    kernel = kernel_of(f"nvcc-13.0-sm_{arch}.cubin", "tile_t128")
    assert kernel.spec is not None
    assert (kernel.threads, kernel.dynamic_shared, kernel.static_shared) == (128, 6272, 0)
    assert kernel.param_bytes == kernel.spec.param_bytes


def test_unknown_attributes_are_kept_as_hex() -> None:
    kernel = kernel_of("nvcc-13.5-sm_90a.cubin", "plain")
    unknown = {a.name: a.text for a in kernel.attributes if a.name.startswith("0x")}
    assert unknown == {"0x5f": "0x101", "0x66": "03000000", "0x6b": "0x1", "0x6d": "0x0"}


def patched(name: str, kernel: str, code: int, value: bytes) -> KernelFacts:
    """A kernel after the value of one of its attributes was overwritten in the file."""
    data = bytearray((DATA / name).read_bytes())
    elf = Elf(bytes(data), name)
    section = elf.by_name[f".nv.info.{kernel}"]
    at = bytes(section.data).index(bytes([4, code]) + len(value).to_bytes(2, "little"))
    data[section.offset + at + 4 : section.offset + at + 4 + len(value)] = value
    (found,) = (k for k in read_cubin(bytes(data), name).kernels if k.name == kernel)
    return found


def test_spills_stay_unknown_where_the_toolkit_does_not_tell() -> None:
    """ptxas 12.4 notes no spills: with a stack there may be some, without one there are none."""
    old = (124).to_bytes(4, "little")
    assert patched("nvcc-13.0-sm_90a.cubin", "plain", 0x37, old).spills == Spills()
    assert patched("nvcc-13.0-sm_90a.cubin", "local_array", 0x37, old).spills is None
    assert kernel_of("nvcc-13.0-sm_90a.cubin", "local_array").spills == Spills()


def test_a_recursion_has_no_known_stack() -> None:
    data = bytearray((DATA / "nvcc-13.5-sm_90a.cubin").read_bytes())
    elf = Elf(bytes(data), "x")
    index = next(i for i, s in enumerate(elf.symbols()) if s.name == "calling")
    info = elf.by_name[".nv.info"]
    entry = bytes([4, 0x12, 8, 0]) + index.to_bytes(4, "little")
    at = info.offset + bytes(info.data).index(entry) + 8
    data[at : at + 4] = b"\xff" * 4  # what ptxas 13.5 writes for a recursive function
    found = {k.name: k.stack for k in read_cubin(bytes(data), "x").kernels}
    assert found["calling"] is None and found["plain"] == 0
