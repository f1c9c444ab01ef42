"""docs/campaign.md: what is committed is what the records give, and it shows what they hold."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest
from walls import made_up_wall

from pyruntime.cubin.installed import installed_specs, manifest
from pyruntime.measure.ab import Measured, Plan, judge
from pyruntime.measure.gates import Gate
from pyruntime.measure.levers import read_levers
from pyruntime.measure.records import save_record
from pyruntime.measure.series import Pair, Sample
from pyruntime.tools.lever import main as lever

ROOT = Path(__file__).parents[2]


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("campaign")


def made_up_duel() -> dict[str, Any]:
    """An ab record of r46_base against r48, which is 6 % faster."""
    rng = random.Random(3)

    def pair(ratio: float) -> Pair:
        a, b = (x * rng.gauss(1, 0.002) for x in (130.0, 130.0 / ratio))
        return Pair(Sample(a + 0.4, a, 1900.0), Sample(b + 0.4, b, 1902.0), rng.random() < 0.5)

    facts = {"launches": None, "kernels": None}
    seen = Measured(
        noise=[pair(1.0) for _ in range(9)],
        pairs=[pair(1.06) for _ in range(9)],
        gates=[Gate("parity", True, "logits differ by at most 0.01", {})],
        facts=[facts, facts],
        roles=[None, None],
    )
    arms = {
        key: {"label": f"attention={name}", "options": {"attention": name}}
        for key, name in (("a", "r46-base"), ("b", "r48"))
    }
    about = {"nt": 3325, "device": "Made-up GPU", "commit": "1" * 40, "date": "2026-03-04T00:00:00"}
    return {**arms, **about, **judge(seen, Plan(), [arms[key]["options"] for key in "ab"])}


def made_up_ladder() -> dict[str, Any]:
    variants = {}
    for i, name in enumerate(("r46_base", "r46", "r48", "r50", "r57", "auto")):
        kernel = f"attention_{name}_hd128"
        row = {"attention_ms": 1.0 - i / 10, "share": 0.2 - i / 50, "kernels": [kernel]}
        figures = {"dynamic_shared": 69376 - i, "registers": 90 + i, "blocks": 3}
        variants[name] = {
            "nt": dict.fromkeys(("512", "2048", "3325", "8192"), row), "kernels": {kernel: figures},
        }  # fmt: skip
    about = {"device": "Made-up GPU", "commit": None, "date": "2026-03-04T00:00:00"}
    return {"model": {"name": "made up"}, "variants": variants, **about}


def made_up_peers() -> dict[str, Any]:
    return {
        "device": "Made-up GPU", "commit": None, "date": "2026-03-04T00:00:00",
        "versions": {"torch": "2.11", "transformers": None},
        "cases": {
            "gemm qkv 512": {"ms": {"burst": {"ours": [1.0, 1.2, 1.1], "cublas": [0.9, 0.88, 0.91]},
                                    "sustained": {"ours": [2.0], "cublas": [3.0]}}},
            "prefill qwen2.5-7b 512": {"ms": {"burst": {"ours": [0.2], "libraries": [0.1]}}},
        },
        "failed": {"gemm o 512": "RuntimeError: x"},
        "quoted": [{"peer": "llama.cpp", "model": "m", "source": "s",
                    "tokens_per_s": {"512": 9800}}],
    }  # fmt: skip


def made_up_int8(**slower: float) -> dict[str, Any]:
    """Prefills whose arms take so many times as long as "int8" does; 9 rounds, 0.2 % of noise."""
    rng = random.Random(4)
    arms = {"int8": 1.0, "again": 1.0, "int8:separate": 1.08, "int8:memo": 1.08 / 1.0232,
            "int8:copy": 1.01, "int8:late": 1.0}  # fmt: skip

    def regime(ratio: float) -> dict[str, Any]:
        wall = [50 * ratio * rng.gauss(1, 0.002) for _ in range(9)]
        return {"wall_ms": wall, "gpu_ms": [x - 0.1 for x in wall], "mhz": [1980.0] * 9}

    lengths = ("nt512", "nt2048")
    found = {
        arm: {nt: {name: regime(ratio) for name in ("burst", "sustained")} for nt in lengths}
        for arm, ratio in (arms | slower).items()
    }
    about = {"device": "Made-up GPU", "commit": "2" * 40, "date": "2026-03-04T00:00:00"}
    found["int8"]["over_llama_cpp"] = {"nt512 burst": 2.125, "generation": 0.987}
    return {**about, "kernels": {"attention_wgmma_x": ""}, "again": found.pop("again"),
            "arms": found, "llama_cpp": {"source": "quoted: somebody"}}  # fmt: skip


def made_up_gemm_int8() -> dict[str, Any]:
    """Products whose rows take so many microseconds: a third block costs Q6_K time."""
    rng = random.Random(5)
    rows = {
        "Q4_K": {"s2_b2": 100.0, "s2_b3": 92.0, "s2_b2_c1": 220.0},
        "Q6_K": {"s2_b2": 150.0, "s2_b3": 155.0, "s1_b2_c16": 151.0},
    }

    def raw(us: float) -> list[float]:
        return [1e-3 * us * rng.gauss(1, 0.001) for _ in range(9)]

    figures = {}
    for kind, of in rows.items():
        names = {f"int8_{kind.lower()}_m64_n128_k1_{row}": us for row, us in of.items()}
        for m in (64, 512, 2048):
            figures[f"{kind} gate, up {m}"] = {
                "choice": next(iter(names)), "again": raw(of["s2_b2"]),
                "ms": {name: raw(us) for name, us in names.items()},
            }  # fmt: skip
    about = {"device": "Made-up GPU", "commit": "3" * 40, "date": "2026-03-04T00:00:00"}
    return {**about, "kernels": {}, "figures": figures}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    for name, change in (("before", {}), ("after", {"attention": 0.2})):
        wall = made_up_wall(**change) | {"options": f"attention={name}"}
        del wall["schema"]
        save_record(folder / f"wall-3325-{name}.json", "wall", wall)
        lever(
            ["price", "--levers", str(ROOT / "bench/levers.toml"), "--wall",
             str(folder / f"wall-3325-{name}.json"), "--save", str(folder / f"lever-{name}.json")]
        )  # fmt: skip
    save_record(folder / "ab-r46_base-r48.json", "ab", made_up_duel())
    save_record(folder / "ladder.json", "ladder", made_up_ladder())
    save_record(folder / "peers.json", "peers", made_up_peers())
    save_record(folder / "int8.json", "int8", made_up_int8())
    save_record(folder / "gemm-int8.json", "gemm-int8", made_up_gemm_int8())
    (folder / "device.json").write_text("{}")  # other records lie there, too
    (folder / "wall-3325-after.trace.json").write_text("{}")
    return folder


def test_the_committed_page_is_that_of_the_committed_records(campaign: ModuleType) -> None:
    """Otherwise: python bench/campaign.py"""
    records = campaign.read_records(ROOT / "bench/results")
    assert (ROOT / "docs/campaign.md").read_text() == campaign.page(records)
    for name, svg in campaign.pictures(records).items():
        assert (ROOT / "docs/images" / name).read_text() == svg


def test_records_are_shown(campaign: ModuleType, results: Path) -> None:
    records = campaign.read_records(results)
    assert set(records) == {
        "wall-3325-before", "wall-3325-after", "lever-before", "lever-after", "ab-r46_base-r48",
        "ladder", "peers", "int8", "gemm-int8",
    }  # fmt: skip
    text = campaign.page(records)
    assert "Not recorded yet" not in text
    assert "commit 000000000000, 111111111111, 222222222222, 333333333333. Since then" in text
    wall = records["wall-3325-after"]
    newer = wall | {"kernels": {"attention_wgmma_hd128_w3_n80_cap0": "0" * 64}}
    assert "Since then" not in campaign.page(records | {"wall-3325-after": newer})
    r48 = next(line for line in text.splitlines() if line.startswith("| r48 |"))
    gain = records["ab-r46_base-r48"]["times"]["wall"]["gain"]
    assert f"{gain:+.2f} %" in r48 and "| better |" in r48 and "| 5.16 |" not in r48
    assert "| 69,374 | 92 | 3 | 0.8000 |" in r48 and "2.12 | +5.60 % | LANDED |" in r48
    assert "**r48: better.** p = 0.0039" in text and "The bar is cleared" in text
    for p in records["ab-r46_base-r48"]["pairs"]:
        assert f"{p['a']['wall']:.4f}" in text and f"{p['b']['gpu']:.4f}" in text
    prices = [line for line in text.splitlines() if line.startswith("| r46 | attention")]
    assert len(prices) == 1 and prices[0].endswith("| below the bar |")
    assert "| qkv 512 | 1.1000 (1.00x) | 0.9000 (0.82x) |" in text and "3.0000 (1.50x)" in text
    assert "| gemm, sustained |" in text and "| prefill, sustained |" not in text
    assert "failed: gemm o 512: RuntimeError: x" in text
    assert "quoted, not measured: llama.cpp, m: 9,800 at 512 tokens/s" in text


def rows_of(campaign: ModuleType, records: dict[str, Any]) -> dict[str, list[str]]:
    """The int8 section's rows, by their first cells."""
    page = campaign.page(records).partition("## The int8 line on an H200")[2].partition("\n## ")[0]
    lines = (line[1:-1].split("|") for line in page.splitlines() if line.startswith("| "))
    cells = [[cell.strip() for cell in line] for line in lines]
    return {" ".join(x[:1] if "`" in x[2] else x[:5]): x for x in cells}


