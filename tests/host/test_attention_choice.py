"""Which attention kernel a name, a head dim and a size pick, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pyruntime.cubin.installed import manifest, root
from pyruntime.cubin.spec import read_specs
from pyruntime.driver.library import Kernel
from pyruntime.errors import UnsupportedModelError
from pyruntime.ops.attention import choose, variants

LADDER = ("r46", "r46_base", "r48", "r50", "r57")


@pytest.fixture(scope="module")
def library() -> Any:
    folder = root() / f"sm_{manifest()['architectures'][0]}"
    specs = [
        spec
        for name in ("attention.cubin", "ladder.cubin")
        for spec in read_specs((folder / name).read_bytes(), name).values()
    ]
    kernels = [Kernel(spec, None, 0) for spec in specs]
    device = SimpleNamespace(sm_count=132)
    return SimpleNamespace(family=lambda _: kernels, device=device, refused={})


def test_variants(library: Any) -> None:
    expected = {"fast": [64, 96, 128, 256], **{name: [64, 128] for name in LADDER}}
    assert variants(library) == expected


@pytest.mark.parametrize("name", LADDER)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_variant_is_taken_at_its_word(library: Any, name: str, head_dim: int) -> None:
    for rows in (1, 1 << 16):
        tile = choose(library, head_dim, rows, 28, name).spec.tile
        assert (tile["variant"], tile["hd"]) == (name, head_dim)
    assert choose(library, head_dim, 1, 28, name.replace("_", "-")).spec.tile["variant"] == name


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_auto_is_fast(library: Any, head_dim: int) -> None:
    """Narrow row tiles for short prompts, wide ones where there is work for all."""
    rows = [
        k.spec.tile["tq"]
        for k in library.family("attention")
        if (k.spec.tile["variant"], k.spec.tile["hd"]) == ("fast", head_dim)
        and not k.spec.tile["cap"]
    ]
    few, many = (choose(library, head_dim, n, 28) for n in (1, 1 << 20))
    assert {few.spec.tile["variant"], many.spec.tile["variant"]} == {"fast"}
    assert (few.spec.tile["tq"], many.spec.tile["tq"]) == (min(rows), max(rows))
    assert choose(library, head_dim, 1 << 20, 28, "fast") is many


def test_refusals_list_what_there_is(library: Any) -> None:
    there = r"there are auto, fast \(head dims 64, 96, 128, 256\), r46 \(head dims 64, 128\), r46_b"
    with pytest.raises(ValueError, match=rf"'r47' is not known; {there}"):
        choose(library, 128, 1, 28, "r47")
    with pytest.raises(UnsupportedModelError, match=rf"'r46' .* at head dim 96; {there}"):
        choose(library, 96, 1, 28, "r46")
    with pytest.raises(UnsupportedModelError, match=rf"'auto' .* at head dim 80; {there}"):
        choose(library, 80, 1, 28)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_windows_are_for_every_fast_kernel_and_caps_for_some(library: Any, head_dim: int) -> None:
    plain = choose(library, head_dim, 1, 28)
    assert choose(library, head_dim, 1, 28, windowed=True) is plain
    if head_dim < 128:
        with pytest.raises(UnsupportedModelError, match=f"dim {head_dim} with capped scores; ther"):
            choose(library, head_dim, 1, 28, capped=True)
    else:
        capped = choose(library, head_dim, 1, 28, capped=True, windowed=True)
        assert capped.spec.tile == plain.spec.tile | {"cap": 1}


@pytest.mark.parametrize("name", LADDER)
def test_the_ladder_refuses_windows_and_caps(library: Any, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{name}' .* 128 with a sliding window; "):
        choose(library, 128, 1, 28, name, windowed=True)
    with pytest.raises(UnsupportedModelError, match=f"'{name}' .* 128 with capped scores; "):
        choose(library, 128, 1, 28, name, capped=True)


def test_a_kernel_that_the_device_has_no_room_for_is_named(library: Any) -> None:
    name = "attention_r46_base_hd128_q64_k64_t256"
    small = SimpleNamespace(
        family=lambda _: [k for k in library.family("attention") if k.name != name],
        device=library.device,
        refused={name: f"{name} asks for 69,376 B", "gemm_x": "gemm_x asks for more"},
    )
    with pytest.raises(UnsupportedModelError, match=f"'r46-base' .*; {name} asks for") as caught:
        choose(small, 128, 1, 28, "r46-base")
    assert "gemm" not in str(caught.value)
