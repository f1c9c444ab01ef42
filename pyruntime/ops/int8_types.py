"""The types of packed weights that are multiplied with int8 activations."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pyruntime.cubin.installed import installed_specs, root
from pyruntime.ops.gemm_int8 import FAMILY

FAMILIES = (FAMILY, "gemv", "repack")  # for many rows, for a few, and for the weights themselves


def installed_types() -> frozenset[str]:
    """GGUF names of those that the installed cubins have all kernels for. Raises CubinError."""
    return _types(root())


@lru_cache(4)
def _types(folder: Path) -> frozenset[str]:
    found = dict.fromkeys(FAMILIES, frozenset[str]())
    for spec in installed_specs():
        if spec.family in found:
            found[spec.family] |= {str(spec.tile["type"]).upper()}
    return frozenset.intersection(*found.values())
