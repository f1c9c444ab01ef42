"""Other programs' clients: the openai package, and lm-evaluation-harness's local-completions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import log_softmax
from serving import NAME, Client, need, serving, write_spoken_model

from pyruntime import Engine

need("openai", "lm_eval")

TEXTS = ["The capital of France", "is Paris. naïve", "and the of"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_spoken_model(tmp_path_factory.mktemp("model") / "spoken.gguf")
    with Engine.load(path, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[Client]:
    with serving(engine) as (client, _):
        yield client


@pytest.fixture
def openai(client: Client) -> Iterator[Any]:
    from openai import OpenAI

    base = f"http://127.0.0.1:{client.port}/v1"
    with OpenAI(base_url=base, api_key="none", max_retries=0) as made:
        yield made


def test_openai_completes(openai: Any, engine: Engine) -> None:
    answer = openai.completions.create(
        model=NAME, prompt=TEXTS, max_tokens=4, logprobs=2, echo=True, temperature=0
    )
    for choice, text in zip(answer.choices, TEXTS, strict=True):
        ids = engine.tokenizer.encode(text).tolist()
        ids += engine.generate(ids, 4)
        assert choice.text == engine.tokenizer.decode(ids) and choice.finish_reason == "length"
        assert len(choice.logprobs.token_logprobs) == len(ids) == len(choice.logprobs.tokens)
        assert len(choice.logprobs.top_logprobs[-1]) == 2
    assert answer.usage.completion_tokens == 12


def test_openai_streams(openai: Any) -> None:
    fields: dict[str, Any] = {"model": NAME, "prompt": TEXTS[0], "max_tokens": 6}
    whole = openai.completions.create(**fields).choices[0].text
    chunks = list(openai.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole and len(chunks) > 1


def test_openai_lists_models(openai: Any) -> None:
    assert [model.id for model in openai.models.list()] == [NAME]
    assert openai.models.retrieve(NAME).id == NAME


def test_openai_knows_our_errors(openai: Any) -> None:
    from openai import BadRequestError, NotFoundError

    with pytest.raises(NotFoundError) as missing:
        openai.completions.create(model="gpt", prompt="a")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(BadRequestError, match="takes the likeliest token") as refused:
        openai.completions.create(model=NAME, prompt="a", temperature=1)
    assert refused.value.type == "invalid_request_error"


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, pair, n) for n, pair in enumerate(arguments)]


@pytest.fixture(params=[(1, 1), (2, 1), (1, 3)], ids=["alone", "in pairs", "three at once"])
def harness(client: Client, request: pytest.FixtureRequest) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    batch, concurrent = request.param
    return LocalCompletionsAPI(
        base_url=f"http://127.0.0.1:{client.port}/v1/completions", model=NAME, max_length=250,
        batch_size=batch, num_concurrent=concurrent, max_retries=1,
    )  # fmt: skip


def test_the_harness_takes_our_tokenizer(harness: Any, engine: Engine) -> None:
    assert harness.tokenizer_backend == "remote"
    for text in TEXTS:
        assert harness.tok_encode(text) == engine.tokenizer.encode(text).tolist()
    assert harness.decode_batch([harness.tok_encode(TEXTS[1])]) == [TEXTS[1]]
    assert harness.eot_token_id == engine.tokenizer.eos_id


def test_the_harness_scores(harness: Any, engine: Engine) -> None:
    """Log-likelihoods, and whether greedy decoding would have said the same."""
    pairs = [(TEXTS[0], " is"), (TEXTS[0], " and"), (TEXTS[1], " of the"), ("the", " capital")]
    greedy = engine.generate(engine.tokenizer.encode(TEXTS[2]), 1)
    pairs.append((TEXTS[2], engine.tokenizer.decode(greedy)))
    found = harness.loglikelihood(instances("loglikelihood", pairs))
    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        ids = engine.tokenizer.encode(context).tolist()
        more = engine.tokenizer.encode(context + continuation).tolist()[len(ids) :]
        rows = log_softmax(np.asarray(engine.prefill([*ids, *more], logits="all").logits))
        rows = rows[len(ids) - 1 : -1]
        assert value == pytest.approx(rows[np.arange(len(more)), more].sum(), abs=1e-4)
        assert is_greedy == (rows.argmax(axis=1).tolist() == more)
    assert found[-1][1] and not found[0][1]


def test_the_harness_scores_texts_of_many_windows(harness: Any, engine: Engine) -> None:
    text = " ".join(TEXTS * 20)
    (found,) = harness.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]))
    ids = engine.tokenizer.encode(text).tolist()
    assert len(ids) > 250
    assert found < 0 and np.isfinite(found)


def test_the_harness_generates(harness: Any, engine: Engine) -> None:
    options = {"until": ["never there"], "max_gen_toks": 5}
    found = harness.generate_until(instances("generate_until", [(t, options) for t in TEXTS]))
    for text, reply in zip(TEXTS, found, strict=True):
        more = engine.generate(engine.tokenizer.encode(text), 5)
        assert reply == engine.tokenizer.decode(more)


def test_the_harness_runs_a_task(client: Client, tmp_path: Path) -> None:
    """From end to end, as its command line does, on a task that is made here."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    (tmp_path / "d.jsonl").write_text('{"q": "The capital of", "c": [" France", " the"], "a": 0}\n')
    (tmp_path / "made_up.yaml").write_text(
        "task: made_up\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'd.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: q\ndoc_to_target: a\n"
        "doc_to_choice: c\nmetric_list: [{metric: acc}]\n"
    )
    address = f"http://127.0.0.1:{client.port}/v1/completions"
    found = simple_evaluate(
        "local-completions",
        model_args={"base_url": address, "model": NAME, "max_length": 250},
        tasks=["made_up"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found is not None and found["results"]["made_up"]["acc,none"] in (0, 1)
