"""JSON and TOML files that say by their `schema` what they are."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from pyruntime.errors import InputError, reason

_SHOWN = 100  # characters of another schema


def read_json(path: Path, schema: str) -> dict[str, Any]:
    """The object in a JSON file of this schema, such as "pyruntime.wall/1", `schema` included.

    Raises:
        InputError: the file cannot be read, or is none; the text says what was expected.
    """
    return _read(path, schema, "JSON")


def read_toml(path: Path, schema: str) -> dict[str, Any]:
    """The table of a TOML file of this schema, `schema` included. Raises as `read_json`."""
    return _read(path, schema, "TOML")


def _read(path: Path, schema: str, form: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {reason(error)}") from None
    except UnicodeDecodeError as error:
        raise _other(path, schema, form, f"not UTF-8 at byte {error.start}") from None
    try:
        found = json.loads(text) if form == "JSON" else tomllib.loads(text)
    except RecursionError:
        raise _other(path, schema, form, "nested too deeply") from None
    except ValueError as error:
        raise _other(path, schema, form, str(error)) from None
    if not isinstance(found, dict) or "schema" not in found:
        raise _other(path, schema, form, "no schema")
    if found["schema"] != schema:
        raise _other(path, schema, form, f"schema = {repr(found['schema'])[:_SHOWN]}")
    return found


def _other(path: Path, schema: str, form: str, why: str) -> InputError:
    return InputError(f"{path}: not a {schema} file in {form}: {why}")
