"""The emulator finds what kernels do wrong: each of these does one thing, and is told of it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from emulated_driver import EmulatedDriver, compiled, emulate
from numpy.typing import NDArray

THREADS, SHARED = 64, 1024
# Thread i has to leave x[i] + 1 at y[i].
SOURCE = """
struct Kernel {
  struct Params {
    const float* x;
    float* y;
    int n;
  };
  static float* shared() { return reinterpret_cast<float*>(spec::raw); }
};
struct Right : Kernel {
  static void run(const Params& p) {
    const int i = threadIdx.x;
    ptx::copy_async_4(ptx::shared_address(shared() + i), p.x + i, 4);
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    __syncthreads();
    const float other = shared()[i ^ 32];  // of the other warp
    __syncthreads();
    shared()[i] = other;
    __syncwarp();
    p.y[i] = __shfl_sync(~0u, shared()[i ^ 1], i % 32 ^ 1) + 1;
    __syncthreads();
    const float mine = p.y[i];
    __syncthreads();
    p.y[i ^ 32] = mine;
  }
};
struct Past : Kernel {
  static void run(const Params& p) {
    p.y[threadIdx.x] = p.x[threadIdx.x + (threadIdx.x == 63)] + 1;
  }
};
struct Misaligned : Kernel {
  static void run(const Params& p) {
    uint32_t r[2];
    ptx::load_once(r, p.x + 1);
  }
};
struct Overrun : Kernel {
  static void run(const Params& p) { shared()[256 - 32 + threadIdx.x] = 0; }
};
struct Alone : Kernel {
  static void run(const Params&) {
    if (threadIdx.x == 7) __syncwarp();
    __syncthreads();
  }
};
struct Unwaited : Kernel {
  static void run(const Params& p) {
    const int i = threadIdx.x;
    ptx::copy_async_4(ptx::shared_address(shared() + i), p.x + i, 4);
    p.y[i] = shared()[i] + 1;
  }
};
struct Early : Kernel {  // the copy may arrive before the other thread has read what was there
  static void run(const Params& p) {
    const int i = threadIdx.x;
    shared()[i] = p.x[i];
    __syncthreads();
    ptx::copy_async_4(ptx::shared_address(shared() + (i ^ 1)), p.x, 4);
    p.y[i] = shared()[i] + 1;
  }
};
struct Unordered : Kernel {
  static void run(const Params& p) {
    const int i = threadIdx.x;
    shared()[i] = p.x[i];
    p.y[i ^ 32] = shared()[i ^ 32] + 1;
  }
};
KERNEL(right, Right)
KERNEL(past, Past)
KERNEL(misaligned, Misaligned)
KERNEL(overrun, Overrun)
KERNEL(alone, Alone)
KERNEL(unwaited, Unwaited)
KERNEL(early, Early)
KERNEL(unordered, Unordered)
"""


class Params(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("n", ctypes.c_int))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("kernels") / "wrong.cu"
    path.write_text(SOURCE)
    return compiled(path, "80")


def run(library: ctypes.CDLL, kernel: str, number: int) -> tuple[str, bool]:
    """What is said of a launch, and whether all of y is right."""
    driver = EmulatedDriver("80", multiprocessors=1)
    x, y = (driver._memory(4 * THREADS).view(np.float32) for _ in range(2))
    x[:], y[:] = np.arange(THREADS), np.nan
    params = Params(address(x), address(y), THREADS)
    fault = emulate(library, kernel, bytes(params), (1, 1, 1), THREADS, SHARED, number)
    return fault, bool((y == x + 1).all())


def address(array: NDArray[np.float32]) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("number", range(1, 9))
def test_what_is_right(library: ctypes.CDLL, number: int) -> None:
    assert run(library, "right", number) == ("", True)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("past", "thread 63: 0x"),
        ("misaligned", "a misaligned load"),
        ("overrun", "written to shared memory past its 1024 bytes"),
        ("alone", "threads wait for others that do not come"),
    ],
)
def test_what_is_told(library: ctypes.CDLL, kernel: str, said: str) -> None:
    fault, _ = run(library, kernel, 1)
    assert fault.startswith("block (0, 0, 0), thread ") and said in fault
    assert run(library, "right", 1) == ("", True)  # as if nothing had happened


def test_copies_that_are_not_waited_for(library: ctypes.CDLL) -> None:
    assert [run(library, "unwaited", number)[1] for number in (1, 2)] == [False, True]
    assert not any(run(library, "early", number)[1] for number in (1, 2))


def test_threads_that_do_not_wait_for_each_other(library: ctypes.CDLL) -> None:
    assert not all(run(library, "unordered", number)[1] for number in range(4))
