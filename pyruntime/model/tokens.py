"""The checks of what callers give: token ids before they are an index, counts and lists."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

INT32, UINT64 = np.dtype(np.int32), np.dtype(np.uint64)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """An argument that is an integer of at least `least`. Raises ValueError, naming it."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < least:
        raise ValueError(f"{name}={value!r:.100}: it must be an integer of at least {least}")
    return int(value)


def check_list(name: str, given: Any, one: str, count: int | None = None) -> list[Any]:
    """The items of an argument, `one` each, and `count` of them if that is given.

    Raises ValueError, naming it, if there are others, or if it is a single text or has no items.
    """
    try:
        items = None if isinstance(given, (str, bytes)) else list(given)
    except TypeError:
        items = None
    if items is None:
        raise ValueError(f"{name}={given!r:.100}: a list is needed, even for one {one}")
    if count is not None and len(items) != count:
        raise ValueError(f"{name}: a list of {count} is needed, one for each {one}")
    return items


def check_tokens(ids: ArrayLike, vocab: int, *, empty: bool = False) -> NDArray[np.int32]:
    """`ids` as int32 [nt], nt > 0 unless they may be `empty`.

    Raises ValueError, naming the value, unless they are one row of integers in [0, vocab).
    """
    array = np.asarray(ids)
    if array.ndim != 1:
        shape = list(array.shape)
        raise ValueError(f"token ids must be one-dimensional, not of shape {shape}: {ids!r:.100}")
    if not array.size:
        if empty:
            return array.astype(INT32)
        raise ValueError("token ids are empty; at least one is needed")
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, not {array.dtype}")
    # A copy, as another thread may change what was given. Negative ones are large in it.
    wide = array.astype(UINT64)
    if wide.item(wide.argmax()) >= vocab:
        at = int(np.argmax(wide >= vocab))
        raise ValueError(f"token id {array[at]} at position {at} is outside [0, {vocab})")
    return wide.astype(INT32)
