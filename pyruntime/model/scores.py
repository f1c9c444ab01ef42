"""Log-probabilities of tokens from logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def log_probs(logits: NDArray[np.float32], targets: NDArray[np.int32]) -> NDArray[np.float32]:
    """log softmax(logits)[target] of each row.

    Args:
        logits: float32 [rows, vocab], overwritten. targets: int32 [rows], each below `vocab`.

    Returns: float32 [rows], summed in float64.
    """
    logits -= logits.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(logits, targets[:, None].astype(np.intp), axis=1)[:, 0]
    np.exp(logits, out=logits)
    found: NDArray[np.float32] = chosen - np.log(logits.sum(axis=1, dtype=np.float64))
    return found.astype(np.float32)
