"""Bias, q/k norm, rotation and the K/V store against a float64 oracle; e4m3 bit for bit."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from pyruntime.driver.program import Program
from pyruntime.errors import CubinError
from pyruntime.ops.rope import rope
from pyruntime.reference import e4m3

# One rounding to fp16 (2^-11) of values computed in float32.
TOLERANCE = 1e-3
NO_OVERFLOW = 2**31 - 1
EPS = 1e-6


def oracle(x: np.ndarray, norm: np.ndarray | None, angle: np.ndarray, pairs: str) -> np.ndarray:
    """float64 [rows, heads, head_dim] normalised and turned by `angle` [rows, head_dim / 2]."""
    if norm is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * norm
    return turn(x, np.cos(angle), np.sin(angle), pairs)


def turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, pairs: str) -> np.ndarray:
    """x [rows, heads, head_dim] with its pairs turned; cos and sin are [rows, head_dim / 2]."""
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if pairs == "interleaved" else (x[..., :half], x[..., half:])
    cos, sin = cos[:, None], sin[:, None]
    turned = np.stack([a * cos - b * sin, a * sin + b * cos], -1)
    if pairs == "interleaved":
        return turned.reshape(x.shape)
    return np.concatenate([turned[..., 0], turned[..., 1]], -1)


class Case:
    """Two sequences in one launch, each with a cache of its own: k, v, and the scales of e4m3."""

    def __init__(
        self,
        gpu: Any,
        rng: np.random.Generator,
        heads: int,
        kv: int,
        hd: int,
        kv_dtype: str = "f16",
    ) -> None:
        self.gpu, self.heads, self.kv, self.hd, self.kv_dtype = gpu, heads, kv, hd, kv_dtype
        self.rows, self.starts, self.capacity, self.layers = (5, 3), (0, 11), (9, 40), 2
        self.total = sum(self.rows)
        self.positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(self.starts, self.rows, strict=True)]
        )
        width = (heads + 2 * kv) * hd
        self.qkv = rng.standard_normal((self.total + 2, width)).astype(np.float32)
        self.bias = rng.standard_normal(width).astype(np.float32)
        self.norms = 1 + 0.1 * rng.standard_normal((2, hd)).astype(np.float32)
        self.angles = np.outer(np.arange(64), 10000.0 ** (-np.arange(hd // 2) / (hd // 2)))
        self.cosines, self.sines = (f(self.angles).astype(np.float32) for f in (np.cos, np.sin))
        self.caches = []
        for positions in self.capacity:
            rows = (self.layers, kv, positions)
            number = np.float16 if kv_dtype == "f16" else np.uint8
            self.caches.append([gpu.empty((*rows, hd), number) for _ in "kv"])
            if kv_dtype == "e4m3":
                self.caches[-1] += [gpu.empty(rows, np.float32) for _ in "kv"]

    def run(self, *, bias: bool, norm: bool, pairs: str) -> tuple[np.ndarray, int]:
        gpu, first = self.gpu, self.rows[0]
        # Sequence of cuda/core/live.cuh without its maps, or that of cuda/core/e4m3.cuh.
        layout = "<4i4Q" if self.kv_dtype == "e4m3" else "<4i2Q8x"
        sequences = b"".join(
            struct.pack(layout, row0, rows, start, capacity, *(a.ptr for a in arrays))
            for row0, rows, start, capacity, arrays in zip(
                (0, first), self.rows, self.starts, self.capacity, self.caches, strict=True
            )
        )
        self.live = gpu.upload(np.array([self.total, 2, 0, NO_OVERFLOW], np.int32))
        positions = np.full(self.total + 2, 10**6, np.int32)  # past the live rows: out of any table
        positions[: self.total] = self.positions
        owner = np.array([0] * first + [1] * (self.total - first) + [7, 7], np.int32)
        q = gpu.empty((self.total + 2, self.heads * self.hd), np.float16)
        program = Program()
        rope(
            program,
            gpu.library,
            qkv=gpu.upload(self.qkv),
            q=q,
            live=self.live,
            sequences=gpu.upload(np.frombuffer(sequences, np.uint8)),
            sequence_of=gpu.upload(owner),
            positions=gpu.upload(positions),
            cosines=gpu.upload(self.cosines),
            sines=gpu.upload(self.sines),
            max_rows=self.total + 2,
            layer=1,
            heads=self.heads,
            kv_heads=self.kv,
            head_dim=self.hd,
            interleaved=pairs == "interleaved",
            overflow=self.live.view(12, (1,), np.int32),
            site=40,
            eps=EPS,
            kv_dtype=self.kv_dtype,
            bias=gpu.upload(self.bias) if bias else None,
            q_norm=gpu.upload(self.norms[0]) if norm else None,
            k_norm=gpu.upload(self.norms[1]) if norm else None,
        )
        gpu.run(program)
        return gpu.download(q), int(gpu.download(self.live)[3])


def close(got: np.ndarray, expected: np.ndarray) -> bool:
    error = np.linalg.norm(got.astype(np.float64) - expected)
    return bool(error <= TOLERANCE * np.linalg.norm(expected))


@pytest.mark.smoke
@pytest.mark.parametrize("pairs", ["interleaved", "neox"])
@pytest.mark.parametrize(("bias", "norm"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("heads", "kv", "hd"), [(9, 3, 64), (28, 4, 128), (5, 1, 96), (4, 2, 256)])
def test_rope(
    gpu: Any, rng: np.random.Generator, heads: int, kv: int, hd: int, bias: bool, norm: bool,
    pairs: str,
) -> None:  # fmt: skip
    case = Case(gpu, rng, heads, kv, hd)
    q, site = case.run(bias=bias, norm=norm, pairs=pairs)
    x = (case.qkv[: case.total] + (case.bias if bias else 0)).astype(np.float64)
    x = x.reshape(case.total, heads + 2 * kv, hd)
    row0 = 0
    for rows, start, capacity, (k, v) in zip(
        case.rows, case.starts, case.capacity, case.caches, strict=True
    ):
        part, angle = x[row0 : row0 + rows], case.angles[start : start + rows]
        q_norm, k_norm = case.norms if norm else (None, None)
        expected = oracle(part[:, :heads], q_norm, angle, pairs).reshape(rows, -1)
        assert close(q[row0 : row0 + rows], expected)
        keys, values = gpu.download(k), gpu.download(v)
        stored = oracle(part[:, heads : heads + kv], k_norm, angle, pairs).swapaxes(0, 1)
        assert close(keys[1, :, start : start + rows], stored)
        assert close(values[1, :, start : start + rows], part[:, heads + kv :].swapaxes(0, 1))
        for cache in (keys, values):  # nothing else was written
            rest = np.ones(capacity, bool)
            rest[start : start + rows] = False
            assert np.isnan(cache[0]).all() and np.isnan(cache[1][:, rest]).all()
        row0 += rows
    assert np.isnan(q[case.total :]).all()
    assert site == NO_OVERFLOW


@pytest.mark.parametrize("value", [1e6, np.nan])
@pytest.mark.parametrize("kv_dtype", ["f16", "e4m3"])
@pytest.mark.parametrize(("column", "site"), [(0, 40), (64 * 2 + 5, 41), (64 * 3 + 5, 42)])
def test_overflow_is_reported(
    gpu: Any, rng: np.random.Generator, column: int, site: int, kv_dtype: str, value: float
) -> None:
    case = Case(gpu, rng, 2, 1, 64, kv_dtype)
    case.qkv[1, column] = value
    assert case.run(bias=False, norm=False, pairs="neox")[1] == site


def stored(case: Case) -> list[tuple[np.ndarray, ...]]:
    """Codes and scales of K, then of V, of each sequence's rows; nothing else was written."""
    found = []
    for rows, start, capacity, arrays in zip(
        case.rows, case.starts, case.capacity, case.caches, strict=True
    ):
        k, v, k_scale, v_scale = (case.gpu.download(array) for array in arrays)
        rest = np.ones((case.layers, case.kv, capacity), bool)
        rest[1, :, start : start + rows] = False
        for codes, scales in ((k, k_scale), (v, v_scale)):
            assert (codes[rest] == 0xFF).all() and (scales.view(np.uint32)[rest] == 2**32 - 1).all()
            found.append((codes[~rest], scales[~rest]))
    return found


