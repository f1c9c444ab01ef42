"""The emulator carries out copies, barriers, clusters and products, and finds what is wrong."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from emulated_driver import EmulatedDriver, compiled, emulate
from numpy.typing import NDArray

from pyruntime.driver import api, tensormap

THREADS, SHARED = 128, 32 << 10
LATE, AT_ONCE = 1, 2  # numbers of launches in which copies and products happen so
# In a kernel `box` is 8 lines of 64 fp16 of x under a map, and y holds floats.
SOURCE = """
#include "cuda/core/tma.cuh"
#include "cuda/core/wgmma.cuh"

constexpr uint32_t kBar = 0, kBox = 1024, kBytes = 8 * 128, kOther = 2048;
struct Kernel {
  struct Params {
    spec::TensorMap map;
    const __half* x;
    float* y;
    int32_t* flags;
    int a, b, c;
  };
  static void begin(int count) {
    if (threadIdx.x == 0) ptx::barrier_init(kBar, count);
    __syncthreads();
  }
  static float half_at(uint32_t address) {
    return __half2float(ptx::shared_at<__half>(address));
  }
  // The box as it lies without its swizzle, for block `number`.
  static void show(const Params& p, int number = 0) {
    for (int i = threadIdx.x; i < 512; i += 128) {
      const int line = i / 64, chunk = i % 64 / 8;
      p.y[number * 512 + i] = half_at(kBox + line * 128 + (chunk ^ line) * 16 + i % 8 * 2);
    }
  }
};

template <int Rank, bool Wait, int More>
struct Load : Kernel {
  static void run(const Params& p) {
    begin(1);
    if (threadIdx.x == 0) {
      ptx::barrier_expect(kBar, kBytes + More);
      if (Rank == 2)
        ptx::tensor_load(kBox, &p.map, kBar, p.a, p.b);
      else
        ptx::tensor_load(kBox, &p.map, kBar, p.a, p.b, p.c);
    }
    if (Wait) ptx::barrier_wait(kBar, 0);
    show(p);
    ptx::barrier_wait(kBar, 0);
  }
};
KERNEL(load, Load<2, true, 0>)
KERNEL(load_3d, Load<3, true, 0>)
KERNEL(load_unwaited, Load<2, false, 0>)
KERNEL(load_more, Load<2, true, 16>)

struct Uninitialised : Kernel {
  static void run(const Params&) { ptx::barrier_arrive(kBar); }
};
KERNEL(uninitialised, Uninitialised)
struct Many : Kernel {
  static void run(const Params&) {
    begin(127);
    ptx::barrier_expect(kBar, 16);
  }
};
KERNEL(many, Many)

// y becomes the box of x, which is in shared memory for as long as it takes.
template <bool Wait>
struct Store : Kernel {
  static void run(const Params& p) {
    for (int i = threadIdx.x; i < 512; i += 128)
      ptx::shared_at<__half>(ptx::swizzled(kBox + i * 2)) = p.x[i];
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::tensor_store(&p.map, kBox, p.a, p.b, p.c);
      if (Wait) ptx::tensor_store_wait();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 512; i += 128)
      ptx::shared_at<__half>(kBox + i * 2) = __float2half_rn(7);
  }
};
KERNEL(store, Store<true>)
KERNEL(store_unwaited, Store<false>)

// Block 0 of two loads a box for both.
template <bool Met, bool Stays>
struct Multicast : Kernel {
  static void run(const Params& p) {
    begin(1);
    if (threadIdx.x == 0) ptx::barrier_expect(kBar, kBytes);
    if (Met) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
      ptx::tensor_load_multicast(kBox, &p.map, kBar, p.a, p.b, 3);
    if (!Stays && blockIdx.x == 1) return;
    ptx::barrier_wait(kBar, 0);
    show(p, blockIdx.x);
  }
};
KERNEL(multicast, Multicast<true, true>)
KERNEL(multicast_unmet, Multicast<false, true>)
KERNEL(multicast_left, Multicast<true, false>)

