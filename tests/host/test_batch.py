"""`pyruntime batch` on Ray: workers and drivers that are killed, and where Ray listens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import (
    BAD,
    MODEL,
    PART_ROWS,
    PARTS,
    ROWS,
    check_a_killed_worker,
    check_rows,
    check_two_workers,
    contents,
    need,
    of_one_worker,
    scored,
    write_source,
)

from pyruntime import Engine
from pyruntime.batch import Embed, Score, cluster, run
from pyruntime.cli import main
from pyruntime.errors import BatchError, DriverNotFoundError

need()

pytestmark = pytest.mark.filterwarnings("default")  # Ray has its own

COMMAND = [sys.executable, "-P", "-m", "pyruntime", "batch", str(MODEL)]


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """One for all tests, but for those whose own process starts one."""
    with cluster.connected(None, cpus=2):
        import ray

        yield ray


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("input") / "in.jsonl")


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return of_one_worker(source, tmp_path_factory.mktemp("one") / "out")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rows_are_the_input_s_with_the_engine_s_scores(undisturbed: dict[str, bytes]) -> None:
    check_rows(undisturbed, atol=1e-4)


def test_two_workers_write_what_one_writes_and_a_rerun_nothing(
    source: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    check_two_workers(source, tmp_path / "out", undisturbed)


def test_a_worker_that_is_killed_loses_and_doubles_nothing(
    source: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    check_a_killed_worker(source, tmp_path / "out", undisturbed)


def test_a_driver_that_is_killed_is_continued(
    source: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """It had a Ray of its own, whose workers end by themselves.

    The current folder has another `pyruntime`, as a clone has: it is not the one to run.
    """
    out = tmp_path / "out"
    sources = tmp_path / "clone"
    (sources / "pyruntime").mkdir(parents=True)
    (sources / "pyruntime/__init__.py").write_text("raise ImportError('not built')\n")
    command = [*COMMAND, str(source), str(out), "--device", "cpu", "--part-rows", str(PART_ROWS)]
    command += ["--workers", "1"]
    with subprocess.Popen(command, cwd=sources, start_new_session=True) as driver:
        until(lambda: driver.poll() is not None or any(out.glob("part-*")))
        workers = [pid for pid in descendants(driver.pid) if "MapWorker" in title(pid)]
        driver.kill()
    before = len(list(out.glob("part-*")))
    assert 1 <= before < PARTS and len(workers) == 1
    until(lambda: not alive(workers[0]))
    report = scored(source, out)
    assert before <= report.resumed < report.parts
    assert contents(out) == undisturbed


def test_it_listens_on_this_machine_only(ray: Any) -> None:
    own = {inode for pid in [os.getpid(), *descendants(os.getpid())] for inode in sockets(pid)}
    found = []
    for family in ("tcp", "tcp6"):
        for line in Path("/proc/net", family).read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = fields = line.split()
            if state == "0A" and fields[9] in own:
                found.append(local.split(":")[0])
    loopback = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
    assert found and set(found) <= set(loopback)
    assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")


def test_the_command_joins_a_ray_that_is_there(
    ray: Any, source: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    command = [*COMMAND, str(source), str(tmp_path / "out"), "--device", "cpu", "--json"]
    command += ["--part-rows", str(PART_ROWS), "--address", ray.get_runtime_context().gcs_address]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
    # Who joins a Ray that listens at the loopback address has to look for it there.
    options["env"] = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == "pyruntime.batch-report/1"
    assert (report["rows"], report["errors"], report["workers"]) == (ROWS, len(BAD), 2)
    assert contents(tmp_path / "out") == undisturbed
    command.remove("--json")
    done = subprocess.run([*command, "--allow-errors"], check=False, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "81 rows in 27 files (27 of them before), 2 with an error\n"


def test_parquet_in_parquet_out(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    texts = [[n + 1, 2, 3] for n in range(10)]
    (tmp_path / "in").mkdir()
    for name, some in (("a", texts[:4]), ("b", texts[4:])):
        parquet.write_table(
            pa.table({"id": some, "ids": some}), tmp_path / "in" / f"{name}.parquet"
        )
    task = Embed(text="ids", normalize=True)
    report = run(MODEL, tmp_path / "in", tmp_path / "out", task=task, device="cpu", part_rows=3)
    assert (report.rows, report.errors, report.parts) == (10, 0, 4)
    found = parquet.read_table(tmp_path / "out")  # passes over the manifest
    assert found["id"].to_pylist() == texts and found["error"].null_count == 10
    with Engine.load(MODEL, device="cpu") as engine:
        vectors = engine.embed(texts, normalize=True)
    np.testing.assert_allclose(np.array(found["embedding"].to_pylist()), vectors, atol=1e-5)


def test_an_option_that_a_worker_refuses(
    source: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    with pytest.raises(BatchError, match=r"weights='fp16' is for a GPU.*goes on from there"):
        scored(source, tmp_path / "out", weights="fp16")
    # A worker that is ended with the run may leave a part that has no name yet.
    assert {name for name in contents(tmp_path / "out") if name[0] != "."} == {"_manifest.json"}
    scored(source, tmp_path / "out")
    assert contents(tmp_path / "out") == undisturbed


def test_what_is_not_there(source: Path, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(ValueError, match="workers=3: there is room for 2"):
        scored(source, tmp_path / "out", workers=3)
    with pytest.raises(ValueError, match="stream: there is no such option"):
        scored(source, tmp_path / "out", stream=1)
    with pytest.raises(DriverNotFoundError, match="there is no GPU"):
        run(MODEL, source, tmp_path / "out", task=Score(), device="cuda")
    with socket.socket() as silent:  # bound, but nobody listens
        silent.bind(("", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(BatchError, match=f"Ray at {address}: Connection refused"):
            scored(source, tmp_path / "out", address=address)
    with pytest.raises(BatchError, match=r"Ray at 127.0.0.1:99999: "):
        scored(source, tmp_path / "out", address="127.0.0.1:99999")
    assert main(["batch", str(MODEL), "no.jsonl", str(tmp_path / "out")]) == 2
    assert "no.jsonl: no such file or folder" in capsys.readouterr().err


# Processes


def descendants(pid: int) -> list[int]:
    """All processes that this one has started, and they."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether it runs: one that nobody waits for has ended, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    try:
        names = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {name[8:-1] for name in names if name.startswith("socket:[")}
