"""The K/V cache of one sequence on a GPU."""

from __future__ import annotations

import math

import numpy as np

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.model.config import ModelConfig
from pyruntime.ops.attention_schedule import MAPS_LAYOUT, key_maps

Layout = dict[str, tuple[tuple[int, ...], str]]


class Cache:
    """Keys (after RoPE) and values: float16 [layers, kv heads, capacity, head dim] each.

    With kv_dtype "e4m3" they are uint8 codes, each row times its scale: `k_scale` and `v_scale`,
    float32 [layers, kv heads, capacity], which are None otherwise. The first `length` positions are
    filled. `arrays` are all of them, with the tensor maps of a float16 one; `owner` is the model
    that may use it, if any.
    """

    def __init__(
        self,
        owner: object,
        library: Library,
        config: ModelConfig,
        tokens: int,
        kv_dtype: str = "f16",
        *,
        layers: int | None = None,
    ) -> None:
        self.owner = owner
        self.kv_dtype = kv_dtype
        layout = cache_layout(config, tokens, kv_dtype, layers=layers)
        # In one statement: no frame of a failure's traceback keeps K when there is no room for V.
        arrays = {
            name: DeviceArray(library.device, shape, dtype, what=f"cache {name}")
            for name, (shape, dtype) in layout.items()
        }
        self.arrays = tuple(arrays.values())
        self.k, self.v = arrays["k"], arrays["v"]
        self.k_scale, self.v_scale = arrays.get("k_scale"), arrays.get("v_scale")
        self.length = 0
        if maps := arrays.get("maps"):
            try:
                maps.upload(key_maps(library, self.k, self.v))
            except BaseException:
                self.close()
                raise

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.k.shape[2]

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        for array in self.arrays:
            array.close()


def cache_layout(
    c: ModelConfig, tokens: int, kv_dtype: str = "f16", *, layers: int | None = None
) -> Layout:
    """Shape and dtype of every array of a cache for `tokens` positions; `layers` instead of all."""
    rows: tuple[int, ...] = (layers or c.layers, c.kv_heads, tokens)
    numbers = ((*rows, c.head_dim), "float16" if kv_dtype == "f16" else "uint8")
    layout = {"k": numbers, "v": numbers}
    if kv_dtype == "f16":
        layout["maps"] = MAPS_LAYOUT
    else:
        layout |= dict.fromkeys(("k_scale", "v_scale"), (rows, "float32"))
    return layout


def layout_bytes(layout: Layout) -> int:
    """Device bytes of all arrays of a layout."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout.values())
