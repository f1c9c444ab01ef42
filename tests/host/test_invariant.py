"""exact="invariant": which kernels it leaves. That they give the same bits: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from goldens import GOLDEN

from pyruntime import Engine
from pyruntime.cubin.installed import manifest
from pyruntime.cubin.spec import KernelSpec
from pyruntime.driver.library import Kernel, Library
from pyruntime.ops.attention_choice import choose

Load = Callable[..., Engine]
needs_hopper = pytest.mark.skipif(
    "90a" not in manifest()["architectures"], reason="this build has no cubins for sm_90a"
)
LENGTHS = (1, 2, 9, 16, 31, 64, 65, 130, 300, 512)


def asked_for_everything(engine: Engine) -> list[KernelSpec]:
    """The kernels that ran for prompts alone, long ones, lists, continuations and scores."""
    for n in LENGTHS:
        for logits in ("none", "last", "all", [0, n // 2, n - 1] if n > 2 else "last"):
            engine.prefill([1] * n, logits=logits)
    engine.prefill([[1] * n for n in LENGTHS], hidden="mean")
    engine.score([[1] * n for n in LENGTHS], [[2, 3]] * len(LENGTHS), logits_bytes=1 << 16)
    engine.generate([1] * 20, 3)
    library = engine.model.library
    return [library[name].spec for name in engine.launches()]


@needs_hopper
@pytest.mark.parametrize("kv_dtype", ["f16", "e4m3"])
@pytest.mark.parametrize("weights", ["fp16", "per-layer"])
@pytest.mark.parametrize("stem", ["llama-q8_0", "qwen3-q6_k", "gemma2-q8_0"])
@pytest.mark.parametrize("exact", ["fast", "invariant"])
def test_all_products_are_by_rows_that_agree(
    load: Load, exact: str, stem: str, weights: str, kv_dtype: str
) -> None:
    engine = load(
        model=GOLDEN / f"tiny-{stem}.gguf", exact=exact, weights=weights, kv_dtype=kv_dtype,
        max_tokens=512, kv_tokens=2048,
    )  # fmt: skip
    specs = asked_for_everything(engine)
    gemms = [spec.tile for spec in specs if spec.family == "gemm"]
    engines = {(tile["engine"], tile.get("split", 1)) for tile in gemms}
    epilogues = {tile["epilogue"] for tile in gemms}
    assert len(epilogues) >= 2 and (engines == {("wgmma", 1)}) == (exact == "invariant"), engines
    if exact == "invariant":
        keys = {spec.tile["tkv"] for spec in specs if spec.family == "attention"}
        assert len(keys) == 1


@pytest.mark.parametrize("exact", ["fast", "invariant"])
def test_without_wgmma_they_are_by_mma(
    load: Load, monkeypatch: pytest.MonkeyPatch, exact: str
) -> None:
    family = Library.family

    def of_any_gpu(library: Library, name: str) -> list[Kernel]:
        found = family(library, name)
        return [x for x in found if name != "gemm" or x.spec.tile["engine"] == "mma"]

    monkeypatch.setattr(Library, "family", of_any_gpu)
    engine = load(exact=exact, max_tokens=512, kv_tokens=2048)
    specs = asked_for_everything(engine)
    assert {spec.tile["engine"] for spec in specs if spec.family == "gemm"} == {"mma"}


@needs_hopper
@pytest.mark.parametrize("weights", ["fp16", "per-layer"])
def test_attention_is_invariant_too(load: Load, weights: str) -> None:
    """No keys are split, and the tile of keys is that of every length."""
    engine = load(exact="invariant", weights=weights, max_tokens=512, kv_tokens=2048)
    c, decoder = engine.config, engine.model._decoder
    for n in LENGTHS:
        engine.prefill([1] * n)
        (schedule,) = decoder._schedules(next(reversed(decoder._passes))).values()
        expected = choose(
            engine.model.library, head_dim=c.head_dim, heads=c.heads, kv_heads=c.kv_heads,
            max_rows=schedule.max_rows, max_keys=schedule.max_rows, variant="invariant",
        )  # fmt: skip
        assert schedule.choice == expected and not expected.splits


def test_the_path_says_so(load: Load) -> None:
    assert load(exact="invariant").path.endswith(", exact invariant")
    result = load(exact="invariant", kv_dtype="e4m3", weights="per-layer").prefill([1])
    assert result.path.endswith(", weights per-layer, exact invariant, K/V e4m3")
    assert "exact" not in load().path


@pytest.mark.parametrize("entry", [Engine.load, Engine.plan])
def test_attention_by_name_contradicts_it(entry: Any) -> None:
    with pytest.raises(ValueError, match="exact='invariant' goes with no attention by name, as 'f"):
        entry("/no/such.gguf", attention="fast", exact="invariant")
    with pytest.raises(ValueError, match="exact='bitwise' is not supported; known: fast, inv"):
        entry("/no/such.gguf", exact="bitwise")


def test_numpy_does_not_promise_it(load: Load) -> None:
    with pytest.raises(ValueError, match="exact='invariant': NumPy does not promise it"):
        load(device="cpu", exact="invariant")


@pytest.mark.parametrize("attention", ["auto", "invariant"])
def test_plan_is_the_same(attention: str) -> None:
    path = GOLDEN / "tiny-llama-q8_0.gguf"
    plan = Engine.plan(path, weights="fp16", exact="invariant", attention=attention)
    assert plan == Engine.plan(path, weights="fp16")
