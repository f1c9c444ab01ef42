"""The folder of results: a manifest of what they are of, and parts that are whole or not there."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyruntime.errors import BatchError, InputError
from pyruntime.schema import read_json

MANIFEST = "_manifest.json"  # readers of folders pass over names that begin so
SCHEMA = "pyruntime.batch/1"
DEVICES, DEVICES_SCHEMA = "_devices.json", "pyruntime.batch-devices/1"


class Folder:
    """Where parts go.

    Args:
        form: their suffix.
    """

    def __init__(self, path: Path, form: str) -> None:
        self.path = path
        self._form = form

    def part(self, index: int) -> Path:
        return self.path / f"part-{index:06}.{self._form}"

    @contextmanager
    def opened(self, manifest: dict[str, Any]) -> Iterator[None]:
        """Held by this process, with this manifest, or one that says the same.

        What processes that were killed have left unfinished is deleted.

        Raises:
            InputError: the folder is another run's, in use, or holds something else.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"{self.path}: another run is at work here") from None
            except OSError:
                pass  # some file systems have no locks
            for left in self.path.glob(".*.unfinished"):
                left.unlink(missing_ok=True)
            self._settle(manifest)
            yield
        finally:
            os.close(handle)

    def _settle(self, manifest: dict[str, Any]) -> None:
        path = self.path / MANIFEST
        others = [file for file in self.path.iterdir() if file != path]
        if path.exists():
            found = read_json(path, SCHEMA)
            differing = differences(found, {"schema": SCHEMA, **manifest})
            if differing and others:
                raise InputError(
                    f"{self.path} holds results of another run: {'; '.join(differing)}. "
                    "Name another folder, or delete this one"
                )
        elif others:
            raise InputError(f"{self.path}: not empty, and without a {MANIFEST} of ours")
        self._write(MANIFEST, {"schema": SCHEMA, **manifest})

    def devices(self) -> list[str]:
        """What has written parts here, in this run or one that it continues (`note`)."""
        path = self.path / DEVICES
        return list(read_json(path, DEVICES_SCHEMA)["devices"]) if path.exists() else []

    def note(self, devices: list[str]) -> None:
        self._write(DEVICES, {"schema": DEVICES_SCHEMA, "devices": devices})

    def _write(self, name: str, content: dict[str, Any]) -> None:
        unfinished = self.path / f".{name}.unfinished"
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        publish(unfinished, self.path / name)

    @contextmanager
    def attempt(self, name: str, *, deaths: int) -> Iterator[Path]:
        """A file of this process's own, whose name stays behind if the process is killed.

        Raises BatchError where so many have stayed behind of what has this `name`.
        """
        left = list(self.path.glob(f".{name}.*.unfinished"))
        if len(left) >= deaths:
            raise BatchError(f"{name}: {len(left)} processes were killed or crashed at it")
        own = self.path / f".{name}.{socket.gethostname()}.{os.getpid()}.unfinished"
        own.touch()
        try:
            yield own
        finally:
            own.unlink(missing_ok=True)


def publish(unfinished: Path, path: Path) -> None:
    """Gives a file its name: it is there with all its contents or not, whatever happens."""
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def differences(there: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two manifests, as "name: what is there, not what is now"."""
    if isinstance(there, dict) and isinstance(now, dict):
        pairs = [(key, there.get(key), now.get(key)) for key in {**there, **now}]
    elif isinstance(there, list) and isinstance(now, list) and len(there) == len(now):
        pairs = [(n, *both) for n, both in enumerate(zip(there, now, strict=True))]
    else:
        return [] if there == now else [f"{name}: {json.dumps(there)}, not {json.dumps(now)}"]
    return [
        text
        for key, old, new in pairs
        for text in differences(old, new, f"{name}.{key}" if name else str(key))
    ]
