"""Occupancy against NVIDIA's own header, and the step to one block more."""

from __future__ import annotations

import random
import shutil
import subprocess
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from pyruntime.cubin.limits import ARCHITECTURES, limits_of
from pyruntime.cubin.occupancy import Demand, next_step, occupancy
from pyruntime.errors import CubinError

POINTS = 10_000
RESOURCES = ("registers", "shared", "warps", "blocks", "barriers")

# Reads "major minor warps shared per_block | threads registers static dynamic barriers" per line.
ORACLE = r"""
#include <climits>
#include <cstdio>
#include <cstring>
#include "cuda_occupancy.h"
int main() {
  int major, minor, warps, shared, per_block, threads, registers, fixed, dynamic, barriers;
  while (scanf("%d %d %d %d %d %d %d %d %d %d", &major, &minor, &warps, &shared, &per_block,
               &threads, &registers, &fixed, &dynamic, &barriers) == 10) {
    cudaOccDeviceProp p;
    p.computeMajor = major, p.computeMinor = minor, p.maxThreadsPerBlock = 1024;
    p.maxThreadsPerMultiprocessor = warps * 32, p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.warpSize = 32, p.sharedMemPerBlock = 49152, p.numSms = 1;
    p.sharedMemPerMultiprocessor = shared;
    p.sharedMemPerBlockOptin = per_block, p.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes a;
    a.maxThreadsPerBlock = INT_MAX, a.numRegs = registers, a.sharedSizeBytes = fixed;
    a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, a.maxDynamicSharedSizeBytes = dynamic;
    a.numBlockBarriers = barriers;
    cudaOccDeviceState s;
    cudaOccResult r;
    memset(&r, 0, sizeof r);
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads, dynamic)) return 1;
    printf("%d %d %d %d %d %d\n", r.activeBlocksPerMultiprocessor, r.blockLimitRegs,
           r.blockLimitSharedMem, r.blockLimitWarps, r.blockLimitBlocks, r.blockLimitBarriers);
  }
}
"""


def header() -> Path:
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/include"
    for folder in (wheels, Path("/usr/local/cuda/include")):
        if (folder / "cuda_occupancy.h").exists():
            return folder
    pytest.skip("no cuda_occupancy.h, neither of a toolkit nor of the wheel nvidia-cuda-runtime")


def test_equals_the_header(tmp_path: Path) -> None:
    include = header()
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    (tmp_path / "oracle.cpp").write_text(ORACLE)
    subprocess.run(
        [compiler, "-w", "-I", include, "-o", tmp_path / "oracle", tmp_path / "oracle.cpp"],
        check=True,
    )
    random.seed(20)
    points = []
    for _ in range(POINTS):
        limits = limits_of(random.choice(ARCHITECTURES))
        static = random.choice([0, 0, random.randrange(49152)])
        dynamic = random.choice([0, random.randrange(8192), random.randrange(limits.shared)])
        threads, registers = random.randint(1, 1024), random.randrange(256)
        points.append((limits, threads, registers, static, dynamic, random.choice([0, 1, 2, 16])))
    lines = [
        f"{int(m.arch[3:]) // 10} {int(m.arch[3:]) % 10} {m.warps} {m.shared} {m.shared_per_block} "
        f"{threads} {registers} {static} {dynamic} {barriers}"
        for m, threads, registers, static, dynamic, barriers in points
    ]
    done = subprocess.run(
        [tmp_path / "oracle"], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    answers = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(answers) == POINTS
    for point, (blocks, *allowed) in zip(points, answers, strict=True):
        limits, threads, registers, static, dynamic, barriers = point
        ours = occupancy(Demand(threads, registers, static + dynamic, barriers), limits)
        theirs = dict(zip(RESOURCES, allowed, strict=True))
        assert ours.blocks == blocks, point
        assert ours.allowed == {r: theirs[r] for r in ours.allowed}, point


@pytest.mark.parametrize(
    ("demand", "arch", "blocks", "binding"),
    [
        # Two Hopper kernels, and one point for each resource that can bind.
        (Demand(128, 56, 1024 + 16 * 1024), "sm_90", 9, ("registers",)),
        (Demand(384, 168, 214_016), "sm_90", 1, ("registers", "shared")),
        (Demand(1024, None, 0), "sm_120", 1, ("warps",)),
        (Demand(32, 16, 0), "sm_86", 16, ("blocks",)),
        (Demand(32, 16, 0, barriers=16), "sm_90", 4, ("barriers",)),
        (Demand(32, 16, 99 * 1024 + 1), "sm_121", 0, ("shared",)),
        (Demand(256, 255, 0), "sm_80", 1, ("registers",)),
    ],
)
def test_known_points(demand: Demand, arch: str, blocks: int, binding: tuple[str, ...]) -> None:
    found = occupancy(demand, limits_of(arch))
    assert (found.blocks, found.binding) == (blocks, binding)


def test_the_step_is_enough_and_no_more_than_needed() -> None:
    random.seed(21)
    for _ in range(500):
        limits = limits_of(random.choice(ARCHITECTURES))
        demand = Demand(
            random.randint(1, 1024), random.randint(1, 255), random.randrange(limits.shared),
            random.randrange(17),
        )  # fmt: skip
        before = occupancy(demand, limits).blocks
        step = next_step(demand, limits)
        if step.never:
            assert before == limits.blocks
            continue

        def less(amounts: dict[str, int], demand: Demand = demand) -> Demand:
            return replace(demand, **{n: getattr(demand, n) - a for n, a in amounts.items()})

        assert occupancy(less(step.less), limits).blocks >= before + 1 == step.blocks
        for name in step.less:
            short = {**step.less, name: step.less[name] - 1}
            assert occupancy(less(short), limits).blocks == before, (demand, step, name)


def test_clusters_are_a_bound_that_needs_the_number_of_sms() -> None:
    h200 = replace(limits_of("sm_90"), sms=132)
    demand = Demand(384, 168, 214_016)
    assert occupancy(demand, h200).clusters_at_most(2) == 66
    assert occupancy(demand, limits_of("sm_90")).clusters_at_most(2) is None


def test_names_of_architectures() -> None:
    assert limits_of("90a") == limits_of("sm_90") == limits_of("sm_90a")
    assert limits_of("sm_101a") == limits_of("sm_110")
    with pytest.raises(CubinError, match="no limits known for sm_75"):
        limits_of("sm_75")
