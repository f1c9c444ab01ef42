"""Scores of tokens against a float64 oracle; of what is not finite, and the likeliest tokens,
against the NumPy backend's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyruntime.driver.program import Program
from pyruntime.model.scores import Targets, TokenScores, token_scores
from pyruntime.ops.scores import scores

VOCABS = [1, 2, 3, 4, 5, 7, 301, 2047, 2048, 2049, 4096, 4099, 32001]
TOLERANCE = {"rtol": 1e-6, "atol": 2e-6}  # float32 sums of exponentials, and their logarithm
SPARE = 5  # entries behind the last target, which must stay as they are


def launch(
    gpu: Any,
    logits: Any,
    targets: Targets,
    *,
    top: int = 1,
    live: int | None = None,
    shift: int = 0,
) -> TokenScores:
    """Of the targets of the first `live` rows.

    The logits begin `shift` floats behind a 16-byte boundary and end with their allocation. Targets
    of rows past the live ones are no tokens, and lie nowhere.
    """
    rows, vocab = logits.shape
    live = rows if live is None else live
    first = np.searchsorted(targets.rows, np.arange(rows + 1)).astype(np.int32)
    count = int(first[live])
    first[live + 1 :] = -1
    tokens = np.full(count + SPARE, vocab, np.int32)
    tokens[:count] = targets.tokens[:count]
    memory = gpu.empty((shift + rows * vocab,), np.float32)
    x = memory.view(4 * shift, (rows, vocab), np.float32).upload(logits)
    log_probs = gpu.empty(tokens.shape, np.float32)
    best, values = (gpu.empty((len(tokens), top), dtype) for dtype in (np.int32, np.float32))
    program = Program()
    scores(
        program, gpu.library, rows=gpu.upload(np.array([live], np.int32)), max_rows=rows, logits=x,
        first=gpu.upload(first), tokens=gpu.upload(tokens), log_probs=log_probs, best=best,
        values=values,
    )  # fmt: skip
    gpu.run(program)
    np.testing.assert_array_equal(gpu.download(x), logits)
    found = [gpu.download(array) for array in (log_probs, best, values)]
    for array in found:
        assert (array[count:].view(np.uint32) == 0xFFFFFFFF).all()
    log_probs, best, values = (array[:count] for array in found)
    given = tokens[:count]
    return TokenScores(np.where(given < 0, best[:, 0], given), log_probs, best, values)


def some_targets(rng: np.random.Generator, logits: Any, most: int = 4) -> Targets:
    """Up to `most` of each row; every other one is the argmax."""
    rows = np.repeat(np.arange(len(logits), dtype=np.int32), rng.integers(0, most + 1, len(logits)))
    rows = np.union1d(rows, [0, len(logits) - 1]) if len(rows) < 2 else rows
    tokens = rng.integers(0, logits.shape[1], len(rows))
    tokens[::2] = logits.argmax(axis=1)[rows[::2]]
    return Targets(rows.astype(np.int32), tokens.astype(np.int32))


def expected(logits: Any, targets: Targets) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    greedy = logits.argmax(axis=1)[targets.rows] == targets.tokens
    return wide[targets.rows, targets.tokens], greedy


@pytest.mark.smoke
@pytest.mark.parametrize(("live", "rows"), [(1, 1), (2, 5), (33, 33)])
@pytest.mark.parametrize("vocab", VOCABS)
def test_values(gpu: Any, rng: np.random.Generator, vocab: int, live: int, rows: int) -> None:
    scale = 10.0 ** rng.uniform(-3, 2, (rows, 1))
    logits = (rng.standard_normal((rows, vocab)) * scale + rng.uniform(-50, 50)).astype("f4")
    targets = some_targets(rng, logits)
    found = launch(gpu, logits, targets, live=live, shift=vocab % 4)
    log_probs, greedy = found.log_probs, found.greedy
    want_probs, want_greedy = expected(logits, targets)
    np.testing.assert_allclose(log_probs, want_probs[: len(log_probs)], **TOLERANCE)
    np.testing.assert_array_equal(greedy, want_greedy[: len(greedy)])


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("vocab", [151936, 256000, 128257])
def test_vocabularies_of_real_models(
    gpu: Any, rng: np.random.Generator, vocab: int, shift: int
) -> None:
    """Rows of which every token counts, and rows of which few do."""
    logits = rng.standard_normal((7, vocab)).astype("f4") * np.float32(
        [[0], [0.01], [1], *[[5]] * 4]
    )
    targets = some_targets(rng, logits)
    found = launch(gpu, logits, targets, shift=shift)
    log_probs, greedy = found.log_probs, found.greedy
    want_probs, want_greedy = expected(logits, targets)
    np.testing.assert_allclose(log_probs, want_probs, **TOLERANCE)
    np.testing.assert_array_equal(greedy, want_greedy)


@pytest.mark.smoke
@pytest.mark.parametrize("vocab", [5, 301, 4099])
def test_of_equal_logits_the_first_is_the_argmax(
    gpu: Any, rng: np.random.Generator, vocab: int
) -> None:
    """Also of zeros of both signs; all pairs of places that different threads or loads read."""
    places = sorted({p % vocab for p in (0, 1, 2, 3, 4, 2047, 2048, 2051, 4095, 4096, vocab - 1)})
    pairs = [*pairwise(places), (places[0], places[-1])]
    logits = -1 - rng.random((2 * len(pairs) + 1, vocab), np.float32)
    for i, pair in enumerate(pairs):
        logits[2 * i, pair] = 7.5
        logits[2 * i + 1, pair] = (-0.0, 0.0) if i % 2 else (0.0, -0.0)
    logits[-1] = 3.25
    found = [p for pair in pairs for p in (*pair, *pair)]
    rows = np.repeat(np.arange(len(logits), dtype=np.int32), 2)
    targets = Targets(rows, np.array([*found, 0, vocab - 1], np.int32))
    assert launch(gpu, logits, targets).greedy.tolist() == [True, False] * len(logits)


@pytest.mark.smoke
@pytest.mark.parametrize("vocab", [1, 3, 301, 4099])
def test_what_is_not_finite(gpu: Any, rng: np.random.Generator, vocab: int) -> None:
    """NaN is the argmax, its first one; a row with NaN or inf, or of -inf alone, has no scores."""
    rows, places = [], (0, vocab // 3, vocab // 2, vocab - 1)
    for kind in ([np.nan], [np.inf], [-np.inf], [np.nan, np.inf], [np.inf, np.nan, np.nan]):
        for place in places:
            row = rng.standard_normal(vocab).astype("f4")
            for i, value in enumerate(kind):
                row[(place + i * vocab // 4) % vocab] = value
            rows.append(row)
    for value in (-np.inf, np.inf, np.nan):
        rows.append(np.full(vocab, value, np.float32))
    most = np.full(vocab, -np.inf, np.float32)
    most[vocab - 1] = 2.5
    logits = np.stack([*rows, most])
    each = sorted({*places, vocab // 4, vocab // 5})
    targets = Targets(
        np.repeat(np.arange(len(logits), dtype=np.int32), len(each)),
        np.tile(np.array(each, np.int32), len(logits)),
    )
    for top in {1, min(vocab, 5), min(vocab, 301)}:
        with np.errstate(invalid="ignore"):
            want = token_scores(logits.copy(), targets, top)
        found = launch(gpu, logits, targets, top=top)
        np.testing.assert_array_equal(found.best, want.best)
        np.testing.assert_allclose(found.log_probs, want.log_probs, **TOLERANCE)
        np.testing.assert_allclose(found.values, want.values, **TOLERANCE)
        assert np.isnan(found.log_probs).any() or vocab == 1


@pytest.mark.smoke
@pytest.mark.parametrize("vocab", [*VOCABS, 152064])
def test_the_likeliest_tokens(gpu: Any, rng: np.random.Generator, vocab: int) -> None:
    """Rows of which all differ, of few values, of one, and of ever larger and ever smaller ones;
    -1 as a target is the likeliest."""
    few = rng.integers(-2, 3, vocab) * rng.choice([0.0, -0.0, 1.5], vocab)
    least = np.where(rng.random(vocab) < 0.99, -np.inf, 1.0)
    least[rng.integers(vocab)] = 2
    ramp = np.linspace(-3, 8, vocab)
    logits = np.stack(
        [rng.standard_normal(vocab) * 4, few, np.full(vocab, -7.25), ramp, ramp[::-1], least]
    ).astype("f4")
    targets = some_targets(rng, logits)
    targets.tokens[1::3] = -1
    for top in sorted({1, min(vocab, 2), min(vocab, 20), min(vocab, 301)}):
        want = token_scores(logits.copy(), targets, top)
        found = launch(gpu, logits, targets, top=top, shift=(vocab + top) % 4)
        np.testing.assert_array_equal(found.best, want.best)
        np.testing.assert_array_equal(found.tokens, want.tokens)
        np.testing.assert_allclose(found.log_probs, want.log_probs, **TOLERANCE)
        np.testing.assert_allclose(found.values, want.values, **TOLERANCE)


def test_the_likeliest_that_one_thread_reads(gpu: Any, rng: np.random.Generator) -> None:
    """All of its elements, before those of others."""
    logits = rng.standard_normal((4, 32771)).astype("f4")
    for shift, row in enumerate(logits):
        row[(-shift) % 4 + 4 * 17 + np.arange(0, 32000, 2048)[:, None] + np.arange(4)] += 50
    for shift in range(4):
        alone = logits[shift : shift + 1]
        targets = Targets(np.zeros(1, np.int32), np.array([5], np.int32))
        found = launch(gpu, alone, targets, top=80, shift=shift)
        np.testing.assert_array_equal(found.best, token_scores(alone.copy(), targets, 80).best)


def test_more_targets_of_a_row_than_threads(gpu: Any, rng: np.random.Generator) -> None:
    """Of rows without any before, between and after."""
    logits = rng.standard_normal((5, 2049)).astype("f4")
    tokens = np.concatenate([np.arange(2049), rng.integers(0, 2049, 1000)]).astype(np.int32)
    targets = Targets(np.repeat(np.int32([1, 3]), [2049, 1000]), tokens)
    found = launch(gpu, logits, targets, top=3)
    log_probs, greedy = found.log_probs, found.greedy
    want_probs, want_greedy = expected(logits, targets)
    np.testing.assert_allclose(log_probs, want_probs, **TOLERANCE)
    np.testing.assert_array_equal(greedy, want_greedy)
    assert greedy[:2049].sum() == 1
    np.testing.assert_array_equal(found.best, token_scores(logits.copy(), targets, 3).best)


def test_a_row_has_the_same_bits_wherever_it_lies(gpu: Any, rng: np.random.Generator) -> None:
    """As it begins on a 16-byte boundary each time."""
    logits = rng.standard_normal((40, 4096)).astype("f4")
    targets = Targets(np.arange(40, dtype=np.int32), rng.integers(0, 4096, 40).astype(np.int32))
    together, again = (launch(gpu, logits, targets, top=4) for _ in range(2))
    for ours, theirs in zip(together, again, strict=True):
        assert ours.tobytes() == theirs.tobytes()
    for row in (0, 7, 39):
        alone = Targets(np.zeros(1, np.int32), targets.tokens[row : row + 1])
        found = launch(gpu, logits[row : row + 1], alone, top=4)
        for ours, theirs in zip(found, together.part(slice(row, row + 1)), strict=True):
            assert ours.tobytes() == theirs.tobytes()


def test_targets_before_the_first_are_left_alone(gpu: Any, rng: np.random.Generator) -> None:
    """Rows of a piece count them from those of the pieces before."""
    logits = rng.standard_normal((2, 64)).astype("f4")
    log_probs = gpu.empty((6,), np.float32)
    best, values = (gpu.empty((6, 2), dtype) for dtype in (np.int32, np.float32))
    program = Program()
    scores(
        program, gpu.library, rows=gpu.upload(np.array([2], np.int32)), max_rows=2,
        logits=gpu.upload(logits), first=gpu.upload(np.array([2, 3, 5], np.int32)),
        tokens=gpu.upload(np.array([-1, -1, 9, 8, 7, -1], np.int32)), log_probs=log_probs,
        best=best, values=values,
    )  # fmt: skip
    gpu.run(program)
    want, _ = expected(logits, Targets(np.int32([0, 1, 1]), np.int32([9, 8, 7])))
    np.testing.assert_allclose(gpu.download(log_probs)[2:5], want, **TOLERANCE)
    order = np.argsort(-logits, axis=1)[[0, 1, 1], :2]
    np.testing.assert_array_equal(gpu.download(best)[2:5], order)
    for array in (log_probs, best, values):
        assert (gpu.download(array)[[0, 1, 5]].view(np.uint32) == 0xFFFFFFFF).all()


def test_what_does_not_fit_is_refused(gpu: Any) -> None:
    floats, words = gpu.empty((9,), np.float32), gpu.empty((9,), np.int32)
    best, values = gpu.empty((9, 3), np.int32), gpu.empty((9, 3), np.float32)
    good: dict[str, Any] = {
        "rows": gpu.empty((1,), np.int32), "max_rows": 4, "logits": gpu.empty((4, 64), np.float32),
        "first": gpu.empty((5,), np.int32), "tokens": words, "log_probs": floats, "best": best,
        "values": values,
    }  # fmt: skip
    scores(Program(), gpu.library, **good)
    for bad in (
        {"logits": gpu.empty((4, 64), np.float16)},
        {"logits": gpu.empty((256,), np.float32)},
        {"logits": gpu.empty((3, 64), np.float32)},
        {"logits": gpu.empty((4, 2), np.float32)},
        {"first": gpu.empty((4,), np.int32)},
        {"first": gpu.empty((5,), np.float32)},
        {"first": gpu.empty((5, 1), np.int32)},
        {"tokens": gpu.empty((8,), np.int32)},
        {"tokens": floats},
        {"log_probs": words},
        {"best": values},
        {"best": words},
        {"best": gpu.empty((9, 2), np.int32)},
        {"values": best},
        {"best": gpu.empty((8, 3), np.int32), "values": gpu.empty((8, 3), np.float32)},
        {"best": gpu.empty((9, 0), np.int32), "values": gpu.empty((9, 0), np.float32)},
        {"max_rows": 5},
        {"max_rows": 0},
    ):
        with pytest.raises(ValueError, match="scores"):
            scores(Program(), gpu.library, **{**good, **bad})
