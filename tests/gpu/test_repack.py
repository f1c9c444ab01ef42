"""GGUF blocks to planes: every byte in its place, and none besides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blocks import FIELDS, block_of, planes, random_blocks
from numpy.typing import NDArray

from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import CubinError
from pyruntime.ops.repack import repack


def run(
    gpu: Any, name: str, packed: NDArray[np.uint8], first: int, rows: int, out: DeviceArray
) -> None:
    """Repacks rows [first, first + rows) of blocks [n, blocks, bytes], from an array of them."""
    source = gpu.upload(packed[first : first + rows].ravel())
    program = Program()
    repack(program, gpu.library, type_name=name, source=source, first=first, rows=rows, out=out)
    gpu.run(program)


def blocks(name: str, n: int, row_blocks: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    return random_blocks(name, n * row_blocks, rng).reshape(n, row_blocks, -1)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(("n", "row_blocks"), [(16, 1), (48, 5), (512, 14), (1024, 17)])
def test_whole_tensor(
    gpu: Any, rng: np.random.Generator, name: str, n: int, row_blocks: int
) -> None:
    packed = blocks(name, n, row_blocks, rng)
    out = gpu.empty((n, row_blocks * block_of(name)[1]), np.uint8)
    run(gpu, name, packed, 0, n, out)
    np.testing.assert_array_equal(gpu.download(out).ravel(), planes(name, packed))


@pytest.mark.smoke
@pytest.mark.parametrize("name", FIELDS)
def test_pieces(gpu: Any, rng: np.random.Generator, name: str) -> None:
    """Each piece writes its own rows; 0xFF elsewhere."""
    n, row_blocks = 48, 3
    packed, pieces = blocks(name, n, row_blocks, rng), ((7, 1), (8, 25), (0, 7), (33, 15))
    out = gpu.empty((n, row_blocks * block_of(name)[1]), np.uint8)
    present = np.full_like(packed, 0xFF)
    for first, rows in pieces:
        run(gpu, name, packed, first, rows, out)
        present[first : first + rows] = packed[first : first + rows]
        np.testing.assert_array_equal(gpu.download(out).ravel(), planes(name, present))
    np.testing.assert_array_equal(present, packed)


@pytest.mark.parametrize(
    ("shape", "first", "rows", "message"),
    [
        ((24, 288), 0, 8, "a multiple of 16 rows"),
        ((32, 286), 0, 8, "whole 144-byte blocks"),
        ((32, 288), 30, 3, "no such rows"),
        ((32, 288), -1, 3, "no such rows"),
        ((32, 288), 0, 0, "no such rows"),
        ((32, 288), 0, 9, "source of 2,304 bytes"),
    ],
)
def test_what_does_not_fit_is_refused(
    gpu: Any, shape: tuple[int, int], first: int, rows: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        repack(
            Program(), gpu.library, type_name="Q4_K", source=gpu.empty((8 * 288,), np.uint8),
            first=first, rows=rows, out=gpu.empty(shape, np.uint8),
        )  # fmt: skip


def test_unknown_type_is_named(gpu: Any) -> None:
    out = gpu.empty((16, 34), np.uint8)
    with pytest.raises(CubinError, match="repack_f16"):
        repack(Program(), gpu.library, type_name="F16", source=out, first=0, rows=16, out=out)
