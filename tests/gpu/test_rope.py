"""Bias, q/k norm, rotation and the K/V store against a float64 oracle."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from pyruntime.driver.program import Program
from pyruntime.ops.rope import rope

# One rounding to fp16 (2^-11) of values computed in float32.
TOLERANCE = 1e-3
NO_OVERFLOW = 2**31 - 1
EPS = 1e-6


def oracle(x: np.ndarray, norm: np.ndarray | None, angle: np.ndarray, pairs: str) -> np.ndarray:
    """float64 [rows, heads, head_dim] normalised and turned by `angle` [rows, head_dim / 2]."""
    if norm is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * norm
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if pairs == "interleaved" else (x[..., :half], x[..., half:])
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    turned = np.stack([a * cos - b * sin, a * sin + b * cos], -1)
    if pairs == "interleaved":
        return turned.reshape(x.shape)
    return np.concatenate([turned[..., 0], turned[..., 1]], -1)


class Case:
    """Two sequences in one launch, each with a cache of its own."""

    def __init__(self, gpu: Any, rng: np.random.Generator, heads: int, kv: int, hd: int) -> None:
        self.gpu, self.heads, self.kv, self.hd = gpu, heads, kv, hd
        self.rows, self.starts, self.capacity, self.layers = (5, 3), (0, 11), (9, 40), 2
        self.total = sum(self.rows)
        width = (heads + 2 * kv) * hd
        self.qkv = rng.standard_normal((self.total + 2, width)).astype(np.float32)
        self.bias = rng.standard_normal(width).astype(np.float32)
        self.norms = 1 + 0.1 * rng.standard_normal((2, hd)).astype(np.float32)
        self.angles = np.outer(np.arange(64), 10000.0 ** (-np.arange(hd // 2) / (hd // 2)))
        self.caches = [
            [gpu.empty((self.layers, kv, c, hd), np.float16) for _ in "kv"] for c in self.capacity
        ]

    def run(self, *, bias: bool, norm: bool, pairs: str) -> tuple[np.ndarray, int]:
        gpu, first = self.gpu, self.rows[0]
        sequences = b"".join(
            struct.pack("<4i2Q", row0, rows, start, capacity, k.ptr, v.ptr)
            for row0, rows, start, capacity, (k, v) in zip(
                (0, first), self.rows, self.starts, self.capacity, self.caches, strict=True
            )
        )
        self.live = gpu.upload(np.array([self.total, 2, 0, NO_OVERFLOW], np.int32))
        positions = np.full(self.total + 2, 10**6, np.int32)  # past the live rows: out of any table
        positions[: self.total] = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(self.starts, self.rows, strict=True)]
        )
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
            cosines=gpu.upload(np.cos(self.angles).astype(np.float32)),
            sines=gpu.upload(np.sin(self.angles).astype(np.float32)),
            max_rows=self.total + 2,
            layer=1,
            heads=self.heads,
            kv_heads=self.kv,
            head_dim=self.hd,
            interleaved=pairs == "interleaved",
            overflow=self.live.view(12, (1,), np.int32),
            site=40,
            eps=EPS,
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


@pytest.mark.parametrize(("column", "site"), [(0, 40), (64 * 2 + 5, 41), (64 * 3 + 5, 42)])
def test_overflow_is_reported(gpu: Any, rng: np.random.Generator, column: int, site: int) -> None:
    case = Case(gpu, rng, 2, 1, 64)
    case.qkv[1, column] = 1e6
    assert case.run(bias=False, norm=False, pairs="neox")[1] == site
