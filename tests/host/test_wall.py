"""`pyruntime wall` on a driver that only keeps time, and its records without any driver."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timed_driver
from browser import browse, layout
from goldens import GOLDEN
from models import write_wide_model
from walls import made_up_wall, qwen2_7b

from pyruntime import Engine
from pyruntime.cli import main
from pyruntime.cubin.installed import manifest
from pyruntime.measure import roofline
from pyruntime.measure.account import Call, checks, explain
from pyruntime.measure.graph import GEMMS, Packed, Planes, Work, expected_work
from pyruntime.measure.inplace import InPlace
from pyruntime.measure.launches import describe, gpu_model
from pyruntime.measure.records import load_record
from pyruntime.measure.series import REGIMES, Regime
from pyruntime.measure.telemetry import parse
from pyruntime.measure.wall import packed_matrices
from pyruntime.ops import qkv
from pyruntime.tools.charts import wall_svg
from pyruntime.tools.wallfiles import write_files

MODEL = str(GOLDEN / "tiny-llama-q4_k_m.gguf")
TIMES = {"attention": 0.05, "gemm": 0.1, "norm": 0.004, "rope": 0.006, "rows": 0.002}
NT = 60
ROTATES = "90a" in manifest()["architectures"]  # the driver's device then has products that do


def kernel_ms(name: str) -> float:
    return 0.08 if name == "gemm_f32_m128_n256_k32_s4" else TIMES.get(name.split("_")[0], 0.01)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> timed_driver.TimedDriver:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(REGIMES, "burst", Regime(rest=0.0, warm_up=0.0))
    monkeypatch.setattr(roofline, "SIDE", 256)
    monkeypatch.setattr(roofline, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(qkv, "ROPE_LAUNCH", math.inf)  # a product that can rotate does
    return timed_driver.install(monkeypatch, kernel_ms)


@pytest.fixture
def record(driver: timed_driver.TimedDriver, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A wall of the tiny model, saved as w.json and shown as w.html, .png, .trace.json."""
    command = ["wall", MODEL, "--nt", str(NT), "--rounds", "3", "--save", str(tmp_path / "w")]
    assert main(command) == 0
    yield load_record(tmp_path / "w.json", "wall")


def test_times_land_in_their_roles(record: dict[str, Any]) -> None:
    slices = {s["role"]: s for s in record["slices"]}
    rope = [] if ROTATES else ["rope"]
    assert list(slices) == [
        "embed", "norm", "qkv", *rope, "attention", "gather", "o", "gate_up", "down", "head",
    ]  # fmt: skip
    for role, family, count in (
        ("attention", "attention", 2), ("qkv", "gemm", 2), ("norm", "norm", 5), ("head", "gemm", 1),
    ):  # fmt: skip
        assert slices[role]["launches"] == slices[role]["launches_expected"] == count
        assert slices[role]["ms"] == pytest.approx(count * TIMES[family], abs=1e-4)
    assert sum(s["share"] for s in record["slices"]) == pytest.approx(1)
    assert record["event_us"] == pytest.approx(1e3 * timed_driver.EVENT_MS, rel=0.03)
    assert record["sm_mhz"] == timed_driver.MHZ
    assert {c["name"]: c["passed"] for c in record["checks"]} == dict.fromkeys(
        ("launches", "sum", "gap", "finite"), True
    )
    qkv = slices["qkv"]
    assert qkv["us_per_gmac"] == pytest.approx(1e3 * qkv["ms"] / (qkv["flop"] / 2e9))
    assert qkv["of_roofline"] == pytest.approx(qkv["bound_ms"] / qkv["ms"])


def test_an_e4m3_cache_is_widened_in_every_layer(
    driver: timed_driver.TimedDriver, tmp_path: Path
) -> None:
    command = ["wall", MODEL, "--nt", str(NT), "--rounds", "2", "--save", str(tmp_path / "w")]
    assert main([*command, "--options", "kv_dtype=e4m3"]) == 0
    slices = {s["role"]: s for s in load_record(tmp_path / "w.json", "wall")["slices"]}
    assert list(slices)[3:6] == ["rope", "widen", "attention"]
    assert slices["widen"]["launches"] == slices["widen"]["launches_expected"] == 2
    assert slices["widen"]["kernels"] == ["widen_e4m3_t256_l2"]
    assert slices["rope"]["kernels"] == ["rope_e4m3_hd256_t128"]


