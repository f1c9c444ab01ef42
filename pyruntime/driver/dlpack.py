"""DLPack capsules for device memory.

NumPy makes the capsule, of an array that pretends to lie in host memory at the device's address,
and the struct inside is then corrected. So the deleter, and the destructor of a capsule that nobody
consumed, are NumPy's C functions. Callbacks made by ctypes could not take their place: a destructor
may be called while an exception is set, under which no Python function can return, and a deleter
after the interpreter has ended.

Structs and rules: dlpack.h and https://dmlc.github.io/dlpack/latest/python_spec.html.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

CUDA = 2  # kDLCUDA
# Older ones make legacy capsules only, which the specification lets a producer return at any time.
_VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


class _Tensor(ctypes.Structure):
    """The head of a DLTensor, with which a legacy capsule's struct, DLManagedTensor, begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned of major version 1, as far as `_Tensor` goes."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class _Pretended:
    """What NumPy takes for host memory at `address`, and keeps alive; it keeps `lease` alive."""

    def __init__(self, lease: object, address: int, shape: tuple[int, ...], dtype: str) -> None:
        self._lease = lease
        self.__array_interface__ = {
            "version": 3, "data": (address, False), "shape": shape, "typestr": dtype,
        }  # fmt: skip


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def capsule(
    lease: object,
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    ordinal: int,
    *,
    versioned: bool,
) -> Any:
    """A capsule of a writable, C-contiguous array of `shape` at `address` on device cuda:`ordinal`.

    Args:
        lease: kept alive until the consumer has called the deleter, in whatever thread, or until
            the capsule is dropped without one.
        versioned: of DLPack 1 ("dltensor_versioned"), where NumPy can (2.1), instead of a legacy
            one ("dltensor").
    """
    pretended = np.asarray(_Pretended(lease, address, shape, dtype.str))
    if versioned and _VERSIONED:
        made = pretended.__dlpack__(max_version=(1, 0))
        tensor = _Versioned.from_address(_pointer(made, b"dltensor_versioned")).tensor
    else:
        made = pretended.__dlpack__()
        tensor = _Tensor.from_address(_pointer(made, b"dltensor"))
    tensor.data = address if math.prod(shape) else None
    tensor.device_type, tensor.device_id = CUDA, ordinal
    return made
