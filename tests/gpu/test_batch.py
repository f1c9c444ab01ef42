"""`pyruntime batch` with an engine per GPU, on a Ray of this machine.

    pip install 'pyruntime-cuda[batch]' && pytest -m gpu tests/gpu/test_batch.py

Skipped where that is not installed. With two GPUs both are at work. bench/batch.py measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from batches import (
    MODEL,
    check_a_killed_worker,
    check_rows,
    check_two_workers,
    need,
    of_one_worker,
    scored,
    write_source,
)

from pyruntime import Engine
from pyruntime.batch import Embed, cluster, run
from pyruntime.driver.device import device_count

need()

pytestmark = pytest.mark.filterwarnings("default")  # Ray has its own

ATOL = 0.02  # of a log-probability: fp16 weights and activations


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    gpus = device_count()
    with cluster.connected(None, cpus=gpus, gpus=gpus):
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("input") / "in.jsonl")


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return of_one_worker(source, tmp_path_factory.mktemp("one") / "out", device="cuda")


def test_scores_are_those_of_numpy(undisturbed: dict[str, bytes]) -> None:
    check_rows(undisturbed, atol=ATOL)


def test_a_worker_that_is_killed_loses_and_doubles_nothing(
    source: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    check_a_killed_worker(source, tmp_path / "out", undisturbed, device="cuda")


def test_two_workers_write_what_one_writes_and_a_rerun_nothing(
    source: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    if device_count() < 2:
        pytest.skip("there is one GPU, and it has one worker")
    check_two_workers(source, tmp_path / "out", undisturbed, device="cuda")


def test_gpus_are_taken_by_themselves(source: Path, tmp_path: Path) -> None:
    report = scored(source, tmp_path / "out", device="auto")
    assert report.workers == device_count() and "NumPy" not in report.device
    with pytest.raises(ValueError, match=f"there is room for {report.workers}"):
        scored(source, tmp_path / "more", device="auto", workers=report.workers + 1)


def test_vectors_are_those_of_numpy(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    texts = [[n + 1, 2, 3] for n in range(10)]
    parquet.write_table(pa.table({"ids": texts}), tmp_path / "in.parquet")
    task = Embed(text="ids", normalize=True)
    report = run(MODEL, tmp_path / "in.parquet", tmp_path / "out", task=task, device="cuda")
    assert (report.rows, report.errors) == (10, 0)
    found = parquet.read_table(tmp_path / "out")["embedding"].to_pylist()
    with Engine.load(MODEL, device="cpu") as engine:
        vectors = engine.embed(texts, normalize=True)
    np.testing.assert_allclose(np.array(found), vectors, atol=ATOL)