// Each of four blocks gets four numbers from the one before, in whose number they lie in y.
template <bool Wait>
struct Send : Kernel {
  static void run(const Params& p) {
    const uint32_t next = (blockIdx.x + 1) % 4;
    begin(2);
    if (threadIdx.x == 0) ptx::barrier_expect(kBar, 16);
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (threadIdx.x == 64) {
      const float base = 10 * blockIdx.x;
      ptx::store_async(ptx::map_to_rank(kBox, next), ptx::map_to_rank(kBar, next), base, base + 1,
                       base + 2, base + 3);
      ptx::barrier_arrive_remote(ptx::map_to_rank(kBar, next));
    }
    if (Wait) ptx::barrier_wait_cluster(kBar, 0);
    const int i = threadIdx.x;
    if (i < 4) p.y[4 * blockIdx.x + i] = ptx::shared_at<float>(kBox + i * 4);
    ptx::barrier_wait(kBar, 0);
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
};
KERNEL(send, Send<true>)
KERNEL(send_unwaited, Send<false>)

// The upper warps leave numbers for the lower ones, without waiting for them.
template <int Threads>
struct Named : Kernel {
  static void run(const Params& p) {
    float* const numbers = reinterpret_cast<float*>(spec::raw);
    if (threadIdx.x >= 64) {
      numbers[threadIdx.x - 64] = threadIdx.x;
      ptx::named_arrive<Threads>(3);
    } else {
      ptx::named_barrier<Threads>(3);
      p.y[threadIdx.x] = numbers[threadIdx.x ^ 32];
    }
  }
};
KERNEL(named, Named<128>)
KERNEL(named_few, Named<64>)
KERNEL(named_many, Named<160>)

// Each block adds one to the number that its neighbour below (or above) leaves.
template <int Below>
struct Chain : Kernel {
  static void run(const Params& p) {
    if (threadIdx.x) return;
    const int from = int(blockIdx.x) - Below;
    float number = 0;
    if (from >= 0 && from < int(gridDim.x)) {
      while (!ptx::load_acquire(p.flags + from)) {
      }
      number = p.y[from];
    }
    p.y[blockIdx.x] = number + 1;
    ptx::store_release(p.flags + blockIdx.x, 1);
  }
};
KERNEL(chain, Chain<1>)
KERNEL(chain_up, Chain<-1>)

// x: A [64][64], then B [32][64], or [16][128] of which planes of 64 columns follow each other.
// y: sums [64][columns].
struct Product : Kernel {
  static constexpr uint32_t kA = 1024, kB = 1024 + 64 * 128;
  static void put(uint32_t to, const __half* from, int count) {
    for (int i = threadIdx.x; i < count; i += 128)
      ptx::shared_at<__half>(ptx::swizzled(to + i * 2)) = from[i];
  }
  static void place(const Params& p) {
    put(kA, p.x, 64 * 64);
    put(kB, p.x + 64 * 64, 32 * 64);
    __syncthreads();
  }
  template <int N>
  static void store(const Params& p, const float (&d)[N]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    for (int i = 0; i < N; ++i)
      p.y[(row + i / 2 % 2 * 8) * 2 * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
  }
};
template <bool Wait, bool Early, bool Stays>
struct Operands : Product {
  static void run(const Params& p) {
    place(p);
    float d[16];
    for (float& x : d) x = 1000;
    const uint64_t a = ptx::wgmma_operand(kA), b = ptx::wgmma_operand(kB);
    for (int i = 0; i < 4; ++i) ptx::Wgmma<32>::mma(d, a + 2 * i, b + 2 * i, i != 0);
    ptx::wgmma_commit();
    if (!Wait) store(p, d);
    if (Early) for (float& x : d) x += 1;
    __syncthreads();
    if (!Stays) put(kB, p.x, 64);
    ptx::wgmma_wait<0>();
    if (Wait) store(p, d);
  }
};
KERNEL(product, Operands<true, false, true>)
KERNEL(product_unwaited, Operands<false, false, true>)
KERNEL(product_overwritten, Operands<true, false, false>)
KERNEL(product_touched, Operands<true, true, true>)

struct Registers : Product {
  static void run(const Params& p) {
    place(p);
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    uint32_t a[4];
    float d[64];
    for (int i = 0; i < 64; ++i) d[i] = i / 2 % 2;  // one more in the lower rows of a fragment
    for (int i = 0; i < 4; ++i)
      std::memcpy(&a[i], p.x + (row + i % 2 * 8) * 64 + i / 2 * 8 + lane % 4 * 2, 4);
    ptx::WgmmaRegisters<128>::mma(d, a, ptx::wgmma_operand_transposed(kB, 16 * 128));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    store(p, d);
  }
};
KERNEL(registers, Registers)

// Four 8x8 matrices beside each other: y[row][column], from halves that tell where they belong.
struct Matrices : Kernel {
  static void run(const Params& p) {
    const int lane = threadIdx.x % 32;
    if (threadIdx.x >= 32) return;
    uint32_t r[4];
    for (int i = 0; i < 4; ++i) {
      const float number = lane / 4 * 32 + i * 8 + lane % 4 * 2;
      r[i] = ptx::pack_halves(number, number + 1);
    }
    ptx::store_matrix_x4(kBox + lane % 8 * 64 + lane / 8 * 16, r[0], r[1], r[2], r[3]);
    __syncwarp();
    for (int i = lane; i < 256; i += 32) p.y[i] = half_at(kBox + i * 2);
  }
};
KERNEL(matrices, Matrices)
"""


class Params(ctypes.Structure):
    _fields_ = (
        ("map", ctypes.c_uint8 * 128),
        *((name, ctypes.c_void_p) for name in ("x", "y", "flags")),
        *((name, ctypes.c_int) for name in "abc"),
        ("unused", ctypes.c_char * 28),  # a map is aligned to 64 bytes
    )


class Machine:
    """Runs the kernels of SOURCE."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.driver = EmulatedDriver("90a", multiprocessors=1)

