"""bench/attention_peers.py and bench/real_heads.py as far as they need no GPU and no library."""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDEN

from pyruntime.gguf import GGUFFile
from pyruntime.measure.records import save_record
from pyruntime.model.config import ModelConfig
from pyruntime.reference.model import ReferenceModel

Bench = Callable[[str], Any]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module


def figure(burst: dict[str, float], sustained: dict[str, float] | None = None) -> dict[str, Any]:
    """One with medians of so many milliseconds and floors of 1.05 and 1."""
    regimes = {"burst": burst, "sustained": sustained or {}}
    raw = {
        regime: {who: [9 * ms, ms, 0.1 * ms] for who, ms in medians.items()}
        for regime, medians in regimes.items()
        if medians
    }
    floors = {"burst": 1.05, "sustained": 1.0} if sustained else {"burst": 1.05}
    return {"ms": raw, "flop": 2e9, "floors": floors, "skipped": {}}


def test_cases(bench: Bench) -> None:
    found = {case.name: case for case in bench("attention_cases").cases()}
    assert len(found) == len(bench("attention_cases").cases()) == 47
    assert found["28/4/128 prompt 512"].floors == {"burst": 1.2}
    assert found["32/8/128 prompt 512"].floors == {}
    assert found["32/8/128 prompt 1024"].floors == {"burst": 1.05, "sustained": 1.0}
    assert found["14/2/64 prompt 3325"].floors == {"burst": 1.0, "sustained": 1.0}
    assert found["16/8/256 prompt 32768"].floors == {"burst": 0.75, "sustained": 0.75}
    assert found["28/4/128 continued 1"].keys == [32768]
    packed = found["28/4/128 packed 64"]
    assert len(packed.sequences) == 64 and packed.rows == 21291 and packed.floors
    assert {rows for rows, _ in packed.sequences} <= set(range(20, 601))
    for case in found.values():
        assert set(case.floors) <= set(case.regimes)


def test_time_of_a_run(bench: Bench) -> None:
    cases = bench("attention_cases")
    quick = [case for case in cases.cases() if case.name in cases.QUICK]
    assert len(quick) == len(cases.QUICK)
    assert cases.expected_seconds(quick) < 50
    assert cases.expected_seconds(cases.cases()) < 230


def test_flop_counts_every_pair_that_the_mask_leaves(bench: Bench) -> None:
    case = bench("attention_cases").Case("x", 6, 2, 8, ((5, 3), (4, 0)))
    pairs = sum(
        key <= before + row
        for rows, before in case.sequences
        for row in range(rows)
        for key in range(before + rows)
    )
    assert case.flop == 2 * 2 * 6 * 8 * pairs and case.rows == 9 and case.keys == [8, 4]


def test_verdicts(bench: Bench) -> None:
    verdict = bench("attention_cases").verdict
    assert verdict(figure({"ours": 1.0, "fa3": 1.05, "cudnn": 1.5})) == "ok"
    assert verdict(figure({"ours": 1.0, "fa3": 1.2, "cudnn": 1.04})) == "BELOW: burst 1.040 < 1.05"
    both = figure({"ours": 1.0, "fa3": 1.1}, {"ours": 1.0, "fa3": 0.99})
    assert verdict(both) == "BELOW: sustained 0.990 < 1"
    assert verdict(figure({"ours": 1.0, "fa3": 0.5}) | {"floors": {}}) == ""
    alone = figure({"ours": 1.0, "cudnn": 2.0}) | {"skipped": {"fa3": "not installed"}}
    assert verdict(alone) == "fa3 is missing"


