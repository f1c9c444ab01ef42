"""Scores of given tokens: how likely logits make them."""

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
    greedy: DeviceArray,
) -> None:
    """Records the scores of the targets of each of the first `rows` rows.

    Target t of row r, first[r] <= t < first[r + 1], has log_probs[t] = log softmax(logits[r]) of
    tokens[t], and greedy[t] says whether that is the row's argmax, the first of equal ones.

    Args:
        rows: int32, the count of live rows on the device; `max_rows` is the most it will be.
        logits: float32 [max rows or more, vocab].
        first: int32 [max rows + 1 or more], ascending; nothing is written but for targets from
            first[0] to first[rows].
        tokens: int32 [targets or more], each below the vocabulary (checked by the caller).
        log_probs, greedy: float32 and int32, shaped like tokens, written.

    Raises:
        ValueError: arrays that do not belong together.
    """
    arrays = {"first": first, "tokens": tokens, "log_probs": log_probs, "greedy": greedy}
    types = [array.dtype.name for array in (logits, *arrays.values())]
    shapes = {array.shape for array in (tokens, log_probs, greedy)}
    flat = all(len(array.shape) == 1 for array in arrays.values())
    if types != ["float32", "int32", "int32", "float32", "int32"] or len(shapes) > 1 or not flat:
        told = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"scores: logits {logits.dtype} {logits.shape}, {told}")
    if len(logits.shape) != 2 or not 1 <= max_rows <= min(logits.shape[0], first.shape[0] - 1):
        raise ValueError(f"scores: {max_rows} rows of logits {logits.shape}, first {first.shape}")
    (kernel,) = library.family("scores")
    program.add(
        kernel,
        grid=max_rows,
        rows=rows,
        logits=logits,
        first=first,
        tokens=tokens,
        log_probs=log_probs,
        greedy=greedy,
        vocab=logits.shape[1],
    )
