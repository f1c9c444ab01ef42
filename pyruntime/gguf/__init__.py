"""GGUF model files: a bounds-checked reader and the table of tensor types."""

from pyruntime.gguf.cursor import StringArray
from pyruntime.gguf.header import Value
from pyruntime.gguf.reader import GGUFFile
from pyruntime.gguf.tensors import TensorInfo
from pyruntime.gguf.types import TYPES, QuantType, by_name, type_name

__all__ = [
    "TYPES",
    "GGUFFile",
    "QuantType",
    "StringArray",
    "TensorInfo",
    "Value",
    "by_name",
    "type_name",
]
