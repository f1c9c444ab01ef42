"""The attention ladder: the shared memory of each step, in the cubins and in the designs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyruntime.cubin.facts import KernelFacts, read_cubin
from pyruntime.cubin.geometry import read_geometry
from pyruntime.cubin.installed import manifest, root
from pyruntime.cubin.ledger import ledger_of
from pyruntime.cubin.limits import limits_of
from pyruntime.cubin.occupancy import Demand, occupancy

ROOT = Path(__file__).parents[2]
# variant: rows, keys, threads, dynamic shared bytes at head dim 128
STEPS = {
    "r46_base": (64, 64, 256, 69_376),
    "r46": (64, 32, 256, 45_824),
    "r48": (64, 32, 128, 34_816),
    "r50": (64, 16, 128, 32_768),
    "r57": (48, 32, 128, 47_872),
}


def kernels(arch: str) -> dict[str, KernelFacts]:
    path = root() / f"sm_{arch}" / "ladder.cubin"
    return {k.name: k for k in read_cubin(path.read_bytes(), path.name).kernels}


def built(variant: str, head_dim: int) -> list[KernelFacts]:
    """The kernel on every architecture."""
    rows, keys, threads, _ = STEPS[variant]
    name = f"attention_{variant}_hd{head_dim}_q{rows}_k{keys}_t{threads}"
    return [kernels(arch)[name] for arch in manifest()["architectures"]]


@pytest.mark.parametrize(
    ("variant", "blocks"), [("r46_base", 1), ("r46", 2), ("r48", 2), ("r50", 3), ("r57", 2)]
)
def test_blocks_on_an_sm_with_100_kb(variant: str, blocks: int) -> None:
    """Where the steps were first measured (a GB10), shared memory binds in each of them."""
    if "120" not in manifest()["architectures"]:
        pytest.skip("this build has no cubins for sm_120")
    (kernel,) = (k for k in built(variant, 128) if k.arch == "sm_120")
    assert kernel.threads is not None and kernel.dynamic_shared is not None
    demand = Demand(kernel.threads, kernel.registers, kernel.dynamic_shared)
    found = occupancy(demand, limits_of("sm_121"))
    assert (found.blocks, found.binding) == (blocks, ("shared",))


@pytest.mark.parametrize("variant", STEPS)
def test_shared_bytes(variant: str) -> None:
    rows, keys, threads, nbytes = STEPS[variant]
    for kernel in built(variant, 128):
        spec = kernel.spec
        assert spec is not None
        tile = {"variant": variant, "hd": 128, "tq": rows, "tkv": keys}
        assert {name: spec.tile[name] for name in tile} == tile
        assert (spec.threads, spec.smem_bytes, kernel.static_shared) == (threads, nbytes, 0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("variant", STEPS)
def test_planes_are_those_of_the_design(variant: str, head_dim: int) -> None:
    """Every plane but O, which r50's design alone draws: in the others it takes nothing more."""
    design = read_geometry(ROOT / "bench/geometries" / f"{variant.replace('_', '-')}.toml")
    drawn = design.ledger({**design.values, "hd": head_dim})
    expected = {p.name.lower(): p for p in drawn.planes if p.name != "O"}
    (spec, *others) = [k.spec for k in built(variant, head_dim) if k.spec is not None]
    assert all(s.planes == spec.planes for s in others)
    planes = {p.name: p for p in spec.planes if p.name != "o"}
    assert planes.keys() == expected.keys()
    for name, plane in planes.items():
        want = expected[name]
        assert (plane.bytes, plane.element) == (want.bytes, want.element), name
        if name not in ("m", "l", "alpha"):  # drawn as a column, built as a row
            assert plane.row_stride == want.row_stride, name
    assert ledger_of(spec).total == drawn.total


def test_nothing_spills() -> None:
    for arch in manifest()["architectures"]:
        for kernel in kernels(arch).values():
            assert kernel.spills is not None
            assert (kernel.stack, kernel.spills.stores, kernel.spills.loads) == (0, 0, 0)
