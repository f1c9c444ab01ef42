"""The q, k, v product that rotates by itself: bit for bit what a product and `rope` give."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyruntime.driver.library import Kernel
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.model.live import NO_OVERFLOW
from pyruntime.ops.gemm import gemm
from pyruntime.ops.gemm_workspace import GemmWorkspace
from pyruntime.ops.qkv import alike_heads, paired_rows, qkv
from pyruntime.ops.rope import rope

TABLE, LAYERS, LAYER, SITE = 1024, 2, 1, 40
STARTS = (0, 11)  # of the two sequences
DEAD = 5  # rows past the live ones: NaN in A, positions and sequences that are none


def fused_rows(gpu: Any) -> list[Kernel]:
    rows = [x for x in gpu.library.family("gemm") if x.spec.tile["epilogue"] == "qkv"]
    if not rows:
        pytest.skip("no GEMM of this device rotates")
    return rows


def twin(gpu: Any, kernel: Kernel) -> Kernel:
    """The row that sums float32 in the same order: of as many splits, all the same without."""
    tile = kernel.spec.tile
    wanted = {name: tile[name] for name in ("split", *(("bn",) if tile["split"] != 1 else ()))}
    return next(
        x
        for x in gpu.library.family("gemm")
        if x.spec.tile["epilogue"] == "f32"
        and x.spec.tile["engine"] == "wgmma"
        and all(x.spec.tile[name] == value for name, value in wanted.items())
    )


class Case:
    """`m` rows of two sequences, each with a cache of its own, through weights of a model."""

    def __init__(
        self,
        gpu: Any,
        rng: np.random.Generator,
        heads: int,
        kv: int,
        hd: int,
        m: int,
        k: int = 200,
        *,
        interleaved: bool,
        bias: bool = False,
        alike: int | None = None,
        dead: int = DEAD,
    ) -> None:
        self.gpu, self.m, self.capacity = gpu, m, m + dead
        self.sizes = {"heads": heads, "kv_heads": kv, "head_dim": hd, "interleaved": interleaved}
        self.alike = alike or alike_heads(
            gpu.library, bias=bias, norm=False, kv_dtype="f16", **self.sizes
        )
        n = (heads + 2 * kv) * hd
        self.a = rng.standard_normal((self.capacity, k)).astype(np.float16)
        self.a[m:] = np.nan
        self.w = (rng.standard_normal((n, k)) * k**-0.5).astype(np.float16)
        angles = np.outer(np.arange(TABLE), 10000.0 ** (-np.arange(hd // 2) / (hd // 2)))
        self.shared = {
            "cosines": gpu.upload(np.cos(angles).astype(np.float32)),
            "sines": gpu.upload(np.sin(angles).astype(np.float32)),
            "bias": gpu.upload(rng.standard_normal(n).astype(np.float32)) if bias else None,
        }
        lengths = (m - m // 3, m // 3)
        positions = np.full(self.capacity, 10**6, np.int32)
        owner = np.full(self.capacity, 7, np.int32)
        positions[:m] = np.concatenate(
            [np.arange(s, s + rows) for s, rows in zip(STARTS, lengths, strict=True)]
        )
        owner[:m] = np.repeat([0, 1], lengths)
        self.lengths = lengths
        self.room = [s + rows + 3 for s, rows in zip(STARTS, lengths, strict=True)]
        self.shared |= {
            "positions": gpu.upload(positions), "sequence_of": gpu.upload(owner),
        }  # fmt: skip

    def run(self, record: Any) -> tuple[list[NDArray[np.uint16]], int]:
        """Bits of q and of both caches, poisoned first, and the overflow site."""
        gpu, hd = self.gpu, self.sizes["head_dim"]
        q = gpu.empty((self.capacity, self.sizes["heads"] * hd), np.float16)
        caches = [
            [gpu.empty((LAYERS, self.sizes["kv_heads"], room, hd), np.float16) for _ in "kv"]
            for room in self.room
        ]
        row0 = (0, self.lengths[0])
        sequences = b"".join(  # Sequence of cuda/core/live.cuh without its maps
            struct.pack("<4i2Q8x", *head, k.ptr, v.ptr)
            for *head, (k, v) in zip(row0, self.lengths, STARTS, self.room, caches, strict=True)
        )
        live = gpu.upload(np.array([self.m, 2, 0, NO_OVERFLOW], np.int32))
        program = Program()
        record(
            program, q=q, live=live, overflow=live.view(12, (1,), np.int32),
            sequences=gpu.upload(np.frombuffer(sequences, np.uint8)), max_rows=self.capacity,
            layer=LAYER, site=SITE, eps=1e-6, **self.sizes, **self.shared,
        )  # fmt: skip
        gpu.run(program)
        found = [q, *(array for pair in caches for array in pair)]
        return [gpu.download(x).view(np.uint16) for x in found], int(gpu.download(live)[3])

    def weights(self, alike: int) -> DeviceArray:
        order = paired_rows(**self.sizes, alike=alike) if alike else slice(None)
        return self.gpu.upload(np.ascontiguousarray(self.w[order]))

    def fused(self, kernel: Kernel, **shared: Any) -> tuple[list[NDArray[np.uint16]], int]:
        a, w = self.gpu.upload(self.a), self.weights(self.alike)
        product = self.gpu.empty((self.capacity, len(self.w)), np.float32)

        def record(program: Program, **given: Any) -> None:
            qkv(
                program, self.gpu.library, a=a, w=w, product=product, rows=given["live"],
                alike=self.alike, kernel=kernel, **given, **shared,
            )  # fmt: skip

        return self.run(record)

    def apart(
        self, kernel: Kernel, alike: int, **shared: Any
    ) -> tuple[list[NDArray[np.uint16]], int]:
        """A product by `kernel` to float32, then `rope`."""
        a, w = self.gpu.upload(self.a), self.weights(alike)
        product = self.gpu.empty((self.capacity, len(self.w)), np.float32)

        def record(program: Program, **given: Any) -> None:
            gemm(
                program, self.gpu.library, a=a, w=w, c=product, rows=given["live"],
                max_rows=self.capacity, epilogue="f32", kernel=kernel, **shared,
            )  # fmt: skip
            rope(program, self.gpu.library, qkv=product, alike=alike, **given)

        return self.run(record)


def check(gpu: Any, case: Case) -> None:
    failures = []
    kernels = fused_rows(gpu)
    expected = {}
    for kernel in kernels:
        other = twin(gpu, kernel)
        if other.name not in expected:
            expected[other.name] = case.apart(other, 0)
            truth, site = expected[other.name]
            assert site == NO_OVERFLOW
            assert (truth[0][case.m :] == 0xFFFF).all()
            assert not np.isnan(truth[0][: case.m].view(np.float16)).any()
        for what, (bits, site) in (
            ("fused", case.fused(kernel)), ("apart", case.apart(other, case.alike)),
        ):  # fmt: skip
            names = ("q", "k of 0", "v of 0", "k of 1", "v of 1")
            for name, got, want in zip(names, bits, expected[other.name][0], strict=True):
                if not np.array_equal(got, want):
                    where = np.argwhere(got != want)
                    failures.append(
                        f"{kernel.name} {what}, {name}: {len(where)} differ, first at {where[0]}"
                    )
            if site != NO_OVERFLOW:
                failures.append(f"{kernel.name} {what}: reported an overflow at {site}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("m", [1, 7, 63, 129, 300])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv", "hd"), [(9, 3, 64), (14, 2, 64), (28, 4, 128), (6, 2, 96), (4, 4, 256)]
)
def test_bits_are_those_of_two_launches(
    gpu: Any, rng: np.random.Generator, heads: int, kv: int, hd: int, interleaved: bool, m: int
) -> None:
    check(gpu, Case(gpu, rng, heads, kv, hd, m, interleaved=interleaved, bias=not interleaved))


@pytest.mark.smoke
@pytest.mark.parametrize(("interleaved", "bias"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize(("m", "dead"), [(17, 0), (130, DEAD)])
def test_edges(
    gpu: Any, rng: np.random.Generator, m: int, dead: int, interleaved: bool, bias: bool
) -> None:
    case = Case(gpu, rng, 3, 1, 64, m, 72, interleaved=interleaved, bias=bias, dead=dead)
    check(gpu, case)


@pytest.mark.parametrize("alike", [1, 2, 4])
def test_however_many_heads_alternate(gpu: Any, rng: np.random.Generator, alike: int) -> None:
    check(gpu, Case(gpu, rng, 8, 4, 128, 129, interleaved=False, bias=True, alike=alike))


def test_more_tiles_than_multiprocessors(gpu: Any, rng: np.random.Generator) -> None:
    """Persistent blocks take several tiles: rows and angles of one must not stay for the next."""
    check(gpu, Case(gpu, rng, 28, 4, 128, 1200, 64, interleaved=False, bias=True))


@pytest.mark.parametrize(("parts", "m", "k"), [(2, 300, 1000), (4, 129, 584), (2, 1500, 328)])
def test_bits_are_those_of_two_launches_where_units_are_shared(
    gpu: Any, rng: np.random.Generator, parts: int, m: int, k: int
) -> None:
    """Sums are divided alike for tiles of one size."""
    case = Case(gpu, rng, 28, 4, 128, m, k, interleaved=False, bias=True)
    workspace = GemmWorkspace(gpu.library)
    shared: dict[str, Any] = {"workspace": workspace, "parts": parts}
    compared = 0
    for kernel in fused_rows(gpu):
        tile = kernel.spec.tile
        for other in gpu.library.family("gemm"):
            alike = all(other.spec.tile.get(x) == tile[x] for x in ("bn", "share", "split"))
            if other.spec.tile["epilogue"] != "f32" or not alike or tile["split"] != 1:
                continue
            workspace.sums.fill(0xFF)
            want, site = case.apart(other, case.alike, **shared)
            for _ in range(2):
                bits, found = case.fused(kernel, **shared)
                assert site == found == NO_OVERFLOW
                assert all(map(np.array_equal, bits, want)), kernel.name
            assert not gpu.download(workspace.raised).any()
            compared += 1
    workspace.close()
    assert compared >= 4


def test_no_live_rows(gpu: Any, rng: np.random.Generator) -> None:
    case = Case(gpu, rng, 4, 2, 64, 0, interleaved=False, bias=True, dead=300)
    for kernel in fused_rows(gpu):
        bits, site = case.fused(kernel)
        assert site == NO_OVERFLOW and all((x == 0xFFFF).all() for x in bits), kernel.name


@pytest.mark.parametrize("value", [2000.0, np.nan])
@pytest.mark.parametrize(("row", "site"), [(0, 40), (64 * 4 + 37, 41), (64 * 6 + 5, 42)])
def test_overflow_is_reported(
    gpu: Any, rng: np.random.Generator, row: int, site: int, value: float
) -> None:
    """One value of q, K or V out of fp16's range; dead rows would be out of it everywhere."""
    case = Case(gpu, rng, 4, 2, 64, 20, interleaved=False)
    case.a[:20] = 0
    case.w[:] = 0
    case.a[3, 0], case.w[row, 0] = (value, 1000) if value == value else (1, value)
    for kernel in fused_rows(gpu):
        bits, found = case.fused(kernel)
        assert found == site, kernel.name
        if site != 40:
            assert (bits[0][:20] & 0x7FFF == 0).all(), kernel.name
