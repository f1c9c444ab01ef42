"""The README's example prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyruntime.hub import cached

README = Path(__file__).parents[2] / "README.md"


def test_the_python_example() -> None:
    if cached("smollm2") is None:
        pytest.skip("smollm2 is not in the cache; `pyruntime info smollm2` fetches it")
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    code, printed = found[1].replace('device="auto"', 'device="cpu"'), found[2]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == printed


def test_what_pages_have_installed_is_the_clone() -> None:
    """No index has the package: by its name it is found only where it is installed already."""
    root = README.parent
    for page in (README, *root.glob("docs/**/*.md")):
        blocks = re.findall(r"^```\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        assert not [b for b in blocks if "pip install 'pyruntime-cuda" in b], page.name
