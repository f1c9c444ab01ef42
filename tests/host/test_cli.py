"""The command line on a machine without a GPU, as its user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import work
from fake_driver import FakeDriver
from gguf_bytes import ARCH, U8, gguf, pair, tensor
from goldens import GOLDEN, prompts
from models import write_model

from pyruntime.cli import COMMANDS, main
from pyruntime.commands import doctor, info
from pyruntime.ops.attention_choice import installed_variants

TINY = "tiny-llama-q4_k_m"
MODEL = str(GOLDEN / f"{TINY}.gguf")
IDS = ",".join(map(str, prompts(TINY)[0].ids))


def run(
    *arguments: str, stdin: str = "", stdout: IO[str] | int = subprocess.PIPE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`pyruntime` in a process of its own, with every GPU hidden."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "pyruntime", *arguments],
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
    )


def test_prefill_shows_the_likeliest_tokens() -> None:
    done = run("prefill", MODEL, "--ids", IDS, "--top", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert lines[0].split() == ["log-prob", "prob", "id"], "this model has no vocabulary"
    assert [len(line.split()) for line in lines[1:4]] == [3] * 3
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
    assert [entry["token"] for entry in record["next"]] == [None] * 5
    assert np.load(saved).shape == (record["tokens"], 259)
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["prefill", "generate"])
def test_an_e4m3_cache(command: str) -> None:
    done = run(command, MODEL, "--ids", IDS, "--device", "cpu", "--json", "--kv-dtype", "e4m3")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device"] == "cpu (NumPy), K/V e4m3"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("prefill", MODEL, "--ids", "1", "--device", "cuda:0"), 3, "no "),
        (("prefill", MODEL, "--ids", "1", "--device", "gpu"), 2, "device='gpu'"),
        (("prefill", MODEL, "--ids", "1,x", "--device", "cpu"), 2, '--ids "1,x": not integers'),
        (("generate", MODEL, "--ids", "", "--device", "cpu"), 2, '--ids "": it is empty'),
        (("prefill", MODEL, "--ids", "300", "--device", "cpu"), 2, "token id 300"),
        (("prefill", MODEL, "hello", "--device", "cpu"), 2, "no_vocab"),
        (("generate", MODEL, "--ids", "1", "--device", "cpu", "--attention", "r48"), 2, "'r48'"),
        (("prefill", MODEL, "--ids", "1", "--device", "cpu", "--graphs", "off"), 2, "for a GPU"),
        (
            ("prefill", MODEL, "--ids", "1", "--device", "cpu", "--kv-dtype", "int4"),
            2,
            "kv_dtype='int4' is not supported; known: f16, e4m3",
        ),
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


@pytest.mark.parametrize("command", ["prefill", "generate"])
def test_help_names_every_attention_variant(command: str) -> None:
    told = " ".join(run(command, "--help").stdout.split())
    names = told.partition("a variant by name: ")[2].partition(" (docs/attention.md)")[0]
    installed = installed_variants().keys() | {"wgmma"}  # of one architecture only
    assert set(names.split(", ")) == installed


def test_max_tokens_does_not_limit_the_prompt() -> None:
    done = run("prefill", MODEL, "--ids", "1,2,3", "--max-tokens", "2", "--json")
    assert json.loads(done.stdout)["tokens"] == 3


def test_rows_beyond_the_vocabulary_are_shown_without_a_text(tmp_path: Path) -> None:
    """Models pad their embedding: this one has 48 rows for 4 tokens."""
    vocabulary = {
        "model": "gpt2", "pre": "qwen2", "tokens": ["a", "b", "ab", "d"], "merges": ["a b"],
        "token_type": [1] * 4,
    }  # fmt: skip
    keys = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    path = write_model(tmp_path / "m.gguf", set_keys=keys)
    done = run("prefill", str(path), "abab", "--top", "48", "--device", "cpu", "--json")
    shown = {entry["id"]: entry["token"] for entry in json.loads(done.stdout)["next"]}
    assert (shown[2], shown[3], shown[4], shown[47]) == ("ab", "d", "", "")
    head, *rows, _ = run("prefill", str(path), "abab", "--device", "cpu").stdout.splitlines()
    assert head.startswith("next token  ") and all(row.startswith('"') for row in rows)


def test_names_in_a_file_cannot_drive_the_terminal(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.gguf",
        set_keys={"general.name": "\x1b[31mred", "key\x1b]0;title\x07": 1},
        set_tensors={"tensor\x1b[2J": np.zeros(3, np.float32)},
    )
    for done in (
        run("info", str(path), "--tensors"),
        run("prefill", str(path), "--ids", "1", "--device", "cpu"),
    ):
        assert done.returncode == 0 and "\\x1b[31mred" in done.stdout
        assert "\x1b" not in done.stdout + done.stderr


def test_generate_continues_greedily() -> None:
    prompt = prompts(TINY)[0]
    done = run("generate", MODEL, "--ids", IDS, "-n", "4", "--device", "cpu", "--json")
    assert json.loads(done.stdout)["tokens"] == prompt.greedy[:4].tolist()


def test_info_is_strict_json() -> None:
    done = run("info", MODEL, "--json")
    record = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
    assert record["supported"] and record["metadata"]["llama.block_count"] == 2
    assert sum(record["types"].values()) == sum(t["bytes"] for t in record["tensors"])


def test_info_of_many_unknown_types_is_quick(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = tuple(tensor(f"t{i}", [1], 1000 + i, 0) for i in range(40_000))
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(ARCH, tensors=tensors, data=32))
    started = time.process_time()
    assert info.main([str(path)]) == 0
    # Usually 0.7 s; a look at every type for every tensor would take more than 30.
    assert time.process_time() - started < 15
    assert "type 40999" in capsys.readouterr().out


def test_info_of_a_long_key_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every other key is padded to the width of the longest one that is shown."""
    pairs = [pair("k" * 65000, U8, b"\1"), *(pair(f"k{i}", U8, b"\1") for i in range(2000))]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(ARCH, *pairs))
    assert info.main([str(path)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines()[1:])) < 300


