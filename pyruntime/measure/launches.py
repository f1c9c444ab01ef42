"""An engine's launches and kernels as plain records."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from pyruntime.cubin.difference import FIELDS
from pyruntime.cubin.installed import root
from pyruntime.cubin.records import kernel_record, kernels_of, read_all
from pyruntime.engine import Engine
from pyruntime.errors import EngineError
from pyruntime.measure.inplace import time_in_place
from pyruntime.measure.records import architecture_of
from pyruntime.measure.series import REGIMES
from pyruntime.model.gpu import GpuModel


def gpu_model(engine: Engine) -> GpuModel:
    """The engine's model. Raises EngineError if that does not run on a GPU."""
    if not isinstance(engine.model, GpuModel):
        raise EngineError(f"kernels are timed on a GPU; this engine runs on {engine.path}")
    return engine.model


def describe(engine: Engine, ids: NDArray[Any]) -> dict[str, Any]:
    """`launches` of a prefill of `ids` [nt], [role, kernel, grid] each, and `kernels` by name."""
    model = gpu_model(engine)
    launches = model.recorded(len(ids))
    return {
        "launches": [[x.role, x.kernel.name, list(x.grid)] for x in launches],
        "kernels": kernel_figures({x.kernel.name for x in launches}, architecture_of(model.device)),
    }


def kernel_figures(names: set[str], architecture: str) -> dict[str, dict[str, Any]]:
    """What two builds' kernels are compared by (`difference.FIELDS`), and the code's sha256."""
    cubins, _ = read_all([root() / architecture])
    return {
        kernel.name: {f: kernel_record(kernel)[f] for f in (*FIELDS, "code_sha256")}
        for _, kernel in kernels_of(cubins)
        if kernel.name in names
    }


def role_times(engine: Engine, ids: NDArray[Any], rounds: int) -> dict[str, float]:
    """Milliseconds of each role in a prefill of `ids` [nt], timed in place."""
    times: dict[str, float] = {}
    model = gpu_model(engine)
    with model.staged(ids, engine.new_cache(len(ids))) as (launches, stream):
        timed = time_in_place(
            launches, stream, rounds=rounds, rest=REGIMES["burst"].rest, overlap=model.overlap
        )
        for launch, ms in zip(launches, timed.medians, strict=True):
            times[launch.role] = times.get(launch.role, 0.0) + ms
    return times