def test_levers_of_int8(campaign: ModuleType, results: Path) -> None:
    records = campaign.read_records(results)
    rows, page = rows_of(campaign, records), campaign.page(records)
    assert "`int8` in tokens/s over llama.cpp: nt512 burst 2.12x, generation 0.99x. " in page
    assert "llama.cpp: quoted: somebody." in page
    for nt in ("512 tokens", "2048 tokens"):
        for regime in ("burst", "sustained"):
            r49, r51, r52, both, late = (
                rows[f"{x}, {nt}, {regime}"][-3:]
                for x in ("r49", "r51", "r52", "r51 and r52",
                          "the wanted row gathered before `o`")
            )  # fmt: skip
            assert r49 == ["better, bar cleared", "+2.32 %, LANDED", "as there"]
            assert r51 == ["better, bar cleared", "+1.89 %, LANDED", "same sign"]  # 4.5 %
            assert r52 == ["better", "+5.45 %, LANDED", "same sign"]
            assert both[0] == "better, bar cleared" and both[2] == "same sign"
            assert late[0] in ("equal", "no verdict") and late[1:] == ["", ""]
    burst = rows["r49, 512 tokens, burst"]
    assert burst[2:4] == ["`int8:separate`", "`int8:memo`"] and burst[8] == "0.0039"
    assert float(burst[4]) == pytest.approx(54.0, rel=3e-3)
    product = {key: row[-3:] for key, row in rows.items() if key.startswith("r40, third-block")}
    assert len(product) == 4  # two types, two lengths
    name = "r40, third-block three blocks per SM, not two {} gate, up 2048"
    assert product[name.format("Q4_K")] == ["better", "+13.00 %, LANDED", "same sign"]
    assert product[name.format("Q6_K")] == ["worse", "+13.00 %, LANDED", "not so"]
    expand = rows["r41, expand16 16 bytes at a time, not one Q4_K gate, up 512"]
    assert expand[-3:] == ["better", "+30.70 %, LANDED", "same sign"]
    slots = rows["r39, q6k-double-buffer two slots, not one Q6_K gate, up 512"]
    assert slots[-1] == "same sign"
    assert not any(" 64" in key for key in rows)


