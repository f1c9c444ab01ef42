"""The cosine and sine tables against formulas written out one angle at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pyruntime.model.rope import RopeConfig, rope_frequencies, rope_table

PLAIN = RopeConfig(style="neox", dim=64, base=10000.0, original_context=64)
POSITIONS = [0, 1, 63, 64, 300, 131071]


def yarn_angle(rope: RopeConfig, position: int, pair: int) -> tuple[float, float]:
    """Angle and magnitude as ggml's rope_yarn states them: a mix of two angles."""

    def correction(turns: float) -> float:
        length = rope.original_context / (turns * 2 * math.pi)
        return rope.dim * math.log(length) / (2 * math.log(rope.base))

    low = max(0.0, math.floor(correction(rope.beta_fast)))
    high = min(rope.dim - 1.0, math.ceil(correction(rope.beta_slow)))
    ramp = 1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))
    extrapolated = position * rope.base ** (-2 * pair / rope.dim)
    interpolated = extrapolated / rope.factor
    angle = interpolated * (1 - ramp) + extrapolated * ramp
    return angle, 1 + 0.1 * math.log(rope.factor)


def assert_table(rope: RopeConfig, expected: dict[tuple[int, int], tuple[float, float]]) -> None:
    """`expected`: (position, pair) -> (angle, magnitude)."""
    cos, sin = rope_table(rope, POSITIONS)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (len(POSITIONS), rope.dim // 2)
    for (position, pair), (angle, magnitude) in expected.items():
        row = POSITIONS.index(position)
        assert cos[row, pair] == pytest.approx(magnitude * math.cos(angle), rel=1e-7, abs=1e-9)
        assert sin[row, pair] == pytest.approx(magnitude * math.sin(angle), rel=1e-7, abs=1e-9)


def every(angle_of: object) -> dict[tuple[int, int], tuple[float, float]]:
    return {(p, i): angle_of(p, i) for p in POSITIONS for i in range(32)}  # type: ignore[operator]


def test_plain() -> None:
    assert_table(PLAIN, every(lambda p, i: (p * 10000 ** (-i / 32), 1.0)))


def test_linear_scaling_divides_positions() -> None:
    rope = replace(PLAIN, scaling="linear", factor=2.0)
    halved, plain = rope_table(rope, [0, 2, 600]), rope_table(PLAIN, [0, 1, 300])
    np.testing.assert_array_equal(halved, plain)


@pytest.mark.parametrize("factor", [2.0, 4.0, 40.0])
@pytest.mark.parametrize("context", [4, 64, 4096, 32768])
def test_yarn(factor: float, context: int) -> None:
    rope = replace(PLAIN, scaling="yarn", factor=factor, original_context=context)
    assert_table(rope, every(lambda p, i: yarn_angle(rope, p, i)))


def test_yarn_leaves_fast_pairs_and_interpolates_slow_ones() -> None:
    rope = replace(PLAIN, scaling="yarn", factor=4.0, original_context=4096)
    ratio = rope_frequencies(PLAIN) / rope_frequencies(rope)
    assert ratio[0] == 1.0 and ratio[-1] == pytest.approx(4.0)
    assert np.all(np.diff(ratio) >= 0) and np.any((ratio > 1.1) & (ratio < 3.9))


def test_yarn_of_factor_one_is_plain() -> None:
    np.testing.assert_array_equal(
        rope_table(replace(PLAIN, scaling="yarn"), POSITIONS), rope_table(PLAIN, POSITIONS)
    )


def test_betas_move_the_ramp() -> None:
    rope = replace(PLAIN, scaling="yarn", factor=4.0, original_context=4096)
    moved = replace(rope, beta_fast=8.0, beta_slow=2.0)
    assert_table(moved, every(lambda p, i: yarn_angle(moved, p, i)))
    assert not np.array_equal(rope_frequencies(moved), rope_frequencies(rope))


def test_attention_factor_multiplies_both() -> None:
    for rope in (PLAIN, replace(PLAIN, scaling="yarn", factor=4.0)):
        once = np.stack(rope_table(rope, POSITIONS))
        twice = np.stack(rope_table(replace(rope, attn_factor=2.0), POSITIONS))
        np.testing.assert_array_equal(twice, 2 * once)


def test_frequency_factors_divide_each_pair() -> None:
    factors = tuple(1.0 + i / 4 for i in range(32))
    rope = replace(PLAIN, factors=factors)
    assert_table(rope, every(lambda p, i: (p * 10000 ** (-i / 32) / factors[i], 1.0)))


def test_far_positions_keep_float32_precision() -> None:
    """An angle in float32 would be off by 0.03 radians here."""
    cos, _ = rope_table(replace(PLAIN, base=1e6), [1_000_003])
    assert cos[0, 0] == pytest.approx(math.cos(1_000_003), rel=1e-7)
