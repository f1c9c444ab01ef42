"""The K/V cache of one sequence in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pyruntime.model.any_cache import AnyCache
from pyruntime.reference.functions import Array

if TYPE_CHECKING:
    from pyruntime.reference.model import ReferenceModel


@dataclass(eq=False)
class Cache(AnyCache):
    """K/V in host memory; in a model's "fp16" precision every float32 element is an fp16 number."""

    k: NDArray[Any]
    v: NDArray[Any]
    owner: ReferenceModel
    k_scale: Array | None = None
    v_scale: Array | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        self.capacity = self.k.shape[2]

    def region(self, first: int, tokens: int) -> Cache:
        """Positions [first, first + tokens) as a cache of their own, empty, in the same memory."""
        if first < 0 or tokens < 1 or first + tokens > self.capacity:
            raise ValueError(
                f"no region of {tokens} positions from {first} on in a cache for {self.capacity}"
            )
        part = np.s_[:, :, first : first + tokens]
        k_scale, v_scale = (s if s is None else s[part] for s in (self.k_scale, self.v_scale))
        return Cache(self.k[part], self.v[part], self.owner, k_scale, v_scale)

    def close(self) -> None:
        """Gives the memory back, once no call is at work on the model; shapes stay. Idempotent."""
        with self.owner.turns.turn():
            self.closed = True
            for name, array in self._numbers().items():
                setattr(self, name, np.broadcast_to(array.dtype.type(0), array.shape))

    @staticmethod
    def _copy(to: NDArray[Any], source: NDArray[Any], positions: int) -> None:
        to[:, :, :positions] = source[:, :, :positions]
