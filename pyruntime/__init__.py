"""Prefill of GGUF language models on the CUDA driver API. Importing touches no driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyruntime.errors import PyruntimeError

if TYPE_CHECKING:
    from pyruntime.engine import Engine, Result

__version__ = "0.1.0"
__all__ = ["Engine", "PyruntimeError", "Result", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("Engine", "Result"):
        from pyruntime import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'pyruntime' has no attribute {name!r}")
