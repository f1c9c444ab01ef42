"""Ray: started here, for this machine alone, or one that is there; and parts through its actors."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyruntime
from pyruntime.batch.parts import Part
from pyruntime.batch.worker import Done, Job, Worker
from pyruntime.errors import BatchError, ToolError, reason

log = logging.getLogger("pyruntime")

GOES_ON = "what is written stays, and the same run goes on from there"
HERE = str(Path(pyruntime.__file__).parents[1])  # the folder of the package that runs
ANSWER_SECONDS = 10  # for a cluster to accept a connection
STORE_BYTES = 128 << 20  # for objects: they are only parts' names and counts

# Where there is no cluster to be, Ray listens at the loopback address, in all its processes: on
# Linux this says so, in spite of its name.
_LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "0",
}
# Of its processes' own logs the fatal errors; a program that wants more of them says so itself.
_QUIET = {"RAY_BACKEND_LOG_LEVEL": os.environ.get("RAY_BACKEND_LOG_LEVEL", "fatal")}
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def require() -> None:
    """Raises ToolError where Ray Data or PyArrow is not installed."""
    for package in ("ray", "pyarrow", "pandas"):  # Ray Data needs the last one
        if importlib.util.find_spec(package) is None:
            raise ToolError(f"{package} is not installed: pip install 'pyruntime-cuda[batch]'")


@contextmanager
def connected(address: str | None, *, cpus: int = 1, gpus: int = 0) -> Iterator[None]:
    """Ray, until the end, unless the program had it before.

    Args:
        address: of a cluster, as `ray.init` takes it; None: the program's own, or a new one on
            this machine, with no dashboard, reachable from this machine only, and with this many
            cpus and gpus.

    Raises BatchError: there is none at that address, or it would be reachable from elsewhere.
    """
    import ray

    if running() and address is None:
        yield
        return
    if address is not None:
        _check_listens(address)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # stays: Ray Data asks again in each run
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is not None:
            ray.init(address=address, **quiet)
        else:
            with _environment(_LOCAL | _QUIET), _loopback():
                ray.init(
                    address="local", num_cpus=cpus, num_gpus=gpus, include_dashboard=False,
                    object_store_memory=STORE_BYTES, **quiet,
                )  # fmt: skip
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise BatchError(f"Ray{f' at {address}' if address else ''}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Raises BatchError where nobody listens at HOST:PORT: Ray would go on asking for minutes."""
    from ray.util import get_node_ip_address

    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdigit():  # "auto", or of a client: Ray finds out itself
        return
    hosts = [host.strip("[]")]
    if hosts[0] in ("localhost", "127.0.0.1", "::1"):  # which Ray takes for this one
        hosts.append(get_node_ip_address())
    for name in hosts:
        try:
            socket.create_connection((name, int(port)), ANSWER_SECONDS).close()
            return
        except (OSError, OverflowError) as error:
            why = reason(error)
    raise BatchError(f"Ray at {address}: {why}")


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _loopback() -> Iterator[None]:
    """What the variable of _LOCAL says, to a Ray that was imported before it was set.

    Raises BatchError where Ray has this no more: it is not to be started for everyone to reach.
    """
    try:
        from ray._private import ray_constants

        before = ray_constants.ENABLE_RAY_CLUSTER
    except (ImportError, AttributeError) as error:
        raise BatchError(
            f"this version of Ray cannot be kept to this machine ({error}): start it yourself, "
            "and give its address"
        ) from error
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def running() -> bool:
    """Whether the program has started or joined a Ray already."""
    ray: Any = sys.modules.get("ray")  # who has started it has imported it
    return ray is not None and bool(ray.is_initialized())


def resources() -> tuple[int, int]:
    """How many CPUs and GPUs the Ray has that is connected."""
    import ray

    found = ray.cluster_resources()
    return int(found.get("CPU", 0)), int(found.get("GPU", 0))


def run_parts(job: Job, parts: Sequence[Part], *, workers: int, on_gpu: bool) -> Iterator[Done]:
    """The parts, as workers write them, in any order.

    A worker that dies is started again, and its part run again: `Folder.attempt` bounds that.

    Raises BatchError: a part has failed.
    """
    import ray
    import ray.cloudpickle

    context = ray.data.DataContext.get_current()
    with _quiet(context):
        data = ray.data.from_items(
            [asdict(part) for part in parts], override_num_blocks=len(parts)
        ).map(
            _actor(),
            fn_constructor_args=(HERE, ray.cloudpickle.dumps(partial(Worker, job))),
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_cpus=1,
            num_gpus=1 if on_gpu else 0,
            runtime_env={} if on_gpu else {"env_vars": _ONE_THREAD},
        )
        try:
            for row in data.iter_rows():
                done = Done(**row)
                if done.failure:
                    raise BatchError(f"{done.failure} ({GOES_ON})")
                yield done
        except ray.exceptions.RayError as error:
            text = str(error).strip().splitlines()[-1]  # before it there are tracebacks
            raise BatchError(f"{text} ({GOES_ON})") from error


def _actor() -> type:
    """What makes a worker in a process of Ray, and hands it the rows.

    Ray has its processes look into this program's current folder for modules, before all others:
    in a clone of this project these would be sources that no kernels were built for. So this class
    is local, which is pickled whole, and imports the package that runs here before anything of it
    is unpickled. On a machine that has no such folder it is the one that is installed there.
    """

    class Actor:
        def __init__(self, folder: str, worker: bytes) -> None:
            import pickle
            import sys

            sys.path.insert(0, folder)
            import pyruntime  # noqa: F401

            sys.path.remove(folder)
            self._worker = pickle.loads(worker)()

        def __call__(self, row: dict[str, Any]) -> Any:
            return self._worker(row)

    return Actor


@contextmanager
def _quiet(context: Any) -> Iterator[None]:
    """Without Ray Data's bars and reports, but where our own log tells everything."""
    logger, bars = logging.getLogger("ray.data"), context.enable_progress_bars
    level = logger.level
    if log.getEffectiveLevel() > logging.DEBUG:
        logger.setLevel(logging.CRITICAL)
        context.enable_progress_bars = False
    try:
        yield
    finally:
        logger.setLevel(level)
        context.enable_progress_bars = bars
