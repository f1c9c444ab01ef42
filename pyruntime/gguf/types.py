"""The tensor types that are read, one row each, and words for those that are not.

Ids, block sizes and byte sizes are ggml's (`enum ggml_type`, `block_*` in ggml-common.h).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantType:
    """One storage type: `block` consecutive elements of a row are stored in `bytes` bytes."""

    name: str
    id: int
    block: int
    bytes: int

    @property
    def suffix(self) -> str:
        """The type's name inside the names of kernels, as in `q4_k`."""
        return self.name.lower()

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` values; `elements` is a multiple of `block`."""
        return elements // self.block * self.bytes


TYPES: dict[int, QuantType] = {
    row.id: row
    for row in (
        QuantType("F32", 0, 1, 4),
        QuantType("F16", 1, 1, 2),
        QuantType("Q4_0", 2, 32, 18),
        QuantType("Q4_1", 3, 32, 20),
        QuantType("Q5_0", 6, 32, 22),
        QuantType("Q5_1", 7, 32, 24),
        QuantType("Q8_0", 8, 32, 34),
        QuantType("Q2_K", 10, 256, 84),
        QuantType("Q3_K", 11, 256, 110),
        QuantType("Q4_K", 12, 256, 144),
        QuantType("Q5_K", 13, 256, 176),
        QuantType("Q6_K", 14, 256, 210),
        QuantType("IQ4_NL", 20, 32, 18),
        QuantType("IQ4_XS", 23, 256, 136),
        QuantType("BF16", 30, 1, 2),
    )
}

# Q4_2, Q4_3 and the repacked Q4_0_*_* and IQ4_NL_*_* were once written to files and then withdrawn.
REMOVED = frozenset({4, 5, 31, 32, 33, 36, 37, 38})

_BY_NAME = {row.name: row for row in TYPES.values()}


def by_name(name: str) -> QuantType:
    """The type called `name` in any case. Raises ValueError that lists the supported ones."""
    try:
        return _BY_NAME[name.upper()]
    except KeyError:
        raise ValueError(f"unknown type {name!r}; supported: {', '.join(_BY_NAME)}") from None


def type_name(type_id: int) -> str:
    """What to call a type id: `Q4_K`, `type 36 (removed)`, `type 16 (IQ2_XXS, not supported)`."""
    if type_id in TYPES:
        return TYPES[type_id].name
    if type_id in REMOVED:
        return f"type {type_id} (removed)"
    from gguf import GGMLQuantizationType

    try:
        return f"type {type_id} ({GGMLQuantizationType(type_id).name}, not supported)"
    except ValueError:
        return f"type {type_id} (unknown)"
