"""Completions over HTTP: OpenAI's fields, from a small model in NumPy."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDEN, log_softmax, prompts
from serving import NAME, Client, need, serving, write_spoken_model

from pyruntime import Engine

need()

STEM = "tiny-llama-q4_k_m"
TEXT = "The capital of France is Paris. naïve"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spoken_model(tmp_path_factory.mktemp("model") / "spoken.gguf")


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with Engine.load(path, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[Client]:
    with serving(engine, prompt_tokens=200) as (client, _):
        yield client


# What is scored


def test_log_probabilities_are_llama_cpps() -> None:
    """Of a model without a vocabulary, whose tokens are shown as their ids."""
    with Engine.load(GOLDEN / f"{STEM}.gguf", device="cpu") as engine, serving(engine) as (c, _):
        for prompt in prompts(STEM):
            ids = prompt.ids.tolist()
            count = len(prompt.greedy)
            fields = {"echo": True, "logprobs": 1, "max_tokens": count}
            choice = c.choice(ids, **fields)
            found = choice["logprobs"]
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            values = found["token_logprobs"][1 : len(ids)]
            np.testing.assert_allclose(values, prompt.logprobs, atol=1e-3)
            for at, top in enumerate(found["top_logprobs"][1 : len(ids)]):
                best = f" {prompt.top10_ids[at, 0]}"
                value = prompt.top10_logits[at, 0] - prompt.lse[at]
                assert (
                    top[best]
                    == pytest.approx(value, abs=1e-3)
                    == pytest.approx(max(top.values()), abs=1e-3)
                )
            if min(prompt.greedy_gap) > 1e-3:
                assert choice["text"] == "".join(f" {id}" for id in [*ids, *prompt.greedy])
            assert choice["text"] == "".join(found["tokens"])


def test_echo_and_log_probabilities(client: Client, engine: Engine) -> None:
    answer = client.complete(TEXT, echo=True, logprobs=3, max_tokens=2)
    assert answer["object"] == "text_completion" and answer["model"] == NAME
    (choice,) = answer["choices"]
    ids = engine.tokenizer.encode(TEXT).tolist()
    more = engine.generate(ids, 2)
    assert choice["text"] == engine.tokenizer.decode([*ids, *more]) and choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": len(ids), "completion_tokens": 2, "total_tokens": len(ids) + 2
    }  # fmt: skip
    assert answer["timings"].keys() == {"queued", "engine", "scores"}
    found = choice["logprobs"]
    assert found["tokens"] == [engine.tokenizer.token(id) for id in [*ids, *more]]
    expected = log_softmax(engine.prefill([*ids, *more], logits="all").logits)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for at, id in enumerate([*ids, *more][1:]):
        assert found["token_logprobs"][at + 1] == pytest.approx(expected[at, id], abs=1e-5)
        top = found["top_logprobs"][at + 1]
        best = np.argsort(-expected[at])[:3].tolist()
        assert top.keys() == {engine.tokenizer.token(t) for t in [*best, id]}
        assert max(top.values()) == pytest.approx(expected[at].max(), abs=1e-5)
        assert top[engine.tokenizer.token(id)] == found["token_logprobs"][at + 1]


def test_offsets_are_where_tokens_begin(client: Client) -> None:
    """Also those of a character whose bytes are several tokens."""
    text = "Paris 🚆 is"
    choice = client.choice(text, echo=True, logprobs=0, max_tokens=0)
    found = choice["logprobs"]
    assert choice["text"] == text
    data, at = text.encode(), 0
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert offset == len(data[:at].decode(errors="ignore")), token
        at += len(re.sub(r"\\x..", "?", token).encode())
    assert at == len(data)


def test_offsets_without_echo_count_from_the_prompt(client: Client) -> None:
    echoed = client.choice(TEXT, echo=True, logprobs=1, max_tokens=3)
    plain = client.choice(TEXT, logprobs=1, max_tokens=3)
    assert echoed["text"] == TEXT + plain["text"]
    for name in ("tokens", "text_offset"):
        values = plain["logprobs"][name]
        assert values == echoed["logprobs"][name][-3:] and len(values) == 3
    values, expected = (choice["logprobs"]["token_logprobs"] for choice in (plain, echoed))
    np.testing.assert_allclose(values, expected[-3:], atol=1e-5)


def test_a_prompt_of_one_token_alone(client: Client) -> None:
    choice = client.choice([5], echo=True, logprobs=1, max_tokens=0)
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None] == choice["logprobs"]["top_logprobs"]
    assert client.choice([5], max_tokens=0)["text"] == ""


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_prompts_of_every_form_are_answered_alike(
    client: Client, engine: Engine, max_tokens: int
) -> None:
    ids = [engine.tokenizer.encode(text).tolist() for text in (TEXT, "of France")]
    fields = {"echo": True, "logprobs": 2, "max_tokens": max_tokens}
    one = [client.choice(prompt, **fields) for prompt in ids]
    for prompt in (ids, [TEXT, "of France"], [TEXT, ids[1]]):
        choices = client.complete(prompt, **fields)["choices"]
        assert [choice.pop("index") for choice in choices] == [0, 1]
        for choice, alone in zip(choices, one, strict=True):
            assert choice["text"] == alone["text"]
            assert choice["logprobs"]["tokens"] == alone["logprobs"]["tokens"]
            values, expected = (c["logprobs"]["token_logprobs"][1:] for c in (choice, alone))
            np.testing.assert_allclose(values, expected, atol=1e-5)


# Where a completion ends


def test_the_default_is_sixteen_tokens(client: Client, engine: Engine) -> None:
    more = engine.generate(engine.tokenizer.encode(TEXT), 16)
    assert client.choice(TEXT)["text"] == engine.tokenizer.decode(more)
    assert client.choice(TEXT, max_tokens=None, temperature=0, n=1, seed=3)["text"]


def test_stop_strings(client: Client) -> None:
    whole = client.choice(TEXT, max_tokens=12, logprobs=0)
    text, tokens = whole["text"], whole["logprobs"]["tokens"]
    stop = text[4:7]  # across tokens, or within one
    assert text.index(stop) == 4
    found = client.choice(TEXT, max_tokens=12, logprobs=0, stop=["never there", stop])
    assert found["text"] == text[:4] and found["finish_reason"] == "stop"
    used = found["logprobs"]["tokens"]  # those that made up the stop string, too
    assert used == tokens[: len(used)] and "".join(used)[:-1].count(stop) == 0
    assert client.choice(TEXT, max_tokens=12, stop="never there")["finish_reason"] == "length"


def test_the_token_that_ends_the_text_is_scored_and_not_shown(
    engine: Engine, tmp_path: Path
) -> None:
    """lm-evaluation-harness takes the last log-probability for one token's, which must be there."""
    prompt = engine.tokenizer.encode(TEXT).tolist()
    first, second = engine.generate(prompt, 2)
    path = write_spoken_model(tmp_path / "m.gguf", eos_token_id=second)
    with Engine.load(path, device="cpu") as other, serving(other) as (client, _):
        choice = client.choice(prompt, max_tokens=9, logprobs=1)
        assert choice["text"] == engine.tokenizer.decode([first])
        assert choice["finish_reason"] == "stop"
        shown = [engine.tokenizer.token(id) for id in (first, second)]
        assert choice["logprobs"]["tokens"] == shown
        answer = client.complete([*prompt, first], max_tokens=1, logprobs=1, echo=True)
        (choice,) = answer["choices"]
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 2
        assert choice["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 1


# Streams


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 8},
        {"max_tokens": 8, "logprobs": 2, "echo": True},
        {"max_tokens": 0, "echo": True},
        {"max_tokens": 3, "prompt": [TEXT, "of"], "stream_options": {"include_usage": True}},
    ],
)
def test_a_stream_adds_up_to_the_whole(client: Client, fields: dict[str, Any]) -> None:
    fields = {"model": NAME, "prompt": TEXT, **fields}
    _, _, whole = client.call("/v1/completions", fields)
    status, headers, text = client.call("/v1/completions", {**fields, "stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    events = [part.removeprefix("data: ") for part in text.split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    chunks = [json.loads(part) for part in events[:-2]]
    if "stream_options" in fields:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"] == whole["usage"]
    for expected in whole["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in own) == expected["text"]
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
        if expected["logprobs"]:
            for name, values in expected["logprobs"].items():
                assert [v for c in own for v in c["logprobs"][name]] == values


# Errors


@pytest.mark.parametrize(
    ("fields", "status", "param", "text"),
    [
        ({"model": "gpt"}, 404, "model", "'gpt' does not exist here; there is 'tiny'"),
        ({"model": None}, 404, "model", "does not exist"),
        ({"prompt": None}, 400, "prompt", "missing"),
        ({"prompt": []}, 400, "prompt", "a string, a list"),
        ({"prompt": {}}, 400, "prompt", "a string, a list"),
        ({"prompt": ""}, 400, "prompt", "^prompt: empty; at least one token"),
        ({"prompt": [[]]}, 400, "prompt", r"prompt\[0\]: empty"),
        ({"prompt": ["a", 1]}, 400, "prompt", r"prompt\[1\] must be"),
        ({"prompt": [1, "a"]}, 400, "prompt", "prompt must be"),
        ({"prompt": [[1], [True]]}, 400, "prompt", r"prompt\[1\] must be"),
        ({"prompt": [1, 99999]}, 400, "prompt", "99999 at position 1 is outside"),
        ({"prompt": [1, -1]}, 400, "prompt", "-1 at position 1"),
        ({"prompt": [1, 10**30]}, 400, "prompt", "integers"),
        ({"prompt": "\ud800"}, 400, "prompt", "lone surrogate"),
        ({"prompt": ["a"] * 9}, 400, "prompt", "a list of 9; the most is 8"),
        ({"prompt": [1] * 200}, 400, "prompt", "200 tokens, but 201 were asked for .200 in the"),
        ({"max_tokens": 250}, 400, "prompt", "250 for the completion"),
        ({"max_tokens": -1}, 400, "max_tokens", "at least 0"),
        ({"max_tokens": 1.5}, 400, "max_tokens", "no integer"),
        ({"logprobs": True}, 400, "logprobs", "no integer"),
        ({"logprobs": 101}, 400, "logprobs", "at most 100"),
        ({"temperature": 0.7}, 400, "temperature", "only 0 is served: .*likeliest"),
        ({"temperature": "0"}, 400, "temperature", "only 0"),
        ({"n": 2}, 400, "n", "only 1"),
        ({"best_of": 3}, 400, "best_of", "only 1"),
        ({"presence_penalty": 1}, 400, "presence_penalty", "only 0"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias", "only {}"),
        ({"suffix": "x"}, 400, "suffix", "only null"),
        ({"seed": "x"}, 400, "seed", "no integer"),
        ({"echo": 1}, 400, "echo", "true or false"),
        ({"stop": ""}, 400, "stop", "none of them empty"),
        ({"stop": ["x"] * 33}, 400, "stop", "most is 32"),
        ({"stream_options": 3}, 400, "stream_options", "object"),
    ],
)
def test_what_is_refused(
    client: Client, fields: dict[str, Any], status: int, param: str, text: str
) -> None:
    asked = {"model": NAME, "prompt": "a", "max_tokens": 1, **fields}
    found, _, record = client.call("/v1/completions", asked)
    error = record["error"]
    assert found == status and error["type"] == "invalid_request_error" and error["param"] == param
    assert re.search(text, error["message"])


def test_codes_of_openai(client: Client) -> None:
    long = client.call("/v1/completions", {"model": NAME, "prompt": [1] * 300})[2]
    assert long["error"]["code"] == "context_length_exceeded"
    assert client.call("/v1/models/gpt")[2]["error"]["code"] == "model_not_found"
    assert client.call("/v1/completions", {"prompt": "a"})[2]["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("raw", "status"),
    [(b"{", 400), (b"\xff", 400), (b"[]", 400), (b"[" * 60000, 400), (b" " * 70000, 413)],
)
def test_bodies_that_are_no_request(client: Client, raw: bytes, status: int) -> None:
    found, _, record = client.call("/v1/completions", raw=raw)
    assert found == status and ("--max-body" in str(record)) == (status == 413)


def test_a_body_that_stops_coming(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as something comes it may take its time."""
    monkeypatch.setattr("pyruntime.serve.app.STALLED", 0.4)
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 1}).encode()
    for sent, status in ((body, b"200"), (body[:-1], b"408")):
        with socket.create_connection(("127.0.0.1", client.port), 30) as connection:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode())
            for at in range(0, len(sent), 10):
                time.sleep(0.15)
                connection.sendall(sent[at : at + 10])
            assert connection.recv(12) == b"HTTP/1.1 " + status


def test_fields_that_are_unknown_are_ignored(client: Client) -> None:
    assert client.complete("a", user="me", top_p=0.5, made_up={"x": 1}, max_tokens=1)


@pytest.mark.parametrize(("address", "status"), [("/v2", 404), ("/v1/completions", 405)])
def test_addresses_that_are_none(client: Client, address: str, status: int) -> None:
    found, _, record = client.call(address)
    message = record["error"]["message"]
    assert found == status and message.startswith(f"GET {address} is not served; what is: ")
    assert "POST /v1/completions" in message and "GET /v1/models/{model}, " in message


# The rest


def test_models(client: Client) -> None:
    _, _, record = client.call("/v1/models")
    (model,) = record["data"]
    assert model["id"] == NAME and model["object"] == "model"
    assert client.call(f"/v1/models/{NAME}")[2] == model


def test_tokenizing(client: Client, engine: Engine) -> None:
    ids = engine.tokenizer.encode(TEXT).tolist()
    assert client.call("/tokenize", {"prompt": TEXT})[2]["tokens"] == ids
    assert client.call("/detokenize", {"tokens": ids})[2]["prompt"] == TEXT
    assert client.call("/tokenizer_info")[2]["eos_token"] == "<|im_end|>"
    for path, body in (("/tokenize", {"prompt": 3}), ("/detokenize", {"tokens": [99999]})):
        assert client.call(path, body)[0] == 400


def test_health_and_counts(client: Client) -> None:
    health = client.call("/health")[2]
    assert health["status"] == "ok" and health["device"] == "cpu (NumPy)" and health["vocabulary"]
    before = client.call("/metrics")[2]
    client.complete([5, 6, 7], max_tokens=2)
    after = client.call("/metrics")[2]
    names = ("requests", "answered", "calls", "prompt_tokens", "completion_tokens", "open")
    assert [after[n] - before[n] for n in names] == [1, 1, 2, 3, 2, 0]


def test_a_model_without_a_vocabulary() -> None:
    with Engine.load(GOLDEN / f"{STEM}.gguf", device="cpu") as engine, serving(engine) as (c, _):
        status, _, record = c.call("/v1/completions", {"model": NAME, "prompt": "text"})
        assert status == 400 and "no vocabulary: give token ids" in record["error"]["message"]
        assert c.call("/tokenizer_info")[0] == 404 and not c.call("/health")[2]["vocabulary"]


def test_nothing_of_it_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, pyruntime; from pyruntime.cli import main; main(['--help'])\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'fastapi', 'uvicorn', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
