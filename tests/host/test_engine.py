"""The engine on the CPU backend."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import count
from types import FrameType
from typing import Any

import numpy as np
import pytest
from goldens import GOLDEN, prompts

from pyruntime import Engine
from pyruntime.engine.texts import _targets
from pyruntime.errors import DriverNotFoundError, EngineError
from pyruntime.gguf import GGUFFile
from pyruntime.model.batch import NONE
from pyruntime.model.calls import Call, wanted_logits
from pyruntime.model.config import KV_DTYPES
from pyruntime.model.tokens import check_tokens

TINY = "tiny-qwen3-q4_k_m"
PATH = GOLDEN / f"{TINY}.gguf"
# Bytes of tensor maps for each sixteen positions of an fp16 cache: of K and V, two heights of box
MAPS = 512


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(PATH, device="cpu", kv_tokens=64)


def test_prefill(engine: Engine) -> None:
    prompt = prompts(TINY)[1]
    last = engine.prefill(prompt.ids)
    every = engine.prefill(prompt.ids, logits="all")
    assert np.asarray(last.logits).shape == (1, engine.config.vocab)
    assert np.asarray(every.logits).dtype == np.float32
    np.testing.assert_allclose(last.logits[0], every.logits[-1], atol=1e-4)
    assert last.tokens == len(prompt.ids) and last.cache is None and last.timings["wall"] > 0


def test_a_cache_carries_on(engine: Engine) -> None:
    ids = prompts(TINY)[1].ids
    cache = engine.new_cache(len(ids))
    engine.prefill(ids[:3], cache=cache)
    rest = engine.prefill(ids[3:], cache=cache)
    assert cache.length == len(ids) and rest.cache is cache
    whole = engine.prefill(ids)
    np.testing.assert_allclose(rest.logits, whole.logits, atol=1e-4)


def test_generate(engine: Engine) -> None:
    prompt = prompts(TINY)[0]
    assert engine.generate(prompt.ids, 6) == prompt.greedy[:6].tolist()
    assert engine.generate(prompt.ids, 0) == []


def test_generate_ends_where_the_context_is_full(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompts(TINY)[0]
    full = replace(engine.config, context_length=len(prompt.ids) + 2)
    monkeypatch.setattr(engine, "config", full)
    assert engine.generate(prompt.ids, 10**12) == prompt.greedy[:3].tolist()
    with pytest.raises(ValueError, match="exceed the model's context of"):
        engine.generate([*prompt.ids, 1, 1, 1], 1)


def test_generate_continues_a_cache_that_was_handed_over(engine: Engine) -> None:
    prompt = prompts(TINY)[1]
    first, second = engine.new_cache(len(prompt.ids)), engine.new_cache(len(prompt.ids) + 4)
    engine.prefill(prompt.ids[:-1], cache=first, logits="none")
    second.import_(first.export())
    tokens = engine.generate(prompt.ids[-1:], 2, cache=second)
    assert second.tokens.tolist() == [*prompt.ids, *tokens[:-1]]
    tokens += engine.generate(tokens[-1:], 10, cache=second)  # until it is full
    assert tokens == prompt.greedy[:5].tolist()
    assert second.tokens.tolist() == [*prompt.ids, *tokens[:-1]]
    with pytest.raises(ValueError, match=r"1 tokens after \d+ exceed the cache's"):
        engine.generate(tokens[-1:], 1, cache=second)
    with pytest.raises(ValueError, match="belongs to another"):
        engine.generate(prompt.ids, 1, cache="cache")  # type: ignore[arg-type]


def test_generate_keeps_what_was_made_before_a_failure(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompts(TINY)[0]
    cache, run, left = engine.new_cache(64), engine.model.run, iter([True] * 3)

    def fails(*given: Any, **options: Any) -> Any:
        if not next(left, False):
            raise KeyboardInterrupt
        return run(*given, **options)

    monkeypatch.setattr(engine.model, "run", fails)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompt.ids, 10, cache=cache)
    assert cache.tokens.tolist() == [*prompt.ids, *prompt.greedy[:2]]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], "empty"),
        ([-1], "-1"),
        ([300], "300"),
        ([0.5], "integers"),
        (np.ones((1, 1), int), "one-dimensional"),
        ("Hello", r"one-dimensional, not of shape \[\]: 'Hello'"),
    ],
)
def test_bad_ids(engine: Engine, ids: list[object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        engine.prefill(ids)
    with pytest.raises(ValueError, match=text):
        engine.prefill([[1], ids])


CHECKS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "ids": (check_tokens, (5,)),
    "logits": (wanted_logits, (5,)),
    "tokens": (_targets, (Call(NONE, None, np.arange(2)), 5)),
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_another_thread_changes_is_what_was_checked_or_refused(name: str) -> None:
    """At whichever line of the check that is."""
    at = next(at for at in count(1) if not changes_at(at, *CHECKS[name]))
    assert at > 4


def changes_at(at: int, check: Callable[..., Any], more: tuple[Any, ...]) -> bool:
    """Checks what is changed at this line; whether there is one."""
    given, lines = np.array([1, 2]), 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if frame.f_code is check.__code__:
            lines += event == "line"
            if lines == at:
                given[:] = 7, 8
        return trace

    usual = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(ValueError):
            assert check(given, *more).tolist() == [1, 2]
    finally:
        sys.settrace(usual)
    return lines >= at


def test_too_long_a_prompt_changes_nothing(engine: Engine) -> None:
    with pytest.raises(ValueError, match="kv_tokens=64"):
        engine.prefill([1] * 65)
    cache = engine.new_cache(4)
    engine.prefill([1, 2], cache=cache)
    with pytest.raises(ValueError, match="4 positions"):
        engine.prefill([1, 2, 3], cache=cache)
    assert cache.length == 2


@pytest.mark.parametrize(
    "option",
    [
        {"weights": "int8"},
        {"weights": "per-layer"},
        {"attention": "r46"},
        {"kv_dtype": "e5m2"},
        {"exact": "invariant"},
        {"exact": "bitwise"},
        {"graphs": "on"},
        {"overlap": "on"},
        {"device": "tpu"},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"kv_tokens": "64"},
        {"memory_budget": "1 GB"},
        {"model": 5},
    ],
)
def test_options_that_do_not_exist_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        Engine.load(**{"model": PATH, "device": "cpu", **option})


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("lengths", lambda engine: engine.warm(5)),
        ("tokens", lambda engine: engine.new_cache(None)),
        ("tokens", lambda engine: engine.new_cache(2.5)),
        ("capacity", lambda engine: engine.new_cache(1).fork("2")),
        ("exported", lambda engine: engine.new_cache(1).import_({})),
        ("n", lambda engine: engine.generate([1], None)),
        ("n", lambda engine: engine.generate([1], -1)),
        ("prompts", lambda engine: engine.score(5, [[1]])),
        ("continuations", lambda engine: engine.score([[1]], None)),
        ("logits_bytes", lambda engine: engine.score([[1]], [[2]], logits_bytes=None)),
        ("prompts", lambda engine: engine.score_rows(None, [[0]], [[1]])),
        ("rows", lambda engine: engine.score_rows([[1]], 0, [[1]])),
        ("tokens", lambda engine: engine.score_rows([[1]], [[0]], np.array(1))),
        ("cache", lambda engine: engine.score_rows([[1]], [[0]], [[1]], cache=True)),
        ("top", lambda engine: engine.score_rows([[1]], [[0]], [[1]], top="2")),
        ("logits_bytes", lambda engine: engine.perplexity([1, 2], logits_bytes=0.5)),
        ("window", lambda engine: engine.perplexity([1, 2], window="all")),
        ("stride", lambda engine: engine.perplexity([1, 2], window=2, stride=1.0)),
        ("texts", lambda engine: engine.embed(None)),
        ("memory", lambda engine: Engine.plan(PATH, memory="all")),
        ("memory_budget", lambda engine: Engine.plan(PATH, weights="fp16", memory_budget=-1)),
        ("model", lambda engine: Engine.plan(None)),
    ],
)
def test_an_argument_of_a_wrong_kind_is_named(
    engine: Engine, name: str, call: Callable[[Engine], object]
) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        call(engine)


def test_numpy_launches_nothing(engine: Engine) -> None:
    engine.prefill([1])
    assert engine.launches() == {}


@pytest.mark.parametrize(
    "option", [{"memory_budget": 1}, {"stream": 3}, {"graphs": "off"}, {"overlap": "off"}]
)
def test_options_without_effect_on_the_cpu_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(option))}.* for a GPU"):
        Engine.load(PATH, device="cpu", **option)


def test_the_cache_behind_the_engine_grows_with_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pyruntime.options.MAX_TOKENS", 4)
    with Engine.load(PATH, device="cpu", max_tokens=2) as engine:
        assert engine.kv_tokens == 4
        assert engine.prefill([1] * 9, logits="all").logits.shape == (9, engine.config.vocab)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DriverNotFoundError):
        Engine.load(PATH, device="cuda:99")


def test_a_closed_engine_says_so() -> None:
    with Engine.load(PATH, device="cpu") as engine:
        pass
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.prefill([1])


def test_plan_counts_every_weight_once() -> None:
    plan = Engine.plan(PATH, max_tokens=16, kv_tokens=16, weights="fp16").nbytes
    c = Engine.load(PATH, device="cpu").config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    matrices = c.hidden * (2 * q + 2 * kv + 3 * c.ffn)
    vectors = 2 * c.hidden + 2 * c.head_dim
    expected = 2 * (c.vocab * c.hidden + c.layers * matrices) + 4 * (c.layers * vectors + c.hidden)
    with GGUFFile.open(PATH) as file:  # the packed embedding lies beside the tied output's fp16
        expected += file.tensors["token_embd.weight"].nbytes
    assert c.tied and plan["weights"] == expected
    assert plan["kv_cache"] == 2 * 2 * c.layers * c.kv_heads * 16 * c.head_dim + MAPS


def test_an_e4m3_cache_takes_half_and_its_scales_and_a_layer_of_fp16() -> None:
    wide, narrow = (
        dict(Engine.plan(PATH, max_tokens=16, kv_tokens=32, kv_dtype=d).nbytes) for d in KV_DTYPES
    )
    c = Engine.load(PATH, device="cpu").config
    rows = c.layers * c.kv_heads * 32
    maps = 2 * MAPS  # of the positions from 0 and from 16 on
    assert wide["kv_cache"] == 2 * 2 * rows * c.head_dim + maps
    assert narrow.pop("kv_cache") == 2 * (rows * c.head_dim + 4 * rows)
    assert (narrow.pop("kv_staging") - maps) * c.layers == wide.pop("kv_cache") - maps
    assert narrow == wide and "kv_staging" not in wide


def test_an_e4m3_cache_on_the_cpu() -> None:
    """Half a byte per element and more, a prompt in pieces as in one, and the path that says so."""
    ids = prompts(TINY)[2].ids
    with Engine.load(PATH, device="cpu", kv_dtype="e4m3") as engine:
        whole = engine.prefill(ids, logits="all")
        cache = engine.new_cache(len(ids))
        assert cache.kv_dtype == "e4m3" and cache.k.dtype == cache.v.dtype == np.uint8
        assert cache.k_scale.shape == cache.k.shape[:3] and cache.k_scale.dtype == np.float32
        pieces = [engine.prefill(part, cache=cache, logits="all").logits
                  for part in np.split(ids, [1, 3, 11])]  # fmt: skip
        np.testing.assert_allclose(np.concatenate(pieces), whole.logits, atol=0.2)
        assert whole.path == "cpu (NumPy), K/V e4m3"
    with Engine.load(PATH, device="cpu") as engine:
        exact = engine.prefill(ids, logits="all")
    assert np.abs(exact.logits - whole.logits).max() > 0.05  # it is another computation


def test_plan_counts_a_table_for_each_form_of_rope() -> None:
    """Gemma 3 has two, and a buffer for what a block adds before it is normalised."""
    path = GOLDEN / "tiny-gemma3-q8_0.gguf"
    plan, longer = (Engine.plan(path, max_tokens=600, kv_tokens=n).nbytes for n in (100, 101))
    assert longer["tables"] - plan["tables"] == 2 * 2 * 4 * 128  # 256 / 2 cosines and sines each
    more = Engine.plan(path, max_tokens=601, kv_tokens=100).nbytes
    wider = more["activations"] - plan["activations"]
    c = Engine.load(path, device="cpu").config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    words = 1 + 2 + 3  # a count, two of targets, and what is found of one
    assert wider == 4 * (2 * c.hidden + q + 2 * kv + words) + 2 * (c.hidden + 2 * q + c.ffn)


def test_plan_takes_the_options_of_load() -> None:
    usual = Engine.plan(PATH, weights="fp16")
    changed = {
        "device": "cuda:0", "graphs": "off", "overlap": "off", "exact": "invariant", "stream": 3,
        "progress": print, "memory_budget": usual.total,
    }  # fmt: skip
    sizes = {"max_tokens": 7, "kv_tokens": 9, "kv_dtype": "e4m3"}
    choices = {"weights": "fp16", "attention": "invariant"}
    assert signature(Engine.load).parameters.keys() == {"model", *changed, *sizes, *choices}
    for name, value in changed.items():
        found = Engine.plan(PATH, **choices, **{name: value})
        assert found.nbytes == usual.nbytes and found.fits, name
    for name, value in sizes.items():
        assert Engine.plan(PATH, **choices, **{name: value}).total < usual.total, name
    with pytest.raises(TypeError, match="'kv_tokns'"):
        Engine.plan(PATH, kv_tokns=3)
    with pytest.raises(ValueError, match="weights"):
        Engine.plan(PATH, weights="int4")


# Compute capability, and what "auto" tries in turn.
ORDERS = (
    (None, ("fp16", "per-layer", "int8")),
    ((9, 0), ("fp16", "per-layer", "int8")),
    ((10, 0), ("fp16", "per-layer", "int8")),
    ((8, 0), ("fp16", "int8", "per-layer")),
    ((8, 6), ("fp16", "int8", "per-layer")),
    ((8, 9), ("fp16", "int8", "per-layer")),
    ((12, 0), ("fp16", "int8", "per-layer")),
)


@pytest.mark.parametrize(("capability", "order"), ORDERS)
def test_auto_is_fp16_where_that_fits_and_what_is_packed_otherwise(
    capability: tuple[int, int] | None, order: tuple[str, ...]
) -> None:
    """And the smallest where nothing does."""
    sizes = {"max_tokens": 16, "kv_tokens": 16}
    plans = {w: Engine.plan(PATH, weights=w, **sizes) for w in order}
    assert all(plan.fits for plan in plans.values())  # no memory to go by
    wide, packed, int8 = (plans[w].total for w in ("fp16", "per-layer", "int8"))
    assert int8 < packed < wide
    for memory in (wide, wide - 1, packed, packed - 1, int8, int8 - 1):
        fitting = [w for w in order if plans[w].total <= memory]
        expected = plans[(fitting or ["int8"])[0]]
        for given in ({"memory": memory}, {"memory": 1 << 60, "memory_budget": memory}):
            plan = Engine.plan(PATH, **given, **sizes, capability=capability)
            assert (plan.weights, plan.nbytes) == (expected.weights, expected.nbytes)
            assert (plan.memory, plan.fits) == (memory, bool(fitting))


def test_auto_leaves_int8_out_where_it_does_not_give_what_is_asked_for() -> None:
    """Rows with the same bits in every pass, or a file without packed matrices."""
    plan = partial(Engine.plan, max_tokens=16, kv_tokens=16, memory=1)
    assert plan(PATH).weights == "int8"
    assert plan(PATH, exact="invariant").weights == "per-layer"
    assert plan(GOLDEN / "tiny-llama-f16.gguf").weights == "fp16"


def test_plan_of_packed_weights() -> None:
    """The file's tensors, and two slots that hold a layer each (or some rows of a long output)."""
    plan = Engine.plan(PATH, max_tokens=16, kv_tokens=16, weights="per-layer")
    with GGUFFile.open(PATH) as file:
        assert plan.nbytes["weights"] == sum(t.nbytes for t in file.tensors.values())
    wide = Engine.plan(PATH, max_tokens=16, kv_tokens=16, weights="fp16")
    same = plan.nbytes.keys() - {"weights", "scratch"}
    assert same == wide.nbytes.keys() - {"weights"}
    assert all(plan.nbytes[name] == wide.nbytes[name] for name in same)
    assert plan.total == sum(plan.nbytes.values())