def test_what_the_int8_section_asks_for_is_there(campaign: ModuleType) -> None:
    section, bench = (importlib.import_module(name) for name in ("campaign_int8", "int8"))
    for _, _, *arms in section.PREFILLS:
        assert all(arm.partition(":")[2] in bench.WAYS for arm in arms)
        assert set(arms) <= set(section.COMMANDS["int8"].split())
    if "90a" in manifest()["architectures"]:
        there = {spec.name for spec in installed_specs()}
        for *_, types, before, after in section.PRODUCTS:
            for name in types:
                assert {section.ROW.format(name.lower(), x) for x in (before, after)} <= there


def test_int8_verdicts_are_void_where_they_should_be(campaign: ModuleType, results: Path) -> None:
    records = campaign.read_records(results)
    key = "r49, 512 tokens, burst"
    schema = {"schema": "pyruntime.int8/1"}
    records["int8"] = made_up_int8(again=1.05) | schema
    assert rows_of(campaign, records)[key][-3:] == ["no verdict", "+2.32 %, LANDED", "open"]
    assert "A differs from itself by -4." in campaign.page(records)
    records["int8"] = made_up_int8() | schema
    records["int8"]["arms"]["int8:memo"]["nt512"]["burst"]["mhz"] = [1700.0] * 9
    assert rows_of(campaign, records)[key][-1] == "open"
    del records["int8"]["arms"]["int8"]["over_llama_cpp"]
    assert "- llama.cpp: quoted: somebody." in campaign.page(records)
    assert f"- {key}: void: A began at 1980 MHz and B at 1700, 16.5 % apart." in campaign.page(
        records
    )
    del records["int8"]["arms"]["int8:memo"]
    assert set(rows_of(campaign, records)) & {key, "r51, 512 tokens, burst"} == set()
    for kind in ("int8", "gemm-int8"):
        del records[kind]
        assert f"/{kind}.json`." in campaign.page(records)


