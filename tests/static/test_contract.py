"""The kernel contract end to end: table row, name, spec in the cubin, what the launcher asks."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from compilers import nvcc

from pyruntime.cubin.contract import breaches
from pyruntime.cubin.facts import KernelFacts, read_cubin
from pyruntime.cubin.installed import architecture_for, manifest, root
from pyruntime.cubin.nvdisasm import disassemble
from pyruntime.cubin.records import kernels_of, read_all
from pyruntime.cubin.spec import KernelSpec, read_specs
from pyruntime.cubin.waiting import RELEASE, late_stores, unwaited
from pyruntime.errors import ToolError

ROOT = Path(__file__).parents[2]


def installed(arch: str) -> dict[str, KernelSpec]:
    specs: dict[str, KernelSpec] = {}
    for path in sorted((root() / f"sm_{arch}").glob("*.cubin")):
        specs |= read_specs(path.read_bytes(), path.name)
    return specs


def table_rows(arch: str) -> int:
    """Rows whose macro a family for all architectures, or for this one alone, defines."""
    kernels = ROOT / "cuda/kernels"
    sources = [*kernels.glob("*.cu"), *kernels.glob(f"sm_{arch}/*.cu")]
    define = re.compile(r"^#define ([A-Z0-9_]+)\(", re.MULTILINE)
    macros = {macro for path in sources for macro in define.findall(path.read_text())}
    text = re.sub(r"//.*", "", (ROOT / "cuda/table.def").read_text())
    return sum(row in macros for row in re.findall(r"^([A-Z0-9_]+)\(", text, re.MULTILINE))


def test_every_row_is_a_kernel_on_every_architecture_it_is_for() -> None:
    names = {arch: set(installed(arch)) for arch in manifest()["architectures"]}
    assert {arch: len(found) for arch, found in names.items()} == {
        arch: table_rows(arch) for arch in names
    }
    general = set.intersection(*names.values())
    special = {name for arch in names for name in names[arch] - general}
    hopper = ("gemm_stream_", "gemm_wgmma_", "attention_wgmma_", "schedule_", "int8_wide_")
    large = {name for name in special if re.fullmatch(r"int8_\w+_m(32|64)_n32_k4_\w+", name)}
    assert all(name.startswith(hopper) for name in special - large)
    assert all(not ((special - large) & names[arch]) for arch in names if arch != "90a")
    for arch in names:  # multiprocessors of sm_120 have no room for them
        assert names[arch] & large == (set() if arch == "120" else large)


def test_specs_are_whole() -> None:
    for arch in manifest()["architectures"]:
        for spec in installed(arch).values():
            assert spec.params and spec.threads % 32 == 0 and spec.min_blocks >= 1
            ends = [plane.offset + plane.bytes for plane in spec.planes]
            assert spec.smem_bytes == max(ends, default=0)
            assert all(param.offset < spec.param_bytes for param in spec.params)


def test_the_compiler_agrees_with_every_contract() -> None:
    cubins, unread = read_all([])
    found = [f"{k.name} {k.arch}: {b}" for _, k in kernels_of(cubins) for b in breaches(k)]
    assert not unread and not found


NORM = "kernels/norm.cuh"


def build_norm(tree: Path, arch: str, *changes: tuple[str, str, str]) -> KernelFacts:
    """The norm kernel of the sources, copied into `tree`; each change: file, a text, another.

    The first of each text is replaced, which in norm.cuh is the norm's own.
    """
    shutil.copytree(ROOT / "cuda", tree / "cuda", dirs_exist_ok=True)
    for name, old, new in changes:
        source = tree / "cuda" / name
        text = source.read_text()
        assert old in text, old
        source.write_text(text.replace(old, new, 1))
    cubin = tree / "norm.cubin"
    subprocess.run(
        [nvcc(), "-cubin", "-std=c++17", "-gencode", f"arch=compute_{arch},code=sm_{arch}",
         "-o", cubin, tree / "cuda/kernels/norm.cu"],
        check=True,
    )  # fmt: skip
    kernels = read_cubin(cubin.read_bytes(), "norm").kernels
    return next(kernel for kernel in kernels if kernel.name == "norm_t256")


@pytest.mark.parametrize("arch", ["80", "90a"])
def test_one_more_plane_changes_what_the_launcher_asks_for(tmp_path: Path, arch: str) -> None:
    """Adds one line to a family's plane list; nothing else is edited."""
    planes = "P(16, float, partial, [kThreads / 32])"
    more = (NORM, planes, f"{planes} P(16, float, extra, [256])")
    before, after = (build_norm(tmp_path, arch, *changes).spec for changes in ((), (more,)))
    assert before and after
    assert after.smem_bytes == before.smem_bytes + 1024
    assert [p.name for p in after.planes] == [*(p.name for p in before.planes), "extra"]


def test_no_tile_or_byte_literal_in_python() -> None:
    """What a launch is given is a name or computed from the spec, never a number written down."""
    launches = 0
    for path in (ROOT / "pyruntime/ops").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add":
                launches += 1
                given = [v for k in node.keywords for v in getattr(k.value, "elts", [k.value])]
                numbers = {v.value for v in given if isinstance(v, ast.Constant)}
                assert not {n for n in numbers if isinstance(n, int | float) and abs(n) > 1}, path
    assert launches >= 8


