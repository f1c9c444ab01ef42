"""Blocks per SM against the driver, for kernels whose register and barrier counts are rewritten."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyruntime.cubin.elf import Elf
from pyruntime.cubin.facts import read_cubin
from pyruntime.cubin.installed import architecture_for
from pyruntime.cubin.limits import limits_of
from pyruntime.cubin.occupancy import Demand, occupancy
from pyruntime.driver import api
from pyruntime.errors import CubinError
from pyruntime.tools.devices import live

DATA = Path(__file__).parents[1] / "data" / "cubins"
KERNEL = "chosen_shared"
KERNELS, POINTS_EACH = 25, 20


def rewritten(data: bytes, registers: int, barriers: int) -> bytes:
    """The cubin with other counts noted for `KERNEL`, and room for blocks of 1,024 threads."""
    elf = Elf(data, "fixture")
    out = bytearray(data)
    index = next(i for i, s in enumerate(elf.symbols()) if s.name == KERNEL)
    shared, own = elf.by_name[".nv.info"], elf.by_name[f".nv.info.{KERNEL}"]
    for section, head, value in (
        (shared, struct.pack("<BBHI", 4, 0x2F, 8, index), struct.pack("<I", registers)),
        (own, struct.pack("<BBH", 4, 0x05, 12), struct.pack("<3I", 1024, 1, 1)),
        (own, bytes([2, 0x4C]), bytes([barriers])),
    ):
        at = section.offset + bytes(section.data).index(head) + len(head)
        out[at : at + len(value)] = value
    (facts,) = (k for k in read_cubin(bytes(out), "rewritten").kernels if k.name == KERNEL)
    assert (facts.registers, facts.barriers, facts.max_threads) == (registers, barriers, 1024)
    return bytes(out)


def fixture_for(capability: tuple[int, int]) -> bytes:
    arch = architecture_for(capability, ["80", "90a", "100a", "120"])
    if arch is None or arch == "80":  # there the register count is also kept outside the attributes
        pytest.skip(f"no fixture to rewrite for compute capability {capability}")
    return (DATA / f"nvcc-13.0-sm_{arch}.cubin").read_bytes()


def test_equals_the_driver_on_500_points(gpu: Any, rng: np.random.Generator) -> None:
    data = fixture_for(gpu.device.compute_capability)
    limits = live(gpu.device.ordinal)
    attribute = api.constant(
        "CUfunction_attribute", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    )
    wrong = []
    with gpu.device.current():
        for _ in range(KERNELS):
            registers, barriers = int(rng.integers(10, 256)), int(rng.integers(6, 17))
            module = api.call("cuModuleLoadData", rewritten(data, registers, barriers))
            function = api.call("cuModuleGetFunction", module, KERNEL.encode())
            api.call("cuFuncSetAttribute", function, attribute, limits.shared_per_block)
            for _ in range(POINTS_EACH):
                threads = int(rng.integers(1, 1025))
                dynamic = int(rng.integers(0, limits.shared_per_block + 1))
                dynamic >>= int(rng.integers(0, 8))
                theirs = api.call(
                    "cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, dynamic
                )
                demand = Demand(threads, registers, dynamic, barriers)
                ours = occupancy(demand, limits)
                if ours.blocks != theirs:
                    wrong.append((demand, ours.allowed, theirs))
            api.call("cuModuleUnload", module)
    assert not wrong, f"{len(wrong)} of {KERNELS * POINTS_EACH}: {wrong[:5]}"


def test_blocks_of_our_own_kernels(gpu: Any) -> None:
    limits = live(gpu.device.ordinal)
    for kernel in gpu.library.family("attention"):
        demand = Demand(kernel.spec.threads, kernel.registers, kernel.spec.smem_bytes)
        assert gpu.library.blocks_per_sm(kernel) == occupancy(demand, limits).blocks, kernel.name


def test_the_table_says_what_the_driver_says(gpu: Any) -> None:
    found = live(gpu.device.ordinal)
    try:
        expected = limits_of(found.arch)
    except CubinError as error:
        pytest.skip(str(error))
    for field in ("warps", "blocks", "shared", "shared_per_block", "registers", "reserve"):
        assert getattr(found, field) == getattr(expected, field), field
    assert found.sms and found.sms > 0
