"""What one engine does: a part after the other, from the input to a file of results."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pyruntime.batch import formats
from pyruntime.batch.folder import Folder, publish
from pyruntime.batch.parts import Part
from pyruntime.batch.tasks import results
from pyruntime.engine import Engine
from pyruntime.errors import BatchError

DEATHS = 3  # of workers at a part, until the run is given up


@dataclass(frozen=True)
class Job:
    """What all workers of a run have in common.

    Attributes:
        model: as `Engine.load` takes it. options: of `Engine.load`, the device included.
        fingerprint: of the model, see `Engine.fingerprint`.
        batch_tokens: tokens that the engine is given at once.
    """

    model: str
    options: dict[str, Any]
    fingerprint: str
    form: str
    columns: formats.Columns
    out: Path
    batch_tokens: int


@dataclass(frozen=True)
class Done:
    """A part that is written.

    Attributes:
        rows: of it; errors: how many of them have one; first_error: "id: error" of the first.
        tokens: of the rows without error. seconds: that it took.
        device: `Engine.path`. pid: of the worker, on its own node.
        failure: why it is not written after all; "" if it is.
    """

    index: int
    pid: int
    rows: int = 0
    errors: int = 0
    first_error: str = ""
    tokens: int = 0
    seconds: float = 0.0
    device: str = ""
    failure: str = ""


class Worker:
    """An engine, as Ray Data calls it: with a `Part` as a row; it returns a `Done` as one."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = Folder(job.out, job.form)
        self._format = formats.of(job.form, job.columns)

    @cached_property
    def _engine(self) -> Engine:
        """Loaded with the first part: what fails before that Ray tries again for ever."""
        engine = Engine.load(self._job.model, **self._job.options)
        if engine.fingerprint != self._job.fingerprint:
            raise BatchError(f"{self._job.model}: another model than where the run was started")
        return engine

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        part = Part(**row)
        try:
            return vars(self.do(part))
        except Exception as error:  # Ray would wrap it in many, with tracebacks for text
            failure = f"{type(error).__name__}: {error}"
            return vars(Done(part.index, os.getpid(), failure=failure))

    def do(self, part: Part) -> Done:
        """Writes the results of a part.

        Raises BatchError: input or model are not what they were, or workers die of this part.
        OSError, and errors of the engine that are no row's fault.
        """
        started = time.perf_counter()
        job, path = self._job, self._folder.part(part.index)
        with self._folder.attempt(path.name, deaths=DEATHS) as own:
            engine = self._engine
            rows, rest = self._format.read(part)
            if len(rows) != part.rows:
                raise BatchError(f"{part.path} has changed since the run was started")
            asked = [(row.values, row.error) for row in rows]
            items = results(job.columns.task, engine, asked, job.batch_tokens)
            self._format.write(own, rows, rest, items)
            publish(own, path)
        errors = [
            f"{row.id}: {item.error}"
            for row, item in zip(rows, items, strict=True)
            if item.error is not None
        ]
        return Done(
            index=part.index,
            rows=len(rows),
            errors=len(errors),
            first_error=errors[0] if errors else "",
            tokens=sum(item.tokens for item in items if item.error is None),
            seconds=time.perf_counter() - started,
            device=engine.path,
            pid=os.getpid(),
        )
