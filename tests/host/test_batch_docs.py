"""docs/clients/batch.md: its program, and then its command, print what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from batches import need

from pyruntime.hub import cached

need()

PAGE = Path(__file__).parents[2] / "docs" / "clients" / "batch.md"


def test_the_page(tmp_path: Path) -> None:
    if cached("smollm2") is None:
        pytest.skip("smollm2 is not in the cache; `pyruntime info smollm2` fetches it")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    _, (_, code), (_, printed), (_, command), (_, told) = blocks
    name, *arguments = command.split()
    assert name == "pyruntime"
    on_cpu = code.replace("batch.Score())", 'batch.Score(), device="cpu")')
    program = [sys.executable, "-P", "-c", on_cpu]
    again = [sys.executable, "-P", "-m", "pyruntime", *arguments, "--device", "cpu"]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    for line, expected in ((program, printed), (again, told)):
        done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=env)
        assert done.stdout == expected, done.stderr