def test_kernels_overlap_from_sm_90_on() -> None:
    for arch in manifest()["architectures"]:
        assert {spec.dependent for spec in installed(arch).values()} == {arch != "80"}


def early(kernels: Sequence[KernelFacts]) -> list[str]:
    """What kernels do before they wait for the kernel before, and should not."""
    try:
        listings = disassemble(kernels)
    except ToolError as error:
        pytest.skip(str(error))
    return [
        f"{kernel.name} {kernel.arch}: {instruction}"
        for kernel, listing in zip(kernels, listings, strict=True)
        for instruction in unwaited(listing)
    ]


def test_every_path_of_a_dependent_kernel_waits() -> None:
    cubins, _ = read_all([])
    assert not early([k for _, k in kernels_of(cubins) if k.spec and k.spec.dependent])


def test_a_kernel_that_does_not_wait_is_found(tmp_path: Path) -> None:
    wait = "if constexpr (!::spec::kWaitsItself<__VA_ARGS__>) ptx::dependency_wait();"
    kernel = build_norm(tmp_path, "90a", ("core/spec.cuh", wait, ""))
    (breach,) = breaches(kernel)
    assert breach.fact == "waits for the kernel before"
    found = early([kernel])
    assert any("STG" in text for text in found) and any("EXIT" in text for text in found)


def test_a_path_that_does_not_wait_is_found(tmp_path: Path) -> None:
    """Blocks past the live rows end first: the contract is kept, the chain of waits is not."""
    threads, leave = "static constexpr int kThreads = Threads", "if (row >= *p.rows) return;"
    itself = (NORM, threads, f"static constexpr bool kWaitsItself = true;\n{threads}")
    first = build_norm(
        tmp_path / "a", "90a", itself, (NORM, leave, f"ptx::dependency_wait();{leave}")
    )
    then = build_norm(
        tmp_path / "b", "90a", itself, (NORM, leave, f"{leave}ptx::dependency_wait();")
    )
    assert not breaches(first) and not breaches(then)
    assert not early([first])
    (found,) = early([then])
    assert "EXIT" in found


def late(kernels: Sequence[KernelFacts]) -> list[str]:
    """What kernels still store once they have let the next one start, which each does."""
    try:
        listings = disassemble(kernels)
    except ToolError as error:
        pytest.skip(str(error))
    assert all(any(i.name == RELEASE for i in listing) for listing in listings)
    return [
        f"{kernel.name}: {instruction}"
        for kernel, listing in zip(kernels, listings, strict=True)
        for instruction in late_stores(listing)
    ]


def test_a_schedule_is_written_before_the_next_kernel_starts() -> None:
    """What follows reads it before it waits."""
    cubins, _ = read_all([])
    schedules = [k for _, k in kernels_of(cubins) if k.spec and k.spec.family == "schedule"]
    assert len(schedules) == ("90a" in manifest()["architectures"])
    assert not late(schedules)


def test_a_kernel_that_does_not_hold_the_next_is_found(tmp_path: Path) -> None:
    threads = "static constexpr int kThreads = Threads"
    holds = (NORM, threads, f"static constexpr bool kHoldsNext = true;\n{threads}")
    assert not late([build_norm(tmp_path / "a", "90a", holds)])
    assert any("STG" in text for text in late([build_norm(tmp_path / "b", "90a")]))


def test_the_planes_of_attention_by_wgmma() -> None:
    """Q, K and V in whole boxes of 64 dims; 64 rows to a warpgroup, and one more feeds them."""
    for spec in installed("90a").values():
        if spec.tile.get("variant") != "wgmma":
            continue
        tile = {name: int(value) for name, value in spec.tile.items() if name != "variant"}
        plane = {p.name: p for p in spec.planes}
        row = 2 * 64 * -(-tile["hd"] // 64)  # bytes
        stages = {name: plane[f"full_{name}"].bytes // 8 for name in "qkv"}
        assert spec.dependent and "cluster" not in tile and spec.min_blocks == tile["blocks"]
        assert spec.threads == 128 * (tile["warpgroups"] + 1)
        assert tile["tq"] == 64 * tile["warpgroups"]
        assert plane["q"].bytes == stages["q"] * tile["tq"] * row
        assert plane["k"].bytes == stages["k"] * tile["tkv"] * row
        assert plane["v"].bytes == stages["v"] * tile["tkv"] * row
        assert all(plane[name].offset % 1024 == 0 for name in "qkv")  # the swizzle's period


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ((8, 0), "80"),
        ((8, 6), "80"),
        ((8, 9), "80"),
        ((9, 0), "90a"),
        ((10, 0), "100"),
        ((10, 3), "100"),
        ((12, 1), "120"),
        ((7, 5), None),
        ((11, 0), None),
    ],
)
def test_architecture_for(device: tuple[int, int], expected: str | None) -> None:
    assert architecture_for(device, ["80", "90a", "100", "120"]) == expected


def test_suffix_a_needs_its_own_version() -> None:
    assert architecture_for((10, 3), ["100a"]) is None
    assert architecture_for((9, 0), ["90", "90a"]) == "90a"
