"""The main loops of int8 products as machine code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pyruntime.cubin.loops import loops
from pyruntime.cubin.nvdisasm import disassemble
from pyruntime.cubin.records import kernels_of, read_all
from pyruntime.cubin.sass import Instruction
from pyruntime.errors import ToolError
from pyruntime.reference import int8

PRODUCT = "IMMA"


def main_loop(code: Sequence[Instruction]) -> list[Instruction]:
    """What runs again and again with all products of 8-bit integers."""
    with_products = [
        loop.body for loop in loops(code) if any(code[at].name == PRODUCT for at in loop.body)
    ]
    assert with_products
    return [code[at] for at in sorted(frozenset().union(*with_products))]


def conversions(code: Sequence[Instruction]) -> list[str]:
    """Instructions of a main loop that convert numbers: they have a quarter of the throughput."""
    return [str(i) for i in main_loop(code) if i.kind.name == "convert"]


@pytest.fixture(scope="module")
def listings() -> dict[str, Sequence[Instruction]]:
    """The machine code of every row, by "kernel architecture"."""
    cubins, _ = read_all([])
    kernels = [k for _, k in kernels_of(cubins) if k.spec and k.spec.family == "int8"]
    try:
        codes = disassemble(kernels)
    except ToolError as error:
        pytest.skip(str(error))
    return {f"{k.name} {k.arch}": code for k, code in zip(kernels, codes, strict=True)}


def test_integers_become_floats_without_a_conversion(
    listings: dict[str, Sequence[Instruction]],
) -> None:
    """Sums by a product that starts from a float's bits, scales by a permute."""
    assert not {name: found for name, code in listings.items() if (found := conversions(code))}


def test_every_type_has_a_row_on_every_architecture(
    listings: dict[str, Sequence[Instruction]],
) -> None:
    for arch in {name.split()[1] for name in listings}:
        tiles = ["m64_n128_k1", "m16_n32_k4"]
        if arch != "sm_120":  # whose multiprocessors have no room for it
            tiles.append("m64_n32_k4")
        for name in int8.TYPES:
            for tile in tiles:
                start = f"int8_{name.lower()}_{tile}_"
                assert any(k.startswith(start) and k.endswith(arch) for k in listings), (arch, name)


def test_a_conversion_is_found_in_the_loop_alone() -> None:
    opcodes = ("I2F.RP", "IMMA.16832.S8.S8", "I2FP.F32.S32", "FFMA", "BRA", "F2I", "EXIT")
    code = [
        Instruction(16 * at, name, "0x10" if name == "BRA" else "R0", "@P0" * (name == "BRA"),
                    0x10 if name == "BRA" else None, 0)
        for at, name in enumerate(opcodes)
    ]  # fmt: skip
    assert [i.name for i in main_loop(code)] == ["IMMA", "I2FP", "FFMA", "BRA"]
    (found,) = conversions(code)
    assert "I2FP.F32.S32" in found
