"""The wall of a prefill, kernel by kernel, for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyruntime.engine import Engine
from pyruntime.serve.protocol import RequestError

ROUNDS = 3  # of every timing


def read_wall(record: Mapping[str, Any], engine: Engine) -> int:
    """The tokens of the prefill that a body asks for. Raises RequestError."""
    nt = record.get("tokens")
    if type(nt) is not int or not 1 <= nt <= engine.max_tokens:
        text = f"tokens must be an integer from 1 to {engine.max_tokens} (--max-tokens)"
        raise RequestError(text, param="tokens")
    return nt


def measured_wall(engine: Engine, nt: int) -> dict[str, Any]:
    """The record of `pyruntime wall` for a prefill of `nt` random tokens, and its picture as SVG.

    Takes seconds, with the GPU for itself. Raises EngineError: no GPU, or weights but "fp16".
    """
    from pyruntime.measure.launches import gpu_model
    from pyruntime.measure.roofline import roofline
    from pyruntime.measure.wall import measure_wall
    from pyruntime.tools.charts import wall_svg

    roof = roofline(gpu_model(engine).library)
    record = measure_wall(engine, nt, roof, regime="burst", rounds=ROUNDS, commit=None)
    return {"svg": wall_svg(record), "record": record}