def test_attention_by_wgmma_begins_with_a_schedule(
    driver: timed_driver.TimedDriver, tmp_path: Path, attention: str
) -> None:
    command = ["wall", MODEL, "--nt", str(NT), "--rounds", "2", "--save", str(tmp_path / "w")]
    assert main([*command, "--options", f"attention={attention}"]) == 0
    slices = {s["role"]: s for s in load_record(tmp_path / "w.json", "wall")["slices"]}
    assert ("schedule" in slices) == (attention == "wgmma")
    if attention == "wgmma":
        assert next(iter(slices)) == "schedule"
        assert slices["schedule"]["launches"] == slices["schedule"]["launches_expected"] == 1
        assert slices["schedule"]["flop"] == 0 < slices["schedule"]["bytes"] < 1024
        (kernel,) = slices["attention"]["kernels"]
        assert kernel.startswith("attention_wgmma_hd64")


def test_the_trace_is_one_that_viewers_read(record: dict[str, Any], tmp_path: Path) -> None:
    events = json.loads((tmp_path / "w.trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(record["launches"]) == (18 if ROTATES else 20)
    for earlier, later in pairwise(spans):
        assert later["ts"] == pytest.approx(earlier["ts"] + earlier["dur"], abs=0.002)
    assert spans[0]["name"] == "embed" and spans[-1]["args"]["kernel"].startswith("gemm_")


def test_the_picture_is_a_png(record: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra plot) is not installed")
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_opens_in_a_browser(record: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "w.html"
    assert not re.search(r"(src|href)=|url\(|@import|<script", page.read_text())
    dom = browse(page, tmp_path / "profile", "--dump-dom")
    assert dom.count("<rect") >= 2 * len(record["slices"])
    assert "Wall of tiny llama at 60 tokens" in dom
    assert dom.count("<tr>") == 1 + len(record["slices"]) + len(record["gap"])


def test_the_page_of_a_large_model_lies_well(tmp_path: Path) -> None:
    write_files(made_up_wall(), tmp_path / "w")
    assert layout(tmp_path / "w.html", tmp_path) == {"figures": 1, "wrong": []}


def test_a_record_is_shown_and_checked_without_a_gpu(
    record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.json"
    assert main(["wall", "--from", str(path), "--save", str(tmp_path / "again")]) == 0
    assert "GPU-busy" in capsys.readouterr().out
    assert (tmp_path / "again.html").read_text() == (tmp_path / "w.html").read_text()
    assert main(["wall", "--check", str(path)]) == 0
    assert "launch plan not compared" in capsys.readouterr().out
    assert main(["wall", MODEL, "--check", str(path)]) == 0


@pytest.mark.parametrize("change", ["code", "gone", "plan"])
def test_a_record_of_other_code_is_void(
    record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    if change == "plan":
        record["plan"] = "0" * 64
    else:
        name = next(n for n in record["kernels"] if n.startswith("attention"))
        code = record["kernels"].pop(name)
        record["kernels"][name if change == "code" else "attention_old"] = code[::-1]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(record))
    assert main(["wall", MODEL, "--check", str(path)]) == 1
    expected = {"code": "other machine code", "gone": "attention_old is gone", "plan": "the launch"}
    assert f"{path} is void" in (out := capsys.readouterr().out) and expected[change] in out


def test_launches_that_the_graph_lacks_fail_by_name(
    driver: timed_driver.TimedDriver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from pyruntime.measure import wall

    def wrong(*args: Any) -> Any:
        work = expected_work(*args)
        work["attention"] = replace(work["attention"], launches=3)
        return work

    monkeypatch.setattr(wall, "expected_work", wrong)
    assert main(["wall", MODEL, "--nt", str(NT), "--rounds", "2"]) == 1
    out = capsys.readouterr().out
    assert "FAIL launches: other launches than the model's graph has: attention 2, not 3" in out


def long_checks(*, busy: float = 70.0, total: float = 70.5, gpu: float = 70.3) -> dict[str, bool]:
    """The checks of a made-up wall of 3,325 tokens."""
    slices = [{"role": "qkv", "launches": 28, "launches_expected": 28, "ms": total}]
    calls = [Call(wall=gpu + 0.3, before=0.1, gpu=gpu, after=0.05)]
    timed = InPlace([busy], [busy], [[total]], 0.001)
    found = checks(3325, slices, timed, explain(calls, busy, busy, 0.02), True)
    return {c["name"]: c["passed"] for c in found}


def test_a_sum_that_is_off_fails() -> None:
    assert all(long_checks().values())
    assert not long_checks(total=71.5)["sum"]
    assert not long_checks(total=68.5)["sum"]


def test_a_gap_that_is_not_explained_fails() -> None:
    starved = long_checks(gpu=72.0)
    assert not starved["gap"] and starved["sum"]


def test_the_parts_of_the_gap_add_up() -> None:
    calls = [Call(wall=75.0 + i, before=1.0, gpu=72.0, after=0.5) for i in range(3)]
    gap = explain(calls, 70.0, 69.2, 0.1)
    assert sum(p["ms"] for p in gap) == pytest.approx(76.0 - 70.0)
    named = {p["name"]: p["ms"] for p in gap}
    assert named["launches that overlap"] == pytest.approx(-0.8)
    assert named["GPU waiting for launches"] == pytest.approx(72.0 - 0.1 - 69.2)


def test_the_graph_of_a_7b_model_is_the_published_one() -> None:
    """21,019 GMAC at 3,325 tokens with all rows in the last output projection (yusiwen/minfer)."""
    work = expected_work(qwen2_7b(), 3325, 2016)
    macs = sum(work[role].flop // 2 for role in GEMMS if role in work and role != "head")
    o_rows_dropped = 3324 * 3584 * 3584
    assert (macs + o_rows_dropped) / 1e9 == pytest.approx(21_019, abs=1)
    assert {role: w.launches for role, w in work.items()} == {
        "embed": 1, "norm": 57, "qkv": 28, "rope": 28, "attention": 28, "gather": 1, "o": 28,
        "gate_up": 28, "down": 28, "head": 1,
    }  # fmt: skip
    assert work["attention"].flop == 28 * 4 * 28 * 128 * 3325 * 3326 // 2
    assert work["head"].bytes == 2 * 152064 * 3584 + 2 * 3584 + 4 * 152064
    assert "gather" not in expected_work(qwen2_7b(), 1, 2016)


def test_the_bytes_of_an_e4m3_cache() -> None:
    """Per layer and token of 4 heads of 128: K and V of a byte instead of two, and 8 scales."""
    wide, narrow = (expected_work(qwen2_7b(), 3325, 2016, kv) for kv in ("f16", "e4m3"))
    stored, copied = 2 * 4 * (128 + 4), 2 * 4 * 128 * 2
    assert wide["rope"].bytes - narrow["rope"].bytes == 28 * 3325 * (copied - stored)
    widen = narrow.pop("widen")
    assert (widen.launches, widen.bytes) == (28, 28 * 3325 * (stored + copied))
    assert {role for role in wide if wide[role] != narrow[role]} == {"rope"}


def test_a_product_that_rotates_does_the_work_of_both() -> None:
    """All but the write and the read of the float32 sums between them."""
    apart, fused = (expected_work(qwen2_7b(), 3325, 2016, rotates=x) for x in (False, True))
    rope = apart.pop("rope")
    assert fused["qkv"].flop == apart["qkv"].flop + rope.flop
    assert fused["qkv"].launches == 28
    saved = apart["qkv"].bytes + rope.bytes - fused["qkv"].bytes
    assert saved == 28 * 3325 * 2 * 4 * (28 + 2 * 4) * 128
    assert {role for role in apart if apart[role] != fused[role]} == {"qkv"}


def test_a_packed_output_matrix_is_read_as_the_embedding_is() -> None:
    """Here in 2,016 bytes a row; and so are a row of x and the norm's weights, in float32."""
    wide, packed = (expected_work(qwen2_7b(), 3325, 2016, packed_head=x) for x in (False, True))
    head = packed.pop("head")
    assert head.bytes == 152064 * (2016 + 4) + 2 * 4 * 3584
    assert head.flop == wide["head"].flop + 4 * 3584 and head.launches == 1
    assert packed == {role: work for role, work in wide.items() if role != "head"}


@pytest.mark.parametrize("stem", ["tiny-gemma2-q4_0", "tiny-gemma3-q5_1", "tiny-mistral-q8_0"])
@pytest.mark.parametrize(("nt", "kv_dtype"), [(1, "f16"), (60, "f16"), (60, "e4m3")])
def test_the_graph_of_models_with_windows_is_what_runs(
    driver: timed_driver.TimedDriver, stem: str, nt: int, kv_dtype: str, attention: str
) -> None:
    options = {"kv_dtype": kv_dtype, "attention": attention}
    with Engine.load(GOLDEN / f"{stem}.gguf", device="cuda:0", max_tokens=64, **options) as engine:
        launches = describe(engine, np.zeros(nt, np.int32))["launches"]
        c = engine.config
    rotates = ROTATES and kv_dtype == "f16" and not c.qk_norm
    work = expected_work(c, nt, 100, kv_dtype, attention == "wgmma", rotates)
    assert Counter(role for role, *_ in launches) == {role: w.launches for role, w in work.items()}
    pairs = sum(
        min(i + 1, c.window_of(layer) or nt) for layer in range(c.layers) for i in range(nt)
    )
    assert work["attention"].flop == 4 * c.heads * c.head_dim * pairs


def graphs_of_int8(path: Path, nt: int, kv_dtype: str) -> tuple[Counter[str], Any, Any, Planes]:
    """Launches of a prefill by role; expected work with its packed matrices, and all in fp16."""
    options = {"max_tokens": 64, "kv_dtype": kv_dtype, "weights": "int8", "attention": "fast"}
    with Engine.load(path, device="cuda:0", **options) as engine:
        launches = describe(engine, np.zeros(nt, np.int32))["launches"]
        c, planes = engine.config, packed_matrices(gpu_model(engine))
    names = {kernel for _, kernel, _ in launches}
    about = {
        "rotates": any("qkv" in name for name in names),
        "packed_head": any(name.startswith("rows_logits") for name in names),
    }
    works = (expected_work(c, nt, 100, kv_dtype, planes=x, **about) for x in (planes, ()))
    return Counter(role for role, *_ in launches), *works, planes


@pytest.mark.parametrize("stem", sorted(path.stem for path in GOLDEN.glob("*-q*.gguf")))
@pytest.mark.parametrize(("nt", "kv_dtype"), [(1, "f16"), (8, "f16"), (60, "f16"), (60, "e4m3")])
def test_the_graph_of_int8_is_what_runs(
    driver: timed_driver.TimedDriver, stem: str, nt: int, kv_dtype: str
) -> None:
    """FLOP of products are those of fp16."""
    found, work, wide, _ = graphs_of_int8(GOLDEN / f"{stem}.gguf", nt, kv_dtype)
    assert found == {role: w.launches for role, w in work.items()}
    assert not {"qkv", "gate_up"} & work.keys()
    parts = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "o": ("o",), "down": ("down",)}
    for fused, names in parts.items():
        assert sum(work[x].flop for x in names) == wide[fused].flop


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("nt", [1, 60])
def test_the_graph_of_int8_where_some_stay_fp16(
    driver: timed_driver.TimedDriver, tmp_path: Path, nt: int, tied: bool
) -> None:
    half = ("blk.0.attn_k.weight", "blk.1.attn_output.weight", "blk.1.ffn_down.weight")
    path = write_wide_model(tmp_path / "m.gguf", half=half, tied=tied)
    found, work, _, planes = graphs_of_int8(path, nt, "f16")
    assert found == {role: w.launches for role, w in work.items()}
    assert [sorted(x) for x in planes] == [
        [], ["attn_output", "down", "gate", "up"], ["k", "q", "v"],
    ]  # fmt: skip
    assert work["qkv"].launches == work["q"].launches == work["gate_up"].launches == 1


def test_the_bytes_of_int8() -> None:
    """A layer's matrices as they are packed; a plane once for each that reads it, and once made."""
    c = replace(qwen2_7b(), layers=2)
    h, kv, ffn, nt = 3584, 512, 18944, 3325
    layer = {
        "q": Packed("Q4_K", 11), "k": Packed("Q4_K", 13), "v": Packed("Q6_K", 17),
        "attn_output": Packed("Q4_K", 19), "gate": Packed("Q4_K", 23), "up": Packed("Q4_K", 29),
        "down": Packed("Q6_K", 31),
    }  # fmt: skip
    planes = [{"output": Packed("Q6_K", 37)}, layer, layer]
    work, wide = (expected_work(c, nt, 2016, planes=x) for x in (planes, ()))

    def plane(k: int, sums: bool = True) -> float:
        return k * (1 + 8 / 32 + (4 / 32 if sums else 0))

    assert work["q"].bytes == 2 * (11 + nt * (plane(h) + 4 * h))
    assert work["v"].bytes == 2 * (17 + nt * (plane(h, sums=False) + 4 * kv))
    assert work["o"].bytes == 2 * 19 + (nt + 1) * (plane(h) + 8 * h)
    assert work["gate"].bytes == 2 * 23 + (nt + 1) * (plane(h) + 2 * ffn)
    assert work["gated"].bytes == (nt + 1) * (2 * 2 * ffn + plane(ffn))
    assert work["down"].bytes == 2 * 31 + (nt + 1) * (plane(ffn, sums=False) + 8 * h)
    assert work["quantize"] == Work(3, 0, int((nt + 2) * (2 * h + plane(h))))
    assert work["head"].bytes == 37 + plane(h, sums=False) + 4 * 152064
    assert work["norm"].flop == wide["norm"].flop
    made = 2 * nt + nt + 1  # rows that norms write as planes; the last norm's is fp16
    assert work["norm"].bytes - wide["norm"].bytes == made * (plane(h) - 2 * h)
    same = {"embed", "rope", "attention", "gather"}
    assert all(work[role] == wide[role] for role in same) and "qkv" not in work


def test_a_wall_of_int8(driver: timed_driver.TimedDriver, tmp_path: Path) -> None:
    command = ["wall", str(GOLDEN / "tiny-qwen2-q4_k_m.gguf"), "--nt", str(NT), "--rounds", "2"]
    assert main([*command, "--options", "weights=int8", "--save", str(tmp_path / "w")]) == 0
    record = load_record(tmp_path / "w.json", "wall")
    slices = {s["role"]: s for s in record["slices"]}
    assert list(slices) == [
        *(["schedule"] if "schedule" in slices else []),
        "embed", "norm", "quantize", "q", "k", "v", "rope", "attention", "gather", "o", "gate",
        "up", "gated", "down", "head",
    ]  # fmt: skip
    assert all(s["launches"] == s["launches_expected"] for s in record["slices"])
    assert {c["name"]: c["passed"] for c in record["checks"]}["launches"]
    assert slices["gate"]["us_per_gmac"] and slices["gated"]["us_per_gmac"] is None


def test_the_roofline_is_measured_once(driver: timed_driver.TimedDriver, tmp_path: Path) -> None:
    from pyruntime.driver.device import Device
    from pyruntime.driver.library import Library

    library = Library(Device(0))
    first = roofline.roofline(library)
    launched = len(driver.launched)
    assert first.flop_per_s == pytest.approx(2 * 256**3 / 0.08 * 1e3, rel=0.03)
    assert roofline.roofline(library) == first and len(driver.launched) == launched
    assert roofline.roofline(library, again=True) and len(driver.launched) > launched
    path = roofline.cache_path("Made-up GPU")
    path.write_text(path.read_text().replace(first.code, "0" * 64))  # another build's kernel
    launched = len(driver.launched)
    assert roofline.roofline(library).code == first.code and len(driver.launched) > launched
    path.write_text("{")
    assert roofline.read(path) is None


def test_nvidia_smi_is_read() -> None:
    lines = [
        "580.159, 1980, 3201, 45, 350.12, 0x0000000000000004",
        "580.159, 1755, 3201, 47, 698.50, 0x0000000000000004",
        "580.159, 1770, 3201, 46, [N/A], 0x0000000000000000",
        "580.159, 17",  # cut short when it was stopped
    ]
    found = parse("\n".join(lines))
    assert found == {
        "driver": "580.159",
        "sm_mhz": [1755, 1770, 1980],
        "memory_mhz": [3201, 3201, 3201],
        "celsius": 47,
        "watts": 698.5,
        "thermal_slowdown": False,
    }
    hot = parse("580.159, 1200, 3201, 90, 700, 0x0000000000000020")
    assert hot is not None and hot["thermal_slowdown"]
    assert parse("") is None


@pytest.mark.parametrize("command", [["wall", MODEL, "--nt", "8"], ["ab", "default", "default"]])
def test_without_a_gpu_it_says_what_it_needs(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rest = [MODEL, "--nt", "8"] if command[0] == "ab" else []
    assert main([*command, *rest]) == 3
    assert f"{command[0]} times kernels on a GPU: no " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--from", "/no/such.json"], ["--check", __file__], [MODEL, "--nt", "8", "--options", "x"]],
)
def test_bad_input(arguments: list[str], driver: timed_driver.TimedDriver) -> None:
    assert main(["wall", *arguments]) == 2


def test_an_svg_is_xml(record: dict[str, Any]) -> None:
    from xml.etree.ElementTree import fromstring

    record["model"]["name"] = "<b> & 'c'"
    root = fromstring(wall_svg(record))
    assert "<b> & 'c'" in "".join(root.itertext())
