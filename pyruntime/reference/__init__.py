"""The NumPy backend: what runs without a GPU, and what the GPU is compared with."""

from __future__ import annotations

from pyruntime.reference.cache import Cache
from pyruntime.reference.model import ReferenceModel

__all__ = ["Cache", "ReferenceModel"]
