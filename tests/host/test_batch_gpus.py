"""GPUs of `pyruntime batch`, where Ray is told of two that there are not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batches import MODEL, need, scored, write_source

from pyruntime.batch import Score, cluster, formats, parts
from pyruntime.batch.worker import Done, Job
from pyruntime.errors import BatchError

need()

pytestmark = pytest.mark.filterwarnings("default")  # Ray has its own


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    """As a run would start it on a machine whose CUDA_VISIBLE_DEVICES are these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
        with cluster.connected(None, cpus=2, gpus=2):
            yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("input") / "in.jsonl")


def spied(monkeypatch: pytest.MonkeyPatch, *, dies: Path | None = None) -> None:
    """Workers tell which GPUs they see; one of them dies once, if there is no file `dies`."""

    class Spy:  # of this function: so it goes to Ray's processes whole
        def __init__(self, job: Job) -> None:
            self.seen = os.environ["CUDA_VISIBLE_DEVICES"]

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            time.sleep(0.05)
            if dies is not None and not dies.exists():
                dies.touch()
                os._exit(1)
            return vars(Done(row["index"], os.getpid(), device=self.seen))

    monkeypatch.setattr(cluster, "Worker", Spy)


def done(source: Path, out: Path, *, workers: int) -> list[Done]:
    given = parts.cut(source, 3)
    columns = formats.Columns(Score(), "id", "")
    job = Job(str(MODEL), {"device": "cuda:0"}, "", given.form, columns, out, 1024)
    found = list(cluster.run_parts(job, given.parts, workers=workers, on_gpu=True))
    assert sorted(d.index for d in found) == list(range(len(given.parts)))
    return found


def test_each_worker_sees_one_gpu_of_its_own(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is cuda:0 to each."""
    spied(monkeypatch)
    found = {(d.pid, d.device) for d in done(source, tmp_path, workers=2)}
    assert len({pid for pid, _ in found}) == 2
    assert sorted(device for _, device in found) == ["3", "5"]


def test_the_gpu_of_a_worker_that_died_is_its_successors(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spied(monkeypatch, dies=tmp_path / "dead")
    found = {(d.pid, d.device) for d in done(source, tmp_path, workers=2)}
    assert {device for _, device in found} == {"3", "5"}


@pytest.mark.parametrize(
    ("device", "workers", "expected"), [("auto", None, 2), ("cuda", None, 2), ("auto", 1, 1)]
)
def test_gpus_are_taken_where_there_are_any(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    workers: int | None,
    expected: int,
) -> None:
    asked: dict[str, Any] = {}

    def run_parts(job: Job, given: Any, **options: Any) -> Iterator[Done]:
        asked.update(options, device=job.options["device"])
        raise BatchError("enough")
        yield

    monkeypatch.setattr(cluster, "run_parts", run_parts)
    with pytest.raises(BatchError, match="enough"):
        scored(source, tmp_path / "out", device=device, workers=workers)
    assert asked == {"workers": expected, "on_gpu": True, "device": "cuda:0"}


def test_a_worker_on_a_gpu_takes_a_core_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "resources", lambda: (1, 2))
    with pytest.raises(ValueError, match="workers=2: there is room for 1"):
        scored(source, tmp_path / "out", device="cuda", workers=2)


def test_other_gpus_and_other_weights_are_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights are chosen by each worker, for the memory that it finds free."""

    def run_parts(job: Job, given: list[parts.Part], **options: Any) -> Iterator[Done]:
        for part in given:
            (job.out / f"part-{part.index:06}.jsonl").touch()
            yield Done(part.index, 1, device="H200, weights int8" if part.index % 2 else "H200")

    monkeypatch.setattr(cluster, "run_parts", run_parts)
    report = scored(source, tmp_path / "out", device="cuda")
    assert report.device == "H200; H200, weights int8"
    assert "values are of several devices: H200; H200, weights int8" in caplog.text


def test_a_run_that_goes_on_elsewhere_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run_parts(job: Job, given: list[parts.Part], **options: Any) -> Iterator[Done]:
        rows = "{}\n" * given[0].rows
        (job.out / f"part-{given[0].index:06}.jsonl").write_text(rows)
        yield Done(given[0].index, 1, device="H100")
        raise BatchError("killed")

    def finish(job: Job, given: list[parts.Part], **options: Any) -> Iterator[Done]:
        for part in given:
            (job.out / f"part-{part.index:06}.jsonl").touch()
            yield Done(part.index, 1, device="H200")

    monkeypatch.setattr(cluster, "run_parts", run_parts)
    with pytest.raises(BatchError, match="killed"):
        scored(source, tmp_path / "out", device="cuda")
    monkeypatch.setattr(cluster, "run_parts", finish)
    assert scored(source, tmp_path / "out", device="cuda").device == "H200"
    assert "values are of several devices: H100; H200" in caplog.text
