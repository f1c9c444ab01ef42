"""The check of token ids that every backend makes before it uses them as an index."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

INT32, UINT64 = np.dtype(np.int32), np.dtype(np.uint64)


def check_tokens(ids: ArrayLike, vocab: int, *, empty: bool = False) -> NDArray[np.int32]:
    """`ids` as int32 [nt], nt > 0 unless they may be `empty`.

    Raises ValueError, naming the value, unless they are one row of integers in [0, vocab).
    """
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, not of shape {list(array.shape)}")
    if not array.size:
        if empty:
            return array.astype(INT32)
        raise ValueError("token ids are empty; at least one is needed")
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, not {array.dtype}")
    wide = array.astype(UINT64)  # negative ones are large then
    if wide.item(wide.argmax()) >= vocab:
        at = int(np.argmax(wide >= vocab))
        raise ValueError(f"token id {array[at]} at position {at} is outside [0, {vocab})")
    return array.astype(INT32)
