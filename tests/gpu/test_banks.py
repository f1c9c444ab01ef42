"""Bank conflicts as simulated against the cycles that a GPU takes for the same accesses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyruntime.cubin.banks import ACCESSES, Access, Served, in_rows, serve
from pyruntime.driver.program import Program

SAMPLES, ROUNDS = 5, 32
TOLERANCE = 0.25  # of the ratio to a pattern without conflicts
KINDS = {name: name for name in ("ld4", "ld8", "ld16", "st4", "st8", "st16")}
KINDS |= {"ldmatrix": "ldmatrix.x4"}


def cycles(gpu: Any, kind: str, served: Served) -> int:
    """The fewest cycles in which all warps of the probe make the access again and again."""
    (kernel,) = (k for k in gpu.library.family("probe") if k.spec.tile["access"] == kind)
    assert max(a or 0 for a in served.addresses) + served.access.bytes <= kernel.spec.smem_bytes
    clocks = gpu.empty((kernel.spec.threads // 32, 2), np.int64)
    program = Program()
    program.add(
        kernel,
        grid=1,
        addresses=gpu.upload(np.array(served.addresses, np.uint32)),
        clocks=clocks,
        sink=gpu.empty((1,), np.uint32),
        rounds=ROUNDS,
        step=0,
    )
    samples = []
    for _ in range(SAMPLES):
        gpu.run(program)
        before, after = gpu.download(clocks).T
        samples.append(int(after.max() - before.min()))
    return min(samples)


def patterns(access: Access) -> dict[str, Served]:
    """Patterns of one kind, the first of them without conflicts."""
    size = access.bytes
    strides = {4: (8, 16, 36, 128, 132), 8: (16, 40, 136, 256), 16: (128, 144, 160, 256, 272, 288)}
    found = {
        "free": in_rows(access, 144) if access.matrices else serve(access, lambda i: i * size),
        **{f"rows of {s}": in_rows(access, s) for s in strides[size]},
        "4 lanes in rows of 160": in_rows(access, 160, lanes_per_row=4),
        "rows of 128, swizzled": in_rows(access, 128, swizzle=128),
        "lanes in reverse": serve(access, lambda i: (31 - i) * size),
        "every other lane far away": serve(access, lambda i: i * size + i % 2 * 4096),
    }
    if size == 4:  # for wider ones see the last test
        found |= equal_words(access)
    assert found["free"].wavefronts == found["free"].ideal
    assert max(s.ways[0] for s in found.values()) >= 8
    return found


def equal_words(access: Access) -> dict[str, Served]:
    """Patterns in which lanes want the same words."""
    return {
        "one word for all lanes": serve(access, lambda i: 0),
        "two words for all lanes": serve(access, lambda i: i % 2 * 4096),
        "one word for each two lanes": serve(access, lambda i: i // 2 * access.bytes),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_cycles_follow_wavefronts(gpu: Any, kind: str) -> None:
    found = patterns(ACCESSES[KINDS[kind]])
    taken = {name: cycles(gpu, kind, served) for name, served in found.items()}
    lines, wrong = [], []
    for name, served in found.items():
        expected = served.wavefronts / found["free"].wavefronts
        measured = taken[name] / taken["free"]
        lines.append(f"{kind}, {name}: {taken[name]:,} cycles, {measured:.2f} of {expected:.2f}")
        if abs(measured / expected - 1) > TOLERANCE:
            wrong.append(name)
    print("\n".join(lines))
    assert not wrong, "\n".join([f"wrong: {wrong}", *lines])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("4")])
def test_equal_words_in_several_phases_cost_no_more_than_simulated(gpu: Any, kind: str) -> None:
    access = ACCESSES[KINDS[kind]]
    free = patterns(access)["free"]
    base = cycles(gpu, kind, free)
    for name, served in equal_words(access).items():
        measured, bound = cycles(gpu, kind, served) / base, served.wavefronts / free.wavefronts
        print(f"{kind}, {name}: {measured:.2f}, at most {bound:.2f}")
        assert measured <= bound * (1 + TOLERANCE), name


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["ld4", "ld16", "ldmatrix"])
def test_every_warp_notes_its_clocks(gpu: Any, kind: str) -> None:
    access = ACCESSES[KINDS[kind]]
    assert cycles(gpu, kind, serve(access, lambda i: i * access.bytes)) > 0
