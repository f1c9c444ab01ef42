"""How far int8 products reach into their arrays, and what is refused for that.

tests/gpu/test_int8_extents.py runs the kernels on arrays that end there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from blocks import FIELDS, block_of
from fake_driver import FakeDriver

from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.ops.extents import SUMMED, product_extents
from pyruntime.ops.gemm_int8 import TOGETHER, gemm_int8, rows_for
from pyruntime.ops.gemv_int8 import gemv_int8
from pyruntime.ops.quantize import Plane, plane_layout


@pytest.mark.parametrize("name", FIELDS)
def test_all_lies_in_what_is_allocated(name: str) -> None:
    """As `plane_layout`, the loader and the layers allocate, for passes of so many rows."""
    weights, size = block_of(name)
    for rows in range(1, 131):
        for k in range(weights, 6 * weights, weights):
            n = width = 144
            held = {
                part: math.prod(shape) * np.dtype(dtype).itemsize
                for part, (shape, dtype) in plane_layout(rows, k).items()
            }
            held |= {"w": n * k // weights * size, "c": rows * width * 4, "rows": 4, "overflow": 4}
            for together in (1, TOGETHER):
                extents = product_extents(
                    type_name=name.lower(), rows=rows, n=n, k=k, row_bytes=k // weights * size,
                    stride=plane_layout(rows, k)["sums"][0][1], width=width, column=0, itemsize=4,
                    together=together,
                )  # fmt: skip
                assert all(extents[x] <= held[x] for x in extents), (rows, k)


@pytest.fixture
def library(driver: FakeDriver) -> Iterator[Library]:
    device = Device(0)
    library = Library(device)
    yield library
    library.close()
    device.close()


Maker = Callable[..., DeviceArray]


@pytest.fixture
def array(library: Library) -> Maker:
    return lambda *shape, dtype="float32": DeviceArray(library.device, shape, np.dtype(dtype))


def plane_of(array: Maker, rows: int, k: int) -> Plane:
    layout = plane_layout(rows, k).items()
    return Plane(**{name: array(*shape, dtype=dtype) for name, (shape, dtype) in layout})


ARRAYS = ("q", "scales", "sums", "w", "c", "rows", "overflow")


@pytest.mark.parametrize("array_name", ARRAYS)
@pytest.mark.parametrize(("operation", "rows"), [(gemm_int8, 67), (gemv_int8, 5)])
def test_an_array_that_is_too_short_is_refused_by_name(
    library: Library, array: Maker, operation: Callable[..., None], rows: int, array_name: str
) -> None:
    """By a byte. What is just long enough is taken."""
    n, k = 144, 512
    plane = plane_of(array, rows, k)
    given: dict[str, Any] = {
        "w": array(n, k // 256 * 144, dtype="uint8"), "c": array(rows, n, dtype="float16"),
        "rows": array(1, dtype="int32"), "overflow": array(1, dtype="int32"),
    }  # fmt: skip
    kernel = rows_for(library, "q4_k")[0] if operation is gemm_int8 else None
    extents = product_extents(
        type_name="q4_k", rows=rows, n=n, k=k, row_bytes=288, stride=plane.stride, width=n,
        column=0, itemsize=2, together=TOGETHER if operation is gemm_int8 else 1,
    )  # fmt: skip
    short = {**given, **vars(plane)}[array_name]

    def record() -> None:
        operation(
            Program(), library, plane=plane, type_name="Q4_K", max_rows=rows, epilogue="f16",
            kernel=kernel, **given,
        )  # fmt: skip

    short.nbytes = extents[array_name]
    record()
    short.nbytes -= 1
    said = rf"{operation.__name__}.*: {array_name} of {short.nbytes:,} bytes"
    with pytest.raises(ValueError, match=said):
        record()


def test_sums_are_not_asked_of_types_that_read_none(library: Library, array: Maker) -> None:
    plane = plane_of(array, 3, 256)
    given: dict[str, Any] = {
        "plane": plane, "c": array(3, 16), "rows": array(1, dtype="int32"), "max_rows": 3,
        "epilogue": "f32",
    }  # fmt: skip
    plane.sums.nbytes = 0
    for name in FIELDS:
        weights, size = block_of(name)
        given |= {"w": array(16, 256 // weights * size, dtype="uint8"), "type_name": name}
        if name.lower() in SUMMED:
            with pytest.raises(ValueError, match="sums of 0 bytes"):
                gemv_int8(Program(), library, **given)
        else:
            gemv_int8(Program(), library, **given)
