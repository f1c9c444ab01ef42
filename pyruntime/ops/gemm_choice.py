"""Which row of the GEMM table for a product: cost models in cycles of a multiprocessor.

Nothing is timed, so the choice is the same in every process. The constants were set by hand on an
H200, for the four products of a Qwen2.5-7B layer; how far a choice is from the best row there is
in bench/results/device.json (bench/gemm.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyruntime.cubin.spec import KernelSpec
from pyruntime.driver.device import Device
from pyruntime.driver.library import Kernel
from pyruntime.errors import CubinError

SMALL = 16  # rows of A up to which mma.sync is chosen though there is wgmma

# mma.sync. What a multiprocessor does in a cycle; only the ratios decide between rows.
MACS = 1200.0  # fp16 multiply-adds with enough warps at work
L2_BYTES = 40.0  # what L2 delivers to one multiprocessor
LATENCY = 1200.0  # cycles until a copy from device memory arrives
START = 3000.0  # cycles of a tile outside its main loop: first copies, stores
IDLE_WARPS = 2.0  # w warps keep the tensor cores busy w / (w + this) of the time

# wgmma, in cycles of an H200.
WGMMA_COLUMN = 4.43  # per column of a tile and slot of k
TMA_BYTES = {1: 50.0, 2: 53.0}  # a cycle from L2, by the blocks that share the slot of W
MEMORY_BYTES = 2170.0  # a cycle from device memory, for the whole device
LAUNCH = 7000.0  # a launch besides its main loops
SHARED_START = 1500.0  # cluster barriers at both ends of a launch
EXCHANGE, EXCHANGED_COLUMN = 700.0, 64.0  # per further rank of a split; its columns are divided
# Between tiles, per column; geglu, not measured, counts as swiglu.
STORED_COLUMN = {"f32": 12.0, "add": 20.0, "swiglu": 10.0, "geglu": 10.0}
OUTPUT_BYTES = {"f32": 4, "add": 8, "swiglu": 1, "geglu": 1}  # to and from C, per product's column
MEMORY_START = 0.6  # the part of a launch's fixed cost during which memory is idle, too
OVERLAP = 4  # work and memory hide each other as the norm of this order: not perfectly


def choose(kernels: Sequence[Kernel], m: int, n: int, k: int, device: Device) -> Kernel:
    """The row that should be fastest for C [m, n] = A [m, k] · W [n, k]ᵀ.

    All rows of the mma engine compute the same bits, and so do those of the wgmma engine that do
    not split k.

    Raises:
        CubinError: no row fits the device.
    """
    rows = [x for x in kernels if x.spec.tile["engine"] == "wgmma"] if m > SMALL else []
    if rows:
        costs = {row: _wgmma_cycles(row, m, n, k, device) for row in rows}
    else:
        costs = {
            row: _mma_cycles(row.spec, m, n, k, device.sm_count, blocks)
            for row in kernels
            if row.spec.tile["engine"] == "mma" and (blocks := _resident(row.spec, device))
        }
    if not costs:
        raise CubinError(f"no gemm row fits {device.smem_per_sm:,} B of shared memory")
    return min(costs, key=lambda row: (costs[row], row.name))


def units(spec: KernelSpec, m: int, n: int) -> int:
    """Pieces of an [m, n] product that the row's blocks, or clusters of blocks, take on."""
    rows = int(spec.tile["bm"]) * int(spec.tile.get("share", 1))
    return -(-m // rows) * -(-n // int(spec.tile["bn"]))


def at_once(kernel: Kernel, device: Device) -> int:
    """Blocks, or clusters of blocks, of a wgmma row that the device holds at a time."""
    return kernel.clusters or device.sm_count


def _wgmma_cycles(kernel: Kernel, m: int, n: int, k: int, device: Device) -> float:
    spec = kernel.spec
    bm, bn, bk, share, split = (
        int(spec.tile[name]) for name in ("bm", "bn", "bk", "share", "split")
    )
    epilogue = str(spec.tile["epilogue"])
    waves = -(-units(spec, m, n) // at_once(kernel, device))
    steps = -(-k // (bk * split))
    step = max(WGMMA_COLUMN * bn, (bm + bn) * 2 * bk / TMA_BYTES[share])
    once = LAUNCH + (split - 1) * (EXCHANGE + EXCHANGED_COLUMN * bn / split)
    once += SHARED_START if share > 1 else 0
    # A grid with split is not persistent: each wave starts anew.
    outside = waves * once if split > 1 else once
    working = waves * (steps * step + STORED_COLUMN[epilogue] * bn) + outside
    moved = 2 * k * (n + m) + OUTPUT_BYTES[epilogue] * m * n
    memory = moved / MEMORY_BYTES + MEMORY_START * once
    return float((working**OVERLAP + memory**OVERLAP) ** (1 / OVERLAP))


def _resident(spec: KernelSpec, device: Device) -> int:
    """Blocks that share a multiprocessor."""
    return min(spec.min_blocks, device.smem_per_sm // (spec.smem_bytes + device.smem_reserved))


def _mma_cycles(spec: KernelSpec, m: int, n: int, k: int, sm_count: int, resident: int) -> float:
    """Of the multiprocessor that has the most to do.

    The time that W takes to come from device memory is the same for all rows and left out.
    """
    bm, bn, bk, stages = (int(spec.tile[name]) for name in ("bm", "bn", "bk", "stages"))
    tiles = -(-units(spec, m, n) // sm_count)
    together = min(tiles, resident)
    warps = together * spec.threads // 32
    column_bytes = 2 * (min(bm, m) + bn)  # copied per column of k; rows past m are not
    on_their_way = together * (stages - 1) * bk * column_bytes
    copying = column_bytes / min(L2_BYTES, on_their_way / LATENCY)
    computing = bm * bn / MACS * (warps + IDLE_WARPS) / warps
    # A second resident block computes while the first starts and stores.
    return tiles * k * max(copying, computing) + START * (tiles if resident == 1 else 1)