    def array(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        memory = self.driver._memory(values.nbytes).view(values.dtype).reshape(values.shape)
        memory[...] = values
        return memory

    def map_of(self, array: NDArray[np.float16], lines: int = 8) -> bytes:
        box = (1,) * (array.ndim - 2) + (lines, 64)
        return tensormap._encode(array.ctypes.data, array.shape, box, 0)

    def run(
        self, kernel: str, number: int, x: NDArray[np.float16], *coordinates: int,
        count: int = 512, blocks: int = 1, cluster: int = 1,
        target: NDArray[np.float16] | None = None,
    ) -> tuple[str, NDArray[np.float32]]:  # fmt: skip
        """What is said of a launch, and y. The map: of x, or of `target`."""
        y = self.array(np.full(count, np.nan, np.float32))
        flags = self.array(np.zeros(blocks, np.int32))
        given = Params(
            (ctypes.c_uint8 * 128)(*self.map_of(x if target is None else target)),
            *(array.ctypes.data for array in (x, y, flags)), *coordinates,
        )  # fmt: skip
        fault = emulate(
            self.library, kernel, bytes(given), (blocks, 1, 1), THREADS, SHARED, number, cluster
        )
        return fault, y


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("kernels") / "hopper.cu"
    path.write_text(SOURCE)
    return compiled(path, "90a")


@pytest.fixture
def machine(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(library)
    monkeypatch.setattr(api, "_driver", made.driver)
    monkeypatch.setattr(api, "call", lambda name, *given, what: made.driver._result(name, *given))
    return made


@pytest.fixture
def matrix(machine: Machine) -> NDArray[np.float16]:
    return machine.array(np.arange(11 * 80, dtype=np.float16).reshape(11, 80))


def box_of(array: NDArray[np.float16], x: int, y: int, lines: int = 8) -> NDArray[np.float16]:
    """A box of zeros, and what of the array is in it."""
    wide = np.zeros((array.shape[0] + 200, array.shape[1] + 200), array.dtype)
    wide[100:-100, 100:-100] = array
    return wide[100 + y : 100 + y + lines, 100 + x : 164 + x]


PLACES = [(0, 0), (64, 0), (8, 6), (70, 9), (-3, -2), (100, 0), (0, 50)]


@pytest.mark.parametrize("number", [LATE, AT_ONCE])
@pytest.mark.parametrize(("x", "y"), PLACES)
def test_boxes(machine: Machine, matrix: NDArray[np.float16], number: int, x: int, y: int) -> None:
    fault, found = machine.run("load", number, matrix, x, y)
    assert fault == ""
    np.testing.assert_array_equal(found.reshape(8, 64), box_of(matrix, x, y))


@pytest.mark.parametrize("z", [0, 2, 3, -1])
def test_boxes_of_three_dimensions(machine: Machine, z: int) -> None:
    cube = machine.array(np.arange(3 * 10 * 64, dtype=np.float16).reshape(3, 10, 64))
    fault, found = machine.run("load_3d", LATE, cube, 8, 4, z)
    plane = cube[z] if 0 <= z < 3 else 0 * cube[0]
    assert fault == ""
    np.testing.assert_array_equal(found.reshape(8, 64), box_of(plane, 8, 4))


def test_a_copy_that_is_not_waited_for(machine: Machine, matrix: NDArray[np.float16]) -> None:
    whole = box_of(matrix, 0, 0).ravel()
    assert np.isnan(machine.run("load_unwaited", LATE, matrix, 0, 0)[1]).any()
    found = [machine.run("load", n, matrix, 0, 0)[1] for n in (LATE, AT_ONCE)]
    assert all((each == whole).all() for each in found)


@pytest.mark.parametrize(
    ("kernel", "coordinates", "said"),
    [
        ("load_more", (0, 0, 0), "128 threads wait for others that do not come"),
        ("load_3d", (0, 0, 0), "a tensor map of 2 dimensions"),
        ("uninitialised", (0, 0, 0), "a barrier that nobody has initialised"),
        ("many", (0, 0, 0), "more threads arrive at a barrier than it counts"),
        ("named_few", (0, 0, 0), ""),
        ("named_many", (0, 0, 0), "64 threads wait for others that do not come"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("number", [LATE, AT_ONCE])
def test_what_is_told(
    machine: Machine, matrix: NDArray[np.float16], number: int, kernel: str,
    coordinates: tuple[int, ...], said: str,
) -> None:  # fmt: skip
    fault, _ = machine.run(kernel, number, matrix, *coordinates)
    assert fault.endswith(said)


@pytest.mark.parametrize("number", [LATE, AT_ONCE])
@pytest.mark.parametrize(("x", "y", "z"), [(0, 0, 0), (8, 0, 1), (24, 7, 1), (0, 9, 2)])
def test_stores_end_with_the_array(machine: Machine, number: int, x: int, y: int, z: int) -> None:
    box = machine.array(np.arange(512, dtype=np.float16).reshape(8, 64))
    cube = machine.array(np.zeros((3, 10, 72), np.float16))
    assert machine.run("store", number, box, x, y, z, target=cube)[0] == ""
    wanted = np.zeros((3, 20, 200), np.float16)
    wanted[z, y : y + 8, x : x + 64] = box
    np.testing.assert_array_equal(cube, wanted[:, :10, :72])


def test_stores_before_the_array(machine: Machine) -> None:
    box = machine.array(np.zeros((8, 64), np.float16))
    cube = machine.array(np.zeros((3, 10, 72), np.float16))
    fault, _ = machine.run("store", LATE, box, 0, -1, 0, target=cube)
    assert fault.endswith("thread 0: a box that begins before the array")


def test_a_store_that_is_not_waited_for(machine: Machine) -> None:
    box = machine.array(np.ones((8, 64), np.float16))
    cube = machine.array(np.zeros((1, 8, 64), np.float16))
    seen = []
    for number in (LATE, AT_ONCE):
        machine.run("store_unwaited", number, box, 0, 0, 0, target=cube)
        seen.append(set(cube.ravel().tolist()))
    assert seen == [{7.0}, {1.0}]


@pytest.mark.parametrize("number", range(1, 7))
def test_clusters(machine: Machine, matrix: NDArray[np.float16], number: int) -> None:
    fault, found = machine.run(
        "multicast", number, matrix, 8, 6, 0, count=1024, blocks=2, cluster=2
    )
    assert fault == ""
    np.testing.assert_array_equal(found.reshape(2, 8, 64), [box_of(matrix, 8, 6)] * 2)
    fault, found = machine.run("send", number, matrix, 0, 0, 0, count=16, blocks=4, cluster=4)
    assert (fault, found.tolist()) == (
        "",
        [10 * ((b - 1) % 4) + i for b in range(4) for i in range(4)],
    )


def test_clusters_whose_blocks_do_not_wait(machine: Machine, matrix: NDArray[np.float16]) -> None:
    def said(kernel: str, number: int) -> str:
        return machine.run(kernel, number, matrix, 0, 0, 0, count=1024, blocks=2, cluster=2)[0]

    unmet = [said("multicast_unmet", number) for number in range(1, 9)]
    assert any("a barrier that nobody has initialised" in fault for fault in unmet)
    left = " ".join(said("multicast_left", number) for number in range(1, 9))
    assert "the block has ended, and bytes are on their way to it" in left
    assert "shared memory of a block that has ended" in left
    _, found = machine.run("send_unwaited", LATE, matrix, 0, 0, 0, count=16, blocks=4, cluster=4)
    assert np.isnan(found).any()


@pytest.mark.parametrize("number", range(1, 5))
def test_named_barriers(machine: Machine, matrix: NDArray[np.float16], number: int) -> None:
    fault, found = machine.run("named", number, matrix, 0, 0, 0, count=64)
    assert (fault, found.tolist()) == ("", [64 + (i ^ 32) for i in range(64)])


def test_blocks_wait_for_lower_ones_alone(machine: Machine, matrix: NDArray[np.float16]) -> None:
    for number in range(1, 9):
        fault, found = machine.run("chain", number, matrix, 0, 0, 0, count=6, blocks=6)
        assert (fault, found.tolist()) == ("", [1, 2, 3, 4, 5, 6])
    said = [
        machine.run("chain_up", number, matrix, 0, 0, 0, count=6, blocks=6)[0]
        for number in range(1, 9)
    ]
    assert all(fault.endswith("threads wait for others that do not come") for fault in said)


@pytest.fixture
def factors(machine: Machine) -> NDArray[np.float16]:
    """Small whole numbers: their products' sums are exact."""
    drawn = np.random.default_rng(1).integers(-8, 9, 64 * 64 + 32 * 64)
    return machine.array(drawn.astype(np.float16).reshape(-1, 64))


@pytest.mark.parametrize("number", [LATE, AT_ONCE])
def test_products(machine: Machine, factors: NDArray[np.float16], number: int) -> None:
    a, b = factors[:64].astype(np.float32), factors[64:].astype(np.float32)
    fault, found = machine.run("product", number, factors, 0, 0, 0, count=64 * 32)
    assert fault == ""
    np.testing.assert_array_equal(found.reshape(64, 32), a @ b.T)
    fault, found = machine.run("registers", number, factors, 0, 0, 0, count=64 * 128)
    assert fault == ""
    wide = np.concatenate([b[:16], b[16:]], axis=1)
    more = np.arange(64)[:, None] // 8 % 2
    np.testing.assert_array_equal(found.reshape(64, 128), a[:, :16] @ wide + more)


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [("unwaited", LATE), ("overwritten", LATE), ("touched", AT_ONCE)],
)
def test_products_that_are_not_waited_for(
    machine: Machine, factors: NDArray[np.float16], kernel: str, wrong: int
) -> None:
    wanted = (factors[:64].astype(np.float32) @ factors[64:].astype(np.float32).T).ravel()
    right = {
        number: (
            machine.run(f"product_{kernel}", number, factors, 0, 0, 0, count=64 * 32)[1] == wanted
        ).all()
        for number in (LATE, AT_ONCE)
    }
    assert right == {wrong: False, LATE + AT_ONCE - wrong: True}


def test_matrices_to_shared_memory(machine: Machine, matrix: NDArray[np.float16]) -> None:
    fault, found = machine.run("matrices", LATE, matrix, 0, 0, 0, count=256)
    assert (fault, found.tolist()) == ("", list(range(256)))


def test_the_driver_refuses_what_cannot_be_copied(
    machine: Machine, matrix: NDArray[np.float16]
) -> None:
    from fake_driver import StatusError

    for refused in (matrix[:, 4:], matrix[:, :79]):  # its address, its rows
        with pytest.raises(StatusError):
            tensormap._encode(refused.ctypes.data, refused.shape, (8, 64), 0)