def by_sequence(case: Case, x: np.ndarray) -> list[np.ndarray]:
    """K and V rows of x [rows, heads + 2 kv heads, head dim] in the order of `stored`."""
    first, k_end = case.rows[0], case.heads + case.kv
    return [
        part[:, heads].swapaxes(0, 1).reshape(-1, case.hd)
        for part in (x[:first], x[first : case.total])
        for heads in (slice(case.heads, k_end), slice(k_end, None))
    ]


@pytest.mark.smoke
@pytest.mark.parametrize("pairs", ["interleaved", "neox"])
@pytest.mark.parametrize(("heads", "kv", "hd"), [(9, 3, 64), (28, 4, 128), (5, 1, 96), (4, 2, 256)])
def test_e4m3_rows_are_those_of_the_emulation(
    gpu: Any, rng: np.random.Generator, heads: int, kv: int, hd: int, pairs: str
) -> None:
    """Bit for bit: quarter turns and no bias are exact, so that only the quantization rounds."""
    case = Case(gpu, rng, heads, kv, hd, "e4m3")
    quarters = rng.integers(0, 4, case.angles.shape)
    case.cosines = np.array([1, 0, -1, 0], np.float32)[quarters]
    case.sines = np.array([0, 1, 0, -1], np.float32)[quarters]
    for row, factor in enumerate((1e-30, 0.0, 2.0**-26, 1e3, 1.0)):  # rows of any reach
        case.qkv[row] = np.abs(case.qkv[row]) * np.float32(factor)
    case.qkv[5, 7::hd] = 60000  # an outlier in every head: most of the others become subnormal
    numbers = e4m3.NUMBERS[:127]
    case.qkv[6] = rng.choice((numbers[1:] + numbers[:-1]) / 2, case.qkv.shape[1])  # ties
    case.qkv[6, 7::hd] = e4m3.LARGEST
    _, site = case.run(bias=False, norm=False, pairs=pairs)
    assert site == NO_OVERFLOW
    x = case.qkv[: case.total].reshape(case.total, -1, hd).astype(np.float64)
    at, keys = case.positions, heads + kv
    x[:, :keys] = turn(x[:, :keys], case.cosines[at], case.sines[at], pairs)
    for (codes, scales), rows in zip(stored(case), by_sequence(case, x), strict=True):
        wanted, factors = e4m3.quantize(rows.astype(np.float32))
        np.testing.assert_array_equal(codes, wanted)
        np.testing.assert_array_equal(scales.view(np.uint32), factors.view(np.uint32))