def test_auto_does_not_choose_what_takes_more() -> None:
    """Of two layers nothing is saved: two slots lie beside them."""
    options = {"max_tokens": 16, "kv_tokens": 16, "memory": 1, "exact": "invariant"}
    assert Engine.plan(GOLDEN / "tiny-llama-f16.gguf", **options).weights == "fp16"
    assert Engine.plan(PATH, **options).weights == "per-layer"


def test_a_pass_over_packed_weights_is_of_limited_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyruntime.model.footprint.PASS_TOKENS", {"per-layer": 20, "int8": 16})
    wide, packed, int8 = (
        Engine.plan(PATH, max_tokens=33, kv_tokens=64, weights=w)
        for w in ("fp16", "per-layer", "int8")
    )
    assert (wide.max_tokens, packed.max_tokens, int8.max_tokens) == (33, 20, 16)
    assert packed.nbytes["activations"] < wide.nbytes["activations"]


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"device": "cuda:0"}, None])
@pytest.mark.parametrize("name", ["nonsense", "r46_", "", None])
def test_an_unknown_attention_is_refused_with_those_there_are(
    options: dict[str, Any] | None, name: Any
) -> None:
    """Before a device or a file is asked for, in `load` as in `plan`."""
    with pytest.raises(
        ValueError, match=f"attention {name!r} is not known; there are auto, inv"
    ) as caught:
        if options is None:
            Engine.plan("/no/such.gguf", attention=name)
        else:
            Engine.load("/no/such.gguf", attention=name, **options)
    assert "r46_base (head dims 64, 128)" in str(caught.value)


@pytest.mark.parametrize("name", ["auto", "invariant", "r46_base", "r46-base"])
def test_plan_takes_every_attention(name: str) -> None:
    plan = partial(Engine.plan, PATH, weights="fp16")
    assert plan(attention=name) == plan()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("invariant", "attention='invariant': NumPy does not promise it: "),
        ("r46-base", "attention='r46-base' names a GPU kernel: NumPy has none"),
        ("fast", "attention='fast' names a GPU kernel: NumPy has none"),
    ],
)
def test_attention_that_numpy_does_not_have(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Engine.load(PATH, device="cpu", attention=name)
