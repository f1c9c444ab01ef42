"""The harness's own `hf` model beside ours, where transformers and torch are installed."""

from __future__ import annotations

import runpy

import pytest
from evaluations import FOLDER, RUNS, answers, check

from pyruntime import Engine
from pyruntime.hub import cached

pytest.importorskip("lm_eval", reason="needs pip install 'pyruntime-cuda[eval]'")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from pyruntime.clients.lm_eval import PyruntimeLM


@pytest.mark.filterwarnings("ignore")
def test_answers_are_those_of_transformers_today() -> None:
    if cached("smollm2") is None:
        pytest.skip("smollm2 is not in the cache; `pyruntime info smollm2` fetches it")
    reference = runpy.run_path(str(FOLDER / "make_reference.py"))["reference"]
    with Engine.load("smollm2", device="cpu") as engine:
        found = answers("short", PyruntimeLM(engine, max_length=RUNS["short"].max_length))
    check(found, reference("short"))
