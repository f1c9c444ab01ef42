"""Attention on a GPU against float64: every table row, by shape, start, poison and packing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyruntime.driver.program import Program
from pyruntime.errors import UnsupportedModelError
from pyruntime.ops.attention import attention, choose, variants

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, Any]
HEAD_DIMS = (64, 96, 128, 256)
LADDER = ("r46", "r46_base", "r48", "r50", "r57")  # the variants for head dims 64 and 128
GROUPS = ((9, 3), (28, 4), (32, 8), (14, 2), (5, 1), (4, 4), (7, 7))
# Tile edges and their neighbours, and the lengths at which a published kernel read NaN padding.
# fmt: off
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 130, 192, 224, 320,
        384, 1000)
# fmt: on
STARTS = (0, 1, 37, 64, 300)
WINDOWS = (1, 2, 15, 31, 32, 33, 63, 64, 65, 96, 97, 128, 200)
CAPPED_HEAD_DIMS = (128, 256)
POISON = (0x7E00, 0xFE19, 0xFFFF)
SEQUENCE = np.dtype("<i4, <i4, <i4, <i4, <u8, <u8")  # row0, rows, start, capacity, k, v
# P and O are rounded to fp16 (2^-11 each at most, in a norm less than half of that).
TOLERANCE = 1e-3


def variants_of(
    head_dim: int, window: int | None = None, softcap: float | None = None
) -> list[str]:
    """In the order in which `launch` stacks them."""
    everyone = window is None and softcap is None and head_dim in (64, 128)
    return ["fast", *(LADDER if everyone else ())]


@dataclass
class Prompt:
    """q [rows, heads, head dim]; k, v [kv heads, start + rows, head dim], all float16."""

    q: Array
    k: Array
    v: Array

    @property
    def start(self) -> int:
        return self.k.shape[1] - len(self.q)

    def part(self, begin: int, end: int) -> Prompt:
        """Rows [begin, end), continuing a cache that holds what came before them."""
        keys = self.start + end
        return Prompt(self.q[begin:end], self.k[:, :keys], self.v[:, :keys])


def draw(rng: Any, rows: int, start: int, heads: int, kv_heads: int, head_dim: int) -> Prompt:
    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(np.float16)

    cache = (kv_heads, start + rows, head_dim)
    return Prompt(normal(rows, heads, head_dim), normal(*cache), normal(*cache))


def oracle(
    prompt: Prompt, scale: float, window: int | None = None, softcap: float | None = None
) -> Array:
    """softmax(scale q k^T) v in float64, [rows, heads, head dim]."""
    q, k, v = (x.astype(np.float64) for x in (prompt.q, prompt.k, prompt.v))
    rows, heads, head_dim = q.shape
    kv_heads, keys, _ = k.shape
    grouped = q.transpose(1, 0, 2).reshape(kv_heads, -1, head_dim)
    scores = scale * (grouped @ k.transpose(0, 2, 1)).reshape(-1, rows, keys)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    behind = prompt.start + np.arange(rows)[:, None] - np.arange(keys)
    scores[:, (behind < 0) | (behind >= (window or np.inf))] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p.reshape(kv_heads, -1, keys) @ v).reshape(heads, rows, head_dim).transpose(1, 0, 2)


def poisoned(shape: tuple[int, ...], pattern: int) -> Array:
    return np.full(shape, pattern, np.uint16).view(np.float16)


def launch(
    gpu: Any,
    prompts: list[Prompt],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    layer: int = 0,
    slack: int = 40,
    poison: int = POISON[0],
    unused: int = 0,
) -> list[Array]:
    """Runs every table row that can on `prompts`, a sequence each, and returns O per prompt.

    O is [variants, rows, heads, head dim]. Demands equal bits of a variant's rows and untouched
    memory elsewhere. Every slot that no row may look at holds `poison`: other layers, `slack`
    positions per head, positions before a window, rows between the sequences. Without slack the
    last key is the end of the allocation. `unused` sequences past the live ones have null caches.
    """
    _, heads, head_dim = prompts[0].q.shape
    kv_heads = prompts[0].k.shape[0]
    table = np.zeros(len(prompts) + unused, SEQUENCE)
    table[len(prompts) :] = (0, 1000, 0, 1000, 0, 0)
    longest = max([len(p.q) for p in prompts] + [1000] * bool(unused))
    row_count = sum(len(p.q) + 3 for p in prompts) + 3
    q = poisoned((row_count, heads * head_dim), poison)
    held, places, row0 = [], [], 3
    for i, p in enumerate(prompts):
        rows, keys = len(p.q), p.k.shape[1]
        places.append(slice(row0, row0 + rows))
        q[places[-1]] = p.q.reshape(rows, heads * head_dim)
        pointers = []
        for values in (p.k, p.v):
            cache = poisoned((layer + 1 + bool(slack), kv_heads, keys + slack, head_dim), poison)
            first = max(p.start - window + 1, 0) if window else 0
            cache[layer, :, first:keys] = values[:, first:]
            held.append(gpu.upload(cache))
            pointers.append(held[-1].ptr)
        table[i] = (row0, rows, p.start, keys + slack, *pointers)
        row0 += rows + 3

    outputs: dict[str, Array] = {}
    untouched = np.ones(row_count, bool)
    for place in places:
        untouched[place] = False
    able = variants_of(head_dim, window, softcap)
    rows_of_table = [
        k
        for k in gpu.library.family("attention")
        if k.spec.tile["hd"] == head_dim
        and k.spec.tile["variant"] in able
        and bool(k.spec.tile.get("cap")) == (softcap is not None)
    ]
    for kernel in rows_of_table:
        out = gpu.upload(poisoned(q.shape, poison))
        program = Program()
        attention(
            program,
            gpu.library,
            q=gpu.upload(q),
            out=out,
            live=gpu.upload(np.array([row_count, len(prompts), 0, 0], np.int32)),
            sequences=gpu.upload(table.view(np.uint8)),
            max_rows=longest + 130,  # a row tile more than any sequence has
            max_sequences=len(table),
            layer=layer,
            heads=heads,
            kv_heads=kv_heads,
            scale=scale or head_dim**-0.5,
            window=window,
            softcap=softcap,
            kernel=kernel,
        )
        gpu.run(program)
        result = gpu.download(out)
        assert (result.view(np.uint16)[untouched] == poison).all(), f"{kernel.name}: stray store"
        variant = str(kernel.spec.tile["variant"])
        assert same_bits(result, outputs.setdefault(variant, result)), (
            f"{kernel.name} and another row of {variant} differ"
        )
    stacked = np.stack([outputs[variant] for variant in able])
    return [
        stacked[:, place].reshape(len(stacked), *p.q.shape)
        for place, p in zip(places, prompts, strict=True)
    ]


def same_bits(a: Array, b: Array) -> bool:
    return np.array_equal(a.view(np.uint16), b.view(np.uint16))


def check(out: Array, prompt: Prompt, scale: float | None = None, **masking: Any) -> None:
    """Every row of every head within the tolerance of the oracle, in the norm.

    `out` is [variants, rows, heads, head dim]; `masking`: window, softcap.
    """
    expected = oracle(prompt, scale or prompt.q.shape[-1] ** -0.5, **masking)
    error = np.linalg.norm(out.astype(np.float64) - expected, axis=-1)
    error /= np.linalg.norm(expected, axis=-1)
    worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    variant, row, head = map(int, worst)
    assert error[worst] <= TOLERANCE, (
        f"{variants_of(out.shape[-1], **masking)[variant]}: row {row}, head {head}: "
        f"relative error {error[worst]}"
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_shapes(gpu: Any, rng: Any, head_dim: int, rows: int) -> None:
    i = ROWS.index(rows) + 3 * HEAD_DIMS.index(head_dim)
    heads, kv_heads = GROUPS[i % len(GROUPS)]
    prompt = draw(rng, rows, STARTS[i % len(STARTS)], heads, kv_heads, head_dim)
    check(launch(gpu, [prompt], poison=POISON[i % 3])[0], prompt)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("start", STARTS)
def test_groups_and_starts(gpu: Any, rng: Any, start: int, group: tuple[int, int]) -> None:
    prompt = draw(rng, 70, start, *group, 64)
    check(launch(gpu, [prompt], slack=0)[0], prompt)


@pytest.mark.parametrize("start", [0, 21])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_length(gpu: Any, rng: Any, head_dim: int, start: int) -> None:
    whole = draw(rng, 130, start, 2, 1, head_dim)
    (longest,) = launch(gpu, [whole])
    check(longest, whole)
    for rows in range(1, 130):
        (out,) = launch(gpu, [whole.part(0, rows)], poison=POISON[rows % 3], slack=rows % 5)
        assert same_bits(out, longest[:, :rows]), f"{rows} rows"


@pytest.mark.parametrize("poison", POISON, ids=hex)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_unused_memory_is_never_seen(gpu: Any, rng: Any, head_dim: int, poison: int) -> None:
    prompt = draw(rng, 77, 20, 4, 2, head_dim)
    outs = [launch(gpu, [prompt], poison=poison, slack=s)[0] for s in (0, 1, 31, 200)]
    check(outs[0], prompt)
    assert all(same_bits(out, outs[0]) for out in outs)


@pytest.mark.smoke
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_layers(gpu: Any, rng: Any, head_dim: int) -> None:
    for layer in (1, 5):
        prompt = draw(rng, 50, 10, 6, 3, head_dim)
        check(launch(gpu, [prompt], layer=layer)[0], prompt)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_packed_sequences(gpu: Any, rng: Any, head_dim: int) -> None:
    two, five = ([(33, 0), (150, 7)], [(64, 0), (0, 9), (1, 200), (129, 0), (0, 0)])
    for lengths in (two, five):
        prompts = [draw(rng, rows, start, 4, 2, head_dim) for rows, start in lengths]
        together = launch(gpu, prompts, unused=2)
        for prompt, out in zip(prompts, together, strict=True):
            if len(prompt.q):
                check(out, prompt)
                (alone,) = launch(gpu, [prompt])
                assert same_bits(out, alone)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cuts_and_repeats_change_no_bit(gpu: Any, rng: Any, head_dim: int) -> None:
    whole = draw(rng, 300, 11, 4, 2, head_dim)
    (out,) = launch(gpu, [whole])
    for cuts in ([0, 300], [0, 77, 78, 178, 300], [0, 64, 128, 299, 300]):
        parts = [launch(gpu, [whole.part(a, b)])[0] for a, b in pairwise(cuts)]
        assert same_bits(np.concatenate(parts, axis=1), out), f"cut at {cuts}"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_key_tiles_and_softmax_give_equal_bits(gpu: Any, rng: Any, head_dim: int) -> None:
    """Neither the row tile nor the copies, the mask or the order of blocks enter the result."""
    (out,) = launch(gpu, [draw(rng, 300, 11, 4, 2, head_dim)])
    by_name = dict(zip(variants_of(head_dim), out, strict=True))
    assert same_bits(by_name["r48"], by_name["fast"])
    assert same_bits(by_name["r57"], by_name["fast"])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("where", [0, 60, 199])
def test_one_outlier_key(gpu: Any, rng: Any, head_dim: int, where: int) -> None:
    prompt = draw(rng, 200, 0, 4, 2, head_dim)
    prompt.k[:, where] *= np.float16(100)
    check(launch(gpu, [prompt])[0], prompt)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_beyond_fp16(gpu: Any, rng: Any, head_dim: int) -> None:
    prompt = draw(rng, 150, 30, 4, 2, head_dim)
    prompt.q *= np.float16(200)
    prompt.k *= np.float16(100)
    scores = prompt.q[:, 0].astype(np.float32) @ prompt.k[0].astype(np.float32).T
    assert scores.max() > 4 * 65504 and scores.min() < -4 * 65504
    scale = 1 / (20000 * head_dim**0.5)
    check(launch(gpu, [prompt], scale=scale)[0], prompt, scale)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_largest_fp16_inputs_stay_finite(gpu: Any, rng: Any, head_dim: int) -> None:
    """Every score of a row is the same, about 65504^2 head_dim: the result is the mean of V."""
    prompt = draw(rng, 100, 0, 2, 1, head_dim)
    prompt.q[:], prompt.k[:] = 65504, -65504
    (out,) = launch(gpu, [prompt])
    prompt.q[:] = 0  # equal scores for the oracle too
    check(out, prompt)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_windows(gpu: Any, rng: Any, head_dim: int, window: int) -> None:
    i = WINDOWS.index(window) + 2 * HEAD_DIMS.index(head_dim)
    for rows in (1, 17, 130, ROWS[i % len(ROWS)]):
        prompt = draw(rng, rows, STARTS[(i + rows) % len(STARTS)], 4, 2, head_dim)
        (out,) = launch(gpu, [prompt], window=window, poison=POISON[i % 3], slack=rows % 7)
        check(out, prompt, window=window)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_window_beyond_all_keys_changes_no_bit(gpu: Any, rng: Any, head_dim: int) -> None:
    prompt = draw(rng, 150, 37, 4, 2, head_dim)
    (out,) = launch(gpu, [prompt])
    for window in (187, 188, 1 << 20, 2**31 - 1, 1 << 40):
        assert same_bits(launch(gpu, [prompt], window=window)[0], out[:1]), window


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [1, 40, 64, 129])
def test_cuts_and_windows_change_no_bit(gpu: Any, rng: Any, head_dim: int, window: int) -> None:
    """A window moves where a block starts to read, not how keys are grouped."""
    whole = draw(rng, 300, 11, 4, 2, head_dim)
    (out,) = launch(gpu, [whole], window=window)
    check(out, whole, window=window)
    for cuts in ([0, 77, 78, 178, 300], [0, 64, 128, 299, 300]):
        parts = [launch(gpu, [whole.part(a, b)], window=window)[0] for a, b in pairwise(cuts)]
        assert same_bits(np.concatenate(parts, axis=1), out), f"cut at {cuts}"


@pytest.mark.smoke
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_packed_sequences_with_windows(gpu: Any, rng: Any, softcap: float | None) -> None:
    lengths = [(64, 0), (0, 9), (1, 200), (129, 70), (33, 5)]
    prompts = [draw(rng, rows, start, 4, 2, 128) for rows, start in lengths]
    masking = {"window": 48, "softcap": softcap}
    for prompt, out in zip(prompts, launch(gpu, prompts, unused=2, **masking), strict=True):
        if len(prompt.q):
            check(out, prompt, **masking)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("head_dim", CAPPED_HEAD_DIMS)
@pytest.mark.parametrize("window", [None, 40])
def test_softcap(gpu: Any, rng: Any, head_dim: int, softcap: float, window: int | None) -> None:
    for rows, start, loudness in ((1, 0, 1), (130, 0, 1), (200, 37, 30), (65, 300, 1)):
        prompt = draw(rng, rows, start, 4, 2, head_dim)
        prompt.q *= np.float16(loudness)  # at 30 the largest scores lie flat at the cap
        masking: dict[str, Any] = {"window": window, "softcap": softcap}
        check(launch(gpu, [prompt], **masking)[0], prompt, **masking)


@pytest.mark.parametrize("head_dim", CAPPED_HEAD_DIMS)
def test_softcap_of_outliers(gpu: Any, rng: Any, head_dim: int) -> None:
    """Scores of either sign far beyond e^x's range: the caps themselves, never a NaN."""
    prompt = draw(rng, 150, 30, 4, 2, head_dim)
    prompt.k[:, 60:63] *= np.float16(1000)
    prompt.q[100] *= np.float16(1000)
    prompt.q[40] = 0
    check(launch(gpu, [prompt], softcap=30.0)[0], prompt, softcap=30.0)


