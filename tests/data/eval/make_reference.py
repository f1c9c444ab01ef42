"""Write reference.json: what the harness's own `hf` model answers to the tasks in this folder.

    python make_reference.py

Needs the extra `eval`, torch, accelerate and transformers, which reads the GGUF file of SmolLM2
itself: vocabulary, chat template and weights, dequantized to float32. Softmax is in float64: that
of torch over 49152 float32 numbers loses the smallest, and log-probabilities come out too large by
8e-6. The values here are of lm-eval 0.4.13, torch 2.13.0 and transformers 5.24.0 on a CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1]))

from evaluations import RUNS, answers  # noqa: E402

from pyruntime.hub import resolve  # noqa: E402


def reference(run: str) -> dict[str, Any]:
    """The answers of `hf` in one run."""
    from lm_eval.models.huggingface import HFLM

    path = resolve("smollm2")
    lm = HFLM(
        str(path.parent), gguf_file=path.name, device="cpu", dtype="float32",
        softmax_dtype="float64", batch_size=8, max_length=RUNS[run].max_length,
    )  # fmt: skip
    return answers(run, lm)


if __name__ == "__main__":
    found = {run: reference(run) for run in RUNS}
    (HERE / "reference.json").write_text(json.dumps(found, indent=1) + "\n")
