"""A consumer of DLPack capsules, with the structs of dlpack.h in ctypes.

`DLTensor` and the two structs around it are written down in full here, from the header and not from
the package, so that a test compares two readings of it.
"""

from __future__ import annotations

import ctypes
from typing import Any


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("dl_tensor", DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    )


NAMES = {b"dltensor": DLManagedTensor, b"dltensor_versioned": DLManagedTensorVersioned}
USED = {name: b"used_" + name for name in NAMES}  # a capsule does not copy its name


def _function(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_get_name = _function("PyCapsule_GetName", ctypes.c_char_p, ctypes.py_object)
_set_name = _function("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_get_pointer = _function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)


class Consumer:
    """Takes what a capsule holds, once.

    Attributes:
        name: of the capsule before. managed: the struct; tensor: the DLTensor in it.
    """

    def __init__(self, capsule: Any) -> None:
        self.name: bytes = _get_name(capsule)
        self.address: int = _get_pointer(capsule, self.name)
        self.managed = NAMES[self.name].from_address(self.address)
        self.tensor: DLTensor = self.managed.dl_tensor
        _set_name(capsule, USED[self.name])

    def close(self) -> None:
        """Calls the deleter as C code does, without the GIL."""
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.managed.deleter)(self.address)
