"""Data sets in parts: what is read, what is written, what a folder of results refuses. No Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from goldens import GOLDEN
from serving import write_spoken_model

from pyruntime import Engine
from pyruntime.batch import Embed, Score, cluster, parts, tasks
from pyruntime.batch.folder import Folder, publish
from pyruntime.batch.formats import Columns, of
from pyruntime.batch.tasks import results
from pyruntime.batch.worker import DEATHS, Job, Worker
from pyruntime.cli import main
from pyruntime.errors import BatchError, InputError, NumericalError

MODEL = GOLDEN / "tiny-llama-q4_k_m.gguf"
FINE = '{"prompt": [1, 2], "n": 1.10, "continuation": [3, 4]}'
# What a file may hold, and the beginning of the error of each row, "" where there is none.
LINES = [
    (FINE, ""),
    ("", None),
    ("{oops", "not JSON: "),
    ("[1]", "not a JSON object"),
    ('{"a": NaN}', "not JSON: NaN is no number"),
    ("[" * 100_000, "not JSON: nested too deeply"),
    ("{}", "no prompt"),
    ('{"prompt": null, "continuation": [1]}', "no prompt"),
    ('{"prompt": [1], "id": 7}', "no continuation"),
    ('{"prompt": [1], "continuation": []}', "continuation is empty"),
    ('{"prompt": 5, "continuation": [1]}', "prompt is 5: neither a text nor token ids"),
    ('{"prompt": [999], "continuation": [1]}', "token id 999 at position 0 is outside [0, 259)"),
    ('{"prompt": [true], "continuation": [1]}', "token ids must be integers"),
    ('{"prompt": "text", "continuation": [1]}', "prompt: this model has no vocabulary"),
    ('{"prompt": [1], "continuation": [1], "error": 1}', "it has a column 'error' already"),
    (json.dumps({"prompt": [1] * 4096, "continuation": [2, 3]}), "4097 tokens exceed the model's"),
    (' \t{"continuation":[9] , "prompt":[] } \r', ""),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(MODEL, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_spoken_model(tmp_path_factory.mktemp("model") / "spoken.gguf")
    with Engine.load(path, device="cpu") as engine:
        yield engine


def worker(engine: Engine, out: Path, form: str = "jsonl", task: Any = None) -> Worker:
    out.mkdir(exist_ok=True)
    columns = Columns(task or Score(), "id", "")
    options = {"device": "cpu"}
    return Worker(Job(str(MODEL), options, engine.fingerprint, form, columns, out, 64))


def written(out: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(out.glob("part-*"))
        for line in path.read_text().splitlines()
    ]


# Parts


@pytest.mark.parametrize("most", [1, 2, 5, 1000])
def test_every_row_is_in_one_part(tmp_path: Path, most: int, engine: Engine) -> None:
    for name in ("b.jsonl", "a.jsonl"):  # the last line has no end
        (tmp_path / name).write_bytes(b"\n".join(line.encode() for line, _ in LINES))
    (tmp_path / "_manifest.json").write_text("not read")
    source = parts.cut(tmp_path, most)
    form = of("jsonl", Columns(Score(), "id", ""))
    rows = [row for part in source.parts for row in form.read(part)[0]]
    numbers = [n for n, (_, error) in enumerate(LINES, 1) if error is not None]
    places = [f"{name}.jsonl:{n}" for name in "ab" for n in numbers]
    assert [row.id for row in rows] == [7 if ":9" in place else place for place in places]
    assert all(part.rows <= most for part in source.parts)
    assert [part.index for part in source.parts] == list(range(len(source.parts)))


def test_input_is_known_by_its_contents(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(FINE)
    before = parts.cut(path, 8).files
    path.write_text(FINE.replace("1.10", "1.11"))
    assert [f["name"] for f in before] == ["in.jsonl"] and parts.cut(path, 8).files != before


@pytest.mark.parametrize(
    ("names", "text"),
    [([], "neither .jsonl nor .parquet"), (["a.jsonl", "b.parquet"], "files of both formats")],
)
def test_folders_that_are_no_input(tmp_path: Path, names: list[str], text: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=text):
        parts.cut(tmp_path, 8)


# Rows


def test_a_bad_row_is_marked_and_the_others_are_not(tmp_path: Path, engine: Engine) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + b"\n".join(line.encode() for line, _ in LINES) + b"\n\xff")
    expected = [error for _, error in LINES if error is not None] + ["not JSON: 'utf-8' codec"]
    (part,) = parts.cut(source, 100).parts
    done = worker(engine, tmp_path / "out").do(part)
    rows = written(tmp_path / "out")
    for row, error in zip(rows, expected, strict=True):
        assert (row["error"] or "").startswith(error) and bool(row["error"]) == bool(error), row
        assert (row["logprob"] is None) == bool(error)
    (first,) = engine.score([[1, 2]], [[3, 4]])
    assert rows[0]["logprobs"] == first.log_probs and rows[0]["logprob"] == first.total
    assert rows[-2]["logprobs"] == [None] and rows[-2]["logprob"] == 0  # nothing precedes it
    assert '"n": 1.10' in (tmp_path / "out" / "part-000000.jsonl").read_text()
    assert (done.rows, done.errors, done.tokens) == (len(expected), len(expected) - 2, 5)
    assert done.first_error.startswith("in.jsonl:3: not JSON")
    form = of("jsonl", Columns(Score(), "id", ""))
    assert form.summary(tmp_path / "out" / "part-000000.jsonl") == (done.rows, done.errors)


def test_texts_are_what_the_engine_makes_of_them(spoken: Engine) -> None:
    pairs = [("The capital", " of France"), ("Two", " and two"), ("", "a"), ("x", "")]
    asked = [({"prompt": p, "continuation": c}, None) for p, c in pairs]
    *found, empty = results(Score(), spoken, asked, 1000)
    expected = [s.log_probs for s in spoken.score(*map(list, zip(*pairs, strict=True)))][:-1]
    assert [item.values["logprobs"] for item in found] == expected
    assert empty.error == "continuation is empty"
    texts = ["a cat", "a form"]
    task = Embed(pooling="last", normalize=True)
    rows: list[Any] = [({"text": text}, None) for text in [*texts, "", None, "word " * 300]]
    *found, empty, missing, long = results(task, spoken, rows, 1000)
    vectors = spoken.embed(texts, pooling="last", normalize=True)
    np.testing.assert_array_equal([item.values["embedding"] for item in found], vectors)
    assert (empty.error, missing.error) == ("text is empty", "no text")
    assert "exceed the model's context of 256" in str(long.error)


def test_rows_are_packed_by_their_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []
    score = engine.score

    def spied(prompts: Any, continuations: Any) -> Any:
        calls.append([len(p) + len(c) for p, c in zip(prompts, continuations, strict=True)])
        return score(prompts, continuations)

    monkeypatch.setattr(engine, "score", spied)
    lengths = [3, 4, 5, 30, 2, 10]
    asked = [({"prompt": [1] * (n - 1), "continuation": [2]}, None) for n in lengths]
    items = results(Score(), engine, asked, 12)
    assert calls == [[3, 4, 5], [30], [2, 10]]
    assert [item.tokens for item in items] == lengths


def test_a_row_that_leaves_the_range_is_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = engine.embed

    def overflows(texts: Any, **options: Any) -> Any:
        if any(ids[0] == 9 for ids in texts):
            raise NumericalError("layer 1 overflows")
        found = embed(texts, **options)
        found[[ids[0] == 8 for ids in texts]] = np.inf
        return found

    monkeypatch.setattr(engine, "embed", overflows)
    asked: list[Any] = [({"text": [n, 1]}, None) for n in (7, 8, 9, 10)]
    items = results(Embed(), engine, asked, 100)
    errors = [None, "the result is not finite", "layer 1 overflows", None]
    assert [item.error for item in items] == errors


def test_batches_keep_the_order() -> None:
    items = [tasks.Item(ids=(np.zeros(n, np.int32),)) for n in (1, 2, 3, 1, 9)]
    assert [[i.tokens for i in b] for b in tasks.batches(items, 4)] == [[1, 2], [3, 1], [9]]


def test_parquet(tmp_path: Path, engine: Engine) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (.ci/run installs it)")
    from pyarrow import parquet

    texts = [[1, n] if n % 3 else None for n in range(11)]
    table = pa.table({"n": pa.array(range(11), pa.int16()), "text": texts})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=4)
    source = parts.cut(tmp_path / "in.parquet", 3)
    assert [part.rows for part in source.parts] == [3, 1, 3, 1, 3]
    out = tmp_path / "out"
    made = worker(engine, out, "parquet", Embed())
    for part in reversed(source.parts):
        made.do(part)
    found = pa.concat_tables([parquet.read_table(path) for path in sorted(out.glob("part-*"))])
    assert found.select(["n", "text"]) == table
    assert found["id"].to_pylist() == [f"in.parquet:{n}" for n in range(1, 12)]
    assert found["error"].to_pylist() == ["no text" if n % 3 == 0 else None for n in range(11)]
    vectors = engine.embed([ids for ids in texts if ids])
    kept = [v for v in found["embedding"].to_pylist() if v is not None]
    np.testing.assert_array_equal(np.array(kept, np.float32), vectors)
    form = of("parquet", Columns(Embed(), "id", ""))
    assert form.summary(out / "part-000000.parquet") == (3, 1)


@pytest.mark.parametrize(
    ("task", "prefix", "text"),
    [(Score(), "", "no column 'prompt'; there are text, error"), (Embed(), "", "'error' already")],
)
def test_parquet_columns_that_do_not_suit(
    tmp_path: Path, task: Any, prefix: str, text: str
) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (.ci/run installs it)")
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": ["a"], "error": ["b"]}), tmp_path / "in.parquet")
    form: Any = of("parquet", Columns(task, "id", prefix))
    with pytest.raises(InputError, match=text):
        form.check(tmp_path / "in.parquet")
    (tmp_path / "in.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(InputError, match=r"in.parquet: not Parquet"):
        parts.cut(tmp_path / "in.parquet", 1)


def test_input_that_changes_on_the_way(tmp_path: Path, engine: Engine) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f"{FINE}\n{FINE}\n")
    (part,) = parts.cut(source, 8).parts
    source.write_text(f"{FINE}\n")
    with pytest.raises(BatchError, match=r"in.jsonl has changed since the run was started"):
        worker(engine, tmp_path / "out").do(part)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_worker_with_another_model(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(FINE)
    job = Job(
        str(MODEL), {"device": "cpu"}, "other", "jsonl", Columns(Score(), "id", ""), tmp_path, 64
    )
    with pytest.raises(BatchError, match="another model than where"):
        Worker(job).do(*parts.cut(source, 8).parts)


# The folder


def test_another_run_is_refused_by_what_differs(tmp_path: Path) -> None:
    out = Folder(tmp_path / "out", "jsonl")
    first = {"model": "a", "task": {"name": "score"}, "input": [{"sha256": "1"}]}
    other = {"model": "a", "task": {"name": "embed"}, "input": [{"sha256": "2"}]}
    with out.opened(first):
        pass
    with out.opened(other):  # nothing is written of the first
        out.part(0).touch()
    with out.opened(other):
        pass
    with pytest.raises(InputError) as refused, out.opened(first):
        pass
    told = str(refused.value)
    assert 'task.name: "embed", not "score"; input.0.sha256: "2", not "1".' in told
    assert "model" not in told


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match="not empty"), Folder(tmp_path, "jsonl").opened({}):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_in_use(tmp_path: Path) -> None:
    out = Folder(tmp_path, "jsonl")
    refused = pytest.raises(InputError, match="another run is at work")
    with out.opened({}), refused, out.opened({}):
        pass


def test_what_is_unfinished_has_no_name_and_does_not_stay(tmp_path: Path) -> None:
    out = Folder(tmp_path, "jsonl")
    with pytest.raises(ZeroDivisionError), out.attempt("part", deaths=1) as own:
        own.write_text("half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with out.attempt("part", deaths=1) as own:
        own.write_text("whole")
        publish(own, tmp_path / "part")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]


def test_what_kills_its_workers_is_given_up(tmp_path: Path) -> None:
    """Each death leaves the file of its attempt behind; a new run begins without them."""
    code = (
        "import os, sys, pathlib; from pyruntime.batch.folder import Folder\n"
        "with Folder(pathlib.Path(sys.argv[1]), 'jsonl').attempt('part', deaths=9):\n"
        "    os.kill(os.getpid(), 9)"
    )
    for _ in range(DEATHS):
        subprocess.run([sys.executable, "-P", "-c", code, str(tmp_path)], check=False)
    out = Folder(tmp_path, "jsonl")
    refused = pytest.raises(BatchError, match="part: 3 processes were killed or crashed at it")
    with refused, out.attempt("part", deaths=DEATHS):
        pass
    (tmp_path / "_manifest.json").write_text('{"schema": "pyruntime.batch/1"}')
    with out.opened({}), out.attempt("part", deaths=1):
        pass


# The command


def test_nothing_of_it_is_imported_before_it_runs() -> None:
    code = (
        "import sys, pyruntime, pyruntime.batch; from pyruntime.cli import main\n"
        "try: main(['batch', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'ray', 'pyarrow', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_ray_that_cannot_be_kept_to_this_machine_is_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray, private = ModuleType("ray"), ModuleType("ray._private")
    vars(ray).update(is_initialized=lambda: False)
    vars(private).update(ray_constants=ModuleType("ray._private.ray_constants"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray._private", private)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with pytest.raises(BatchError, match="cannot be kept to this machine"), cluster.connected(None):
        raise AssertionError


@pytest.mark.parametrize("package", ["ray", "pyarrow"])
def test_what_is_missing_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == package else object()
    )
    assert main(["batch", str(MODEL), "in.jsonl", "out"]) == 2
    told = capsys.readouterr().err
    assert f"{package} is not installed: pip install 'pyruntime-cuda[batch]'" in told


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--workers", "0"], "workers=0: it must be at least 1"),
        (["--part-rows", "0"], "part_rows=0"),
        (["--id", "error"], "id='error' is a column of the results"),
    ],
)
def test_options_that_cannot_be(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", str(MODEL), "in.jsonl", "out", *options]) == 2
    assert text in capsys.readouterr().err
    assert not os.path.lexists("out")
