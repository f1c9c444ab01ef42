"""Products of quantized rows with packed weights on tensor cores, against the NumPy model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blocks import EXPONENT_BYTES, block_of, planes, random_blocks
from numpy.typing import NDArray

from pyruntime.driver.library import Kernel
from pyruntime.driver.program import Program
from pyruntime.errors import CubinError
from pyruntime.ops.gemm_int8 import choice, gemm_int8, rows_for
from pyruntime.ops.quantize import Plane, plane_layout
from pyruntime.reference import int8

NONE, SITE = 2**31 - 1, 3
ERROR = 1e-3  # of a row's largest value; of float16's rounding besides
HALF = 2.0**-11
TYPES = int8.TYPES
# Those two that files mostly have, one whose k ends anywhere, and one of integer mins.
SMOKE = ("Q4_K", "Q6_K", "Q5_1", "Q2_K")
K_QUANTS = {name for name in int8.TYPES if block_of(name)[0] == 256}
SHAPES = [  # rows, n, k of blocks of 32; of 256
    (1, 16, 32, 256),
    (8, 144, 576, 768),
    (9, 128, 896, 256),
    (63, 48, 224, 1024),
    (64, 256, 512, 512),
    (65, 272, 1504, 1536),
    (200, 1040, 96, 1280),
    (513, 400, 992, 768),
]
GUARD = 7.0  # what is in c where nothing may be written


def rows_of(gpu: Any, name: str) -> list[Kernel]:
    return rows_for(gpu.library, name.lower(), levers=True)


def width_of(name: str, k32: int, k256: int) -> int:
    return k256 if name in K_QUANTS else k32


class Case:
    """Random rows of activations, of which `live` count; what is past them is NaN."""

    def __init__(
        self, gpu: Any, rng: np.random.Generator, name: str, rows: int, n: int, k: int, live: int,
        exact: bool = False,
    ) -> None:  # fmt: skip
        self.gpu, self.name, self.n, self.live = gpu, name, n, live
        weights, size = block_of(name)
        packed = random_blocks(name, n * k // weights, rng)
        values = rng.standard_normal((rows, k)) * 10.0 ** rng.uniform(-2, 2, (rows, 1))
        if exact:  # scales are powers of two and sums small: no step of the arithmetic rounds
            powers_of_two(name, packed)
            values = np.round(values / np.abs(values).max() * 20)
            values[:, ::32] = 127
        self.x = int8.quantize_rows(values.astype(np.float32))
        self.packed = packed.reshape(n, -1, size)
        self.want = int8.product(self.x, self.packed.reshape(n, -1), name)[:live]
        self.plane = self._plane()
        self.w = gpu.upload(planes(name, self.packed).reshape(n, -1))
        self.rows = gpu.upload(np.array([live], np.int32))

    def _plane(self) -> Plane:
        rows, k = self.x.q.shape
        shapes = plane_layout(rows, k)
        scales = np.full(shapes["scales"][0], np.nan, np.float32)
        sums = np.full(shapes["sums"][0], np.nan, np.float32)
        live = self.live
        scales[:, :live] = int8.device_scales(self.x)[:, :live]
        sums[:, :live] = self.x.sums.T[:, :live]
        upload = self.gpu.upload
        return Plane(upload(self.x.q), upload(scales), upload(sums))

    def run(
        self, kernel: Kernel | None, epilogue: str, width: int = 0, **more: Any
    ) -> tuple[NDArray[Any], int]:
        """c, full of GUARD before, and the overflow word."""
        shape = (len(self.x.q), width or self.n)
        c = self.gpu.upload(np.full(shape, GUARD, np.float16 if epilogue == "f16" else np.float32))
        overflow, program = self.gpu.upload(np.array([NONE], np.int32)), Program()
        gemm_int8(
            program, self.gpu.library, plane=self.plane, w=self.w, type_name=self.name, c=c,
            rows=self.rows, max_rows=shape[0], epilogue=epilogue, overflow=overflow, site=SITE,
            kernel=kernel, **more,
        )  # fmt: skip
        self.gpu.run(program)
        return self.gpu.download(c), int(self.gpu.download(overflow)[0])

    def off(self, got: NDArray[Any], scale: float = 1.0, rounding: float = 0.0) -> str:
        """Where it is wrong, or nothing."""
        size = np.abs(self.want).max(axis=1, keepdims=True)
        error = np.abs(got.astype(np.float64) / scale - self.want) / size
        wrong = ~(error <= ERROR + rounding)
        if not wrong.any():
            return ""
        rows, columns = np.nonzero(wrong)
        return f"{wrong.sum()} values, rows {set(rows[:9])}, columns {set(columns[:9])} …"


def powers_of_two(name: str, packed: NDArray[np.uint8]) -> None:
    """Makes every float of blocks 2^-2: the high byte of its fp16 is 0x34, the low one 0."""
    for byte in EXPONENT_BYTES[name]:
        packed[:, byte], packed[:, byte - 1] = 0x34, 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.smoke] * (name in SMOKE)) for name in TYPES]
)
def test_small(gpu: Any, rng: np.random.Generator, name: str) -> None:
    """Every row of the table: past a tile of rows, of n, and of k where a type may end there."""
    case = Case(gpu, rng, name, 67, 144, width_of(name, 288, 768), 66)
    failures = []
    for kernel in rows_of(gpu, name):
        c, word = case.run(kernel, "f32")
        failures += [f"{kernel.name}: {case.off(c[:66])}"] * bool(case.off(c[:66]))
        assert (c[66:] == GUARD).all() and word == NONE, kernel.name
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("rows", "n", "k32", "k256"), SHAPES)
@pytest.mark.parametrize("name", TYPES)
def test_products(
    gpu: Any, rng: np.random.Generator, name: str, rows: int, n: int, k32: int, k256: int
) -> None:
    case, failures = Case(gpu, rng, name, rows, n, width_of(name, k32, k256), rows), []
    for kernel in (None, *rows_of(gpu, name)):
        c, _ = case.run(kernel, "f32")
        if off := case.off(c):
            failures.append(f"{kernel.name if kernel else 'chosen'}: {off}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", TYPES)
def test_rows_of_the_table_agree_to_the_bit(gpu: Any, rng: np.random.Generator, name: str) -> None:
    """Where no step rounds: the integers are the same, whatever the tile and the split."""
    case = Case(gpu, rng, name, 130, 176, 1536, 130, exact=True)
    for kernel in rows_of(gpu, name):
        c, _ = case.run(kernel, "f32")
        np.testing.assert_array_equal(c, case.want, err_msg=kernel.name)


@pytest.mark.parametrize(("rows", "live"), [(70, 0), (70, 1), (70, 64), (300, 129)])
@pytest.mark.parametrize("name", TYPES)
def test_rows_that_are_not_live_stay(
    gpu: Any, rng: np.random.Generator, name: str, rows: int, live: int
) -> None:
    case = Case(gpu, rng, name, rows, 160, 1024, live)
    for kernel in rows_of(gpu, name):
        c, _ = case.run(kernel, "add")
        assert not live or not case.off(c[:live] - GUARD, rounding=1e-5), kernel.name
        assert (c[live:] == GUARD).all(), kernel.name


@pytest.mark.parametrize("epilogue", ["f32", "add"])
@pytest.mark.parametrize("name", TYPES)
def test_columns_of_a_wider_result(
    gpu: Any, rng: np.random.Generator, name: str, epilogue: str
) -> None:
    case = Case(gpu, rng, name, 33, 80, 768, 33)
    for kernel in rows_of(gpu, name):
        c, _ = case.run(kernel, epilogue, width=200, column=36, scale=0.5)
        assert (c[:, :36] == GUARD).all() and (c[:, 116:] == GUARD).all(), kernel.name
        got = c[:, 36:116] - (GUARD if epilogue == "add" else 0)
        assert not case.off(got, 0.5, rounding=1e-3 * (epilogue == "add")), kernel.name


@pytest.mark.parametrize("name", TYPES)
def test_f16(gpu: Any, rng: np.random.Generator, name: str) -> None:
    case = Case(gpu, rng, name, 21, 144, 512, 20)
    largest = float(np.abs(case.want).max())
    for kernel in rows_of(gpu, name):
        c, word = case.run(kernel, "f16", scale=60000 / largest)
        assert word == NONE and (c[20:] == GUARD).all(), kernel.name
        assert not case.off(c[:20], 60000 / largest, rounding=HALF), kernel.name
        _, word = case.run(kernel, "f16", scale=66000 / largest)
        assert word == SITE, kernel.name


@pytest.mark.parametrize("name", TYPES)
def test_a_row_does_not_depend_on_its_neighbours(
    gpu: Any, rng: np.random.Generator, name: str
) -> None:
    case = Case(gpu, rng, name, 130, 128, 2304, 130)
    for kernel in rows_of(gpu, name):
        every, _ = case.run(kernel, "f32")
        case.rows.upload(np.array([50], np.int32))
        few, _ = case.run(kernel, "f32")
        case.rows.upload(np.array([130], np.int32))
        np.testing.assert_array_equal(every[:50], few[:50], err_msg=kernel.name)


@pytest.mark.parametrize("m", [9, 64, 512, 4096])
@pytest.mark.parametrize("name", TYPES)
def test_what_is_chosen_is_no_lever(gpu: Any, name: str, m: int) -> None:
    assert not choice(gpu.library, name.lower(), m, 3584, 3584).spec.tile["lever"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"column": 2}, "column 2 of 152, not multiples of 4"),
        ({"column": 12}, "144 rows of w from column 12"),
        ({"epilogue": "swiglu"}, "epilogue 'swiglu'"),
        ({"epilogue": "f16"}, "epilogue 'f16' into float32"),
        ({"max_rows": 21}, "21 rows of 20"),
        ({"type_name": "Q6_K"}, "no rows of whole blocks"),
    ],
)
def test_what_does_not_fit_is_refused(gpu: Any, change: dict[str, Any], message: str) -> None:
    shapes = plane_layout(20, 512)
    arrays = {name: gpu.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
    given: dict[str, Any] = {
        "plane": Plane(**arrays), "w": gpu.empty((144, 288), np.uint8), "type_name": "Q4_K",
        "c": gpu.empty((20, 152), np.float32), "rows": gpu.empty((1,), np.int32), "max_rows": 20,
        "epilogue": "f32",
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        gemm_int8(Program(), gpu.library, **(given | change))


def test_a_type_without_kernels_is_named(gpu: Any) -> None:
    with pytest.raises(CubinError, match="f16"):
        rows_for(gpu.library, "f16")
