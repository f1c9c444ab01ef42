"""Shared-memory ledgers of designs: the r46 family's figures, and what a design file may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyruntime.cubin.facts import read_cubin
from pyruntime.cubin.geometry import Geometry, read_geometry
from pyruntime.cubin.ledger import Ledger, ledger_of
from pyruntime.cubin.limits import limits_of
from pyruntime.cubin.occupancy import Demand, occupancy
from pyruntime.cubin.spec import Plane
from pyruntime.errors import InputError

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data/cubins"


def design(name: str) -> Geometry:
    return read_geometry(ROOT / "bench/geometries" / f"{name}.toml")


def blocks(geometry: Geometry, nbytes: int, arch: str) -> int:
    threads = geometry.threads(geometry.values)
    return occupancy(Demand(threads, geometry.registers, nbytes), limits_of(arch)).blocks


@pytest.mark.parametrize(
    ("name", "threads", "nbytes", "on_100_kb", "on_hopper"),
    [
        ("r46-base", 256, 69_376, 1, 3),
        ("r46", 256, 45_824, 2, 4),
        ("r48", 128, 34_816, 2, 4),
        ("r50", 128, 32_768, 3, 6),
        ("r57", 128, 47_872, 2, 4),
    ],
)
def test_the_family(name: str, threads: int, nbytes: int, on_100_kb: int, on_hopper: int) -> None:
    geometry = design(name)
    assert geometry.threads(geometry.values) == threads
    assert geometry.ledger().total == nbytes
    assert blocks(geometry, nbytes, "sm_121") == on_100_kb
    assert blocks(geometry, nbytes, "sm_90") == on_hopper


def test_the_base_on_a_100_kb_sm_has_one_block_of_eight_warps() -> None:
    found = occupancy(Demand(256, None, 69_376), limits_of("sm_121"))
    assert (found.warps, found.limits.warps, found.binding) == (8, 48, ("shared",))


def test_the_pad_that_the_published_formula_forgets() -> None:
    geometry = design("r46")
    assert geometry.launcher is not None
    assert geometry.launcher(geometry.values) == 43_776
    assert geometry.ledger().total - 43_776 == 2_048 == geometry.padding()["S"]
    rows = {p.name: p for p in geometry.ledger().planes}
    assert rows["S"].row_stride == 160  # not 288, which is the row of a K/V tile of 64
    assert all(p.asked < p.needed for p in geometry.mismatches())
    assert len(geometry.mismatches()) == len(list(geometry.combinations()))


def test_the_tail_of_r50_is_the_maximum_not_the_sum() -> None:
    ledger = design("r50").ledger()
    staged = sum(p.bytes for p in ledger.planes if p.on is None)
    assert (staged, ledger.total, ledger.reused) == (26_112, 32_768, 26_112)


def test_the_base_launcher_is_wrong_wherever_the_tiles_differ() -> None:
    geometry = design("r46-base")
    wrong = geometry.mismatches()
    assert all((p.values["TQ"] != p.values["TKV"]) for p in wrong)
    square = [v for v in geometry.combinations() if v["TQ"] == v["TKV"]]
    assert len(wrong) + len(square) == len(list(geometry.combinations()))
    # Under-requests come first.
    kinds = [p.asked < p.needed for p in wrong]
    assert kinds == sorted(kinds, reverse=True)
    by_values = {tuple(p.values.values()): (p.asked, p.needed) for p in wrong}
    assert by_values[16, 32, 128] == (15_296, 24_000)
    assert by_values[64, 32, 128] == (61_184, 43_776)
    assert blocks(geometry, 43_776, "sm_121") == 2 and blocks(geometry, 61_184, "sm_121") == 1


@pytest.mark.parametrize("name", ["r48", "r50", "r57"])
def test_right_launchers_are_right_everywhere(name: str) -> None:
    geometry = design(name)
    assert len(list(geometry.combinations())) == 144 and geometry.mismatches() == []


def test_a_built_kernel_has_the_ledger_of_its_contract() -> None:
    name = "nvcc-13.0-sm_90a.cubin"
    facts = read_cubin((DATA / name).read_bytes(), name)
    (kernel,) = (k for k in facts.kernels if k.spec)
    assert kernel.spec is not None
    ledger = ledger_of(kernel.spec)
    assert [(p.name, p.offset, p.bytes, p.on) for p in ledger.planes] == [
        ("small", 0, 12, None), ("rows", 128, 5120, None), ("tail", 128, 6144, "rows"),
    ]  # fmt: skip
    assert (ledger.holes, ledger.reused, ledger.total) == (((12, 116),), 5120, 6272)


def test_holes_at_the_end_and_none() -> None:
    plane = Plane("a", 0, 100, 10, 2, None)
    assert Ledger((plane,), 128).holes == ((100, 28),)
    assert Ledger((plane,), 100).holes == ()
    assert Ledger((), 0).holes == ()


HEAD = """schema = "pyruntime.geometry/1"
threads = 128
values = { T = 4 }
"""


def written(tmp_path: Path, text: str) -> Geometry:
    path = tmp_path / "design.toml"
    path.write_text(text)
    return read_geometry(path)


def test_alignment_and_holes(tmp_path: Path) -> None:
    planes = """planes = [
      { name = "a", rows = 3, element = 4 },
      { name = "b", rows = "T", columns = 6, element = 2, align = 128 },
      { name = "c", rows = 1, element = 1 },
    ]"""
    ledger = written(tmp_path, HEAD + planes).ledger()
    assert [(p.offset, p.bytes) for p in ledger.planes] == [(0, 12), (128, 48), (176, 1)]
    assert (ledger.holes, ledger.total) == (((12, 116),), 177)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no schema"),
        ("nonsense", "design.toml: "),
        (HEAD, "no 'planes'"),
        (HEAD + "planes = [{ name = 'a' }]", "no 'element'"),
        (HEAD + "planes = [{ name = 'a', element = 4, colums = 3 }]", "plane a: unknown colums"),
        (HEAD + "planes = [{ name = 'a', element = -4 }]", "element = -4"),
        (HEAD + "planes = [{ name = 'a', element = 4, rows = 'X' }]", "no value for X"),
        (HEAD + "planes = [{ name = 'a', element = 4, rows = '2-T' }]", "plane a: rows = -2"),
        (HEAD + "planes = [{ name = 'a', element = 4, on = 'b' }]", "no earlier plane is called b"),
        (HEAD + "planes = [{ name = 'a', element = 4, pad = 1, stride = 2 }]", "pad or stride"),
        (HEAD + "planes = []\nsweep = { U = [1] }", "sweep: unknown U"),
        (HEAD + "planes = []\nlauncher = 'T.x'", "not allowed"),
        (HEAD + "planes = []\nbytes = 3", "the file: unknown bytes"),
        (HEAD + "planes = 7", "design.toml: "),
        (HEAD + f"planes = []\nsweep = {{ T = {list(range(100_001))} }}", "more than 100,000"),
    ],
)  # fmt: skip
def test_bad_designs_are_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        written(tmp_path, text)
