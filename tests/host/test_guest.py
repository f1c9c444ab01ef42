"""An engine is a guest in its process: what belongs to the application it leaves as it was."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from goldens import GOLDEN

import pyruntime
from pyruntime import Engine

PACKAGE = str(Path(pyruntime.__file__).parent)
README = Path(__file__).parents[2] / "README.md"


class NotedEnvironment(dict[str, str]):
    """The environment; `read` are the names that code of ours has looked up."""

    def __init__(self) -> None:
        super().__init__(os.environ)
        self.read: set[str] = set()

    def _note(self, name: Any) -> None:
        if sys._getframe(2).f_code.co_filename.startswith(PACKAGE):
            self.read.add(name)

    def get(self, name: Any, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> str:
        self._note(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._note(name)
        return super().__contains__(name)


def state() -> dict[str, Any]:
    """What an application sets for its whole process, as far as Python tells."""
    loggers = [logging.getLogger(), logging.getLogger("pyruntime")]
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "logging": [(x.level, list(x.handlers), x.propagate) for x in loggers],
        "environment": dict(os.environ),
        "threads": threading.enumerate(),
        "folder": Path.cwd(),
    }


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_it_leaves_the_process_as_it_was(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, capfd: Any, device: str
) -> None:
    environment = NotedEnvironment()
    monkeypatch.setattr(os, "environ", environment)
    before = state()
    with load(device=device) as engine:
        cache = engine.new_cache(8)
        engine.prefill([1, 2], cache=cache)
        cache.fork().import_(cache.export())
        engine.warm([3])
        engine.prefill([[1, 2], [3]], hidden="mean")
        engine.generate([1], 2)
        engine.score([[1]], [[2, 3]])
        engine.embed([[1, 2]])
        during = state()
    assert before == during == state()
    assert capfd.readouterr() == ("", "")
    undocumented = {name for name in environment.read if f"`{name}`" not in README.read_text()}
    assert not undocumented


def test_reads_of_the_environment_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyruntime import hub

    environment = NotedEnvironment()
    monkeypatch.setattr(os, "environ", environment)
    os.environ.get("HOME")
    hub.cached("smollm2")
    assert environment.read == {"XDG_CACHE_HOME"}


def test_without_a_gpu_no_driver_is_looked_for() -> None:
    """Nor by an import, whatever there is."""
    code = f"""
import sys, pyruntime
from pyruntime import Engine, Exported, Result
def cuda(): return sorted(name for name in sys.modules if name.split(".")[0] == "cuda")
print(cuda())
with Engine.load({str(GOLDEN / "tiny-llama-q8_0.gguf")!r}, device="cpu") as engine:
    engine.prefill([1, 2])
print(cuda())
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n[]\n", "")
