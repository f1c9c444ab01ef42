"""A whole run: input, model and options in, a folder of results out, however often it is begun."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from pyruntime import __version__
from pyruntime.batch import cluster, formats, parts
from pyruntime.batch.folder import Folder
from pyruntime.batch.options import BATCH_TOKENS, DEVICES, PART_ROWS
from pyruntime.batch.tasks import Embed, Score
from pyruntime.batch.worker import Done, Job
from pyruntime.driver.device import device_count
from pyruntime.engine import Engine
from pyruntime.errors import BatchError, DriverNotFoundError, InputError
from pyruntime.gguf import GGUFFile
from pyruntime.hub import resolve
from pyruntime.model.config import ModelConfig

log = logging.getLogger("pyruntime")


@dataclass(frozen=True)
class Report:
    """What a run has come to.

    Attributes:
        rows: of the output, all of it; errors: how many have an error; first_error: one of those
            that this run met.
        parts: files of the output; resumed: how many of them were there before.
        workers: that this run had. device: theirs, as `Engine.path` names it, "" where nothing was
            left to do; of several kinds, or with several modes of weights, all of them.
        tokens: that this run has gone through. seconds: that it took, start of Ray included.
    """

    rows: int
    errors: int
    first_error: str
    parts: int
    resumed: int
    workers: int
    device: str
    tokens: int
    seconds: float


def run(
    model: str | os.PathLike[str],
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    task: Score | Embed,
    device: str = "auto",
    workers: int | None = None,
    address: str | None = None,
    id: str = "id",
    prefix: str = "",
    part_rows: int = PART_ROWS,
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[Done], object] | None = None,
    **options: Any,
) -> Report:
    """Scores or embeds every row of a data set, with one engine per GPU or CPU core.

    The output has each row of the input once, in its order, with the input's columns, the task's
    results and `error`, which is null where all went well. A run that was killed is continued by
    the same call: parts are written whole or not at all. The values do not depend on the workers.

    Args:
        model: see `Engine.load`; a path, or what it fetches, is the same on all nodes.
        source: a .jsonl or .parquet file, or a folder of files of one of these formats.
        out: a folder, which is made; beside `_manifest.json` and `_devices.json` it holds
            `part-000000` and so on, in the format of the input. On a cluster all nodes share both.
        task: what is done, and the columns that it reads.
        device: "auto" (GPUs where there are any), "cpu" or "cuda". CUDA_VISIBLE_DEVICES says which.
        workers: default: one per GPU, or per CPU core, whose BLAS has one thread.
        address: of a Ray cluster; None: the Ray that the program has started, or else one that is
            started for this run, on this machine alone.
        id: the column that names rows; where there is none it is made, "file:line".
        prefix: what the names of result columns begin with.
        part_rows: rows of a file of results: what is lost at most, for each worker, by a kill.
        batch_tokens: tokens that an engine is given at once, to be packed into passes.
        progress: called with each part that is written.
        options: of `Engine.load`: weights, attention, kv_dtype, graphs, max_tokens and so on.

    Raises:
        InputError: input, or an output that is another run's. ToolError: Ray is not installed.
        BatchError: the run ended early. As `Engine.load` for model and device. ValueError: an
        option.
    """
    started = time.perf_counter()
    _check(device, workers=workers, part_rows=part_rows, batch_tokens=batch_tokens)
    options = _options(options)
    columns = formats.Columns(task, id, prefix)
    if id in columns.results:
        raise ValueError(f"id={id!r} is a column of the results")
    cluster.require()
    path = resolve(model)
    with GGUFFile.open(path) as file:
        ModelConfig.from_gguf(file)  # refuses what no worker could load
        fingerprint = file.fingerprint
    given = parts.cut(Path(source), part_rows)
    form = formats.of(given.form, columns)
    if isinstance(form, formats.Parquet):
        for name in dict.fromkeys(part.path for part in given.parts):
            form.check(Path(name))
    folder = Folder(Path(out).absolute(), given.form)
    with ExitStack() as stack:
        shared = address is not None or cluster.running()
        if shared:
            stack.enter_context(cluster.connected(address))
        cpus, gpus = cluster.resources() if shared else _own(device)
        on_gpu = _on_gpu(device, gpus)
        stack.enter_context(
            folder.opened(
                {
                    "version": __version__,
                    "input": given.files,
                    "model": fingerprint,
                    "task": {"name": task.name, **asdict(task)},
                    "device": "cuda" if on_gpu else "cpu",
                    "id": id,
                    "prefix": prefix,
                    "part_rows": part_rows,
                    "batch_tokens": batch_tokens,
                    "options": options,
                }
            )
        )
        before = [part for part in given.parts if folder.part(part.index).exists()]
        counts = [_counted(form, folder.part(part.index), part.rows) for part in before]
        left = [part for part in given.parts if not folder.part(part.index).exists()]
        there = cpus
        if on_gpu:
            there = min(gpus, cpus) if shared else gpus  # Ray wants a core for each, too
        used = min(len(left), _workers(workers, there, fixed=shared or on_gpu))
        found: list[Done] = []
        devices = folder.devices()
        if left:
            if not shared:
                stack.enter_context(cluster.connected(None, cpus=used, gpus=gpus))
            job = Job(
                model=str(path.absolute() if path == Path(model) else model),
                options={**options, "device": "cuda:0" if on_gpu else "cpu"},
                fingerprint=fingerprint, form=given.form, columns=columns, out=folder.path,
                batch_tokens=batch_tokens,
            )  # fmt: skip
            for done in cluster.run_parts(job, left, workers=used, on_gpu=on_gpu):
                found.append(done)
                if done.device not in devices:
                    devices = sorted([*devices, done.device])
                    folder.note(devices)
                if progress is not None:
                    progress(done)
        if len(devices) > 1:
            log.warning("values are of several devices: %s", "; ".join(devices))
        if missing := [p.index for p in given.parts if not folder.part(p.index).exists()]:
            raise BatchError(f"{out}: {len(missing)} parts are missing, such as {missing[0]}")
    return Report(
        rows=sum(part.rows for part in given.parts),
        errors=sum(counts) + sum(done.errors for done in found),
        first_error=next((done.first_error for done in found if done.errors), ""),
        parts=len(given.parts),
        resumed=len(before),
        workers=used,
        device="; ".join(sorted({done.device for done in found})),
        tokens=sum(done.tokens for done in found),
        seconds=time.perf_counter() - started,
    )


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Those that are not as `Engine.load` has them anyway. Raises ValueError: there is no such."""
    known = signature(Engine.load).parameters
    for name in given:
        if name not in known or name in ("model", "stream"):
            raise ValueError(f"{name}: there is no such option of a run")
    return {name: value for name, value in given.items() if value != known[name].default}


