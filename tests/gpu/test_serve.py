"""The scoring service's worker on a GPU: prompts that are scored and continued side by side."""

from __future__ import annotations

import numpy as np
import pytest
from goldens import GOLDEN, prompts

from pyruntime import Engine
from pyruntime.serve.sequence import Sequence
from pyruntime.serve.texts import Texts
from pyruntime.serve.worker import Job, Worker

STEM = "tiny-llama-q4_k_m"
ATOL = 0.02  # of a log-probability: fp16 weights and activations

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [7, 1 << 20])
def test_scores_and_continuations_are_llama_cpps(rows: int) -> None:
    """Also where few rows of logits are made at a time, so that prompts are cut."""
    golden = prompts(STEM)
    with Engine.load(GOLDEN / f"{STEM}.gguf", device="cuda:0", max_tokens=256) as engine:
        worker = Worker(engine, logits_bytes=4 * engine.config.vocab * rows)
        texts = Texts(engine)
        jobs = []
        for prompt in golden:
            scored = Sequence(prompt.ids, texts, max_tokens=1, scored=True, top=2)
            more = Sequence(prompt.ids, texts, max_tokens=len(prompt.greedy))
            jobs.append(Job([scored, more]))
            worker.submit(jobs[-1])
        for job in jobs:
            job.done.result(60)
            assert "gpu" in job.timings
        worker.close()
        assert worker.counts.calls < worker.counts.sequences
    for job, prompt in zip(jobs, golden, strict=True):
        scored, more = job.sequences
        values = scored.scores.log_probs[: len(prompt.ids) - 1]
        np.testing.assert_allclose(values, prompt.logprobs, atol=ATOL)
        if min(prompt.greedy_gap) > 2 * ATOL:
            assert more.tokens == prompt.greedy.tolist()
