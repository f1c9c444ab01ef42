"""What is compared: sets of `Engine.load` options, in this process or in another build's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DEFAULT = "default"
_PYTHON = "python:"


@dataclass(frozen=True)
class ArmSpec:
    """An arm as the user names it; `python`: another build's interpreter, or None for ours."""

    label: str
    options: dict[str, Any]
    python: str | None


def parse_arm(text: str) -> ArmSpec:
    """ "default", "attention=r48,overlap=off", "python:/path/to/python" or that with options after
    a comma.

    Raises:
        ValueError: none of these.
    """
    if text.startswith(_PYTHON):
        python, _, options = text.removeprefix(_PYTHON).partition(",")
        if not python:
            raise ValueError(f"{text!r}: python: needs the path of an interpreter")
        return ArmSpec(text, parse_options(options), python)
    return ArmSpec(text, {} if text == DEFAULT else parse_options(text), None)


def parse_options(text: str) -> dict[str, Any]:
    """ "a=1,b=x" as keyword arguments; whole numbers become int.

    Raises:
        ValueError: an item is no key=value.
    """
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not (key.isidentifier() and equals and value):
            raise ValueError(
                f"{item!r} is no key=value; give options as attention=r48, or {DEFAULT!r}"
            )
        options[key] = int(value) if value.isdigit() else value
    return options


def require_gpu(command: str) -> None:
    """Raises DriverNotFoundError, saying what needs one, if there is no GPU."""
    from pyruntime.driver.device import device_count
    from pyruntime.errors import DriverNotFoundError

    try:
        found = device_count()
    except DriverNotFoundError as error:
        raise DriverNotFoundError(f"{command} times kernels on a GPU: {error}") from None
    if not found:
        raise DriverNotFoundError(f"{command} times kernels on a GPU: the driver shows no device")
