"""Int8 products touch no more of their arrays than `ops.extents` says.

All arrays end there: on the host (--emulate) before a page that nothing may touch, on a GPU where
memcheck looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from blocks import block_of, planes, random_blocks
from numpy.typing import NDArray

from pyruntime.driver.library import Kernel
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.ops.extents import product_extents
from pyruntime.ops.gemm_int8 import TOGETHER, gemm_int8, rows_for
from pyruntime.ops.gemv_int8 import gemv_int8
from pyruntime.ops.quantize import Plane, plane_layout
from pyruntime.reference import int8

ROWS = (1, 2, 3, 8, 9, 16, 17, 33, 63, 64, 65, 130)
SHAPES = [(16, 32, 256), (144, 96, 512), (272, 1056, 768)]  # n, k of blocks of 32; of 256
ERROR = 1e-3  # of a row's largest value


def cut(gpu: Any, values: NDArray[Any], extent: int) -> DeviceArray:
    """An array of these values, of which no more than the first bytes exist."""
    nbytes = min(extent, values.nbytes)
    array: DeviceArray = gpu.upload(np.frombuffer(values.tobytes()[:nbytes], np.uint8))
    array.shape, array.dtype = values.shape, values.dtype
    return array


def run(
    gpu: Any, rng: np.random.Generator, operation: Callable[..., None], kernel: Kernel, name: str,
    rows: int, n: int, k: int,
) -> None:  # fmt: skip
    weights, size = block_of(name)
    packed = random_blocks(name, n * k // weights, rng).reshape(n, -1, size)
    x = int8.quantize_rows(rng.standard_normal((rows, k)).astype(np.float32))
    shapes = plane_layout(rows, k)
    scales, sums = (np.full(shapes[part][0], np.nan, np.float32) for part in ("scales", "sums"))
    scales[:, :rows], sums[:, :rows] = int8.device_scales(x)[:, :rows], x.sums.T[:, :rows]
    given = {"q": x.q, "scales": scales, "sums": sums, "w": planes(name, packed).reshape(n, -1)}
    extents = product_extents(
        type_name=name.lower(), rows=rows, n=n, k=k, row_bytes=given["w"].shape[1],
        stride=scales.shape[1], width=n + 8, column=4, itemsize=4,
        together=TOGETHER if operation is gemm_int8 else 1,
    )  # fmt: skip
    arrays = {part: cut(gpu, values, extents[part]) for part, values in given.items()}
    c = cut(gpu, np.zeros((rows, n + 8), np.float32), extents["c"])
    program, w = Program(), arrays.pop("w")
    operation(
        program, gpu.library, plane=Plane(**arrays), w=w, type_name=name, c=c,
        rows=gpu.upload(np.array([rows], np.int32)), max_rows=rows, epilogue="f32", column=4,
        kernel=kernel,
    )  # fmt: skip
    gpu.run(program)
    c.shape = (math.prod(c.shape) - 4,)  # as far as it goes
    got = np.append(gpu.download(c), np.zeros(4, np.float32)).reshape(rows, -1)[:, 4:-4]
    want = int8.product(x, packed.reshape(n, -1), name)
    assert (abs(got - want) <= ERROR * abs(want).max()).all(), (kernel.name, rows, n, k)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["Q4_K", "Q5_1"])
def test_small(gpu: Any, rng: np.random.Generator, name: str) -> None:
    run(gpu, rng, gemm_int8, rows_for(gpu.library, name.lower())[0], name, 17, 144, 768)
    run(gpu, rng, gemv_int8, gpu.library.family("gemv")[0], "Q4_0", 1, 144, 768)


@pytest.mark.parametrize(("n", "k32", "k256"), SHAPES)
@pytest.mark.parametrize("name", int8.TYPES)
def test_gemm(gpu: Any, rng: np.random.Generator, name: str, n: int, k32: int, k256: int) -> None:
    k = k256 if block_of(name)[0] == 256 else k32
    for kernel in rows_for(gpu.library, name.lower(), levers=True):
        for rows in ROWS:
            run(gpu, rng, gemm_int8, kernel, name, rows, n, k)


@pytest.mark.parametrize(("n", "k32", "k256"), SHAPES)
@pytest.mark.parametrize("name", int8.TYPES)
def test_gemv(gpu: Any, rng: np.random.Generator, name: str, n: int, k32: int, k256: int) -> None:
    k = k256 if block_of(name)[0] == 256 else k32
    for kernel in gpu.library.family("gemv"):
        tile = kernel.spec.tile
        if tile["type"] == name.lower():
            for rows in range(1, int(tile["tokens"]) + 1):
                run(gpu, rng, gemv_int8, kernel, name, rows, n, k)
