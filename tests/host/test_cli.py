"""The command line on a machine without a GPU, as its user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from goldens import GOLDEN, prompts

from pyruntime.cli import COMMANDS

TINY = "tiny-llama-q4_k_m"
MODEL = str(GOLDEN / f"{TINY}.gguf")
IDS = ",".join(map(str, prompts(TINY)[0].ids))


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """`pyruntime` in a process of its own, with every GPU hidden."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "pyruntime", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def test_prefill_shows_the_likeliest_tokens() -> None:
    done = run("prefill", MODEL, "--ids", IDS, "--top", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert lines[1].split()[-1] == str(prompts(TINY)[0].top10_ids[-1, 0])
    assert "tok/s on cpu (NumPy)" in lines[-1]
    assert "running on the CPU with NumPy:" in done.stderr


def test_prefill_prints_json_and_saves_logits(tmp_path: Path) -> None:
    saved = tmp_path / "logits"
    done = run(
        "prefill", MODEL, "--ids", IDS, "--device", "cpu", "--all", "--json", "--save", str(saved)
    )
    record = json.loads(done.stdout)
    assert record["schema"] == "pyruntime.prefill/1"
    assert record["tokens"] == len(prompts(TINY)[0].ids)
    assert np.load(saved).shape == (record["tokens"], 259)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("prefill", MODEL, "--ids", "1", "--device", "cuda:0"), 3, "no "),
        (("prefill", MODEL, "--ids", "1", "--device", "gpu"), 2, "device='gpu'"),
        (("prefill", MODEL, "--ids", "1,x", "--device", "cpu"), 2, "not integers"),
        (("prefill", MODEL, "--ids", "300", "--device", "cpu"), 2, "token id 300"),
        (("prefill", MODEL, "hello", "--device", "cpu"), 2, "no_vocab"),
        (("generate", MODEL, "--ids", "1", "--device", "cpu", "--attention", "r48"), 2, "'r48'"),
        (("prefill", "/no/such.gguf", "hello"), 2, "/no/such.gguf"),
        (("prefill", __file__, "hello"), 2, "not a GGUF file"),
        (("info", __file__), 2, "not a GGUF file"),
        (("nonsense",), 2, "unknown command"),
        ((), 2, "usage"),
        (("prefill", MODEL, "--ids", "1", "--file", "x"), 2, "--ids goes with"),
        (("prefill", MODEL, "--file", "/no/such.txt"), 2, "/no/such.txt"),
        (("prefill", MODEL, "--top", "0", "--ids", "1"), 2, "--top"),
    ],
)
def test_errors_have_one_line_and_a_code(arguments: tuple[str, ...], code: int, text: str) -> None:
    done = run(*arguments)
    assert done.returncode == code, done.stderr
    assert text in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_generate_continues_greedily() -> None:
    prompt = prompts(TINY)[0]
    done = run("generate", MODEL, "--ids", IDS, "-n", "4", "--device", "cpu", "--json")
    assert json.loads(done.stdout)["tokens"] == prompt.greedy[:4].tolist()


def test_info_is_strict_json() -> None:
    done = run("info", MODEL, "--json")
    record = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
    assert record["supported"] and record["metadata"]["llama.block_count"] == 2
    assert sum(record["types"].values()) == sum(t["bytes"] for t in record["tensors"])


def test_doctor_without_a_gpu() -> None:
    done = run("doctor", "--json")
    record = json.loads(done.stdout)
    assert done.returncode == 3 and record["devices"] == [] and record["missing"]
    assert record["cubins"]["architectures"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_quick(command: str) -> None:
    def seconds() -> float:
        started = time.perf_counter()
        done = run(*([command] if command else []), "--help")
        assert done.returncode == 0 and "usage" in done.stdout
        return time.perf_counter() - started

    assert min(seconds() for _ in range(5)) < 0.15


def test_import_is_quick_and_touches_no_driver() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import pyruntime; "
        "print(time.perf_counter() - t, 'cuda.bindings' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    seconds, driver = done.stdout.split()
    assert float(seconds) < 0.2 and driver == "False"


def test_version() -> None:
    from importlib.metadata import version

    assert run("--version").stdout == f"pyruntime {version('pyruntime-cuda')}\n"