@pytest.mark.parametrize("head_dim", CAPPED_HEAD_DIMS)
def test_a_wide_cap_is_none(gpu: Any, rng: Any, head_dim: int) -> None:
    prompt = draw(rng, 100, 0, 4, 2, head_dim)
    check(launch(gpu, [prompt], softcap=500.0)[0], prompt)


@pytest.mark.parametrize(
    ("variant", "window"), [("auto", None), ("auto", 64), *((name, None) for name in LADDER)]
)
def test_rows_and_cache_beyond_32_bits(
    gpu: Any, rng: Any, variant: str, window: int | None
) -> None:
    """The end of a million positions in a far layer; activations a million rows into their array.

    Only the touched parts exist: the base addresses are set back by the distances under test.
    """
    head_dim, heads, layer, positions, rows, row0 = 64, 40, 40, 1 << 20, 5, 1 << 20
    prompt = draw(rng, rows, 200, heads, 1, head_dim)
    row_bytes = 2 * heads * head_dim
    assert min(layer * positions * head_dim, row0 * heads * head_dim) > 2**31
    scale = 4.0  # the zeros before the last 205 keys weigh nothing
    caches = []
    for values in (prompt.k, prompt.v):
        caches.append(gpu.empty((positions, head_dim), np.float16, fill=0))
        caches[-1].rows(positions - 205, positions).upload(values[0])
    k, v = ((c.ptr - 2 * layer * positions * head_dim) % 2**64 for c in caches)
    q = gpu.upload(prompt.q.reshape(rows, -1))
    out = gpu.empty(q.shape, np.float16)
    program = Program()
    attention(
        program,
        gpu.library,
        q=SimpleNamespace(ptr=q.ptr - row0 * row_bytes, shape=q.shape, dtype=q.dtype),
        out=SimpleNamespace(ptr=out.ptr - row0 * row_bytes, shape=q.shape, dtype=q.dtype),
        live=gpu.upload(np.array([row0 + rows, 1, 0, 0], np.int32)),
        sequences=gpu.upload(
            np.array([(row0, rows, positions - rows, positions, k, v)], SEQUENCE).view(np.uint8)
        ),
        max_rows=rows,
        max_sequences=1,
        layer=layer,
        heads=heads,
        kv_heads=1,
        scale=scale,
        window=window,
        variant=variant,
    )
    gpu.run(program)
    check(gpu.download(out).reshape(1, *prompt.q.shape), prompt, scale, window=window)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_choice_of_table_row(gpu: Any, head_dim: int) -> None:
    """Narrow row tiles for short prompts, wide ones where there is work for all."""
    tiles = [
        int(k.spec.tile["tq"])
        for k in gpu.library.family("attention")
        if (k.spec.tile["hd"], k.spec.tile["variant"]) == (head_dim, "fast")
        and not k.spec.tile["cap"]
    ]
    assert choose(gpu.library, head_dim, 1, 28).spec.tile["tq"] == min(tiles)
    assert choose(gpu.library, head_dim, 1 << 20, 28).spec.tile["tq"] == max(tiles)