def test_pictures_are_svg(campaign: ModuleType, results: Path) -> None:
    pictures = campaign.pictures(campaign.read_records(results))
    assert set(pictures) == {
        "campaign-ab.svg", "campaign-wall-3325-before.svg", "campaign-wall-3325-after.svg",
    }  # fmt: skip
    for svg in pictures.values():
        fromstring(svg)
    assert pictures["campaign-ab.svg"].count("<circle") == 4 * 9


def test_the_command_writes_the_page(
    campaign: ModuleType, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs"
    arguments = ["--results", str(results), "--docs", str(docs)]
    monkeypatch.setattr(sys, "argv", ["campaign.py", *arguments])
    assert campaign.main() == 0
    text = (docs / "campaign.md").read_text()
    for name in ("campaign-ab.svg", "campaign-wall-3325-before.svg"):
        assert f"images/{name}" in text and (docs / "images" / name).exists()


def test_a_spoilt_record_is_named(campaign: ModuleType, results: Path) -> None:
    (results / "wall-x.json").write_text(json.dumps({"schema": "pyruntime.ab/1"}))
    with pytest.raises(Exception, match=r"wall-x\.json: not a pyruntime\.wall/1 file"):
        campaign.read_records(results)


def test_the_source_s_arithmetic(campaign: ModuleType) -> None:
    """What the page says of the source, against its published figures."""
    source = importlib.import_module("campaign_source")
    assert [source.ways(s) for s in (256, 272, 288, 160)] == [8, 1, 2, 2]
    text = "\n".join(source.faults())
    assert "43,776 B, leaves out its own pad: 45,824 B (2,048 more)" in text
    assert "2.64x between the two, so about 2.2x" in text
    assert "69,376 B are 1 block on a GB10 and 3 on an H200" in text
    assert "15 % apart" in text
    assert len(read_levers(ROOT / "bench/levers.toml")) > 20
