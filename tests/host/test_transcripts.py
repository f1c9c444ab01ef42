"""The transcripts in docs/: our tools print of the installed cubins what the pages say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pyruntime.cli import main
from pyruntime.cubin import nvdisasm
from pyruntime.cubin.installed import manifest, root
from pyruntime.errors import ToolError

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ pyruntime (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
TRANSCRIPTS = [
    pytest.param(*found, id=f"{page}: {found[0]}")
    for page in ("inspection.md", "attention.md", "performance.md")
    for block in BLOCK.findall((ROOT / "docs" / page).read_text())
    for found in COMMAND.findall(block)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: it holds the cubins that the pages name, and this project."""
    built = manifest()
    if not built["nvcc_version"].startswith("13.0") or "90a" not in built["architectures"]:
        pytest.skip("the pages show cubins by nvcc 13.0, of sm_90a most of all")
    for source in (root() / "sm_90a", ROOT / "tests/data/cubins", ROOT):
        for path in source.iterdir():
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "shown"), TRANSCRIPTS)
def test_it_prints_what_the_page_shows(
    command: str, shown: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = shlex.split(command)
    if arguments[0] in ("sass", "audit") or "slots_per_mma" in command:
        try:
            nvdisasm.find()
        except ToolError as error:
            pytest.skip(str(error))
    if "sm_121" in arguments and "120" not in manifest()["architectures"]:
        pytest.skip("no cubins for sm_120 are installed")
    main(arguments)
    lines = shown.splitlines(keepends=True)
    # A line with nothing but … stands for any number of lines.
    pattern = "".join("(?:.*\n)*?" if x.strip() == "…" else re.escape(x) for x in lines)
    assert re.fullmatch(pattern, capsys.readouterr().out)