def test_a_record_is_shown(bench: Bench, tmp_path: Path, capsys: Any) -> None:
    fast, slow = {"ours": 0.01, "fa3": 0.011, "cudnn": 0.02}, {"ours": 0.01, "fa3": 0.01}
    path = tmp_path / "attention.json"
    main = bench("attention_peers").main

    def shown(cases: dict[str, Any], failed: dict[str, str]) -> tuple[int, str]:
        save_record(path, "attention-peers", {"cases": cases, "failed": failed})
        return main(["--from", str(path)]), capsys.readouterr().out

    code, out = shown({"a": figure(fast, fast), "b": figure(fast)}, {})
    assert code == 0 and "FAILED" not in out and "BELOW" not in out
    a, b = (" ".join(line.split()) for line in out.splitlines()[1:])
    assert a == "a | 10.0 200 1.10x 2.00x | 10.0 200 1.10x 2.00x | ok"
    assert b == "b | 10.0 200 1.10x 2.00x | | ok"
    missing = figure(slow) | {"skipped": {"cudnn": "takes no packed prompts"}}
    code, out = shown({"c": missing}, {})
    assert code == 1 and "1.00x      -" in out and "BELOW: burst 1.000 < 1.05" in out
    assert "    cudnn: takes no packed prompts" in out
    code, out = shown({"a": figure(fast)}, {"d": "ArithmeticError: x"})
    assert code == 1 and out.splitlines()[-1] == "FAILED d: ArithmeticError: x"


def test_choice_of_cases(bench: Bench, capsys: Any) -> None:
    main = bench("attention_peers").main
    assert main(["--list", "--cases", "256 prompt"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert main(["--list", "--quick"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(bench("attention_cases").QUICK)
    for pattern in ("no such", "("):
        with pytest.raises(SystemExit) as caught:
            main(["--cases", pattern])
        assert caught.value.code == 2 and f"--cases {pattern}" in capsys.readouterr().err
    assert main(["--from", "/nowhere.json"]) == 2 and "/nowhere.json" in capsys.readouterr().err


def test_rounds_are_shuffled_and_rested(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(time, "sleep", seen.append)

    def timed(name: str) -> tuple[str, int]:
        seen.append(name)
        return name, len(seen)

    raw = bench("regimes").interleaved({n: n for n in "abc"}, timed, rounds=5, rest=0.25, warm_up=2)
    assert seen[::2] == [0.25] * 21
    rounds = [tuple(seen[i + 1 : i + 6 : 2]) for i in range(0, 42, 6)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds) and len(set(rounds)) > 2
    for name in "abc":
        assert raw[name] == [(name, 6 * i + 2 * rounds[i].index(name) + 2) for i in range(2, 7)]


@pytest.mark.parametrize("to_end", [False, True])
def test_growing_maxima(bench: Bench, to_end: bool) -> None:
    real_heads = bench("real_heads")
    like = tuple(np.empty(shape, np.float16) for shape in ((640, 4, 64), *[(2, 640, 64)] * 2))
    q, k, v = real_heads.growing(np.random.default_rng(0), like, to_end)
    assert [x.shape for x in (q, k, v)] == [x.shape for x in like] and q.dtype == np.float16
    scores = q[:, 1].astype(np.float32) @ k[0].astype(np.float32).T / 8
    tiles = scores.reshape(640, 10, 64).max(-1)
    growth = np.diff(tiles if to_end else tiles[:, ::-1], axis=1)
    assert np.median(growth) == pytest.approx(real_heads.STEP, rel=0.1)
    assert (growth > 5).mean() > 0.9


def test_heads_of_a_model(bench: Bench, tmp_path: Path) -> None:
    real_heads = bench("real_heads")
    ids = [random.Random(0).randrange(100) for _ in range(20)]
    with GGUFFile.open(GOLDEN / "tiny-llama-q8_0.gguf") as file:
        layers = real_heads.heads_of(file, ids)
        again = real_heads.heads_of(file, ids[:12])
        model = ReferenceModel(file, ModelConfig.from_gguf(file), precision="fp16")
    cache = model.new_cache(20)
    model.forward(ids, cache)
    path = tmp_path / "heads.npz"
    real_heads.save_heads(path, layers)
    loaded = real_heads.load_heads(path)
    for i, (heads, same, shorter) in enumerate(zip(layers, loaded, again, strict=True)):
        assert all(np.array_equal(x, y) for x, y in zip(heads, same, strict=True))
        q, k, v = heads
        assert np.array_equal(k, cache.k[i]) and np.array_equal(v, cache.v[i])
        assert q.shape == (20, model.config.heads, model.config.head_dim)
        assert np.allclose(shorter[0], q[:12], atol=0.01) and np.abs(q).max() > 0.1
    sets = {name: make() for name, make in real_heads.sets(layers).items()}
    assert all([x.shape for x in s[0]] == [x.shape for x in layers[0]] for s in sets.values())