def _check(device: str, **numbers: int | None) -> None:
    if device not in DEVICES:
        raise ValueError(
            f"device={device!r}: {', '.join(DEVICES)}; CUDA_VISIBLE_DEVICES says which GPUs"
        )
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name}={number}: it must be at least 1")


def _own(device: str) -> tuple[int, int]:
    """How many CPU cores and GPUs of this machine there are for a run.

    Raises DriverNotFoundError for device "cuda" without a driver.
    """
    gpus = 0
    if device != "cpu":
        try:
            gpus = device_count()
        except DriverNotFoundError:
            if device == "cuda":
                raise
    return len(os.sched_getaffinity(0)), gpus


def _on_gpu(device: str, gpus: int) -> bool:
    if device == "cuda" and not gpus:
        raise DriverNotFoundError("device='cuda': there is no GPU here")
    if device == "auto" and not gpus:
        log.warning("running on the CPU with NumPy: there is no GPU here")
    return device != "cpu" and gpus > 0


def _workers(wanted: int | None, there: int, *, fixed: bool) -> int:
    """Raises ValueError where more are wanted than there can be at once."""
    if wanted is not None and wanted > there and fixed:
        raise ValueError(f"workers={wanted}: there is room for {there}")
    return there if wanted is None else wanted


def _counted(form: formats.JsonLines | formats.Parquet, path: Path, rows: int) -> int:
    """How many rows have an error, of a file that an earlier run wrote. Raises InputError."""
    found, errors = form.summary(path)
    if found != rows:
        raise InputError(f"{path}: {found} rows instead of {rows}; delete it, then run again")
    return errors
