"""Prefill of GGUF language models on the CUDA driver API. Importing touches no driver."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyruntime.errors import PyruntimeError

if TYPE_CHECKING:
    from pyruntime.engine import Engine, Result
    from pyruntime.model.handover import Exported

__version__ = "0.1.0"
__all__ = ["Engine", "Exported", "PyruntimeError", "Result", "__version__"]
_HOMES = {"Engine": "engine", "Result": "engine", "Exported": "model.handover"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pyruntime' has no attribute {name!r}")
