"""Products of a few quantized rows with packed weights, against the NumPy model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blocks import block_of, planes, random_blocks
from numpy.typing import NDArray

from pyruntime.driver.program import Program
from pyruntime.errors import CubinError
from pyruntime.ops.gemv_int8 import gemv_int8
from pyruntime.ops.quantize import Plane, plane_layout
from pyruntime.reference import int8

NONE, SITE = 2**31 - 1, 3
ERROR = 1e-3  # of a row's size; mins' sums are tf32
F32_ERROR = 2e-6  # of the sum of the products' sizes, for types without mins: float32 sums
K_QUANTS = {name for name in int8.TYPES if block_of(name)[0] == 256}
SHAPES = [  # n, k of blocks of 32; of 256
    (16, 32, 256), (48, 576, 768), (208, 896, 1024), (512, 3584, 3584), (80, 4864, 8960),
]  # fmt: skip


def upload_plane(gpu: Any, x: int8.Quantized) -> Plane:
    """As kernels write it: what is past the rows is NaN."""
    rows, k = x.q.shape
    shapes = plane_layout(rows, k)
    scales = np.full(shapes["scales"][0], np.nan, np.float32)
    sums = np.full(shapes["sums"][0], np.nan, np.float32)
    scales[:, :rows], sums[:, :rows] = int8.device_scales(x), x.sums.T
    return Plane(gpu.upload(x.q), gpu.upload(scales), gpu.upload(sums))


class Case:
    """A product: the live rows of random activations with random weights."""

    def __init__(
        self, rng: np.random.Generator, name: str, rows: int, n: int, k: int, live: int
    ) -> None:
        self.name, self.live = name, live
        values = rng.standard_normal((rows, k)) * 10.0 ** rng.uniform(-2, 2, (rows, 1))
        self.x = int8.quantize_rows(values.astype(np.float32))
        weights, size = block_of(name)
        self.packed = random_blocks(name, n * k // weights, rng).reshape(n, -1, size)
        self.shape = (rows, n)
        rows_of_bytes = self.packed.reshape(n, -1)
        self.want = int8.product(self.x, rows_of_bytes, name)[:live]
        found = int8.parts(rows_of_bytes, name)
        self.sizes = (np.abs(self.x.values) @ np.abs(found.values).T)[:live]
        self.mins = found.mins is not None

    def arguments(self, gpu: Any, epilogue: str, c: NDArray[Any], **more: Any) -> dict[str, Any]:
        n = self.shape[1]
        w = gpu.upload(planes(self.name, self.packed).reshape(n, -1))
        return {
            "plane": upload_plane(gpu, self.x), "w": w, "type_name": self.name, "c": gpu.upload(c),
            "rows": gpu.upload(np.array([self.live], np.int32)), "max_rows": self.shape[0],
            "epilogue": epilogue, "overflow": gpu.upload(np.array([NONE], np.int32)),
            "site": SITE, **more,
        }  # fmt: skip

    def run(self, gpu: Any, epilogue: str, c: NDArray[Any], **more: Any) -> tuple[Any, int]:
        """What c holds then, and the overflow word."""
        given, program = self.arguments(gpu, epilogue, c, **more), Program()
        gemv_int8(program, gpu.library, **given)
        gpu.run(program)
        return gpu.download(given["c"]), int(gpu.download(given["overflow"])[0])

    def assert_near(self, got: NDArray[Any], scale: float = 1.0, rounding: float = 0.0) -> None:
        size = np.abs(self.want).max(axis=1, keepdims=True)
        error = np.abs(got / scale - self.want)
        assert (error <= (ERROR + rounding) * size).all(), (error / size).max()
        if not self.mins and not rounding:
            assert (error <= F32_ERROR * self.sizes).all(), (error / self.sizes).max()


@pytest.mark.smoke
@pytest.mark.parametrize("name", int8.TYPES)
def test_small(gpu: Any, rng: np.random.Generator, name: str) -> None:
    case = Case(rng, name, 3, 48, 512, 2)
    c, word = case.run(gpu, "f32", np.full((3, 48), 7, np.float32))
    case.assert_near(c[:2])
    assert (c[2] == 7).all() and word == NONE


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("n", "k32", "k256"), SHAPES)
@pytest.mark.parametrize("name", int8.TYPES)
def test_products(
    gpu: Any, rng: np.random.Generator, name: str, n: int, k32: int, k256: int, rows: int
) -> None:
    case = Case(rng, name, rows, n, k256 if name in K_QUANTS else k32, rows)
    c, _ = case.run(gpu, "f32", np.full((rows, n), np.nan, np.float32))
    case.assert_near(c)


@pytest.mark.parametrize("live", range(8))
def test_rows_that_are_not_live_stay(gpu: Any, rng: np.random.Generator, live: int) -> None:
    """Nothing is written for them, and nothing of theirs gets to others: their scales are NaN."""
    case = Case(rng, "Q4_K", 7, 64, 1024, live)
    case.x.scales[live:], case.x.sums[live:] = np.nan, np.nan
    c, _ = case.run(gpu, "f32", np.full((7, 64), 7, np.float32), max_rows=7)
    if live:
        case.assert_near(c[:live])
    assert (c[live:] == 7).all()


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", ["Q4_K", "Q5_0"])
def test_columns_of_a_wider_result(
    gpu: Any, rng: np.random.Generator, name: str, rows: int
) -> None:
    case = Case(rng, name, rows, 80, 768, rows)
    for epilogue, before in (("f32", np.full), ("add", np.full)):
        c, _ = case.run(gpu, epilogue, before((rows, 200), 7, np.float32), column=33, scale=0.5)
        assert (c[:, :33] == 7).all() and (c[:, 113:] == 7).all()
        added = c[:, 33:113].astype(np.float64) - (7 if epilogue == "add" else 0)
        case.assert_near(added, 0.5, rounding=1e-6 if epilogue == "add" else 0)


def test_f16(gpu: Any, rng: np.random.Generator) -> None:
    case = Case(rng, "Q6_K", 4, 96, 512, 3)
    largest = float(np.abs(case.want).max())
    c, word = case.run(gpu, "f16", np.full((4, 96), 7, np.float16), scale=100 / largest)
    case.assert_near(c[:3].astype(np.float64), 100 / largest, rounding=2.0**-11)
    assert (c[3] == 7).all() and word == NONE
    _, word = case.run(gpu, "f16", np.full((4, 96), 7, np.float16), scale=66000 / largest)
    assert word == SITE


def test_a_row_is_the_same_whatever_rows_are_beside_it(gpu: Any, rng: np.random.Generator) -> None:
    case = Case(rng, "Q4_K", 8, 64, 3584, 8)
    all_rows, _ = case.run(gpu, "f32", np.zeros((8, 64), np.float32))
    again, _ = case.run(gpu, "f32", np.zeros((8, 64), np.float32))
    np.testing.assert_array_equal(all_rows, again)
    for rows in (1, 2, 4):
        case.live = rows
        c, _ = case.run(gpu, "f32", np.zeros((8, 64), np.float32), max_rows=rows)
        np.testing.assert_array_equal(c[:rows], all_rows[:rows])


def test_what_does_not_fit_is_refused(gpu: Any, rng: np.random.Generator) -> None:
    case = Case(rng, "Q4_K", 4, 32, 512, 4)
    good = case.arguments(gpu, "f32", np.zeros((4, 32), np.float32))
    plane = good["plane"]
    for bad in (
        {"w": gpu.empty((32, 144), np.uint8)}, {"w": gpu.empty((24, 288), np.uint8)},
        {"column": 1}, {"column": -1}, {"epilogue": "f16"}, {"epilogue": "swiglu"},
        {"max_rows": 5}, {"max_rows": 0}, {"c": gpu.empty((4, 16), np.float32)},
        {"type_name": "Q5_K"},
        {"epilogue": "f16", "c": gpu.empty((4, 32), np.float16), "overflow": 0},
        {"plane": Plane(gpu.empty((4, 256), np.int8), plane.scales, plane.sums)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="gemv_int8"):
            gemv_int8(Program(), gpu.library, **{**good, **bad})
    for bad in ({"type_name": "F16"}, {"max_rows": 9}):
        with pytest.raises(CubinError, match="gemv_int8"):
            gemv_int8(Program(), gpu.library, **{**good, **bad})
