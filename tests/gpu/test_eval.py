"""The lm-evaluation-harness on a GPU: the answers of its own `hf`, and those of NumPy.

    pip install 'pyruntime-cuda[eval]' && pytest -m gpu tests/gpu/test_eval.py

Skipped where that is not installed. SmolLM2 is looked for as `goldens.py` says. bench/eval.py
measures.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evaluations import FP16_OF_A_TOKEN, RUNS, answers, check, command, reference, transcripts
from goldens import SMOLLM2, model_path
from models import write_talking_model

from pyruntime import Engine

pytest.importorskip("lm_eval", reason="needs pip install 'pyruntime-cuda[eval]'")

from pyruntime.clients.lm_eval import PyruntimeLM

pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports

DEVICE = "cuda:0"
ATOL = 0.02  # of a log-probability: fp16 weights and activations


@pytest.mark.parametrize("run", RUNS)
def test_answers_are_those_of_transformers(run: str) -> None:
    with Engine.load(model_path(SMOLLM2), device=DEVICE) as engine:
        found = answers(run, PyruntimeLM(engine, max_length=RUNS[run].max_length))
    check(found, reference(run), FP16_OF_A_TOKEN)


def test_the_command_prints_the_pages_table() -> None:
    """All but the first line, which repeats the arguments."""
    path = model_path(SMOLLM2)
    assert transcripts()
    for arguments, shown in transcripts():
        asked = arguments.replace("smollm2,device=cpu", f"{path},device={DEVICE}")
        assert asked != arguments
        done = command(*shlex.split(asked), env={**os.environ, "HF_HUB_OFFLINE": "1"})
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().splitlines()[1:] == shown.strip().splitlines()[1:]


def test_answers_are_those_of_numpy(tmp_path: Path) -> None:
    """Of a small model that is made here: likelihoods, of whole texts, too, and greedy answers."""
    path = write_talking_model(tmp_path / "talking.gguf", head_dim=64)
    found = []
    for device in (DEVICE, "cpu"):
        with Engine.load(path, device=device, max_tokens=32, kv_tokens=64) as engine:
            found.append(asked(PyruntimeLM(engine, max_length=40)))
    pairs, texts, answers = zip(*found, strict=True)
    for (mine, _), (theirs, _) in zip(*pairs, strict=True):
        assert mine == pytest.approx(theirs, abs=ATOL)
    assert [greedy for _, greedy in pairs[0]] == [greedy for _, greedy in pairs[1]]
    assert texts[0] == pytest.approx(texts[1], abs=3 * ATOL)  # of 90 tokens
    assert answers[0] == answers[1] and len({*answers[0]}) > 1


def asked(lm: PyruntimeLM) -> tuple[list[tuple[float, bool]], list[float], list[str]]:
    """Its answers to one request of each kind, and more."""
    contexts = ["the cat", "", "abc" * 20, "x, y", "0123456789"]
    greedy = {"until": ["."], "max_gen_toks": 6}
    return (
        lm.loglikelihood(requests(*((c, e) for c in contexts for e in " abz"))),
        lm.loglikelihood_rolling(requests(("0123456789" * 9,), ("the cat sat",))),
        lm.generate_until(requests(*((c, greedy) for c in contexts))),
    )


def requests(*arguments: Any) -> list[Any]:
    """As the harness makes them."""
    return [SimpleNamespace(args=args) for args in arguments]
