"""Pages in a real browser, which reaches no network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

# What is wrong with the layout: text that leaves its figure or runs into other text, a page that
# must be scrolled sideways.
MEASURE = """<script>
const wrong = [];
const page = document.documentElement;
if (page.scrollWidth > page.clientWidth) wrong.push(`page ${page.scrollWidth} wide`);
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map((t) => [t, t.getBoundingClientRect()]);
  for (const [t, r] of texts) {
    if (r.left < frame.left || r.right > frame.right + 1 || r.bottom > frame.bottom + 1)
      wrong.push(`outside: ${t.textContent}`);
    for (const [u, q] of texts)
      if (t !== u && r.left < q.right && q.left < r.right && r.top < q.bottom && q.top < r.bottom)
        wrong.push(`overlap: ${t.textContent} / ${u.textContent}`);
  }
}
document.title = JSON.stringify({ figures: document.querySelectorAll("svg").length, wrong });
</script>"""


def browse(page: Path | str, profile: Path, *options: str) -> str:
    """What chromium prints about a page, a file or at an address of this machine.

    Skips the test where there is no chromium.
    """
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("chromium is not installed (.ci/run installs it: apt-get install chromium)")
    run = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
            f"--user-data-dir={profile}",
            "--window-size=1000,2600", *options, page if isinstance(page, str) else page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return run.stdout


def layout(page: Path, folder: Path) -> dict[str, Any]:
    """How many figures a page has, and what is wrong with the way it lies ([] if nothing)."""
    measured = folder / "measured.html"
    measured.write_text(page.read_text().replace("</body>", f"{MEASURE}</body>"))
    title = re.search(r"<title>(.*?)</title>", browse(measured, folder / "profile", "--dump-dom"))
    assert title is not None
    found: dict[str, Any] = json.loads(unescape(title[1]))
    return found
