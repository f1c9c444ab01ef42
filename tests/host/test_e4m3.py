"""The e4m3 emulation against the format's definition, and what a row of a cache becomes."""

from __future__ import annotations

import numpy as np
import pytest

from pyruntime.reference import e4m3

CODES = np.arange(256, dtype=np.uint8)
NANS = {0x7F, 0xFF}


def value(code: int) -> float:
    """(-1)^s 2^(e - 7) (1 + m / 8), or 2^-6 m / 8 for e = 0."""
    sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * 2.0**-6 * mantissa / 8
    return sign * 2.0 ** (exponent - 7) * (1 + mantissa / 8)


def test_all_codes_are_those_of_the_format() -> None:
    assert e4m3.NUMBERS.dtype == np.float32 and e4m3.NUMBERS.shape == (256,)
    for code in range(256):
        number = e4m3.NUMBERS[code]
        assert np.isnan(number) if code in NANS else number == np.float32(value(code)), code
    assert np.nanmax(e4m3.NUMBERS) == e4m3.LARGEST == 448


def test_every_number_has_its_own_code() -> None:
    """Both zeros too; and a NaN keeps being one."""
    np.testing.assert_array_equal(e4m3.encode(e4m3.NUMBERS), np.where(CODES == 0xFF, 0xFF, CODES))
    assert set(e4m3.encode(np.float32([np.nan, -np.nan])).tolist()) <= NANS


def test_every_tie_goes_to_the_even_code_and_its_neighbours_do_not() -> None:
    positive = e4m3.NUMBERS[:127].astype(np.float64)
    ties = ((positive[1:] + positive[:-1]) / 2).astype(np.float32)  # exact: one bit more
    below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))
    lower = CODES[:126]
    for sign, bit in ((1, 0), (-1, 0x80)):
        np.testing.assert_array_equal(e4m3.encode(sign * below), lower | bit)
        np.testing.assert_array_equal(e4m3.encode(sign * above), (lower + 1) | bit)
        np.testing.assert_array_equal(e4m3.encode(sign * ties), (lower + (lower & 1)) | bit)


@pytest.mark.parametrize("x", [448.0, 463.99, 464.0, 479.0, 480.0, 1e30, np.inf])
def test_beyond_the_largest_is_the_largest(x: float) -> None:
    assert e4m3.encode(np.float32([x, -x])).tolist() == [0x7E, 0xFE]


def test_any_float_goes_to_the_nearest() -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(5000) * 2.0 ** rng.integers(-14, 9, 5000)).astype(np.float32)
    got = e4m3.NUMBERS[e4m3.encode(x)].astype(np.float64)
    finite = e4m3.NUMBERS[[c for c in range(256) if c not in NANS]].astype(np.float64)
    nearest = np.abs(x[:, None] - finite).min(axis=1)
    np.testing.assert_array_equal(np.abs(x - got), nearest)


@pytest.mark.parametrize("reach", [1e-30, 2.0**-24, 2.0**-22, 1e-3, 1.0, 3e4, 65504.0])
def test_a_row_keeps_its_largest_and_is_off_by_a_sixteenth_at_most(reach: float) -> None:
    rng = np.random.default_rng(2)
    rows = rng.uniform(-1, 1, (3, 5, 64)).astype(np.float32) * np.float32(reach)
    codes, scales = e4m3.quantize(rows)
    assert codes.shape == rows.shape and codes.dtype == np.uint8
    assert scales.shape == rows.shape[:2] and scales.dtype == np.float32
    wide = e4m3.widen(codes, scales)
    assert wide.dtype == np.float32
    if np.abs(rows).max(axis=-1).min() >= 2.0**-24:
        assert (np.abs(e4m3.NUMBERS[codes]).max(axis=-1) == 448).all()
    # Half a step: 1/16 of a normal number, and 2^-10 of the scale below those.
    bound = np.maximum(np.abs(rows) / 16, scales[..., None] * 2**-10) * (1 + 1e-6)
    assert (np.abs(wide - rows) <= bound).all()


def test_rows_of_zeros_and_rows_that_are_not_finite() -> None:
    codes, scales = e4m3.quantize(np.zeros((2, 16), np.float32))
    assert not codes.any() and (scales > 0).all() and not e4m3.widen(codes, scales).any()
    spoiled = np.ones((2, 16), np.float32)
    spoiled[:, 3] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        assert np.isnan(e4m3.widen(*e4m3.quantize(spoiled))[:, 3]).all()


def test_a_row_depends_on_itself_alone() -> None:
    rows = np.random.default_rng(3).standard_normal((7, 64)).astype(np.float32)
    rows[3] *= 1e4
    codes, scales = e4m3.quantize(rows)
    for i in range(7):
        alone = e4m3.quantize(rows[i : i + 1])
        np.testing.assert_array_equal(alone[0][0], codes[i])
        assert alone[1][0] == scales[i]
