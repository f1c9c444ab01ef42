"""`pyruntime serve` as a process: its address, its signals, its end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from goldens import GOLDEN
from serving import NAME, Client, need, process

from pyruntime.cli import main

need()

MODEL = GOLDEN / "tiny-llama-q4_k_m.gguf"
FIELDS = {"model": NAME, "prompt": [[n, 5, 6] for n in range(1, 9)], "max_tokens": 400}


def until_open(client: Client, count: int) -> None:
    deadline = time.monotonic() + 30
    while client.call("/metrics")[2]["open"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_loses_no_request_that_was_taken(number: int) -> None:
    with process(MODEL) as (client, server), ThreadPoolExecutor() as pool:
        asked = [pool.submit(client.call, "/v1/completions", FIELDS) for _ in range(3)]
        until_open(client, 3)
        server.send_signal(number)
        assert [future.result()[0] for future in asked] == [200] * 3
        for future in asked:
            assert all(c["finish_reason"] == "length" for c in future.result()[2]["choices"])
        assert server.wait(30) == 0
        with pytest.raises(ConnectionRefusedError):
            client.call("/health")
        assert server.stderr is not None and server.stderr.read() == ""


def test_a_second_interrupt_does_not_wait() -> None:
    with process(MODEL) as (client, server):
        connection = client.open("/v1/completions", {**FIELDS, "prompt": [[1, 2]] * 100})
        until_open(client, 1)
        server.send_signal(signal.SIGINT)
        with pytest.raises(ConnectionError):
            while True:  # until it has seen the first one; each connection is work that delays it
                client.open("/health").close()
                time.sleep(0.02)
        server.send_signal(signal.SIGINT)
        assert server.wait(5) == 0
        with suppress(ConnectionError):
            assert connection.getresponse().status == 500
        connection.close()


def test_a_client_that_does_not_read_its_answer_holds_up_nothing() -> None:
    """11 MB, more than lies in the sockets' buffers."""
    fields = {"prompt": [[1, 2, 3, 4] * 25] * 64, "max_tokens": 1, "echo": True, "logprobs": 100}
    with process(MODEL, "--timeout", "5") as (client, server):
        connection = client.open("/v1/completions", {"model": NAME, **fields})
        deadline = time.monotonic() + 30
        while client.call("/metrics")[2]["answered"] < 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(1)
        assert server.wait(30) == 0
        connection.close()


def test_a_signal_right_after_the_start() -> None:
    with process(MODEL) as (_, server):
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def test_a_server_that_is_killed_and_asked_again() -> None:
    """The client sees that the connection broke, and gets the same answer from another server."""

    def ask(client: Client) -> Any:
        return client.complete(FIELDS["prompt"], max_tokens=20)["choices"]

    with process(MODEL) as (client, server), ThreadPoolExecutor() as pool:
        before = ask(client)
        asked = pool.submit(client.call, "/v1/completions", FIELDS)
        until_open(client, 1)
        server.kill()
        with pytest.raises(ConnectionError):
            asked.result(30)
    with process(MODEL) as (client, _):
        assert ask(client) == before


def test_a_port_that_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(MODEL), "--device", "cpu", "--port", str(port)]) == 2
    told = capsys.readouterr().err
    assert f"127.0.0.1, port {port}: " in told and "in use" in told and "--port 0" in told


def test_answers_are_not_held_back() -> None:
    """By Nagle's algorithm, 40 ms each, as the head and the body of an answer are two packets."""
    with process(MODEL) as (client, _):
        connection = client.open("/health")
        connection.getresponse().read()
        times = []
        for _ in range(21):
            started = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            times.append(time.perf_counter() - started)
        connection.close()
    assert sorted(times)[5] < 0.02


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--host", "no.such.host.invalid"], "no.such.host.invalid, port 8000"),
        (["--port", "99999"], "port 99999"),
        (["--max-queue", "0"], "--max-queue 0: it must be more than 0"),
        (["--timeout", "-1"], "--timeout"),
        (["--timeout", "nan"], "--timeout nan: it must be more than 0"),
        (["--max-prompt-tokens", "0"], "--max-prompt-tokens 0"),
    ],
)
def test_options_that_cannot_be(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(MODEL), "--device", "cpu", *options]) == 2
    assert text in capsys.readouterr().err


def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(MODEL)]) == 2
    assert "pip install 'pyruntime-cuda[serve]'" in capsys.readouterr().err


def test_it_says_where_it_is(tmp_path: Path) -> None:
    model = tmp_path / "some-model.gguf"
    model.symlink_to(MODEL)
    command = [sys.executable, "-P", "-m", "pyruntime", "serve", str(model), "--device", "cpu"]
    with subprocess.Popen([*command, "--port", "0", "--json"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        record, lines = None, ""
        while record is None:
            lines += server.stdout.readline().decode()
            record = json.loads(lines) if lines.endswith("}\n") else None
        assert record["schema"] == "pyruntime.serve/1" and record["model"] == "some-model"
        client = Client(int(record["url"].rpartition(":")[2]))
        assert client.call("/v1/models")[2]["data"][0]["id"] == "some-model"
        server.terminate()
        assert server.wait(30) == 0
