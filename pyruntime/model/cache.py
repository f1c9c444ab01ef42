"""The K/V cache of one sequence on a GPU, and regions of it that serve as caches themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import numpy as np

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray, Plane, copy_starts
from pyruntime.model.any_cache import AnyCache, Filled
from pyruntime.model.batch import REGION
from pyruntime.model.config import ModelConfig
from pyruntime.ops.attention_schedule import MAPS_LAYOUT, key_maps
from pyruntime.turns import Deadline

Layout = dict[str, tuple[tuple[int, ...], str]]


class Positions(Protocol):
    """What a pass reads and writes of a sequence's keys and values.

    Attributes:
        length: positions filled. stride: positions from one K/V head to the next.
        addresses: of position 0 of each array of the cache, and of the tensor maps from there on.
    """

    length: int
    stride: int

    @property
    def addresses(self) -> tuple[int, ...]: ...


class Cache(AnyCache):
    """K/V in device memory: `k` and `v`, and `k_scale` and `v_scale` if there are any.

    `arrays` are all of them, with the tensor maps of a float16 one from each multiple of REGION on,
    and `addresses` where they lie; `owner` may be None, too.

    Array libraries may share the arrays, codes as uint8 since few know e4m3; see `DeviceArray` for
    what they may read while a prefill is under way.
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
        self.capacity = self.stride = tokens
        layout = cache_layout(config, tokens, kv_dtype, layers=layers)
        # In one statement: no frame of a failure's traceback keeps K when there is no room for V.
        arrays = {
            name: DeviceArray(library.device, shape, dtype, what=f"cache {name}")
            for name, (shape, dtype) in layout.items()
        }
        self.arrays = tuple(arrays.values())
        self.addresses = tuple([array.ptr for array in self.arrays])
        self._library = library
        self._maps = arrays.get("maps")
        self._mapped: set[int] = set()  # positions whose maps have been made
        self.k, self.v = arrays["k"], arrays["v"]
        self.k_scale, self.v_scale = arrays.get("k_scale"), arrays.get("v_scale")
        if self._maps is not None:
            try:
                self.maps_from(0)
            except BaseException:
                self.close()
                raise

    @property
    def closed(self) -> bool:
        """Whether the memory has been freed."""
        return not self.k.ptr

    def region(self, first: int, tokens: int) -> Region:
        """Positions [first, first + tokens) as a cache of their own, empty.

        Raises ValueError unless they lie within this cache, from a multiple of REGION on.
        """
        if first % REGION or first < 0 or tokens < 1 or first + tokens > self.capacity:
            raise ValueError(
                f"no region of {tokens} positions from {first} on in a cache for {self.capacity}"
            )
        return Region(self, first, tokens)

    def maps_from(self, first: int) -> int:
        """The address of the tensor maps of a float16 cache's positions from `first` on."""
        assert self._maps is not None
        row = self._maps.rows(first // REGION, first // REGION + 1)
        if first not in self._mapped:
            row.upload(key_maps(self._library, self.k, self.v, first)[None])
            self._mapped.add(first)
        return row.ptr

    def close(self) -> None:
        """Frees the memory, once no call is at work on the model. Idempotent."""
        with nullcontext() if self.owner is None else self.owner.idle():
            for array in self.arrays:
                array.close()

    @contextmanager
    def _entry(self, timeout: float | Deadline | None = None) -> Iterator[None]:
        with super()._entry(timeout), self.owner._entry():
            yield

    @staticmethod
    def _copy(to: Plane, source: Plane, positions: int) -> None:
        if not isinstance(source, DeviceArray):
            source = np.ascontiguousarray(source)
        layers, heads, capacity = source.shape[:3]
        width = source.nbytes // max(layers * heads * capacity, 1) * positions
        copy_starts(to, source, width, layers * heads)


class Region(Filled):
    """Positions [first, first + capacity) of the cache `base`, as a cache; see `Cache.region`."""

    def __init__(self, base: Cache, first: int, capacity: int) -> None:
        self.owner, self.base, self.stride = base.owner, base, base.stride
        self.first, self.capacity = first, capacity

    @property
    def addresses(self) -> tuple[int, ...]:
        """See `Positions`."""
        base = self.base
        if not self.first:
            return base.addresses
        found = []
        for array in (base.k, base.v, base.k_scale, base.v_scale):
            if array is not None:
                found.append(array.ptr + self.first * (array.nbytes // math.prod(array.shape[:3])))
        if base.k_scale is None:
            found.append(base.maps_from(self.first))
        return tuple(found)

    @property
    def closed(self) -> bool:
        """Whether the memory has been freed."""
        return self.base.closed


def cache_layout(
    c: ModelConfig, tokens: int, kv_dtype: str = "f16", *, layers: int | None = None
) -> Layout:
    """Shape and dtype of every array of a cache for `tokens` positions; `layers` instead of all."""
    rows: tuple[int, ...] = (layers or c.layers, c.kv_heads, tokens)
    numbers = ((*rows, c.head_dim), "float16" if kv_dtype == "f16" else "uint8")
    layout = {"k": numbers, "v": numbers}
    if kv_dtype == "f16":
        (nbytes,), dtype = MAPS_LAYOUT
        layout["maps"] = ((-(-tokens // REGION), nbytes), dtype)
    else:
        layout |= dict.fromkeys(("k_scale", "v_scale"), (rows, "float32"))
    return layout


def layout_bytes(layout: Layout) -> int:
    """Device bytes of all arrays of a layout."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout.values())
