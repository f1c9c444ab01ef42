"""Every exception that pyruntime raises on purpose.

All derive from `PyruntimeError`; `exit_code` is what the command line returns for it
(2: the input is at fault, 3: no usable driver or GPU, 1: the run itself failed).
"""

from __future__ import annotations


def reason(error: BaseException) -> str:
    """What went wrong, without the error number and the file's name that an OSError's text has."""
    return getattr(error, "strerror", None) or str(error)


class PyruntimeError(Exception):
    """Base of all errors raised by this package."""

    exit_code = 1


class GGUFError(PyruntimeError):
    """A GGUF file that cannot be read. The text names file, byte offset and key or tensor."""

    exit_code = 2


class UnsupportedModelError(PyruntimeError):
    """A well-formed file whose architecture, option or tensor this package does not implement."""

    exit_code = 2


class TokenizerError(PyruntimeError):
    """A vocabulary, pre-tokenizer or chat template that is missing or not supported."""

    exit_code = 2


class DownloadError(PyruntimeError):
    """A model could not be fetched, or what arrived is not what was expected."""

    exit_code = 2


class CubinError(PyruntimeError):
    """A cubin that is missing, unreadable, or does not carry the contract that its caller needs."""

    exit_code = 2


class HandoverError(PyruntimeError):
    """An exported K/V cache that cannot be read or written, or does not fit where it should go.

    The text names the file and what is wrong, or the field, theirs and ours.
    """

    exit_code = 2


class InputError(PyruntimeError):
    """A formula, rule, design, baseline or data set that was given and cannot be used."""

    exit_code = 2


class ToolError(PyruntimeError):
    """An external program that is missing or failed. The text says where it was looked for."""

    exit_code = 2


class BatchError(PyruntimeError):
    """A run over a data set that ended early. What it has written can be used to go on."""


class DriverNotFoundError(PyruntimeError):
    """No CUDA driver library, no device, or a device ordinal that does not exist."""

    exit_code = 3


class ArchMismatchError(CubinError):
    """No installed cubin runs on this device. The text names the device and the architectures."""

    exit_code = 3


class CudaError(PyruntimeError):
    """A CUDA driver call failed. `code` is the CUresult value, `name` its enum name."""

    def __init__(self, message: str, *, code: int, name: str, call: str) -> None:
        super().__init__(message)
        self.code = code
        self.name = name
        self.call = call


class OutOfMemoryError(PyruntimeError):
    """Device or host memory does not suffice. The text gives the bytes needed and free."""


class NumericalError(PyruntimeError):
    """A value left the range of its type. The text names layer and tensor."""


class EngineError(PyruntimeError):
    """An engine that cannot do what is asked: closed, forked, its device lost, or on the CPU."""


class WaitTimeoutError(EngineError, TimeoutError):
    """The `timeout` of a call ran out. The engine can be used on, and no cache has grown."""


class BusyError(WaitTimeoutError):
    """It ran out before the call's turn came, so that nothing of the call has begun."""
