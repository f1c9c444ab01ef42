"""Every packed type against gguf's float32 values rounded to fp16: bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blocks import TYPES, block_of, dequantized, random_blocks
from numpy.typing import NDArray

from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import CubinError
from pyruntime.ops.dequant import dequantize

NONE = 2**31 - 1  # the overflow word before anything has overflowed
SITE = 5


def packed_rows(name: str, rows: int, columns: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random packed rows as one array of bytes."""
    return random_blocks(name, rows * columns // block_of(name)[0], rng).ravel()


def halves(name: str, packed: NDArray[np.uint8], columns: int) -> NDArray[np.uint16]:
    """The expected bits [rows, columns]."""
    return dequantized(name, packed).astype(np.float16).view(np.uint16).reshape(-1, columns)


def run(gpu: Any, name: str, source: DeviceArray, out: DeviceArray, rows: int, **keys: Any) -> int:
    """Dequantizes into `out`; returns the overflow word."""
    overflow = gpu.upload(np.array([NONE], np.int32))
    program = Program()
    dequantize(
        program,
        gpu.library,
        type_name=name,
        source=source,
        rows=rows,
        columns=out.shape[1],
        out=out,
        overflow=overflow,
        **{"site": SITE, **keys},
    )
    gpu.run(program)
    return int(gpu.download(overflow)[0])


def bits(gpu: Any, array: DeviceArray) -> NDArray[np.uint16]:
    host: NDArray[np.uint16] = gpu.download(array).view(np.uint16)
    return host


def test_table_has_every_type(gpu: Any) -> None:
    kernels = {k.name: k.spec.tile for k in gpu.library.family("dequant")}
    assert set(kernels) == {f"dequant_{name.lower()}" for name in TYPES}
    for name in TYPES:
        weights, size = block_of(name)
        tile = kernels[f"dequant_{name.lower()}"]
        assert tile["type"] == name.lower()
        assert int(tile["bytes"]) * weights == int(tile["block"]) * size


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize(
    ("name", "columns"),
    [(n, c) for n in TYPES for c in (256, 576, 896, 3584) if c % block_of(n)[0] == 0],
)
def test_values(gpu: Any, rng: np.random.Generator, name: str, columns: int, rows: int) -> None:
    packed = packed_rows(name, rows, columns, rng)
    out = gpu.empty((rows, columns), np.float16)
    assert run(gpu, name, gpu.upload(packed), out, rows) == NONE
    np.testing.assert_array_equal(bits(gpu, out), halves(name, packed, columns))


@pytest.mark.smoke
@pytest.mark.parametrize(("row0", "row_step"), [(0, 2), (1, 2), (5, 1), (2, 3)])
@pytest.mark.parametrize("name", TYPES)
def test_placement(gpu: Any, rng: np.random.Generator, name: str, row0: int, row_step: int) -> None:
    """Only the rows asked for are written. 35 rows are more than one tile, and no whole number."""
    rows, columns = 35, 256
    packed = packed_rows(name, rows, columns, rng)
    out = gpu.empty((row0 + rows * row_step + 2, columns), np.float16)
    run(gpu, name, gpu.upload(packed), out, rows, row0=row0, row_step=row_step)
    want = np.full(out.shape, 0xFFFF, np.uint16)
    want[row0 : row0 + rows * row_step : row_step] = halves(name, packed, columns)
    np.testing.assert_array_equal(bits(gpu, out), want)


@pytest.mark.parametrize(("name", "columns"), [("F16", 8), ("Q8_0", 32), ("Q5_0", 32), ("F32", 24)])
def test_rows_shorter_than_a_stride(
    gpu: Any, rng: np.random.Generator, name: str, columns: int
) -> None:
    rows = 2001
    packed = packed_rows(name, rows, columns, rng)
    out = gpu.empty((2 * rows, columns), np.float16)
    run(gpu, name, gpu.upload(packed), out, rows, row0=1, row_step=2)
    got = bits(gpu, out)
    np.testing.assert_array_equal(got[1::2], halves(name, packed, columns))
    assert (got[::2] == 0xFFFF).all()


def test_more_weights_than_31_bits_count(gpu: Any, rng: np.random.Generator) -> None:
    rows, columns = 2**31 // 4096 + 2, 4096
    nbytes = rows * columns // 32 * 18
    if gpu.device.memory()[0] < nbytes + 2 * rows * columns + 2**28:
        pytest.skip("needs 6 GB of device memory")
    source = gpu.empty((nbytes,), np.uint8, fill=0)
    last = packed_rows("Q4_0", 3, columns, rng)
    source.view(nbytes - last.size, last.shape, np.uint8).upload(last)
    out = gpu.empty((rows, columns), np.float16)
    assert run(gpu, "Q4_0", source, out, rows) == NONE
    got = bits(gpu, out.rows(rows - 4, rows))
    np.testing.assert_array_equal(got[1:], halves("Q4_0", last, columns))
    assert (got[0] == 0x8000).all()  # 0 * (0 - 8)


@pytest.mark.parametrize(
    ("value", "word"),
    [(65504, NONE), (-65504, NONE), (1e5, SITE), (-1e5, SITE), (np.inf, SITE), (np.nan, SITE)],
)
def test_weights_out_of_range_are_reported(gpu: Any, value: float, word: int) -> None:
    weights = np.zeros((3, 64), np.float32)
    weights[2, 63] = value
    out = gpu.empty(weights.shape, np.float16)
    assert run(gpu, "F32", gpu.upload(weights.view(np.uint8).ravel()), out, 3) == word


def test_lowest_site_is_kept(gpu: Any) -> None:
    source = gpu.upload(np.full(256, 1e30, np.float32).view(np.uint8))
    out = gpu.empty((1, 256), np.float16)
    overflow = gpu.upload(np.array([NONE], np.int32))
    program = Program()
    for site in (9, 4, 7):
        dequantize(
            program, gpu.library, type_name="f32", source=source, rows=1, columns=256, out=out,
            overflow=overflow, site=site,
        )  # fmt: skip
    gpu.run(program)
    assert gpu.download(overflow)[0] == 4


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        ("Q4_K", 128, "256-weight blocks"),
        ("Q8_0", 48, "32-weight blocks"),
        ("F32", 12, "8-weight blocks"),
        ("Q6_K", 256, "source of 128 bytes"),
        ("Q4_0", 64, r"out \(4, 32\)"),
        ("Q4_0", 32, "to 4 of 4"),
    ],
)
def test_what_does_not_fit_is_refused(gpu: Any, name: str, columns: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dequantize(
            Program(), gpu.library, type_name=name, source=gpu.empty((128,), np.uint8), rows=2,
            columns=columns, out=gpu.empty((4, 32), np.float16), row0=2, row_step=2,
            overflow=gpu.empty((1,), np.int32), site=0,
        )  # fmt: skip


def test_unaligned_source_is_refused(gpu: Any) -> None:
    source = gpu.empty((64,), np.uint8).view(8, (32,), np.uint8)
    with pytest.raises(ValueError, match="16-byte aligned"):
        run(gpu, "Q4_0", source, gpu.empty((1, 32), np.float16), 1)


def test_unknown_type_is_named(gpu: Any) -> None:
    with pytest.raises(CubinError, match="dequant_tq1_0"):
        run(gpu, "TQ1_0", gpu.empty((64,), np.uint8), gpu.empty((1, 256), np.float16), 1)