def test_doctor_without_a_gpu() -> None:
    done = run("doctor", "--json")
    record = json.loads(done.stdout)
    assert done.returncode == 3 and record["devices"] == [] and record["missing"]
    assert record["cubins"]["architectures"]


def test_doctor_of_a_device_that_does_not_answer(
    driver: FakeDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.fail["cuDevicePrimaryCtxRetain"] = (0, 46)  # unavailable: in exclusive use
    assert doctor.main([]) == 3
    out = capsys.readouterr().out
    assert "missing   cuda:0 does not answer: cuDevicePrimaryCtxRetain failed" in out
    assert "cubins    sm_" in out


def test_doctor_of_a_driver_that_is_too_old(
    driver: FakeDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.answers["cuDriverGetVersion"] = 12040
    assert doctor.main([]) == 3
    assert "missing   the driver supports CUDA 12.4; the cubins" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"schema": "pyruntime.cubins/1"}',
        '{"schema": "pyruntime.cubins/1", "nvcc": "", "nvcc_version": "13.0", "flags": "", '
        '"architectures": [90]}',
    ],
    ids=["empty", "a list", "deep", "too little", "numbers"],
)
def test_doctor_of_a_manifest_that_is_none(
    driver: FakeDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
) -> None:
    (tmp_path / "manifest.json").write_text(text)
    monkeypatch.setenv("PYRUNTIME_CUBINS", str(tmp_path))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "Made-up GPU, sm_" in out and f"missing   {tmp_path / 'manifest.json'}: " in out


