"""Tensor maps: how the tensor memory accelerator sees an array (CUDA driver API, CUtensorMap)."""

from __future__ import annotations

import ctypes
import functools
import math

from pyruntime.driver import api
from pyruntime.driver.memory import DeviceArray

_BYTES = 128  # sizeof(CUtensorMap)


class TensorMap(bytes):
    """An encoded map, for a parameter of letter T. It keeps `array` alive."""

    array: DeviceArray


def tensor_map(
    array: DeviceArray,
    box: tuple[int, ...],
    shape: tuple[int, ...] | None = None,
    *,
    first: int = 0,
) -> TensorMap:
    """The map of a row-major float16 array, copied a box at a time.

    Boxes lie in shared memory under the 128-byte swizzle, so one row of a box is at most 128 bytes.
    What a box holds beyond the array is read as zeros and not written.

    Args:
        box: elements along each axis of `shape`.
        shape: how to see the array, if not as it is.
        first: the map begins at so many of the rows of the last but one axis, which is that much
            shorter in it.

    Raises:
        CudaError: the driver refuses; rows must be whole 16-byte units on a 16-byte boundary.
    """
    with array.device.current():  # the driver looks the address up in a context
        encoded = TensorMap(_encode(array.ptr, shape or array.shape, box, first))
    encoded.array = array
    return encoded


@functools.lru_cache(maxsize=4096)  # a prompt of a new length meets the same arrays
def _encode(address: int, shape: tuple[int, ...], box: tuple[int, ...], first: int) -> bytes:
    driver = api.bindings()
    rank = len(shape)
    strides = [2 * math.prod(shape[axis:]) for axis in range(1, rank)]  # bytes, from the outermost
    if first:
        address += first * strides[-1]
        shape = (*shape[:-2], shape[-2] - first, shape[-1])
    encoded = api.call(
        "cuTensorMapEncodeTiled",
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        rank,
        address,
        [driver.cuuint64_t(n) for n in reversed(shape)],
        [driver.cuuint64_t(n) for n in reversed(strides)],
        [driver.cuuint32_t(n) for n in reversed(box)],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        what=f"tensor map of float16 {list(shape)} in boxes of {' x '.join(map(str, box))}",
    )
    return ctypes.string_at(encoded.getPtr(), _BYTES)
