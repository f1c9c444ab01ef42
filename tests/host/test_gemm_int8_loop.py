"""The main loops of int8 products as installed: issue slots per mma, and what must not be there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pyruntime.cli import main
from pyruntime.cubin import nvdisasm
from pyruntime.cubin.facts import KernelFacts, read_cubin
from pyruntime.cubin.installed import manifest, root
from pyruntime.cubin.limits import limits_of
from pyruntime.cubin.occupancy import Demand, occupancy
from pyruntime.cubin.structure import structure
from pyruntime.errors import ToolError

# The most instructions that a warp issues in a step, for each of its mma of 8-bit integers: scales,
# copies, loads, unpacking and the fold's 8 FFMA, of sm_100 4 of pairs. A bound is what ptxas 13.0
# makes, rounded up. Of sm_120 a warp has half the tokens where there are scales for 16 weights.
SLOTS = {
    "int8_q4_k_m64_n128_k1_s2_b3": {"80": 12.0, "90a": 12.9, "100": 8.7, "120": 12.0},
    "int8_q4_k_m64_n128_k1_s2_b2": {"90a": 12.6},
    "int8_q6_k_m64_n128_k1_s2_b3": {"80": 11.4, "90a": 11.8, "100": 7.7, "120": 13.6},
    "int8_q6_k_m64_n128_k1_s2_b2": {"90a": 11.7},
    "int8_wide_q4_k_m128_n128_k1_s2_b2": {"90a": 12.0},
    "int8_wide_q6_k_m128_n128_k1_s2_b2": {"90a": 10.7},
}
# Small multiprocessors after the architecture whose cubin they run, and types whose tiles of 64
# tokens they hold two of.
SMALL = [("80", "sm_86"), ("80", "sm_89"), ("120", "sm_120")]
TWICE = ("q4_0", "q4_1", "q5_0", "q4_k", "iq4_nl", "iq4_xs")
CASES = [
    (architecture, name)
    for architecture in manifest()["architectures"]
    for name, slots in SLOTS.items()
    if architecture in slots
]


@pytest.fixture
def disassembled() -> None:
    try:
        nvdisasm.find()
    except ToolError as error:
        pytest.skip(str(error))


def file_of(architecture: str, name: str) -> Path:
    file = "gemm_int8_wide" if "wide" in name else "gemm_int8"
    return root() / f"sm_{architecture}" / f"{file}.cubin"


def kernel_of(architecture: str, name: str) -> KernelFacts:
    path = file_of(architecture, name)
    kernels = read_cubin(path.read_bytes(), path.name).kernels
    return next(kernel for kernel in kernels if kernel.name == name)


@pytest.mark.usefixtures("disassembled")
@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_a_step_is_short(architecture: str, name: str) -> None:
    """By the gate, which refuses a bound of one and a half slots less."""
    gate = ["gate", str(file_of(architecture, name)), "--kernel", name, "--rule"]
    slots = SLOTS[name][architecture]
    assert main([*gate, f"mma == 'IMMA' and slots_per_mma <= {slots}"]) == 0
    assert main([*gate, f"mma == 'IMMA' and slots_per_mma <= {slots - 1.5}"]) == 1


@pytest.mark.usefixtures("disassembled")
@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_a_step_converts_nothing(architecture: str, name: str) -> None:
    (code,) = nvdisasm.disassemble([kernel_of(architecture, name)])
    count = Counter(x.name for x in structure(code, None).inside)
    assert count["IMMA"] >= 64
    for converted in ("I2F", "I2FP", "F2I", "LDL", "STL"):
        assert not count[converted], converted
    # M + isum is a float without more: the fold of an mma is two FFMA for each of its four sums.
    assert 8 <= (count["FFMA"] + 2 * count["FFMA2"]) / count["IMMA"] <= 8.3
    assert count["FFMA2"] == (4 * count["IMMA"] if architecture == "100" else 0)


@pytest.mark.parametrize(("architecture", "device"), SMALL)
@pytest.mark.parametrize("name", TWICE)
def test_two_blocks_fit(architecture: str, device: str, name: str) -> None:
    if architecture not in manifest()["architectures"]:
        pytest.skip(f"no cubins for sm_{architecture}")
    kernel = kernel_of(architecture, f"int8_{name}_m64_n128_k1_s2_b2")
    assert kernel.spec is not None
    demand = Demand(kernel.spec.threads, kernel.registers, kernel.spec.smem_bytes)
    assert occupancy(demand, limits_of(device)).blocks == 2
