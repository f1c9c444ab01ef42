"""Scores of tokens: how likely logits make given ones, and which they make the likeliest."""

from __future__ import annotations

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program


def scores(
    program: Program,
    library: Library,
    *,
    rows: DeviceArray,
    max_rows: int,
    logits: DeviceArray,
    first: DeviceArray,
    tokens: DeviceArray,
    log_probs: DeviceArray,
    best: DeviceArray,
    values: DeviceArray,
) -> None:
    """Records the scores of the targets of each of the first `rows` rows.

    Target t of row r, first[r] <= t < first[r + 1], has log_probs[t] = log softmax(logits[r]) of
    tokens[t]; best[t] are the row's likeliest tokens, values[t] their log-probabilities. Likeliest
    first; of equal ones the first token, and a NaN before any number.

    Args:
        rows: int32, the count of live rows on the device; `max_rows` is the most it will be.
        logits: float32 [max rows or more, vocab].
        first: int32 [max rows + 1 or more], ascending; nothing is written but for targets from
            first[0] to first[rows].
        tokens: int32 [targets or more], each below the vocabulary (checked by the caller), or
            negative: the likeliest.
        log_probs: float32, shaped like tokens, written.
        best, values: int32 and float32 [targets or more, top], written; top is 1 to vocab.

    Raises:
        ValueError: arrays that do not belong together.
    """
    arrays = {
        "logits": logits, "first": first, "tokens": tokens, "log_probs": log_probs, "best": best,
        "values": values,
    }  # fmt: skip
    types = [array.dtype.name for array in arrays.values()]
    ranks = [len(array.shape) for array in arrays.values()]
    fit = types == ["float32", "int32", "int32", "float32", "int32", "float32"]
    fit = fit and ranks == [2, 1, 1, 1, 2, 2] and tokens.shape == log_probs.shape
    if not fit or best.shape != values.shape or best.shape[0] != tokens.shape[0]:
        told = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"scores: {told}")
    vocab, top = logits.shape[1], best.shape[1]
    if not 1 <= max_rows <= min(logits.shape[0], first.shape[0] - 1) or not 1 <= top <= vocab:
        raise ValueError(
            f"scores: {max_rows} rows of logits {logits.shape}, first {first.shape}, the {top} best"
        )
    (kernel,) = library.family("scores")
    program.add(
        kernel,
        grid=max_rows,
        rows=rows,
        logits=logits,
        first=first,
        tokens=tokens,
        log_probs=log_probs,
        best=best,
        values=values,
        vocab=vocab,
        top=top,
    )
