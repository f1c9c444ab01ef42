"""The NumPy model of int8 products: its weights are the format's, its products float64's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from blocks import EXPONENT_BYTES, block_of, dequantized, random_blocks

from pyruntime.reference import int8

GOLDEN_FILES = sorted((Path(__file__).parents[1] / "data/golden").glob("tiny-llama-*.gguf"))


def rows_of(x: np.ndarray) -> int8.Quantized:
    return int8.quantize_rows(x.astype(np.float32))


@pytest.mark.parametrize("name", int8.TYPES)
def test_weights_are_scale_times_integer_less_min(name: str) -> None:
    blocks = random_blocks(name, 64, np.random.default_rng(0))
    for i, byte in enumerate((0x00, 0x80, 0x01, 0x7B, 0xFB)):  # zeros, subnormals, large ones
        blocks[i::8, EXPONENT_BYTES[name]] = byte
    found = int8.parts(blocks.reshape(8, -1), name)
    np.testing.assert_array_equal(found.values.ravel(), dequantized(name, blocks))
    assert found.q.min() >= -128 and found.q.max() <= 127
    assert found.q.shape == (8, 8 * block_of(name)[0])


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
def test_weights_of_real_blocks(path: Path) -> None:
    for tensor in gguf.GGUFReader(path).tensors:
        if (name := tensor.tensor_type.name) in int8.TYPES:
            packed = np.array(tensor.data).view(np.uint8)
            packed = packed.reshape(-1, packed.shape[-1])
            found = int8.parts(packed, name).values
            np.testing.assert_array_equal(found.ravel(), dequantized(name, packed))


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no int8 products of F16"):
        int8.parts(np.zeros((1, 64), np.uint8), "F16")


@pytest.mark.parametrize("name", int8.TYPES)
def test_products(name: str) -> None:
    """But for float32 and tf32 roundings they are those of the numbers that integers stand for."""
    rng = np.random.default_rng(1)
    n, k = 48, 768
    packed = random_blocks(name, n * k // block_of(name)[0], rng).reshape(n, -1)
    x = rows_of(rng.standard_normal((5, k)) * 10.0 ** rng.uniform(-3, 3, (5, 1)))
    weights, values = int8.parts(packed, name), x.values.astype(np.float64)
    got = int8.product(x, packed, name)
    error = np.abs(got - values @ weights.values.astype(np.float64).T)
    sizes = np.abs(values) @ np.abs(weights.values).astype(np.float64).T
    bound = 1e-6 * sizes
    if weights.mins is not None:  # a sum's tf32 rounding is of the sum, not of each value
        by_group = np.abs(values.reshape(5, weights.mins.shape[1], -1).sum(2))
        bound += 2.0**-11 * by_group @ np.abs(weights.mins).astype(np.float64).T
    assert (error <= bound).all()


def test_a_scale_has_16_bits_and_its_product_with_the_magic_number_is_exact() -> None:
    rng = np.random.default_rng(2)
    x = rows_of(rng.standard_normal((64, 256)) * 10.0 ** rng.uniform(-30, 30, (64, 1)))
    assert not (x.scales.view(np.uint32) & 0xFF).any()
    exact = x.scales.astype(np.float64) * float(int8.MAGIC)
    np.testing.assert_array_equal(int8.device_scales(x)[..., 1].T, -exact)
    assert np.float32(int8.MAGIC).view(np.uint32) == 0x4B400000


def test_integers_are_the_nearest() -> None:
    rng = np.random.default_rng(3)
    given = rng.standard_normal((64, 512)).astype(np.float32)
    x = int8.quantize_rows(given)
    assert np.abs(x.q).max(axis=1).tolist() == [127] * 64
    steps = np.abs(x.values.astype(np.float64) - given) / np.repeat(x.scales, 32, axis=1)
    assert steps.max() <= 0.5 + 2e-3  # of the largest, which may be just beyond 127 steps
    wide = x.q.reshape(64, 16, 32).sum(2) * x.scales.astype(np.float64)
    assert (np.abs(x.sums - wide) <= 2.0**-11 * np.abs(wide)).all()
    assert not (x.sums.view(np.uint32) & 0x1FFF).any()


def test_zeros_and_what_is_next_to_none() -> None:
    given = np.zeros((1, 96), np.float32)
    given[0, 40], given[0, 70] = 1e-38, -1e-6
    x = int8.quantize_rows(given)
    assert x.q[0, :70].tolist() == [0] * 70 and x.q[0, 70] == -127
    assert x.scales[0, :2].tolist() == [0, 0] and x.scales[0, 2] > 0


@pytest.mark.parametrize(("value", "fits"), [(np.nan, 0), (-np.inf, 0), (2e30, 0), (1e30, 1)])
def test_what_is_not_finite_or_too_large_does_not_fit(value: float, fits: bool) -> None:
    given = np.ones((2, 64), np.float32)
    given[1, 3] = value
    assert int8.fits(given) == fits
    assert np.isfinite(int8.quantize_rows(given).sums).all()