def test_refusals(gpu: Any) -> None:
    expected = {"fast": list(HEAD_DIMS), **{variant: [64, 128] for variant in LADDER}}
    assert variants(gpu.library) == expected
    arguments: dict[str, Any] = dict.fromkeys(("live", "sequences", "layer"), 0)
    arguments |= {"max_rows": 5, "max_sequences": 1, "kv_heads": 2, "scale": 1.0}

    def refused(error: type[Exception], match: str, q: Any, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            attention(Program(), gpu.library, q=q, out=q, **(arguments | {"heads": 4} | changes))

    q = gpu.empty((5, 4 * 64), np.float16)
    refused(
        UnsupportedModelError, "head dim 80; .* 64, 96, 128, 256", gpu.empty((5, 320), np.float16)
    )
    refused(ValueError, "'r47' is not known; .* r46_base .* r57", q, variant="r47")
    refused(ValueError, "3 K/V heads", q, kv_heads=3)
    refused(ValueError, "5 heads", q, heads=5, kv_heads=1)
    refused(ValueError, "float32", gpu.empty((5, 4 * 64), np.float32))
    refused(ValueError, "scale", q, scale=float("nan"))
    refused(ValueError, "window of 0 keys", q, window=0)
    refused(ValueError, "softcap -1", q, softcap=-1.0)
    refused(ValueError, "softcap nan", q, softcap=float("nan"))
    refused(UnsupportedModelError, "'r48' .* with a sliding window", q, variant="r48", window=9)
    refused(UnsupportedModelError, "head dim 64 with capped scores", q, softcap=50.0)
    plain = choose(gpu.library, 64, 5, 4)
    refused(ValueError, f"{plain.name} with window None, softcap 50", q, kernel=plain, softcap=50.0)
