"""Data sets through many engines at once: `pyruntime batch`, or `run` from a program.

It needs Ray and PyArrow (extra "batch"), which nothing here imports before a run begins.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyruntime.batch.dataset import Report, run
    from pyruntime.batch.tasks import Embed, Score

__all__ = ["Embed", "Report", "Score", "run"]
_HOMES = {"Embed": "tasks", "Score": "tasks", "Report": "dataset", "run": "dataset"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pyruntime.batch' has no attribute {name!r}")
