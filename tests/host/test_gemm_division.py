"""cuda/kernels/sm_90a/gemm_division.cuh, compiled for the host: every step once, no owner waits in
vain."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from compilers import cxx

HEADER = Path(__file__).parents[2] / "cuda/kernels/sm_90a/gemm_division.cuh"
SOURCE = """
#define __device__
#define __forceinline__ inline
#include <algorithm>
using std::max;
using std::min;
#include "{header}"
// Writes unit, first and last step of each of a cluster's segments, at most `room`; how many.
extern "C" int segments(int units, int steps, int cluster, int clusters, int parts, int room,
                        int (*out)[3]) {{
  const Division d(units, steps, cluster, clusters, parts);
  int count = 0;
  for (int unit = d.start(); unit < d.units; unit = d.next(unit), ++count) {{
    if (count == room) return -1;
    out[count][0] = unit;
    out[count][1] = d.first(unit);
    out[count][2] = d.last(unit);
  }}
  return count;
}}
"""


class Segment(NamedTuple):
    """Steps [first, last) of a unit."""

    unit: int
    first: int
    last: int


Walk = Callable[[int, int, int, int], list[list[Segment]]]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """The segments of each cluster, in its order."""
    folder = tmp_path_factory.mktemp("division")
    (folder / "division.cpp").write_text(SOURCE.format(header=HEADER))
    library = folder / "division.so"
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC"]
    flags += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    command = [cxx(), *flags, "-o", library, folder / "division.cpp"]
    subprocess.run(command, check=True)
    segments = ctypes.CDLL(str(library)).segments

    def walk(units: int, steps: int, clusters: int, parts: int) -> list[list[Segment]]:
        room = units + 3
        found = []
        for cluster in range(clusters):
            out = ((ctypes.c_int * 3) * room)()
            count = segments(units, steps, cluster, clusters, parts, room, out)
            assert count >= 0, "a walk without an end"
            found.append([Segment(*x) for x in out[:count]])
        return found

    return walk


def check(walks: list[list[Segment]], units: int, steps: int) -> dict[int, int]:
    """Runs clusters one after the other, as if there were room for one: the least that there can
    be. Returns how many had a part of each shared unit.
    """
    done: dict[int, int] = {}  # steps of a unit that its owner has
    flags: dict[int, Segment] = {}  # of clusters that have left sums
    sharers: dict[int, int] = {}
    for cluster, segments in enumerate(walks):
        for place, segment in enumerate(segments):
            assert 0 <= segment.first < segment.last <= steps and 0 <= segment.unit < units
            if segment.first:
                assert place == 0 and cluster not in flags  # a slot is written once
                flags[cluster] = segment
                continue
            assert segment.unit not in done  # which has one owner
            done[segment.unit], other = segment.last, cluster
            sharers[segment.unit] = 1
            last = segment.last == steps
            while not last:  # as `collect` does
                other -= 1
                left = flags.pop(other)  # fails where the owner would wait for ever
                assert (left.unit, left.first) == (segment.unit, done[segment.unit])
                done[segment.unit] = left.last
                sharers[segment.unit] += 1
                last = left.last == steps  # its flag says so
    assert not flags  # all are lowered again
    assert done == dict.fromkeys(range(units), steps)
    return {unit: count for unit, count in sharers.items() if count > 1}


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
@pytest.mark.parametrize("clusters", [1, 2, 3, 7])
def test_every_small_division(walk: Walk, clusters: int, parts: int) -> None:
    for units in range(3 * clusters + 2):
        for steps in range(1, 12):
            walks = walk(units, steps, clusters, parts)
            shared = check(walks, units, steps)
            assert parts > 1 or not shared
            busy = [sum(x.last - x.first for x in segments) for segments in walks]
            if parts > 1 and units < clusters:
                sharing = min(clusters, units * min(parts, steps))
                assert [x > 0 for x in busy] == [i < sharing for i in range(clusters)]
                assert max(busy[:sharing], default=0) - min(busy[:sharing], default=0) <= 1
                assert not shared or max(shared.values()) <= parts + 1
            assert units < clusters or not shared


def test_divisions_of_a_device(walk: Walk) -> None:
    rng = random.Random(0)
    for clusters in (66, 132):
        cases = [(468, 56), (40, 1), (131, 296), (133, 296), (264, 3), (3848, 56), (1, 2), (0, 5)]
        cases += [(rng.randrange(600), rng.randrange(1, 300)) for _ in range(20)]
        for units, steps in cases:
            check(walk(units, steps, clusters, rng.choice((2, 3, 4))), units, steps)


def test_a_division_without_parts_or_of_a_wave_is_whole_waves(walk: Walk) -> None:
    for units, clusters, parts in ((468, 132, 2), (7, 3, 1), (2, 5, 1), (5, 5, 3)):
        walks = walk(units, 9, clusters, parts)
        for cluster, segments in enumerate(walks):
            assert segments == [Segment(unit, 0, 9) for unit in range(cluster, units, clusters)]


def test_parts_that_divide_begin_together(walk: Walk) -> None:
    """Each unit's clusters begin at the same steps, so that they read W and A in step."""
    walks = walk(28, 56, 132, 3)
    begins = {(x.first, x.last) for segments in walks for x in segments}
    assert begins == {(0, 18), (18, 37), (37, 56)}
    assert [len(x) for x in walks] == [1] * 84 + [0] * 48


def test_huge_k_stays_in_32_bits(walk: Walk) -> None:
    """The sanitizer would end the process."""
    units, steps, clusters = 131, 1 << 23, 132
    ends = 0
    for segments in reversed(walk(units, steps, clusters, 2)):
        for segment in segments:
            assert segment.unit * steps + segment.first == ends
            ends += segment.last - segment.first
    assert ends == units * steps
