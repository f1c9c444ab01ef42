"""Which attention kernel a name, a head dim and a size pick, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pyruntime.cubin.installed import manifest, root
from pyruntime.cubin.spec import read_specs
from pyruntime.driver.library import Kernel
from pyruntime.errors import UnsupportedModelError
from pyruntime.ops import attention_choice
from pyruntime.ops.attention_choice import Choice, choose, packings, variants

HEAD_DIMS = [64, 96, 128, 256]
LADDER = ("r46", "r46_base", "r48", "r50", "r57")


def library_of(architecture: str, *cubins: str) -> Any:
    folder = root() / f"sm_{architecture}"
    kernels = [
        Kernel(spec, None, 0)
        for name in cubins
        for spec in read_specs((folder / f"{name}.cubin").read_bytes(), name).values()
    ]
    device = SimpleNamespace(sm_count=132)
    return SimpleNamespace(family=lambda _: kernels, device=device, refused={})


@pytest.fixture(scope="module")
def library() -> Any:
    """What runs everywhere."""
    return library_of(manifest()["architectures"][0], "attention", "ladder")


@pytest.fixture(scope="module")
def hopper() -> Any:
    """What runs on a device of sm_90."""
    if "90a" not in manifest()["architectures"]:
        pytest.skip("no cubins for sm_90a are installed")
    return library_of("90a", "attention", "attention_wgmma", "ladder")


def pick(library: Any, head_dim: int, rows: int, variant: str = "auto", **options: Any) -> Choice:
    sizes = {"heads": 28, "kv_heads": 4, "max_rows": rows}
    return choose(library, head_dim=head_dim, variant=variant, **(sizes | options))


def test_variants(library: Any, hopper: Any) -> None:
    expected = {"fast": HEAD_DIMS, **{name: [64, 128] for name in LADDER}}
    assert variants(library) == expected
    assert variants(hopper) == expected | {"wgmma": HEAD_DIMS}


@pytest.mark.parametrize("name", LADDER)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_variant_is_taken_at_its_word(
    library: Any, hopper: Any, name: str, head_dim: int
) -> None:
    for kernels in (library, hopper):
        for rows in (1, 1 << 16):
            tile = pick(kernels, head_dim, rows, name).kernel.spec.tile
            assert (tile["variant"], tile["hd"]) == (name, head_dim)
    tile = pick(library, head_dim, 1, name.replace("_", "-")).kernel.spec.tile
    assert tile["variant"] == name


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_fast_is_narrow_for_short_prompts_and_wide_where_there_is_work(
    library: Any, head_dim: int
) -> None:
    rows = [
        k.spec.tile["tq"]
        for k in library.family("attention")
        if (k.spec.tile["variant"], k.spec.tile["hd"]) == ("fast", head_dim)
        and not k.spec.tile["cap"]
    ]
    few, many = (pick(library, head_dim, n, "fast") for n in (1, 1 << 20))
    assert {c.kernel.spec.tile["variant"] for c in (few, many)} == {"fast"}
    assert (few.tokens, many.tokens) == (min(rows), max(rows))
    # Elsewhere than on Hopper there is nothing else to choose.
    assert [pick(library, head_dim, n) for n in (1, 1 << 20)] == [few, many]
    assert pick(library, head_dim, 1, "invariant") == few
    assert not (few.scheduled or few.splits or many.splits)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_hopper_takes_its_own_where_there_is_work(hopper: Any, head_dim: int) -> None:
    short = pick(hopper, head_dim, 16, max_keys=16)
    long = pick(hopper, head_dim, 8192, max_keys=8192)
    assert not short.scheduled, "a launch of the list does not pay"
    assert pick(hopper, head_dim, 128, max_keys=128).scheduled
    most = max(c.warpgroups for c in scheduled(hopper, head_dim, capped=False))
    assert long.scheduled and long.warpgroups == most
    packed = pick(hopper, head_dim, 300, max_keys=300, max_sequences=64)
    assert packed.scheduled
    continued = pick(hopper, head_dim, 1, max_keys=30000)
    assert continued.splits and continued.pack == 7, "one row: heads fill the tile"
    assert pick(hopper, head_dim, 1) == continued, "many earlier keys are assumed"


def scheduled(library: Any, head_dim: int, *, capped: bool, splits: bool = True) -> list[Choice]:
    """In every packing that there is for 28 heads on 4."""
    return [
        choice
        for kernel in library.family("attention")
        if kernel.spec.tile["hd"] == head_dim and bool(kernel.spec.tile.get("cap")) == capped
        for choice in packings(kernel, 28, 4, splits)
        if choice.scheduled
    ]


def test_the_model_of_speed_knows_every_scheduled_kernel(hopper: Any) -> None:
    """One more row of the table is one more entry, or none."""
    found = [Choice(kernel) for kernel in hopper.family("attention")]
    shapes = {(c.warpgroups, int(c.kernel.spec.tile["blocks"])) for c in found if c.scheduled}
    assert shapes == set(attention_choice._WAITING)


def test_a_window_is_all_that_a_continuation_pays_for(hopper: Any) -> None:
    near = pick(hopper, 128, 64, max_keys=3000, window=512)
    assert pick(hopper, 128, 64, max_keys=30000, window=512) == near


@pytest.mark.parametrize(
    ("head_dim", "capped"), [*((n, False) for n in HEAD_DIMS), (128, True), (256, True)]
)
def test_invariant_is_one_key_tile_and_never_splits(
    hopper: Any, head_dim: int, capped: bool
) -> None:
    found = [
        pick(hopper, head_dim, rows, "invariant", max_keys=keys, max_sequences=sequences,
             capped=capped, window=100 if windowed else None)
        for rows in (1, 16, 128, 512, 2048, 8192)
        for keys in (None, rows, rows + 30000)
        for sequences in (1, 64)
        for windowed in (False, True)
    ]  # fmt: skip
    assert len({c.kernel.spec.tile["tkv"] for c in found}) == 1
    assert all(c.scheduled and not c.splits for c in found)
    assert len({(c.kernel.name, c.pack) for c in found}) > 1, "it still goes by size"


@pytest.mark.parametrize("variant", ["wgmma", "invariant", "auto"])
def test_a_named_choice_is_among_its_packings(hopper: Any, variant: str) -> None:
    for head_dim in HEAD_DIMS:
        able = scheduled(hopper, head_dim, capped=False, splits=variant != "invariant")
        for rows in (1, 300, 4000):
            choice = pick(hopper, head_dim, rows, variant)
            assert choice in able or variant == "auto"


def test_packings(library: Any, hopper: Any) -> None:
    fast, *_ = library.family("attention")
    assert packings(fast, 28, 4) == packings(fast, 28, 4, splits=False) == [Choice(fast)]
    by_name = {k.name: k for k in hopper.family("attention")}
    one, whole = (by_name[f"attention_wgmma_hd256_w{n}_n80_cap0"] for n in (1, 2))
    assert packings(one, 28, 4) == [Choice(one, 1, True), Choice(one, 7, True)]
    assert packings(one, 28, 4, splits=False) == [Choice(one), Choice(one, 7)]
    assert packings(whole, 28, 4) == [Choice(whole), Choice(whole, 7)], "its sums have no room"
    assert packings(one, 4, 4) == [Choice(one, 1, True)]
    assert packings(one, 64, 1, splits=False) == [Choice(one), Choice(one, 64)]
    assert packings(one, 66, 1, splits=False) == [Choice(one)], "more heads than a tile has rows"
    assert Choice(whole, 7).tokens == 2 * (64 // 7)
    assert Choice(one, 7).workers(132) == 132 * one.spec.tile["blocks"]


def test_refusals_list_what_there_is(library: Any) -> None:
    there = r"there are auto, invariant, fast \(head dims 64, 96, 128, 256\), r46 \(head dims 64, 1"
    with pytest.raises(ValueError, match=rf"'r47' is not known; {there}"):
        pick(library, 128, 1, "r47")
    with pytest.raises(ValueError, match=rf"'wgmma' is not known; {there}"):
        pick(library, 128, 1, "wgmma")
    with pytest.raises(UnsupportedModelError, match=rf"'r46' .* at head dim 96; {there}"):
        pick(library, 96, 1, "r46")
    for name in ("auto", "invariant"):
        with pytest.raises(UnsupportedModelError, match=rf"'{name}' .* at head dim 80; {there}"):
            pick(library, 80, 1, name)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_windows_are_for_every_fast_kernel_and_caps_for_some(
    library: Any, hopper: Any, head_dim: int
) -> None:
    plain = pick(library, head_dim, 1)
    assert pick(library, head_dim, 1, window=100) == plain
    for kernels in (library, hopper):
        if head_dim < 128:
            with pytest.raises(UnsupportedModelError, match=f"dim {head_dim} with capped scores; "):
                pick(kernels, head_dim, 1, capped=True)
        else:
            for rows in (1, 5000):
                tile = pick(kernels, head_dim, rows, capped=True, window=100).kernel.spec.tile
                assert tile["cap"] == 1 and tile["hd"] == head_dim


@pytest.mark.parametrize("name", LADDER)
def test_the_ladder_refuses_windows_and_caps(library: Any, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{name}' .* 128 with a sliding window; "):
        pick(library, 128, 1, name, window=100)
    with pytest.raises(UnsupportedModelError, match=f"'{name}' .* 128 with capped scores; "):
        pick(library, 128, 1, name, capped=True)


def test_a_kernel_that_the_device_has_no_room_for_is_named(library: Any) -> None:
    name = "attention_r46_base_hd128_q64_k64_t256"
    small = SimpleNamespace(
        family=lambda _: [k for k in library.family("attention") if k.name != name],
        device=library.device,
        refused={name: f"{name} asks for 69,376 B", "gemm_x": "gemm_x asks for more"},
    )
    with pytest.raises(UnsupportedModelError, match=f"'r46-base' .*; {name} asks for") as caught:
        pick(small, 128, 1, "r46-base")
    assert "gemm" not in str(caught.value)
