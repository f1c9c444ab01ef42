"""Tensor maps: how the tensor memory accelerator sees a matrix (CUDA driver API, CUtensorMap)."""

from __future__ import annotations

import ctypes
import functools

from pyruntime.driver import api
from pyruntime.driver.memory import DeviceArray

_BYTES = 128  # sizeof(CUtensorMap)


class TensorMap(bytes):
    """An encoded map, for a parameter of letter T. It keeps `matrix` alive."""

    matrix: DeviceArray


def tensor_map(matrix: DeviceArray, box_rows: int, box_columns: int) -> TensorMap:
    """The map of a row-major float16 matrix [rows, columns], copied a box at a time.

    Boxes lie in shared memory under the 128-byte swizzle, so one row of a box is at most 128 bytes.
    What a box holds beyond the matrix is read as zeros.

    Raises:
        CudaError: the driver refuses; rows must be whole 16-byte units on a 16-byte boundary.
    """
    rows, columns = matrix.shape
    with matrix.device.current():  # the driver looks the address up in a context
        encoded = TensorMap(_encode(matrix.ptr, rows, columns, box_rows, box_columns))
    encoded.matrix = matrix
    return encoded


@functools.lru_cache(maxsize=4096)  # a prompt of a new length meets the same matrices
def _encode(address: int, rows: int, columns: int, box_rows: int, box_columns: int) -> bytes:
    driver = api.bindings()
    encoded = api.call(
        "cuTensorMapEncodeTiled",
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        2,
        address,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(2 * columns)],  # bytes between rows
        [driver.cuuint32_t(box_columns), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1)] * 2,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        what=f"tensor map of float16 [{rows}, {columns}] in boxes of {box_rows} x {box_columns}",
    )
    return ctypes.string_at(encoded.getPtr(), _BYTES)
