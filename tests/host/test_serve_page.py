"""The page of the scoring service: nothing from outside, and what a real browser makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import timed_driver
from browser import browse
from goldens import GOLDEN
from serving import Client, need, serving, write_spoken_model

from pyruntime import Engine
from pyruntime.measure import roofline
from pyruntime.measure.series import REGIMES, Regime

need()

from pyruntime.serve import app  # noqa: E402

TEXT = "The capital of France is Paris. <b>naïve</b>\n🚆"
# What a user without a mouse does, and what is wrong with the layout, into the page's title.
SCRIPT = """<script>
const wait = async (what) => { while (!what()) await new Promise((done) => setTimeout(done, 20)); };
const press = (key) => $("tokens").dispatchEvent(new KeyboardEvent("keydown", { key }));
const told = () => $("token").textContent;
(async () => {
  await wait(() => !$("results").hidden);
  const found = [told()], own = [];
  for (const key of ["ArrowRight", "End", "ArrowRight", "Home", "ArrowLeft"]) {
    press(key);
    found.push(told());
    own.push([...document.querySelectorAll("#token tr.own code")].map((code) => code.textContent));
  }
  $("measure").click();
  await wait(() => $("reason").textContent && !$("measure").disabled);
  const page = document.documentElement;
  const colours = [...$("tokens").children].map((t) => getComputedStyle(t).backgroundColor);
  document.title = JSON.stringify({
    found, own, reason: $("reason").textContent, wide: page.scrollWidth > page.clientWidth,
    colours: new Set(colours).size, drawn: $("kernels").querySelectorAll("rect").length,
  });
})();
</script>"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_spoken_model(tmp_path_factory.mktemp("model") / "spoken.gguf")
    with Engine.load(path, device="cpu") as engine:
        yield engine


def visit(client: Client, prompt: str, folder: Path, *options: str) -> str:
    """The page after it scored `prompt`."""
    address = f"http://127.0.0.1:{client.port}/#{quote(prompt)}"
    waiting = ["--virtual-time-budget=30000", *options]
    return browse(address, folder / "profile", "--dump-dom", *waiting)


def test_it_needs_nothing_but_the_server(engine: Engine) -> None:
    with serving(engine) as (client, _):
        status, headers, text = client.call("/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert not re.search(r"https?:|//\w|<img|\bsrc=|@import|url\(", text)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy


def test_a_prompt_is_scored_in_a_browser(engine: Engine, tmp_path: Path) -> None:
    with serving(engine) as (client, _):
        dom = visit(client, TEXT, tmp_path)
    ids = engine.tokenizer.encode(TEXT)
    assert dom.count('role="option"') == len(ids)
    assert "<b>" not in dom and "on cpu (NumPy)" in dom
    (shown,) = re.findall(r"Perplexity</dt><dd>([\d.e+]+)", dom)
    assert float(shown) == pytest.approx(engine.perplexity(ids), rel=1e-3)
    best = np.asarray(engine.prefill(ids).logits)[0].argmax()
    token = engine.tokenizer.token(int(best)).replace(" ", "·").replace("\n", "↵")
    assert re.findall(r'id="next">.*?<code>(.*?)</code>', dom) == [escape(token, quote=False)]


@pytest.mark.parametrize("width", [1000, 500])
def test_without_a_mouse(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    page = app.page().replace("</body>", f"{SCRIPT}</body>")
    monkeypatch.setattr(app, "page", lambda: page)
    with serving(engine) as (client, _):
        dom = visit(client, TEXT, tmp_path, f"--window-size={width},2600")
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    found = json.loads(unescape(title[1]))
    count = len(engine.tokenizer.encode(TEXT))
    places = [int(text.split(".")[0]) for text in found["found"]]
    assert places == [2, 3, count, count, 1, 1]
    # The token itself is always in the table, though it be none of the likeliest.
    shown = [
        text.split(". ", 1)[1].split("log-prob")[0].split("nothing")[0]
        for text in found["found"][1:]
    ]
    assert found["own"] == [[text] for text in shown[:3]] + [[], []]
    assert "log-probability −" in found["found"][0] and "no log-prob" in found["found"][-1]
    assert found["reason"] == "kernels are timed on a GPU; this engine runs on cpu (NumPy)"
    assert found["drawn"] == 0 and not found["wide"] and found["colours"] >= 4


def test_the_wall_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a driver that only keeps time; the model has no vocabulary."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(REGIMES, "burst", Regime(rest=0.0, warm_up=0.0))
    monkeypatch.setattr(roofline, "SIDE", 256)
    monkeypatch.setattr(roofline, "COPY_BYTES", 1 << 20)
    timed_driver.install(monkeypatch, lambda name: 0.05)
    path = GOLDEN / "tiny-llama-q4_k_m.gguf"
    with Engine.load(path, device="cuda:0", max_tokens=64) as engine, serving(engine) as (c, _):
        status, _, found = c.call("/wall", {"tokens": 40})
        assert status == 200 and found["record"]["nt"] == 40
        assert found["svg"].startswith("<svg") and found["svg"].count("<rect") > 10
        for tokens in (0, 65, "x", None):
            status, _, record = c.call("/wall", {"tokens": tokens})
            assert status == 400 and "from 1 to 64" in record["error"]["message"]
