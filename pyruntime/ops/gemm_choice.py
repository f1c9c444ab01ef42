"""Which row of the GEMM table for a product: cost models in cycles of a multiprocessor.

Nothing is timed, so the choice is the same in every process. The constants were set by hand on an
H200, for the four products of a Qwen2.5-7B layer; how far a choice is from the best row there is
in bench/results/device.json (bench/gemm.py). bench/gemm_choice.py times and fits them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from pyruntime.cubin.spec import KernelSpec
from pyruntime.driver.library import Kernel
from pyruntime.errors import CubinError

# mma.sync.
MACS = 1200.0  # fp16 multiply-adds of a multiprocessor in a cycle with enough warps at work
L2_BYTES = 40.0  # what L2 delivers to it in a cycle
LATENCY = 1200.0  # cycles until a copy from device memory arrives
START = 3000.0  # of a tile outside its main loop: first copies, stores
IDLE_WARPS = 2.0  # w warps keep the tensor cores busy w / (w + this) of the time

# wgmma.
WGMMA_COLUMN = 4.43  # per column of a tile and slot of k
TMA_BYTES = {1: 50.0, 2: 53.0}  # a cycle from L2, by the blocks that share the slot of W
SHARED_START = 1500.0  # cluster barriers at both ends of a launch
EXCHANGE, EXCHANGED_COLUMN = 700.0, 64.0  # per further rank of a split; its columns are divided
# Between tiles, per column. Not measured: f16 and geglu count as swiglu, and qkv as f32.
STORED_COLUMN = {
    "f32": 12.0, "f16": 10.0, "add": 20.0, "swiglu": 10.0, "geglu": 10.0, "qkv": 12.0,
}  # fmt: skip

# stream: set by reasoning. Most of a launch's fixed cost passes while W is on its way.
STREAM_LAUNCH = 2800.0  # a launch besides its copies
STREAM_EXCHANGE = 700.0  # per further rank of a split
STREAM_BYTES = 50.0  # a cycle, of W and A into one multiprocessor

# All.
LAUNCH = 7000.0  # a launch besides its main loops
MEMORY_BYTES = 16.4  # a cycle from device memory, for each multiprocessor of the device
# To and from C, per product's column.
OUTPUT_BYTES = {"f32": 4, "f16": 2, "add": 8, "swiglu": 1, "geglu": 1, "qkv": 2}
MEMORY_START = 0.6  # the part of a launch's fixed cost during which memory is idle, too
OVERLAP = 4.0  # work and memory hide each other as the norm of this order: not perfectly


class Limits(Protocol):
    """What is asked of a device: see `driver.device.Device`."""

    @property
    def sm_count(self) -> int: ...
    @property
    def smem_per_sm(self) -> int: ...
    @property
    def smem_reserved(self) -> int: ...


def choose(kernels: Sequence[Kernel], m: int, n: int, k: int, device: Limits) -> Kernel:
    """The row that should be fastest for C [m, n] = A [m, k] · W [n, k]ᵀ.

    All rows of the mma engine compute the same bits. So do those of the wgmma engine that do not
    split k, those of the stream engine that do not, and stream rows with the same `bn` and `split`.

    Raises:
        CubinError: no row fits the device.
    """
    found = costs(kernels, m, n, k, device)
    if not found:
        raise CubinError(f"no gemm row fits {device.smem_per_sm:,} B of shared memory")
    return min(found, key=lambda row: (found[row], row.name))


def costs(kernels: Iterable[Kernel], m: int, n: int, k: int, device: Limits) -> dict[Kernel, float]:
    """Cycles of an H200 that each row should take.

    Left out are rows that do not fit the device, and stream rows whose tile has not all m rows of
    A: they would read W again for each tile.
    """
    found = {}
    for row in kernels:
        tile = row.spec.tile
        if (work := _WORK[str(tile["engine"])](row, m, n, k, device)) is None:
            continue
        moved = 2 * k * (n + m) + OUTPUT_BYTES[str(tile["epilogue"])] * m * n
        memory = moved / (MEMORY_BYTES * device.sm_count) + MEMORY_START * work.once
        cycles = work.once + work.cycles
        found[row] = float((cycles**OVERLAP + memory**OVERLAP) ** (1 / OVERLAP))
    return found


def units(spec: KernelSpec, m: int, n: int) -> int:
    """Pieces of an [m, n] product that the row's blocks, or clusters of blocks, take on."""
    rows = int(spec.tile["bm"]) * int(spec.tile.get("share", 1))
    return -(-m // rows) * -(-n // int(spec.tile["bn"]))


def at_once(kernel: Kernel, device: Limits) -> int:
    """Blocks, or clusters of blocks, of a row with TMA that the device holds at a time."""
    return kernel.clusters or device.sm_count


class _Work(NamedTuple):
    """Of the multiprocessor that has the most to do.

    Attributes:
        cycles: in its tiles, if memory were no limit.
        once: outside of them.
    """

    cycles: float
    once: float


def _wgmma(kernel: Kernel, m: int, n: int, k: int, device: Limits) -> _Work:
    tile = kernel.spec.tile
    bm, bn, bk, share, split = (int(tile[name]) for name in ("bm", "bn", "bk", "share", "split"))
    waves = -(-units(kernel.spec, m, n) // at_once(kernel, device))
    steps = -(-k // (bk * split))
    step = max(WGMMA_COLUMN * bn, (bm + bn) * 2 * bk / TMA_BYTES[share])
    once = LAUNCH + (split - 1) * (EXCHANGE + EXCHANGED_COLUMN * bn / split)
    once += SHARED_START if share > 1 else 0
    # A grid with split is not persistent: each wave starts anew.
    again = (waves - 1) * once if split > 1 else 0
    stored = STORED_COLUMN[str(tile["epilogue"])] * bn
    return _Work(waves * (steps * step + stored) + again, once)


def _stream(kernel: Kernel, m: int, n: int, k: int, device: Limits) -> _Work | None:
    tile = kernel.spec.tile
    bm, bn, bk, boxes, split = (int(tile[name]) for name in ("bm", "bn", "bk", "boxes", "split"))
    if m > bm:
        return None
    waves = -(-units(kernel.spec, m, n) // at_once(kernel, device))
    steps = -(-k // (bk * boxes * split))
    copying = steps * boxes * (bm + bn) * 2 * bk / STREAM_BYTES
    once = STREAM_LAUNCH + (split - 1) * STREAM_EXCHANGE
    # A grid with split is not persistent: each wave starts anew.
    again = (waves - 1) * once if split > 1 else 0
    return _Work(waves * copying + again, once)


def _mma(kernel: Kernel, m: int, n: int, k: int, device: Limits) -> _Work | None:
    spec = kernel.spec
    resident = min(spec.min_blocks, device.smem_per_sm // (spec.smem_bytes + device.smem_reserved))
    if not resident:
        return None
    bm, bn, bk, stages = (int(spec.tile[name]) for name in ("bm", "bn", "bk", "stages"))
    tiles = -(-units(spec, m, n) // device.sm_count)
    together = min(tiles, resident)
    warps = together * spec.threads // 32
    column_bytes = 2 * (min(bm, m) + bn)  # copied per column of k; rows past m are not
    on_their_way = together * (stages - 1) * bk * column_bytes
    copying = column_bytes / min(L2_BYTES, on_their_way / LATENCY)
    computing = bm * bn / MACS * (warps + IDLE_WARPS) / warps
    # A second resident block computes while the first starts and stores.
    starts = START * ((tiles if resident == 1 else 1) - 1)
    return _Work(tiles * k * max(copying, computing) + starts, LAUNCH)


_WORK: dict[str, Callable[[Kernel, int, int, int, Limits], _Work | None]] = {
    "mma": _mma,
    "wgmma": _wgmma,
    "stream": _stream,
}
