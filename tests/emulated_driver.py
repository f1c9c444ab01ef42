"""A CUDA driver that runs the kernels of this tree on the host: slowly, and watching them.

`EmulatedDriver` is a `FakeDriver` whose launches are carried out by the kernels themselves, which
tests/emulator compiles for the host. What goes wrong is an error that names launch, block and
thread:

- an address past the end of an array: behind it lies a page that nothing may touch (but up to 15
  bytes past an array whose size is no multiple of 16 go unseen);
- a misaligned access of several words, or one past shared memory;
- shared memory written past what the kernel asks for; a barrier that some threads or bytes do not
  come to, or more than it counts, or that nobody has initialised;
- a block of a cluster that ends before others are done with its shared memory;
- a wait for a block of a higher number, which on a GPU may not have started.

Memory that nothing has written holds NaN, shared memory, too. Threads and blocks run in an order
that differs from one launch of a kernel to the next. Asynchronous copies and products of wgmma
happen when they are waited for, copies by tensor maps when nothing else can, in one launch, at once
in the next. Who depends on either gives wrong results. Fences do nothing: that one is missing is
not seen.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from compilers import cuda_includes, cxx
from cuda.bindings import driver
from fake_driver import INVALID_VALUE, FakeDriver, StatusError
from numpy.typing import NDArray

from pyruntime.cubin.installed import root
from pyruntime.cubin.spec import KernelSpec, read_specs

CUDA = Path(__file__).parents[1] / "cuda"
EMULATOR = Path(__file__).parent / "emulator"
FLAGS = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
# Shared memory of a block and of a multiprocessor, by architecture: CUDA programming guide,
# "Compute Capabilities".
SHARED = {
    "80": (163 << 10, 164 << 10),
    "90a": (227 << 10, 228 << 10),
    "100": (227 << 10, 228 << 10),
    "120": (99 << 10, 100 << 10),
}
MAP = struct.Struct("<QQ3Q2Q3II")  # Map of tests/emulator/core/tma.cuh
MAP_MAGIC = 0x70616D726F736E74
ALIGNMENT = 16
_libc = ctypes.CDLL(None, use_errno=True)


class EmulatedDriver(FakeDriver):
    """See the module. `architecture`: a key of SHARED."""

    def __init__(self, architecture: str, multiprocessors: int) -> None:
        super().__init__()
        block, multiprocessor = SHARED[architecture]
        self.attributes |= {
            "COMPUTE_CAPABILITY_MAJOR": capability(architecture) // 10,
            "COMPUTE_CAPABILITY_MINOR": capability(architecture) % 10,
            "MULTIPROCESSOR_COUNT": multiprocessors,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": block,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": multiprocessor,
        }
        self.fresh = 0xFF
        self.carry_out = self._launch
        self.keep = self._kept
        self._architecture = architecture
        self._specs = _specs(architecture)
        self._launches: Counter[str] = Counter()

    def _memory(self, nbytes: int) -> NDArray[np.uint8]:
        inside = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = np.frombuffer(mmap.mmap(-1, inside + mmap.PAGESIZE), np.uint8)
        end = ctypes.c_void_p(memory.ctypes.data + inside)
        if _libc.mprotect(end, ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        start = inside - -(-nbytes // ALIGNMENT) * ALIGNMENT
        return memory[start : start + nbytes]

    def _result(self, name: str, *arguments: Any) -> Any:
        if name == "cuTensorMapEncodeTiled":
            return self._map(*arguments)
        if name == "cuOccupancyMaxActiveClusters":
            return self.attributes["MULTIPROCESSOR_COUNT"] // cluster_of(arguments[1])
        return super()._result(name, *arguments)

    def _map(
        self, dtype: Any, rank: int, base: int, sizes: Any, strides: Any, box: Any, steps: Any,
        interleave: Any, swizzle: Any, *_: Any,
    ) -> Any:  # fmt: skip
        """A tensor map as the emulator reads it; the driver refuses what it would refuse."""
        sizes, strides, box = ([int(n) for n in given] for given in (sizes, strides, box))
        right = (
            rank in (2, 3)
            and base % 16 == 0
            and all(0 < n <= 1 << 32 for n in sizes)
            and all(n % 16 == 0 for n in strides)
            and all(0 < n <= 256 for n in box)
        )
        if not right:
            raise StatusError(INVALID_VALUE)
        if (
            dtype != driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
            or swizzle != driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
            or box[0] != 64
        ):
            raise NotImplementedError("a tensor map of other lines than 64 fp16, swizzled")
        less = 3 - rank
        packed = MAP.pack(
            MAP_MAGIC, base, *sizes, *[1] * less, *strides, *[0] * less, *box, *[1] * less, rank
        )
        found = driver.CUtensorMap()
        ctypes.memmove(found.getPtr(), packed, len(packed))
        return found

    def _kept(self, kernel: str, address: int) -> bytes:
        """Parameters as they are now."""
        block = ctypes.c_void_p.from_address(address).value
        return ctypes.string_at(block or 0, self._specs[kernel][1].param_bytes)

    def _launch(self, config: Any, kernel: str, given: int | bytes) -> None:
        params = self._kept(kernel, given) if isinstance(given, int) else given
        source, spec = self._specs[kernel]
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        self._launches[kernel] += 1
        fault = emulate(
            compiled(source, self._architecture), kernel, params, grid, spec.threads,
            spec.smem_bytes, self._launches[kernel], cluster_of(config),
        )  # fmt: skip
        if fault:
            raise AssertionError(f"kernel {kernel}, grid {grid}: {fault}")


def emulate(
    library: ctypes.CDLL,
    kernel: str,
    params: bytes,
    grid: tuple[int, int, int],
    threads: int,
    shared: int,
    number: int,
    cluster: int = 1,
) -> str:
    """Runs a kernel; what went wrong, or nothing. `number`: of the launch, by which orders differ;
    in odd ones what is asynchronous happens late."""
    run = library.emulate
    run.restype = ctypes.c_char_p
    sizes = (ctypes.c_uint * 3)(*grid)
    fault = run(
        getattr(library, kernel), params, len(params), sizes, threads, shared, cluster, number,
        number % 2,
    )  # fmt: skip
    return str(fault.decode()) if fault else ""


def capability(architecture: str) -> int:
    return int(architecture.rstrip("af"))


def cluster_of(config: Any) -> int:
    """Blocks in a cluster, of a launch's configuration."""
    dimension = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    sizes = [a.value.clusterDim.x for a in config.attrs[: config.numAttrs] if a.id == dimension]
    return int(sizes[0]) if sizes else 1


