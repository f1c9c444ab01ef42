"""`pyruntime occupancy`: numbers in, blocks out."""

from __future__ import annotations

import json

import pytest

from pyruntime.cli import main
from pyruntime.cubin.limits import ARCHITECTURES


def test_table_over_all_architectures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["occupancy", "--threads", "256", "--shared", "69376"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == list(ARCHITECTURES)
    lines = {row.split()[0]: " ".join(row.split()) for row in rows}
    assert lines["sm_90"] == ("sm_90 (H100, H200) 3 24/64 38% shared 12,032 B less shared memory")
    assert lines["sm_121"].endswith(" 1 8/48 17% shared 19,200 B less shared memory")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--threads", "128", "--registers", "56", "--shared", "17408", "--device", "90"]
    assert main(["occupancy", *arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == "pyruntime.occupancy/1"
    (device,) = record["devices"]
    assert (device["blocks"], device["binding"]) == (9, ["registers"])
    assert device["next"] == {"blocks": 10, "less": {"registers": 8}}


def test_clusters_are_called_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["occupancy", "--threads", "128", "--cluster", "16", "--device", "sm_90"]) == 0
    out = capsys.readouterr().out
    assert "clusters of more than 8 blocks need a launch attribute" in out
    assert "unknown without its number of SMs" in out and "only the driver knows" in out


def test_what_fits_nowhere_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["occupancy", "--threads", "128", "--shared", "200000", "--device", "86"]) == 1
    assert " 0 " in capsys.readouterr().out


def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["occupancy", "--threads", "128", "--device", "cuda:99"]) == 3


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["occupancy", "--threads", "128", "--device", "sm_75"]) == 2
    assert "no limits known for sm_75" in capsys.readouterr().err
    for arguments in (
        ["--threads", "0"],
        ["--threads", "2000"],
        ["--threads", "32", "--shared=-1"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["occupancy", *arguments])
