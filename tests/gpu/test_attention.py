"""Attention on a GPU against float64: every kernel and packing, by shape, start, poison, window."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from attention_launch import (
    HEAD_DIMS,
    POISON,
    SEQUENCE,
    Inputs,
    Prompt,
    Recorded,
    Results,
    check,
    classes,
    draw,
    draw_uneven,
    label,
    launch,
    same_bits,
)

from pyruntime.driver.memory import DeviceArray
from pyruntime.ops.attention_schedule import MAPS_LAYOUT, key_maps

pytestmark = pytest.mark.gpu

GROUPS = ((9, 3), (28, 4), (32, 8), (14, 2), (5, 1), (4, 4), (7, 7))
# As many heads as a warpgroup has rows, more than it has, and so many that one token remains.
WIDE_GROUPS = ((64, 1), (66, 1), (40, 1))
# Tile edges and their neighbours, and the lengths at which a published kernel read NaN padding.
# fmt: off
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 95, 96, 97, 127, 128, 129, 130, 159,
        160, 161, 191, 192, 193, 224, 256, 320, 384, 1000)
# fmt: on
STARTS = (0, 1, 37, 64, 300)
WINDOWS = (1, 2, 15, 31, 32, 33, 63, 64, 65, 79, 80, 81, 96, 97, 127, 128, 129, 200)
CAPPED_HEAD_DIMS = (128, 256)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_shapes(gpu: Any, rng: Any, head_dim: int, rows: int) -> None:
    i = ROWS.index(rows) + 3 * HEAD_DIMS.index(head_dim)
    heads, kv_heads = GROUPS[i % len(GROUPS)]
    prompt = draw(rng, rows, STARTS[i % len(STARTS)], heads, kv_heads, head_dim)
    check(launch(gpu, [prompt], poison=POISON[i % 3])[0], prompt)


@pytest.mark.parametrize("group", GROUPS + WIDE_GROUPS)
@pytest.mark.parametrize("start", STARTS)
def test_groups_and_starts(gpu: Any, rng: Any, start: int, group: tuple[int, int]) -> None:
    prompt = draw(rng, 70, start, *group, 64)
    check(launch(gpu, [prompt], slack=0)[0], prompt)


@pytest.mark.parametrize("start", [0, 21])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_length(gpu: Any, rng: Any, head_dim: int, start: int) -> None:
    whole = draw_uneven(rng, 130, start, 2, 1, head_dim)
    (longest,) = launch(gpu, [whole], splits=False)
    check(longest, whole)
    for rows in range(1, 130):
        poison, slack = POISON[rows % 3], rows % 5
        (out,) = launch(gpu, [whole.part(0, rows)], poison=poison, slack=slack, splits=False)
        assert same_bits(out, {name: o[:rows] for name, o in longest.items()}), f"{rows} rows"


@pytest.mark.parametrize("poison", POISON, ids=hex)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_unused_memory_is_never_seen(gpu: Any, rng: Any, head_dim: int, poison: int) -> None:
    prompt = draw(rng, 77, 20, 4, 2, head_dim)
    outs = [launch(gpu, [prompt], poison=poison, slack=s)[0] for s in (0, 1, 31, 200)]
    check(outs[0], prompt)
    assert all(same_bits(out, outs[0]) for out in outs)


@pytest.mark.parametrize("layer", [pytest.param(1, marks=pytest.mark.smoke), 5])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_layers(gpu: Any, rng: Any, head_dim: int, layer: int) -> None:
    prompt = draw(rng, 50, 10, 6, 3, head_dim)
    check(launch(gpu, [prompt], layer=layer)[0], prompt)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_packed_sequences(gpu: Any, rng: Any, head_dim: int) -> None:
    two, five = ([(33, 0), (150, 7)], [(64, 0), (0, 9), (1, 200), (129, 0), (0, 0)])
    for lengths in (two, five, five[::-1]):
        prompts = [draw_uneven(rng, rows, start, 4, 2, head_dim) for rows, start in lengths]
        together = launch(gpu, prompts, unused=2, splits=False)
        for prompt, out in zip(prompts, together, strict=True):
            if len(prompt.q):
                check(out, prompt)
                (alone,) = launch(gpu, [prompt], splits=False)
                assert same_bits(out, alone)


def cut(gpu: Any, whole: Prompt, cuts: list[int], **masking: Any) -> Results:
    """The results of a prompt that comes in parts, one after the other."""
    parts = [launch(gpu, [whole.part(a, b)], splits=False, **masking)[0] for a, b in pairwise(cuts)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cuts_and_repeats_change_no_bit(gpu: Any, rng: Any, head_dim: int) -> None:
    whole = draw_uneven(rng, 300, 11, 4, 2, head_dim)
    (out,) = launch(gpu, [whole], splits=False)
    check(out, whole)
    for cuts in ([0, 300], [0, 77, 78, 178, 300], [0, 64, 128, 299, 300]):
        assert same_bits(cut(gpu, whole, cuts), out), f"cut at {cuts}"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_key_tiles_and_softmax_give_equal_bits(gpu: Any, rng: Any, head_dim: int) -> None:
    """Neither the row tile nor the copies, the mask or the order of blocks enter the result."""
    (out,) = launch(gpu, [draw_uneven(rng, 300, 11, 4, 2, head_dim)], splits=False)
    for name in ("r48", "r57"):
        assert same_bits({"fast": out[name]}, out), name


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
    prompt = draw_uneven(rng, 150, 37, 4, 2, head_dim)
    (out,) = launch(gpu, [prompt])
    for window in (187, 188, 1 << 20, 2**31 - 1, 1 << 40):
        assert same_bits(launch(gpu, [prompt], window=window)[0], out), window


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [1, 40, 64, 129])
def test_cuts_and_windows_change_no_bit(gpu: Any, rng: Any, head_dim: int, window: int) -> None:
    """A window moves where a block starts to read, not how keys are grouped."""
    whole = draw_uneven(rng, 300, 11, 4, 2, head_dim)
    (out,) = launch(gpu, [whole], window=window, splits=False)
    check(out, whole, window=window)
    for cuts in ([0, 77, 78, 178, 300], [0, 64, 128, 299, 300]):
        assert same_bits(cut(gpu, whole, cuts, window=window), out), f"cut at {cuts}"


@pytest.mark.smoke
@pytest.mark.parametrize(("head_dim", "softcap"), [(128, None), (128, 50.0), (256, 50.0)])
def test_packed_sequences_with_windows(
    gpu: Any, rng: Any, head_dim: int, softcap: float | None
) -> None:
    lengths = [(64, 0), (0, 9), (1, 200), (129, 70), (33, 5)]
    prompts = [draw(rng, rows, start, 4, 2, head_dim) for rows, start in lengths]
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


@pytest.mark.parametrize("window", [None, 64])
def test_rows_and_cache_beyond_32_bits(gpu: Any, rng: Any, window: int | None) -> None:
    """The end of a million positions in a far layer; activations a million rows into their array.

    All of it is allocated, since a tensor map describes the whole of an array; what is not used
    holds NaN. The zeros before the prompt's own keys weigh nothing at this scale.
    """
    head_dim, heads, layer, positions, rows, row0 = 64, 40, 40, 1 << 20, 70, 1 << 20
    elements = (layer + 1) * positions * head_dim + (row0 + rows + 3) * heads * head_dim
    assert min(layer * positions * head_dim, row0 * heads * head_dim) > 2**31
    if gpu.device.memory()[0] < 4 * elements + 2**30:
        pytest.skip(f"needs {4 * elements / 1e9:.0f} GB of device memory")
    prompt, scale = draw(rng, rows, 200, heads, 1, head_dim), 4.0
    keys = prompt.k.shape[1]
    inputs = Inputs(gpu, heads, head_dim, row0 + rows + 3, 1)
    inputs.q.rows(row0, row0 + rows).upload(prompt.q.reshape(rows, -1))
    caches = []
    for values in (prompt.k, prompt.v):
        caches.append(gpu.empty((layer + 1, 1, positions, head_dim), np.float16))
        used = caches[-1].rows(layer, layer + 1).fill(0)
        at = 2 * (positions - keys) * head_dim
        used.view(at, (keys, head_dim), np.float16).upload(values[0])
    maps = DeviceArray(gpu.device, *MAPS_LAYOUT).upload(key_maps(gpu.library, *caches))
    pointers = (a.ptr for a in (*caches, maps))
    entry = np.array([(row0, rows, positions - rows, positions, *pointers)], SEQUENCE)
    inputs.live.upload(np.array([row0 + rows, 1, 0, 0], np.int32))
    inputs.sequences.upload(entry.view(np.uint8))
    for choice in chain(*classes(gpu.library, heads, 1, head_dim, window=window).values()):
        recorded = Recorded(
            gpu, inputs, choice, kv_heads=1, max_rows=rows, scale=scale, window=window, layer=layer
        )
        gpu.run(recorded.program)
        around = gpu.download(recorded.out.rows(row0 - 3, row0 + rows + 3))
        del recorded  # its result is large
        out = around[3:-3].reshape(prompt.q.shape)
        check({label(choice): out}, prompt, scale, window=window)
        assert (around[[0, 1, 2, -3, -2, -1]].view(np.uint16) == 0xFFFF).all(), label(choice)
