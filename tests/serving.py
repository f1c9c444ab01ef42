"""A scoring service in this process, or in one of its own, and a client that hides nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import HIDDEN, write_model

from pyruntime import Engine
from pyruntime.gguf import GGUFFile

VOCABULARY = Path(__file__).parent / "data" / "vocab" / "smollm2.reduced.gguf"
NAME = "tiny"


def need(*packages: str) -> None:
    """Skips the module where one of these packages is not installed."""
    for package in ("fastapi", "uvicorn", *packages):
        pytest.importorskip(package, reason=f"{package} is not installed (.ci/run installs it)")


@dataclass(frozen=True)
class Client:
    """Of the service at 127.0.0.1:`port`."""

    port: int

    def open(self, path: str, record: Any = None, *, raw: bytes | None = None) -> HTTPConnection:
        """A connection on which a request was sent."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = raw if raw is not None else None if record is None else json.dumps(record)
        connection.request("GET" if body is None else "POST", path, body)
        return connection

    def call(
        self, path: str, record: Any = None, *, raw: bytes | None = None
    ) -> tuple[int, Any, Any]:
        """Status, headers and body of an answer, which is JSON, or else text."""
        connection = self.open(path, record, raw=raw)
        try:
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        is_json = response.headers["content-type"] == "application/json"
        return response.status, response.headers, json.loads(text) if is_json else text

    def complete(self, prompt: Any, **fields: Any) -> Any:
        """The answer to a completions request, which must be one."""
        fields = {"model": NAME, "prompt": prompt, **fields}
        status, _, record = self.call("/v1/completions", fields)
        assert status == 200, record
        return record

    def choice(self, prompt: Any, **fields: Any) -> Any:
        """The only choice of `complete`."""
        (choice,) = self.complete(prompt, **fields)["choices"]
        return choice


@contextmanager
def serving(engine: Engine, *, seconds: float = 60, **options: Any) -> Iterator[tuple[Client, Any]]:
    """A service of `engine`, and its worker, which is closed at the end; options are limits."""
    import uvicorn

    from pyruntime.serve.app import create_app
    from pyruntime.serve.command import listening
    from pyruntime.serve.protocol import Limits
    from pyruntime.serve.texts import Texts
    from pyruntime.serve.worker import Worker

    limits = {"prompts": 8, "prompt_tokens": engine.config.context_length, "body_bytes": 1 << 16}
    limits |= {name: options.pop(name) for name in list(options) if name in limits}
    worker = Worker(engine, **options)
    app = create_app(worker, Texts(engine), NAME, 0, Limits(seconds=seconds, **limits))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    with listening("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield Client(listener.getsockname()[1]), worker
        finally:
            server.should_exit = True
            thread.join()
            worker.close()


@contextmanager
def process(model: Path, *options: str) -> Iterator[tuple[Client, subprocess.Popen[str]]]:
    """`pyruntime serve` in a process of its own, at a port that was free."""
    command = [sys.executable, "-P", "-m", "pyruntime", "serve", str(model), "--device", "cpu"]
    started = subprocess.Popen(
        [*command, "--port", "0", "--name", NAME, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    with started:
        assert started.stdout is not None and started.stderr is not None
        line = started.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, line + started.stderr.read()
        try:
            yield Client(int(found[1])), started
        finally:
            started.kill()


def write_spoken_model(path: Path, **keys: Any) -> Path:
    """A small model with random weights and a part of SmolLM2's vocabulary; `keys` replace some."""
    with GGUFFile.open(VOCABULARY) as file:
        found = {k: v for k, v in file.metadata.items() if k.startswith("tokenizer.")}
    size = len(found["tokenizer.ggml.tokens"])
    metadata = {k: list(v) if not isinstance(v, (str, bool, int)) else v for k, v in found.items()}
    metadata["tokenizer.ggml.token_type"] = [int(t) for t in found["tokenizer.ggml.token_type"]]
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    random = np.random.default_rng(1)
    matrices = {
        name: random.standard_normal((size, HIDDEN), np.float32) / np.float32(scale)
        for name, scale in (("token_embd.weight", 1), ("output.weight", 3))
    }
    return write_model(path, set_keys={"*.context_length": 256, **metadata}, set_tensors=matrices)
