"""What K/V caches of every backend share: the tokens they hold, and what can be asked of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray


def _frozen(own: NDArray[np.int32]) -> NDArray[np.int32]:
    """An array that nobody changes from now on."""
    own.flags.writeable = False
    return own


class Filled(ABC):
    """The tokens whose keys and values fill the first `length` positions of something."""

    _tokens = _frozen(
        np.empty(0, np.int32)
    )  # replaced as a whole, so that a thread sees the old or the new

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Their ids, int32 [length]. The array never changes; later calls may give another."""
        return self._tokens

    @property
    def length(self) -> int:
        """Positions filled. Assigning to it is `truncate`: what is not known cannot be made so."""
        return len(self._tokens)

    @length.setter
    def length(self, tokens: int) -> None:
        self.truncate(tokens)

    def truncate(self, tokens: int) -> None:
        """Forgets the positions from `tokens` on.

        Raises ValueError if it is negative or beyond `length`. A pass that is storing positions in
        another thread meanwhile counts as having stored them before.
        """
        if not isinstance(tokens, (int, np.integer)) or not 0 <= tokens <= self.length:
            raise ValueError(f"a cache of length {self.length} cannot be cut to {tokens!r}")
        self._tokens = self._tokens[:tokens]

    def append(self, ids: NDArray[np.int32], start: int) -> None:
        """For backends: a pass that began at `length` = `start` has stored `ids` there.

        If the cache has been cut since then, it stays as it is: what was stored is forgotten, too.
        """
        if self.length == start:
            self._tokens = _frozen(np.concatenate([self._tokens, ids]))

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the memory has been freed."""

    def check_open(self) -> None:
        """Raises ValueError if the memory has been freed."""
        if self.closed:
            raise ValueError("this cache has been closed")


class AnyCache(Filled):
    """K/V of one sequence: [layers, kv heads, capacity, head dim] each, K after RoPE.

    They are float16, in NumPy float32. With kv_dtype "e4m3" they are uint8 codes, each row times
    its scale: `k_scale` and `v_scale`, float32 [layers, kv heads, capacity], which are None
    otherwise. The first `length` positions are filled. `owner` is the model that may use it.
    """

    owner: Any
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any

    @property
    def kv_dtype(self) -> str:
        """What K and V are: "f16" or "e4m3"."""
        return "f16" if self.k_scale is None else "e4m3"

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return int(self.k.shape[2])

    @abstractmethod
    def close(self) -> None:
        """Frees the memory. Idempotent."""
