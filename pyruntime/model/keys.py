"""Typed reads of the metadata under `<arch>.`, and a refusal of what nobody read.

Every option of an architecture changes what the network computes. A key counts as understood
because it was read, so there is no second list to keep: what is left over must be on one of the
two short lists below, or the model is refused by the name of the key.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pyruntime.errors import UnsupportedModelError
from pyruntime.gguf.source import shown

if TYPE_CHECKING:
    from pyruntime.gguf.reader import GGUFFile

# Options that are not implemented, with the values that switch them off.
NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}

# Facts about where the file came from; no value of these changes a result.
INFORMATIVE = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})


def value_shown(value: object) -> str:
    """A metadata value for a message."""
    return shown(repr(value)) if isinstance(value, bool | int | float | str) else "an array"


class ArchitectureKeys:
    """The metadata keys `<arch>.*` of one file.

    Every read raises UnsupportedModelError, naming file, byte offset and key, when the key is
    missing without a default, of another type, or out of range.
    """

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file = file
        self.arch = arch
        self._read: set[str] = set()

    def refusal(self, name: str, problem: str) -> UnsupportedModelError:
        """The error that refuses `<arch>.<name>`, to be raised."""
        return UnsupportedModelError(f"{self.file.where(key=f'{self.arch}.{name}')}: {problem}")

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer, stored in any integer type."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refusal(name, f"is {value_shown(value)}, not an integer")
        if value < 1:
            raise self.refusal(name, f"is {value}, not a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite positive number, stored in any numeric type."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(name, f"is {value_shown(value)}, not a number")
        if not (math.isfinite(value) and value > 0):
            raise self.refusal(name, f"is {value_shown(value)}, not a finite positive number")
        return float(value)

    def optional_integer(self, name: str) -> int | None:
        """A positive integer, or None where the key is absent or 0, which switches it off."""
        return None if self._off(name) else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        """A finite positive number, or None where the key is absent or 0."""
        return None if self._off(name) else self.number(name)

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.refusal(name, f"is {value_shown(value)}, not a string")
        return value

    def refuse_unread(self) -> None:
        """Refuse the first key that was not read, unless it is informative or switched off."""
        prefix = f"{self.arch}."
        for key, value in self.file.metadata.items():
            name = key.removeprefix(prefix)
            if name == key or name in self._read or name in INFORMATIVE:
                continue
            neutral = NEUTRAL.get(name, ())
            if not isinstance(value, bool | int | float) or value not in neutral:
                only = f" (only {' or '.join(map(str, neutral))})" if neutral else ""
                raise self.refusal(name, f"the option {value_shown(value)} is not supported{only}")

    def _off(self, name: str) -> bool:
        value = self._get(name, 0)
        return not isinstance(value, bool) and isinstance(value, int | float) and value == 0

    def _get(self, name: str, default: object) -> Any:
        self._read.add(name)
        value = self.file.metadata.get(f"{self.arch}.{name}", default)
        if value is None:
            raise self.refusal(name, "is missing")
        return value
