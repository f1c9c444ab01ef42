"""The audit's HTML page: nothing outside itself, and laid out well in a real browser."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path

import pytest
from browser import browse, layout

from pyruntime.cli import main
from pyruntime.cubin import nvdisasm
from pyruntime.errors import ToolError

DATA = Path(__file__).parents[1] / "data" / "cubins"
KERNEL = ["tile_t128", str(DATA / "nvcc-13.0-sm_90a.cubin")]
RECORD = {
    "schema": "pyruntime.behaviour/1", "kernel": "tile_t128", "device": "<a GPU & more>",
    "source": "events", "milliseconds": [0.3, 0.31, 0.29],
    "work": {"flop": 1e9}, "peak": {"flop_per_s": 1e13},
    "counters": {"achieved_occupancy": 0.1, "bank_conflicts": 12345.0, "stall_mio": 0.36},
}  # fmt: skip


def written(tmp_path: Path, *options: str) -> Path:
    page = tmp_path / "audit.html"
    assert main(["audit", *KERNEL, "--html", str(page), *options]) == 0
    return page


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A page with everything on it."""
    record = tmp_path / "record.json"
    record.write_text(json.dumps(RECORD))
    return written(tmp_path, "--record", str(record), "--share", "10.2%", "--gain", "2.43")


def test_the_page_needs_nothing_but_itself(full: Path) -> None:
    text = full.read_text()
    assert not re.search(r"https?:|//\w|<script|<link|<img|\bsrc=|@import|url\(", text)
    assert "&lt;a GPU &amp; more&gt;" in text and "<a GPU" not in text
    assert text.count("<figure>") == text.count("<svg") >= 3
    assert text.startswith("<!DOCTYPE html>") and text.endswith("</html>\n")


def test_what_is_unknown_is_said(tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    kernel = ["row_sum", str(DATA / "triton-sm_90a.cubin")]
    assert main(["audit", *kernel, "--html", str(page)]) == 0
    text = page.read_text()
    assert "Blocks per SM unknown" in text and "none inside (not a kernel of this package)" in text
    assert "unknown (--record)" in text


def test_the_layout_in_a_browser(full: Path, tmp_path: Path) -> None:
    found = layout(full, tmp_path)
    try:
        nvdisasm.find()
        figures = 5
    except ToolError:
        figures = 4  # none of the stages
    assert found == {"figures": figures, "wrong": []}


def test_a_picture_in_a_browser(full: Path, tmp_path: Path) -> None:
    png = tmp_path / "page.png"
    browse(full, tmp_path / "profile", f"--screenshot={png}")
    data = png.read_bytes()
    assert data[16:24] == (1000).to_bytes(4, "big") + (2600).to_bytes(4, "big")
    chunks, at = [], 8
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == b"IDAT":
            chunks.append(data[at + 8 : at + 8 + size])
        at += size + 12
    pixels = zlib.decompress(b"".join(chunks))
    assert len(set(pixels)) > 100  # text and colours, not one blank sheet
