"""docs/embedding.md: its program runs, and prints what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyruntime.hub import cached

PAGE = Path(__file__).parents[2] / "docs" / "embedding.md"


def test_the_page(tmp_path: Path) -> None:
    if cached("smollm2") is None:
        pytest.skip("smollm2 is not in the cache; `pyruntime info smollm2` fetches it")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    code = "".join(text for language, text in blocks if language == "python")
    printed = "".join(text for language, text in blocks if not language)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code.replace('device="auto"', 'device="cpu"')],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == printed
