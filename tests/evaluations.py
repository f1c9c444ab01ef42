"""The tasks of tests/data/eval, and how the lm-evaluation-harness runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "data" / "eval"
PAGE = (ROOT / "docs" / "clients" / "lm-eval.md").read_text()


@dataclass(frozen=True)
class Run:
    """Tasks, and what they are run with.

    `max_length`: of the model; None: its context length. `limit`: documents of each task.
    """

    tasks: tuple[str, ...]
    max_length: int | None = None
    chat: bool = False
    fewshot: int = 0
    limit: int | None = None


RUNS = {
    "whole": Run(("pyruntime_facts", "pyruntime_prose", "pyruntime_answers")),
    # Prompts are cut off, texts are read in windows.
    "short": Run(("pyruntime_facts", "pyruntime_prose"), max_length=10, limit=3),
    "chat": Run(("pyruntime_facts", "pyruntime_answers"), chat=True, fewshot=1, limit=3),
}


def answers(run: str, lm: Any) -> dict[str, Any]:
    """By task: "metrics" by name, and "responses", those of the model to each document's requests.

    A response is [log-probability, whether greedy], a log-probability, or a text.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    asked = RUNS[run]
    found: Any = simple_evaluate(
        lm, tasks=list(asked.tasks), task_manager=TaskManager(include_path=str(FOLDER)),
        num_fewshot=asked.fewshot, limit=asked.limit, apply_chat_template=asked.chat,
        fewshot_as_multiturn=asked.chat, bootstrap_iters=0,
    )  # fmt: skip
    return {
        task: {
            "metrics": {
                name.removesuffix(",none"): float(value)
                for name, value in found["results"][task].items()
                if name.endswith(",none") and "stderr" not in name
            },
            "responses": [[r[0] for r in doc["resps"]] for doc in found["samples"][task]],
        }
        for task in asked.tasks
    }


def reference(run: str) -> dict[str, Any]:
    """What the harness's own `hf` has answered in one run, see `make_reference.py`."""
    found: dict[str, Any] = json.loads((FOLDER / "reference.json").read_text())[run]
    return found


# float32 of a token's log-probability: each of 30 layers may move it by 2**-24 of a logit of up to
# 32. Those of several tokens add up as chance has it.
OF_A_TOKEN = 30 * 2**-24 * 32
# fp16 weights and activations: twice what NumPy's own such path (ReferenceModel's "fp16") is off by
# in answers of four tokens; its texts, accuracies and greedy flags are all the same.
FP16_OF_A_TOKEN = 0.022
TOKENS = {"pyruntime_facts": 4, "pyruntime_prose": 137}  # scored in one answer, at most


def check(found: dict[str, Any], want: dict[str, Any], of_a_token: float = OF_A_TOKEN) -> None:
    """Log-probabilities are equal but for rounding, all else is."""
    assert found.keys() == want.keys()
    for task, theirs in want.items():
        mine = found[task]
        assert mine["metrics"] == pytest.approx(theirs["metrics"], rel=of_a_token)
        if task not in TOKENS:
            assert mine["responses"] == theirs["responses"]
            continue
        for given, expected in zip(mine["responses"], theirs["responses"], strict=True):
            numbers, others = np.array(given, float), np.array(expected, float)
            tolerance = of_a_token * TOKENS[task] ** 0.5
            np.testing.assert_allclose(numbers[..., :1], others[..., :1], rtol=0, atol=tolerance)
            np.testing.assert_array_equal(numbers[..., 1:], others[..., 1:])  # greedy


# The command, and the page that shows it


def command(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`pyruntime eval`, run where the page has it run."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "pyruntime", "eval", *arguments],
        capture_output=True, text=True, check=False, cwd=ROOT, env=env,
    )  # fmt: skip


def transcripts() -> list[tuple[str, str]]:
    """Arguments of `pyruntime eval`, and what it prints."""
    pattern = r"^```\n\$ pyruntime eval ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)^```"
    return [
        (command.replace("\\\n", " "), shown)
        for command, shown in re.findall(pattern, PAGE, re.MULTILINE | re.DOTALL)
    ]