@pytest.mark.parametrize("level", ["nonsense", "10"])
def test_a_log_level_that_is_none(level: str) -> None:
    done = run("info", MODEL, PYRUNTIME_LOG=level)
    assert done.returncode == 2
    assert done.stderr.startswith(f"pyruntime info: PYRUNTIME_LOG={level}: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("prefill", MODEL, "--file"),
        ("gate", "--baseline"),
        ("ledger", "--geometry"),
        ("lever", "price", "--levers"),
        ("wall", "--from"),
    ],
)
def test_a_missing_file_is_named_once(arguments: tuple[str, ...], tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    done = run(*arguments, missing)
    said = f"pyruntime {arguments[0]}: {missing}: No such file or directory\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize(
    ("arguments", "schema"),
    [
        (("wall", "--from"), "pyruntime.wall/1 file in JSON"),
        (("wall", "--check"), "pyruntime.wall/1 file in JSON"),
        (("lever", "price", "--wall"), "pyruntime.wall/1 file in JSON"),
        (("audit", "widen_e4m3_t256_l2", "--record"), "pyruntime.behaviour/1 file in JSON"),
        (("lever", "price", "--levers"), "pyruntime.levers/1 file in TOML"),
        (("ledger", "--geometry"), "pyruntime.geometry/1 file in TOML"),
        (("gate", "--baseline"), "pyruntime.resources/1 file in TOML"),
    ],
)
@pytest.mark.parametrize(
    ("content", "json", "toml"),
    [
        (b"# Readme\n", "Expecting value: line 1", "no schema"),
        (b"Read me!\n", "Expecting value: line 1", "Expected '='"),
        (b"\x00\xff", "not UTF-8 at byte 1", "not UTF-8 at byte 1"),
        (b"[" * 100_000, "nested too deeply", ""),
        (b"[1]", "no schema", "no schema"),
        (b'{"schema": "pyruntime.x/1"}', "schema = 'pyruntime.x/1'", "Invalid statement"),
        (b'schema = "pyruntime.x/1"', "Expecting value", "schema = 'pyruntime.x/1'"),
    ],
)
def test_a_file_of_another_kind_is_named_with_what_was_expected(
    arguments: tuple[str, ...], schema: str, content: bytes, json: str, toml: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(Path(__file__).parents[2])  # the ledger of levers is there
    path = tmp_path / "file"
    path.write_bytes(content)
    assert main([*arguments, str(path)]) == 2
    said, why = capsys.readouterr().err, json if "JSON" in schema else toml
    assert said.startswith(f"pyruntime {arguments[0]}: {path}: not a {schema}: {why}")
    assert said.count("\n") == 1 and len(said) < 500


def test_a_record_that_is_not_whole_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wall.json"
    path.write_text('{"schema": "pyruntime.wall/1", "nt": 1}')
    for option in ("--from", "--check"):
        assert main(["wall", option, str(path)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"pyruntime wall: {path}: pyruntime.wall/1 without architecture, ")


@pytest.mark.parametrize("command", ["sass", "audit", "banks", "ledger"])
def test_a_file_in_the_place_of_a_kernel_is_one(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, __file__]) == 2
    assert f"{__file__} is a file: name a kernel before it" in capsys.readouterr().err


def test_an_empty_log_level_is_the_usual_one() -> None:
    done = run("info", MODEL, PYRUNTIME_LOG="")
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_nobody_reads(unbuffered: str) -> None:
    """It fails in `print`, or only when what is buffered is written."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        done = run("--help", stdout=closed, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 0 and done.stderr == ""


COUNT = f"""
import sys
sys.path.append({str(Path(work.__file__).parent)!r})
from work import calls

def act():
    if sys.argv[1:] == ["import"]:
        import pyruntime
    else:
        from pyruntime.cli import main
        try:
            sys.exit(main(sys.argv[1:]))
        except SystemExit as end:
            assert end.code == 0

slow = {{"numpy", "cuda.bindings", "gguf", "tokenizers", "jinja2", "matplotlib", "lm_eval"}}
print(calls(act), sorted(slow & sys.modules.keys()))
"""


def count(*arguments: str) -> tuple[int, str, str]:
    """The calls that an import of the package or a command line makes in a new interpreter, what
    it imports that takes long, and what it prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", COUNT, *arguments], capture_output=True, text=True, check=True
    )
    printed, _, last = done.stdout.rstrip().rpartition("\n")
    made, slow = last.split(maxsplit=1)
    return int(made), slow, printed


# `eval` shows the help of its harness, too.
@pytest.mark.parametrize("command", ["", *sorted(COMMANDS.keys() - {"eval"})])
def test_help_is_quick(command: str) -> None:
    """Half of this, which `audit` takes, is 0.1 s; an import of NumPy is as much again."""
    made, slow, printed = count(*([command] if command else []), "--help")
    assert "usage" in printed and slow == "[]" and made < 150_000


def test_without_the_harness() -> None:
    """Help says what is missing and how to get it, and so does an error."""
    code = (
        "import sys; sys.modules['lm_eval'] = None; from pyruntime.cli import main; "
        "sys.exit(main(['eval', *sys.argv[1:]]))"
    )
    for arguments, status in ((["--help"], 0), (["--tasks", "x"], 2)):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status
        assert "pip install 'pyruntime-cuda[eval]'" in (done.stderr or done.stdout)
        assert len(done.stderr.splitlines()) == (status > 0)


def test_import_is_quick_and_touches_no_driver() -> None:
    made, slow, _ = count("import")
    assert slow == "[]" and made < 20_000


def test_version() -> None:
    from importlib.metadata import version

    assert run("--version").stdout == f"pyruntime {version('pyruntime-cuda')}\n"