@cache
def _specs(architecture: str) -> dict[str, tuple[Path, KernelSpec]]:
    """Of each kernel the file that it is compiled from, and its contract."""
    found = {}
    for cubin in (root() / f"sm_{architecture}").glob("*.cubin"):
        source = CUDA / f"kernels/{cubin.stem}.cu"
        if not source.exists():
            source = CUDA / f"kernels/sm_{architecture}/{cubin.stem}.cu"
        for name, spec in read_specs(cubin.read_bytes(), str(cubin)).items():
            found[name] = source, spec
    return found


@cache
def compiled(source: Path, architecture: str) -> ctypes.CDLL:
    """The kernels of a file, for the host, as they are for an architecture."""
    with TemporaryDirectory() as folder:
        tree, library = Path(folder, "cuda"), Path(folder, "kernels.so")
        for path in CUDA.rglob("*.*"):
            place = tree / path.relative_to(CUDA)
            place.parent.mkdir(parents=True, exist_ok=True)
            instead = EMULATOR / path.relative_to(CUDA)
            place.symlink_to(instead if instead.exists() else path)
        if source.is_relative_to(CUDA):  # its `#include`s are then of that tree
            source = tree / source.relative_to(CUDA)
        command = [
            cxx(), *FLAGS, *cuda_includes(), f"-I{folder}",
            f"-DEMULATED={10 * capability(architecture)}",
            f'-DKERNELS="{source}"', "-o", str(library), str(EMULATOR / "kernels.cpp"),
        ]  # fmt: skip
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))
