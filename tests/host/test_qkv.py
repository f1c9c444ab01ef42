"""The paired columns of the q, k, v product, where they are used, and what `qkv` refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyruntime import Engine
from pyruntime.cubin.installed import manifest, root
from pyruntime.cubin.spec import read_specs
from pyruntime.driver.library import Kernel
from pyruntime.driver.program import Program
from pyruntime.model.decoder import Shape
from pyruntime.ops import qkv as module
from pyruntime.ops.qkv import alike_heads, paired_rows, qkv
from pyruntime.ops.rope import GROUP

Load = Callable[..., Engine]
needs_hopper = pytest.mark.skipif(
    "90a" not in manifest()["architectures"], reason="this build has no cubins for sm_90a"
)
SIZES = [
    (9, 3, 64, 1),
    (9, 3, 64, 3),
    (28, 4, 128, 4),
    (14, 2, 64, 2),
    (6, 2, 96, 2),
    (4, 2, 256, 1),
]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "kv", "hd", "alike"), SIZES)
def test_columns_are_those_of_the_kernels(
    heads: int, kv: int, hd: int, alike: int, interleaved: bool
) -> None:
    """As paired_column in cuda/kernels/rotary.cuh says."""
    rows = paired_rows(
        heads=heads, kv_heads=kv, head_dim=hd, interleaved=interleaved, alike=alike
    ).tolist()
    assert sorted(rows) == list(range((heads + 2 * kv) * hd))
    for head in range(heads + 2 * kv):
        for pair in range(hd // 2):
            group = pair // 16 * alike + head % alike
            column = head // alike * alike * hd + group * 32 + pair % 4 * 8 + pair // 4 % 4 * 2
            first, apart = (2 * pair, 1) if interleaved else (pair, hd // 2)
            assert rows[column] == head * hd + first
            assert rows[column + 1] == head * hd + first + apart


def test_a_group_of_columns_is_of_one_head_and_the_next_of_one_alike() -> None:
    rows = paired_rows(heads=28, kv_heads=4, head_dim=128, interleaved=False, alike=4)
    heads, elements = np.divmod(rows.reshape(-1, 32), 128)
    assert (heads == heads[:, :1]).all()
    np.testing.assert_array_equal(heads[:8, 0], [0, 1, 2, 3, 0, 1, 2, 3])
    assert all(set(elements[i]) == set(elements[0]) for i in range(4))
    assert set(elements[4]).isdisjoint(elements[0])


def asked(**changed: Any) -> int:
    library: Any = SimpleNamespace(
        family=lambda name: [SimpleNamespace(spec=SimpleNamespace(tile={"epilogue": "qkv"}))]
    )
    sizes = {
        "heads": 28, "kv_heads": 4, "head_dim": 128, "interleaved": False, "bias": True,
        "norm": False, "kv_dtype": "f16",
    }  # fmt: skip
    return alike_heads(changed.pop("library", library), **{**sizes, **changed})


def test_heads_that_alternate_divide_both_counts() -> None:
    assert asked() == 4
    assert asked(heads=14, kv_heads=2) == 2
    assert asked(heads=9, kv_heads=3) == 1
    assert asked(interleaved=True, bias=False) == 4


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_dtype": "e4m3"},
        {"norm": True},
        {"interleaved": True},  # with a bias
        {"head_dim": 80},
        {"library": SimpleNamespace(family=lambda name: [])},
    ],
)
def test_columns_stay_where_nothing_could_rotate(changed: dict[str, Any]) -> None:
    assert asked(**changed) == 0


@needs_hopper
@pytest.mark.parametrize(("rows", "fused"), [(1, False), (16, False), (500, True)])
def test_a_pass_of_many_rows_needs_no_rope(load: Load, rows: int, fused: bool) -> None:
    engine = load(max_tokens=500)
    model = engine.model
    assert model.weights.alike == asked(
        heads=engine.config.heads, kv_heads=engine.config.kv_heads, head_dim=engine.config.head_dim
    )
    program = model._decoder.recorded(Shape(rows, rows, 1, 1, fresh=True)).body
    roles = [launch.role for launch in program.launches]
    assert roles.count("qkv") == engine.config.layers
    assert roles.count("rope") == (0 if fused else engine.config.layers)
    kernels = {x.kernel.spec.tile["epilogue"] for x in program.launches if x.role == "qkv"}
    assert kernels == {"qkv" if fused else "f32"}


@needs_hopper
def test_pairing_leaves_nothing_behind(load: Load, driver: Any) -> None:
    """One gather for each layer, and every layer has an array of its own."""
    engine = load()
    weights = engine.model.weights
    assert engine.launches()["rows_gather_t256"] == engine.config.layers
    addresses = {layer["qkv"].ptr for layer in weights.layers}
    assert len(addresses) == engine.config.layers and 0 not in addresses
    engine.close()
    assert not driver.held()


def array(*shape: int, dtype: str = "float16", ptr: int = 256) -> Any:
    device = SimpleNamespace(current=nullcontext)
    return SimpleNamespace(shape=shape, dtype=np.dtype(dtype), ptr=ptr, device=device)


GOOD: dict[str, Any] = {
    "a": array(40, 72), "w": array(512, 72), "product": array(40, 512, dtype="float32"),
    "q": array(40, 256), "cosines": array(64, 32, dtype="float32"),
    "sines": array(64, 32, dtype="float32"), "max_rows": 40, "layer": 0, "heads": 4, "kv_heads": 2,
    "head_dim": 64, "interleaved": False, "alike": 2, "site": 0, "eps": 1e-6,
    **dict.fromkeys(
        ("rows", "live", "sequences", "sequence_of", "positions", "overflow"),
        array(40, dtype="int32"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a": array(40, 64)}, r"a \(40, 64\), w"),
        ({"a": array(40, 72, dtype="float32")}, "a is float32"),
        ({"w": array(448, 72)}, r"w \(448, 72\)"),
        ({"q": array(40, 128)}, r"q \(40, 128\)"),
        ({"q": array(40, 256, ptr=8)}, "q at 0x8"),
        ({"max_rows": 41}, "41 rows"),
        ({"alike": 4}, "4 and 2 heads of 64 cannot be paired, 4 in turn"),
        ({"cosines": array(64, 64, dtype="float32")}, "tables"),
        ({"sines": array(64, 32)}, "tables"),
        ({"kv_dtype": "e4m3"}, "a e4m3 cache"),
        ({"q_norm": array(64, dtype="float32")}, "norms"),
        ({"interleaved": True, "bias": array(512, dtype="float32")}, "bias of interleaved"),
    ],
)
def test_misfits_are_named(changed: dict[str, Any], message: str) -> None:
    library: Any = SimpleNamespace(device=None)
    row: Any = SimpleNamespace(name="any")
    with pytest.raises(ValueError, match=message):
        qkv(Program(), library, kernel=Kernel(row, None, 0), **{**GOOD, **changed})


@needs_hopper
@pytest.mark.parametrize("rows", [17, 128, 129, 5000])
def test_grids_are_those_of_a_product(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    specs = read_specs((root() / "sm_90a/gemm_wgmma.cubin").read_bytes(), "gemm_wgmma").values()
    found = [
        Kernel(spec, None, 0, 30 if spec.cluster > 1 else None)
        for spec in specs
        if spec.tile["epilogue"] == "qkv"
    ]
    library: Any = SimpleNamespace(device=SimpleNamespace(sm_count=132))
    monkeypatch.setattr(module, "operands", lambda kernel, a, w: {"a": bytes(128), "w": bytes(128)})
    for kernel in found:
        program = Program()
        given = {**GOOD, "a": array(rows, 72), "q": array(rows, 256), "max_rows": rows}
        qkv(program, library, kernel=kernel, **given)
        (launch,), tile = program.launches, kernel.spec.tile
        bm, bn, share, split = (int(tile[x]) for x in ("bm", "bn", "share", "split"))
        clusters = -(-rows // (bm * share)) * -(-512 // bn)
        if split == 1:  # persistent
            clusters = min(clusters, 30 if share > 1 else 132)
        assert launch.grid == (clusters * share * split, 1, 1) and launch.role == "qkv"
        assert bn % GROUP == 0
    assert found
