"""The clients in docs/clients/serve.md print what it shows, with SmolLM2 in NumPy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Client, need, process

from pyruntime.hub import cached

need("openai")

PAGE = Path(__file__).parents[2] / "docs" / "clients" / "serve.md"
EXAMPLE = re.compile(r"```python\n(.*?)```\n\n```\n(.*?)```", re.DOTALL)
URLLIB, OPENAI, _ = EXAMPLE.findall(PAGE.read_text())  # the last one is test_torch.py's


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    path = cached("smollm2")
    if path is None:
        pytest.skip("smollm2 is not in the cache; `pyruntime info smollm2` fetches it")
    with process(path, "--name", "smollm2") as (client, _):
        yield client


@pytest.mark.parametrize("example", [URLLIB, OPENAI], ids=["urllib", "openai"])
def test_a_client(client: Client, example: tuple[str, str]) -> None:
    code, printed = example
    done = subprocess.run(
        [sys.executable, "-P", "-c", code.replace("127.0.0.1:8000", f"127.0.0.1:{client.port}")],
        capture_output=True, text=True, check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout == printed, done.stderr
