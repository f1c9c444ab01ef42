"""The main loops of int8 products as installed: issue slots per mma, and what must not be there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pyruntime.cli import main
from pyruntime.cubin import nvdisasm
from pyruntime.cubin.facts import read_cubin
from pyruntime.cubin.installed import manifest, root
from pyruntime.cubin.structure import structure
from pyruntime.errors import ToolError

# The most instructions that a warp issues in a step, for each of its mma of 8-bit integers: scales,
# copies, loads, unpacking and 8 FFMA of the fold. A bound is what ptxas 13.0 makes, rounded up.
# Of sm_80 moves are separate instructions; of sm_120 a warp has half the tokens.
SLOTS = {
    "int8_q4_k_m64_n128_k1_s2_b3": {"80": 15.0, "90a": 13.0, "100": 13.0, "120": 15.0},
    "int8_q6_k_m64_n128_k1_s2_b3": {"80": 14.5, "90a": 12.0, "100": 12.0, "120": 14.0},
    "int8_wide_q4_k_m128_n128_k1_s2_b2": {"90a": 12.0},
    "int8_wide_q6_k_m128_n128_k1_s2_b2": {"90a": 11.0},
}
CASES = [
    (architecture, name)
    for architecture in manifest()["architectures"]
    for name, slots in SLOTS.items()
    if architecture in slots
]


@pytest.fixture(autouse=True)
def nvdisasm_is_there() -> None:
    try:
        nvdisasm.find()
    except ToolError as error:
        pytest.skip(str(error))


def file_of(architecture: str, name: str) -> Path:
    file = "gemm_int8_wide" if "wide" in name else "gemm_int8"
    return root() / f"sm_{architecture}" / f"{file}.cubin"


@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_a_step_is_short(architecture: str, name: str) -> None:
    """By the gate, which refuses a bound of one and a half slots less."""
    gate = ["gate", str(file_of(architecture, name)), "--kernel", name, "--rule"]
    slots = SLOTS[name][architecture]
    assert main([*gate, f"mma == 'IMMA' and slots_per_mma <= {slots}"]) == 0
    assert main([*gate, f"mma == 'IMMA' and slots_per_mma <= {slots - 1.5}"]) == 1


@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_a_step_converts_nothing(architecture: str, name: str) -> None:
    path = file_of(architecture, name)
    kernels = read_cubin(path.read_bytes(), path.name).kernels
    (code,) = nvdisasm.disassemble([kernel for kernel in kernels if kernel.name == name])
    count = Counter(x.name for x in structure(code, None).inside)
    assert count["IMMA"] >= 64
    for converted in ("I2F", "I2FP", "F2I", "LDL", "STL"):
        assert not count[converted], converted
    # M + isum is a float without more: the fold of an mma is two FFMA for each of its four sums.
    assert 8 <= count["FFMA"] / count["IMMA"] <= 8.3
