"""bench/gemm_choice.py: its cases, a run on a made-up GPU, its judgement, and the fit."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timed_driver

from pyruntime.cubin.installed import manifest, root
from pyruntime.cubin.spec import read_specs
from pyruntime.measure.records import load_record, save_record
from pyruntime.ops import gemm_choice

Bench = Callable[[str], Any]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module


def test_sets_have_no_product_in_common(bench: Bench) -> None:
    shapes = bench("gemm_shapes")
    found = {which: shapes.cases(which) for which in ("fit", "held-out")}
    products = {which: {case[1:] for case in some} for which, some in found.items()}
    assert not products["fit"] & products["held-out"]
    assert {which: len(set(some)) for which, some in found.items()} == shapes.COUNTS
    assert shapes.Case(64, 37888, 3584, "swiglu") in found["fit"]
    for case in found["fit"] + found["held-out"]:
        assert 1 <= case.m <= (shapes.HEAD_ROWS if case.n > 40000 else shapes.LONGEST)
        assert case.k % 8 == 0 and case.n % 8 == 0
    lengths = sorted(case.m for case in found["held-out"])
    assert lengths[40] < 17 and lengths[100] > 64 and lengths[160] > 512  # all are well covered


@pytest.fixture
def record(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> Any:
    """Of some cases on a GPU on which m16_n32 rows are a little faster than any other."""
    if "90a" not in manifest()["architectures"]:
        pytest.skip("no cubins for sm_90a are installed")

    def ms(kernel: str) -> float:
        return 0.01 * (1 + sum(map(ord, kernel)) % 11 / 20) if "m16_n32" not in kernel else 0.0099

    timed_driver.install(monkeypatch, ms)
    choice = bench("gemm_choice")
    monkeypatch.setattr(choice, "REST", 0)
    path = tmp_path / "record.json"
    code = choice.main(["--shapes", "held-out", "--cases", "x 576 x|x 1152 x", "--save", str(path)])
    assert code == 1 and "NOT MET" in capsys.readouterr().out
    return load_record(path, "gemm-choice")


def test_a_run(bench: Bench, record: Any) -> None:
    assert record["failed"] == {} and len(record["cases"]) >= 10
    choice, shapes = bench("gemm_choice"), bench("gemm_shapes")
    for figure in record["cases"]:
        case = shapes.Case(*figure["case"])
        tiles = {x: row["tile"] for x, row in record["rows"].items()}
        able = {
            x
            for x, tile in tiles.items()
            if tile["epilogue"] == case.epilogue
            and (tile["engine"] != "stream" or case.m <= tile["bm"])
        }
        assert set(figure["quick"]) == able and figure["choice"] in figure["ms"]
        best = min(figure["quick"].values())
        near = {x for x, ms in figure["quick"].items() if ms <= choice.NEAR * best}
        assert set(figure["ms"]) == near | {figure["choice"]} and len(near) > 1
        assert {len(raw) for raw in figure["ms"].values()} == {choice.ROUNDS}
    assert record["limits"]["sm_count"] == 132 and set(record["kernels"]) == set(record["rows"])


def test_judgement(bench: Bench, record: Any, tmp_path: Path, capsys: Any) -> None:
    found = bench("gemm_fit").verdicts(record)
    assert [x.chosen for x in found] == [figure["choice"] for figure in record["cases"]]
    assert all("m16_n32" in x.best and x.exact for x in found)
    for x, figure in zip(found, record["cases"], strict=True):
        raw = figure["ms"]
        assert x.lost == pytest.approx(raw[x.chosen][0] / raw[x.best][0])
    # Where the best rows are those that are chosen, all is well.
    for figure in record["cases"]:
        figure["ms"] = {x: [1.0 if x == figure["choice"] else 1.02] for x in figure["ms"]}
    path = tmp_path / "good.json"
    del record["schema"]
    save_record(path, "gemm-choice", record)
    main = bench("gemm_choice").main
    assert main(["--judge", str(path)]) == 0 and "NOT MET" not in capsys.readouterr().out
    figure = record["cases"][0]
    figure["ms"][figure["choice"]] = [3.06, 1.0, 9.0]
    save_record(path, "gemm-choice", record)
    assert main(["--judge", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "200.0%" in lines[1] and figure["choice"] in lines[1]
    # A choice that the record's run did not have is judged by its one timing, and that is said.
    other = next(x for x in figure["quick"] if x not in figure["ms"])
    figure["ms"] = {other: [1.0], **{x: [1.0] for x in figure["ms"] if x != figure["choice"]}}
    assert not bench("gemm_fit").verdicts(record)[0].exact


def test_a_fit_finds_constants(bench: Bench, record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are the model's own with other constants."""
    fitting, shapes = bench("gemm_fit"), bench("gemm_shapes")
    chosen = shapes.cases("fit")[:60:4]
    before = {str(x): x.get() for x in fitting.constants()}
    assert {"L2_BYTES", "LAUNCH['wgmma']", "STORED_COLUMN['add']"} <= set(before)
    figures = [
        {"case": case, "quick": dict.fromkeys(record["rows"], 1.0), "ms": {}} for case in chosen
    ]
    for figure in figures:
        epilogue = figure["case"].epilogue
        figure["quick"] = {
            x: 1.0 for x, row in record["rows"].items() if row["tile"]["epilogue"] == epilogue
        }
        figure["ms"] = {x: [1.0] for x in figure["quick"]}
    made_up = record | {"cases": figures}
    with monkeypatch.context() as patch:
        patch.setitem(gemm_choice.LAUNCH, "wgmma", 2 * gemm_choice.LAUNCH["wgmma"])
        patch.setattr(gemm_choice, "WGMMA_COLUMN", 1.5 * gemm_choice.WGMMA_COLUMN)
        for figure, measured in zip(figures, fitting.measured(made_up), strict=True):
            costs = measured.costs()
            for row, cycles in zip(measured.rows, costs, strict=True):
                figure["quick"][row.name], figure["ms"][row.name] = cycles / 2e6, [cycles / 2e6]
    lost = [x.lost for x in fitting.verdicts(made_up)]
    assert max(lost) > 1.05
    lines = fitting.fit([made_up])
    assert {str(x): x.get() for x in fitting.constants()} == before
    found = {line.split()[0]: float(line.split()[1]) for line in lines[1:]}
    for constant in fitting.constants():
        owner = getattr(gemm_choice, constant.name)
        if constant.key is None:
            monkeypatch.setattr(gemm_choice, constant.name, found[str(constant)])
        else:
            monkeypatch.setitem(owner, constant.key, found[str(constant)])
    again = [x.lost for x in fitting.verdicts(made_up)]
    assert max(again) < 1.02