@pytest.mark.parametrize(("bias", "norm"), [(True, False), (False, True)])
@pytest.mark.parametrize(("heads", "kv", "hd"), [(9, 3, 64), (5, 1, 96), (4, 2, 256)])
def test_e4m3_rows_are_within_half_a_step(
    gpu: Any, rng: np.random.Generator, heads: int, kv: int, hd: int, bias: bool, norm: bool
) -> None:
    case = Case(gpu, rng, heads, kv, hd, "e4m3")
    q, _ = case.run(bias=bias, norm=norm, pairs="neox")
    x = (case.qkv[: case.total] + (case.bias if bias else 0)).astype(np.float64)
    x = x.reshape(case.total, -1, hd)
    q_norm, k_norm = case.norms if norm else (None, None)
    angle = case.angles[case.positions]
    expected = oracle(x[:, :heads], q_norm, angle, "neox").reshape(case.total, -1)
    assert close(q[: case.total], expected)
    x[:, heads : heads + kv] = oracle(x[:, heads : heads + kv], k_norm, angle, "neox")
    for (codes, scales), rows in zip(stored(case), by_sequence(case, x), strict=True):
        error = np.abs(e4m3.widen(codes, scales) - rows)
        # 1/16 of a normal number, 2^-10 of the scale below those; and float32's own rounding.
        half = np.maximum(np.abs(rows) / 16, scales[:, None] * 2.0**-10)
        assert (error <= half + 1e-5 * np.abs(rows).max(-1, keepdims=True)).all()


def test_a_cache_type_without_a_kernel_is_refused(gpu: Any, rng: np.random.Generator) -> None:
    with pytest.raises(CubinError, match="stores K and V as e5m2 in the cubins for"):
        Case(gpu, rng, 2, 1, 64, "e5m2").run(bias=False, norm=False, pairs="neox")
