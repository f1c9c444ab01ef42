"""Scores of tokens against a float64 oracle; of what is not finite, against the NumPy backend's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyruntime.driver.program import Program
from pyruntime.model.scores import Targets, token_scores
from pyruntime.ops.scores import scores

VOCABS = [1, 2, 3, 4, 5, 7, 301, 2047, 2048, 2049, 4096, 4099, 32001]
TOLERANCE = {"rtol": 1e-6, "atol": 2e-6}  # float32 sums of exponentials, and their logarithm
SPARE = 5  # entries behind the last target, which must stay as they are


def launch(
    gpu: Any, logits: Any, targets: Targets, *, live: int | None = None, shift: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """log_probs and greedy of the targets of the first `live` rows.

    The logits begin `shift` floats behind a 16-byte boundary and end with their allocation. Targets
    of rows past the live ones are no tokens, and lie nowhere.
    """
    rows, vocab = logits.shape
    live = rows if live is None else live
    first = np.searchsorted(targets.rows, np.arange(rows + 1)).astype(np.int32)
    count = int(first[live])
    first[live + 1 :] = -1
    tokens = np.full(count + SPARE, -1, np.int32)
    tokens[:count] = targets.tokens[:count]
    memory = gpu.empty((shift + rows * vocab,), np.float32)
    x = memory.view(4 * shift, (rows, vocab), np.float32).upload(logits)
    log_probs, greedy = (gpu.empty(tokens.shape, dtype) for dtype in (np.float32, np.int32))
    program = Program()
    scores(
        program, gpu.library, rows=gpu.upload(np.array([live], np.int32)), max_rows=rows, logits=x,
        first=gpu.upload(first), tokens=gpu.upload(tokens), log_probs=log_probs, greedy=greedy,
    )  # fmt: skip
    gpu.run(program)
    np.testing.assert_array_equal(gpu.download(x), logits)
    found = gpu.download(log_probs), gpu.download(greedy)
    for array in found:
        assert (array[count:].view(np.uint32) == 0xFFFFFFFF).all()
    return found[0][:count], found[1][:count]


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
    log_probs, greedy = launch(gpu, logits, targets, live=live, shift=vocab % 4)
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
    log_probs, greedy = launch(gpu, logits, targets, shift=shift)
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
    _, greedy = launch(gpu, logits, targets)
    assert greedy.tolist() == [1, 0] * len(logits)


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
    with np.errstate(invalid="ignore"):
        want = token_scores(logits.copy(), targets)
    log_probs, greedy = launch(gpu, logits, targets)
    np.testing.assert_allclose(log_probs, want.log_probs, **TOLERANCE)
    np.testing.assert_array_equal(greedy, want.greedy)
    assert np.isnan(log_probs).any() or vocab == 1


def test_more_targets_of_a_row_than_threads(gpu: Any, rng: np.random.Generator) -> None:
    """Of rows without any before, between and after."""
    logits = rng.standard_normal((5, 2049)).astype("f4")
    tokens = np.concatenate([np.arange(2049), rng.integers(0, 2049, 1000)]).astype(np.int32)
    targets = Targets(np.repeat(np.int32([1, 3]), [2049, 1000]), tokens)
    log_probs, greedy = launch(gpu, logits, targets)
    want_probs, want_greedy = expected(logits, targets)
    np.testing.assert_allclose(log_probs, want_probs, **TOLERANCE)
    np.testing.assert_array_equal(greedy, want_greedy)
    assert greedy[:2049].sum() == 1


def test_a_row_has_the_same_bits_wherever_it_lies(gpu: Any, rng: np.random.Generator) -> None:
    """As it begins on a 16-byte boundary each time."""
    logits = rng.standard_normal((40, 4096)).astype("f4")
    targets = Targets(np.arange(40, dtype=np.int32), rng.integers(0, 4096, 40).astype(np.int32))
    together, _ = launch(gpu, logits, targets)
    again, _ = launch(gpu, logits, targets)
    assert together.tobytes() == again.tobytes()
    for row in (0, 7, 39):
        alone = Targets(np.zeros(1, np.int32), targets.tokens[row : row + 1])
        assert launch(gpu, logits[row : row + 1], alone)[0][0] == together[row]


def test_targets_before_the_first_are_left_alone(gpu: Any, rng: np.random.Generator) -> None:
    """Rows of a piece count them from those of the pieces before."""
    logits = rng.standard_normal((2, 64)).astype("f4")
    log_probs, greedy = gpu.empty((6,), np.float32), gpu.empty((6,), np.int32)
    program = Program()
    scores(
        program, gpu.library, rows=gpu.upload(np.array([2], np.int32)), max_rows=2,
        logits=gpu.upload(logits), first=gpu.upload(np.array([2, 3, 5], np.int32)),
        tokens=gpu.upload(np.array([-1, -1, 9, 8, 7, -1], np.int32)), log_probs=log_probs,
        greedy=greedy,
    )  # fmt: skip
    gpu.run(program)
    want, _ = expected(logits, Targets(np.int32([0, 1, 1]), np.int32([9, 8, 7])))
    np.testing.assert_allclose(gpu.download(log_probs)[2:5], want, **TOLERANCE)
    for array in (log_probs, greedy):
        assert (gpu.download(array)[[0, 1, 5]].view(np.uint32) == 0xFFFFFFFF).all()


def test_what_does_not_fit_is_refused(gpu: Any) -> None:
    floats, words = gpu.empty((9,), np.float32), gpu.empty((9,), np.int32)
    good: dict[str, Any] = {
        "rows": gpu.empty((1,), np.int32), "max_rows": 4, "logits": gpu.empty((4, 64), np.float32),
        "first": gpu.empty((5,), np.int32), "tokens": words, "log_probs": floats, "greedy": words,
    }  # fmt: skip
    scores(Program(), gpu.library, **good)
    for bad in (
        {"logits": gpu.empty((4, 64), np.float16)},
        {"logits": gpu.empty((256,), np.float32)},
        {"logits": gpu.empty((3, 64), np.float32)},
        {"first": gpu.empty((4,), np.int32)},
        {"first": gpu.empty((5,), np.float32)},
        {"first": gpu.empty((5, 1), np.int32)},
        {"tokens": gpu.empty((8,), np.int32)},
        {"tokens": floats},
        {"log_probs": words},
        {"greedy": gpu.empty((8,), np.int32)},
        {"greedy": floats},
        {"max_rows": 5},
        {"max_rows": 0},
    ):
        with pytest.raises(ValueError, match="scores"):
            scores(Program(), gpu.library, **{**good, **bad})