def test_removed_rows_are_left_out(bench: Bench, record: Any) -> None:
    """Also if the times of others stand in proportion to theirs."""
    fitting = bench("gemm_fit")
    before = list(fitting.measured(record))
    gone = {x.best for x in fitting.verdicts(record)}
    for was, now in zip(before, fitting.measured(record | {"removed": sorted(gone)}), strict=True):
        kept = [i for i, row in enumerate(was.rows) if row.name not in gone]
        assert 0 < len(kept) < len(was.rows)
        assert [row.name for row in now.rows] == [was.rows[i].name for i in kept]
        assert now.ms.tolist() == was.ms[kept].tolist()


RECORD = Path(__file__).parents[2] / "bench/results/gemm-fit.json"


def test_the_record_that_constants_are_fitted_to(bench: Bench) -> None:
    """Today's choices lose little there, and what it says has been removed is not in the table."""
    if "90a" not in manifest()["architectures"]:
        pytest.skip("no cubins for sm_90a are installed")
    record = load_record(RECORD, "gemm-choice")
    assert bench("gemm_fit").judge(record)[1]
    table = {
        name
        for family in ("gemm", "gemm_wgmma", "gemm_stream")
        for name in read_specs((root() / f"sm_90a/{family}.cubin").read_bytes(), family)
    }
    assert set(record["rows"]) - table == set(record["removed"])


def test_commands(bench: Bench, capsys: Any) -> None:
    main = bench("gemm_choice").main
    for arguments in (
        ["--shapes", "fit", "--cases", "no such"],
        ["--shapes", "fit", "--cases", "("],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2 and "--cases" in capsys.readouterr().err
    assert main(["--judge", "/nowhere.json"]) == 2 and "/nowhere.json" in capsys.readouterr().err
    assert main(["--fit", "/nowhere.json"]) == 2
