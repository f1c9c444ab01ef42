"""The only importer of `cuda.bindings`: one checked way to call the driver.

The package's own cuda-bindings wheel loads libcuda on the first call and raises its own
`DynamicLibNotFoundError` when there is none; here that becomes `DriverNotFoundError`.
"""

from __future__ import annotations

import os
from typing import Any

from pyruntime.errors import CudaError, DriverNotFoundError, EngineError, OutOfMemoryError

OUT_OF_MEMORY = 2
NOT_READY = 600
# After these the context is lost for good: those of which the driver's header (enum CUresult) says
# that nothing works any more, uncorrectable errors, a destroyed context, and what is unknown.
STICKY = frozenset(
    {226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911} | {214, 220, 709, 999}
)


def bindings() -> Any:
    """The `cuda.bindings.driver` module, after one successful `cuInit`.

    Raises:
        DriverNotFoundError: no driver library, or it refuses to initialise.
        EngineError: the driver was initialised before this process was forked.
    """
    return _driver or _initialised()


def _initialised() -> Any:
    global _driver
    if forked:
        raise EngineError("the CUDA driver does not work in a forked child: use a new process")
    from cuda.bindings import driver

    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # cuda.pathfinder.DynamicLibNotFoundError is one
        raise DriverNotFoundError("no CUDA driver: the library libcuda was not found") from error
    if int(status):
        raise DriverNotFoundError(f"no usable CUDA driver: cuInit returned {_name(status)}")
    _driver = driver
    return driver


_driver: Any = None  # the module, once it is initialised
# Whether this process is a child of one that had initialised it: what that gave is the parent's.
forked = False


def _note_fork() -> None:
    global _driver, forked
    _driver, forked = None, forked or _driver is not None


if hasattr(os, "register_at_fork"):  # where processes fork; asking for an id is a system call
    os.register_at_fork(after_in_child=_note_fork)


def call(name: str, *args: Any, what: str = "") -> Any:
    """Calls driver function `name`; returns its results without the status (None, one, a tuple).

    Args:
        what: what was being done, for the error text (kernel, grid, bytes).

    Raises:
        OutOfMemoryError: CUDA_ERROR_OUT_OF_MEMORY.
        CudaError: any other failure; the text names call, code and `what`.
    """
    answer = getattr(_driver or _initialised(), name)(*args)
    if answer[0]:
        raise failure(name, answer[0], what)
    if len(answer) == 1:
        return None
    return answer[1] if len(answer) == 2 else answer[1:]


def make(name: str, undo: str, *args: Any) -> Any:
    """Calls driver function `name`, which takes long, and returns the one thing that it makes.

    Where an interrupt comes meanwhile, function `undo` is called with that. See `call`.
    """
    answers: list[Any] = []
    try:
        # One call into C is whole: the interrupt shows when the answer is in the list.
        answers.extend(map(getattr(bindings(), name), *zip(args)))
    except BaseException:
        for status, *made in answers:
            if not status:
                call(undo, *made)
        raise
    status, *made = answers[0]
    if status:
        raise failure(name, status)
    return made[0]


def failure(name: str, status: Any, what: str = "") -> CudaError | OutOfMemoryError:
    """The exception for a failed driver call."""
    text = f"{name} failed: {_name(status)} ({int(status)})" + (f"; {what}" if what else "")
    if int(status) == OUT_OF_MEMORY:
        return OutOfMemoryError(text)
    return CudaError(text, code=int(status), name=_name(status), call=name)


def constant(enum: str, member: str) -> Any:
    """A member of a driver enum, such as ("CUstream_flags", "CU_STREAM_NON_BLOCKING")."""
    return getattr(getattr(bindings(), enum), member)


def _name(status: Any) -> str:
    # The enum knows its names without a driver; cuGetErrorName does not.
    return str(getattr(status, "name", status))
