"""The K/V cache of one sequence on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyruntime.driver.memory import DeviceArray

if TYPE_CHECKING:
    from pyruntime.model.gpu import GpuModel


class Cache:
    """Keys (after RoPE) and values: float16 [layers, kv heads, capacity, head dim] each.

    The first `length` positions are filled.
    """

    def __init__(self, owner: GpuModel, tokens: int) -> None:
        device, config = owner.device, owner.config
        self.owner = owner
        shape = (config.layers, config.kv_heads, tokens, config.head_dim)
        # In one statement: no frame of a failure's traceback keeps K when there is no room for V.
        self.k, self.v = (
            DeviceArray(device, shape, np.float16, what=f"{name} cache") for name in "KV"
        )
        self.length = 0

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.k.shape[2]

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        self.k.close()
        self.v.close()
