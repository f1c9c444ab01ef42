"""The build fails where ptxas only mentions that a kernel is not what was written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from compilers import cmake, nvcc

ROOT = Path(__file__).parents[2]
PRODUCTS = """
#include "core/wgmma.cuh"
extern "C" __global__ void __launch_bounds__(128) products(float* out, uint64_t a, uint64_t b) {
  float d[32] = {};
  ptx::wgmma_settle(d);
  ptx::wgmma_fence();
  ptx::Wgmma<64>::mma(d, a, b, 1);
  ptx::Wgmma<64>::mma(d, a, b, 1);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_settle(d);
  for (int i = 0; i < 32; ++i) out[i] = d[i];
}
"""

SUMS = """
extern "C" __global__ void __launch_bounds__(1024, 2) sums(float* x, int n) {
  float d[64] = {};
  for (int i = 0; i < n; ++i)
#pragma unroll
    for (int j = 0; j < 64; ++j) d[j] += d[(j + 7) % 64] * x[i];
  for (int j = 0; j < 64; ++j) x[j] = d[j];
}
"""


def build(made: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [cmake(), "-P", ROOT / "cuda/compile.cmake", "--", made, *command],
        capture_output=True,
        text=True,
    )


def compile_cubin(made: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = made.with_suffix(".cu")
    path.write_text(source)
    return build(
        made, nvcc(), "-cubin", "-std=c++17", "-O3", f"-I{ROOT / 'cuda'}", *options,
        "-gencode", "arch=compute_90a,code=sm_90a", "-o", made, path,
    )  # fmt: skip


def test_products_in_a_row_are_built(tmp_path: Path) -> None:
    made = tmp_path / "k.cubin"
    done = compile_cubin(made, PRODUCTS)
    assert done.returncode == 0, done.stderr
    assert made.stat().st_size


@pytest.mark.parametrize("touch", ["d[0] += 1;", "out[99] = d[5];"])
def test_products_that_wait_for_one_another_are_not(tmp_path: Path, touch: str) -> None:
    """Accumulators are touched between two products, so that the compiler serialises them."""
    made, first = tmp_path / "k.cubin", "ptx::Wgmma<64>::mma(d, a, b, 1);\n"
    done = compile_cubin(made, PRODUCTS.replace(first, first + touch, 1))
    assert done.returncode and "serialized" in done.stderr
    assert not made.exists()


def test_spills_are_not_built(tmp_path: Path) -> None:
    made = tmp_path / "k.cubin"
    done = compile_cubin(made, SUMS, "-Xptxas", "-warn-spills")
    assert done.returncode and "spill" in done.stderr
    assert not made.exists()


def test_errors_are_those_of_the_compiler(tmp_path: Path) -> None:
    done = compile_cubin(tmp_path / "k.cubin", "nonsense;")
    assert done.returncode and "nonsense" in done.stderr


@pytest.mark.parametrize("code", [7508, *range(7510, 7521)])
def test_what_ptxas_mentions(tmp_path: Path, code: int) -> None:
    """All but C7519, a warpgroup.arrive that the compiler puts where one was missing."""
    made = tmp_path / "k.cubin"
    made.touch()
    done = build(made, cmake(), "-E", "echo", f"ptxas info    : (C{code}) in the function 'k'")
    assert (done.returncode == 0) == made.exists() == (code == 7519)
    assert f"C{code}" in done.stderr
