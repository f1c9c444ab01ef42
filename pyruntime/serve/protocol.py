"""What a client asks for: the fields of OpenAI's completions, checked, and its errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pyruntime.errors import PyruntimeError, TokenizerError
from pyruntime.model.batch import Rows
from pyruntime.model.tokens import check_tokens
from pyruntime.serve.texts import Texts

MOST_LOGPROBS = 100
MOST_STOPS = 32
DEFAULT_TOKENS = 16  # OpenAI's


class RequestError(PyruntimeError):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP. kind, param, code: `type`, `param` and `code` of OpenAI's error.
        headers: more of the answer's.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = headers

    def record(self) -> dict[str, Any]:
        """The body of the answer."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


@dataclass(frozen=True)
class Limits:
    """What a request may be.

    Attributes:
        prompts: in it, and prompt_tokens: in each of them with its completion, at most.
        body_bytes: of its body. seconds: until it is answered.
    """

    prompts: int
    prompt_tokens: int
    body_bytes: int
    seconds: float


@dataclass(frozen=True)
class Asked:
    """A completions request.

    Attributes:
        prompts: int32 [nt] each, nt >= 1. texts: as they were given, None for token ids.
        logprobs: how many of the likeliest tokens; None: no log-probabilities at all.
    """

    prompts: list[Rows]
    texts: list[str | None]
    max_tokens: int
    echo: bool
    logprobs: int | None
    stop: list[str]
    stream: bool
    include_usage: bool


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises RequestError."""
    try:
        record = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise RequestError("the body is not a JSON object")
    return record


def check_model(record: Mapping[str, Any], name: str) -> None:
    """Raises RequestError unless the model asked for is the one that there is."""
    if "model" not in record:
        _refuse("model", "is missing")
    if record["model"] != name:
        raise RequestError(
            f"the model {record['model']!r} does not exist here; there is {name!r}",
            status=404, param="model", code="model_not_found",
        )  # fmt: skip


def read_completion(
    record: Mapping[str, Any], name: str, texts: Texts, vocab: int, limits: Limits
) -> Asked:
    """The request in a body's `record`, for the model `name` of `vocab` tokens.

    Fields that OpenAI does not have are ignored, and so are those that change nothing where the
    likeliest token is always taken. Raises RequestError, naming the field.
    """
    check_model(record, name)
    _check_fixed(record)
    max_tokens = _integer(record, "max_tokens", DEFAULT_TOKENS, least=0)
    prompts, given = _prompts(record.get("prompt"), texts, vocab, limits)
    longest = max(map(len, prompts))
    if longest + max_tokens > limits.prompt_tokens:
        raise RequestError(
            f"the most that a prompt and its completion may have together is "
            f"{limits.prompt_tokens} tokens, but {longest + max_tokens} were asked for ({longest} "
            f"in the prompt, {max_tokens} for the completion)",
            param="prompt", code="context_length_exceeded",
        )  # fmt: skip
    logprobs = _integer(record, "logprobs", None, least=0, most=MOST_LOGPROBS)
    options = record.get("stream_options") or {}
    if not isinstance(options, dict):
        _refuse("stream_options", "must be an object")
    return Asked(
        prompts=prompts,
        texts=given,
        max_tokens=max_tokens,
        echo=_flag(record, "echo"),
        logprobs=logprobs,
        stop=_stop(record.get("stop")),
        stream=_flag(record, "stream"),
        include_usage=_flag(options, "include_usage"),
    )


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError(f"{param} {message}", param=param)


def _check_fixed(record: Mapping[str, Any]) -> None:
    """Refuses what would need another answer than the likeliest tokens."""
    for field, only in (
        ("temperature", 0), ("n", 1), ("best_of", 1), ("presence_penalty", 0),
        ("frequency_penalty", 0), ("suffix", None), ("logit_bias", {}),
    ):  # fmt: skip
        value = record.get(field)
        if value is not None and (isinstance(value, bool) or value != only):
            why = ": this server takes the likeliest token each time" if only == 0 else ""
            _refuse(field, f"is {json.dumps(value)}, but only {json.dumps(only)} is served{why}")
    _integer(record, "seed", None)


def _integer(
    record: Mapping[str, Any],
    field: str,
    default: Any,
    *,
    least: int | None = None,
    most: int | None = None,
) -> Any:
    value = record.get(field)
    if value is None:
        return default
    if type(value) is not int:
        _refuse(field, f"is {json.dumps(value)[:80]}, which is no integer")
    if least is not None and value < least:
        _refuse(field, f"is {value}; it must be at least {least}")
    if most is not None and value > most:
        _refuse(field, f"is {value}; it must be at most {most}")
    return value


def _flag(record: Mapping[str, Any], field: str) -> bool:
    value = record.get(field)
    if value is not None and not isinstance(value, bool):
        _refuse(field, "must be true or false")
    return bool(value)


def _stop(stop: Any) -> list[str]:
    if stop is None:
        return []
    found = [stop] if isinstance(stop, str) else stop
    if not isinstance(found, list) or not all(isinstance(s, str) and s for s in found):
        _refuse("stop", "must be a string or a list of strings, none of them empty")
    if len(found) > MOST_STOPS:
        _refuse("stop", f"has {len(found)} strings; the most is {MOST_STOPS}")
    return found


def _prompts(
    prompt: Any, texts: Texts, vocab: int, limits: Limits
) -> tuple[list[Rows], list[str | None]]:
    if prompt is None:
        _refuse("prompt", "is missing")
    one = isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is int
    )
    items = [prompt] if one else prompt
    if not isinstance(items, list) or not items:
        _refuse("prompt", "must be a string, a list of strings, token ids, or a list of these")
    if len(items) > limits.prompts:
        _refuse(
            "prompt", f"is a list of {len(items)}; the most is {limits.prompts} (--max-prompts)"
        )
    ids = [
        _ids(item, "prompt" if one else f"prompt[{place}]", texts, vocab)
        for place, item in enumerate(items)
    ]
    return ids, [item if isinstance(item, str) else None for item in items]


def _ids(item: Any, place: str, texts: Texts, vocab: int) -> Rows:
    if not isinstance(item, str) and not _all(item, int):
        raise RequestError(f"{place} must be a string or a list of token ids", param="prompt")
    try:
        ids = texts.encode(item) if isinstance(item, str) else item
        if len(ids) == 0:
            raise ValueError("empty; at least one token is needed, such as the model's BOS")
        return check_tokens(ids, vocab)
    except (ValueError, TokenizerError) as error:
        raise RequestError(f"{place}: {error}", param="prompt") from None


def _all(item: Any, kind: type) -> bool:
    return isinstance(item, list) and set(map(type, item)) <= {kind}


def read_text(record: Mapping[str, Any], texts: Texts) -> Rows:
    """The ids of a text that is to be tokenized. Raises RequestError."""
    text = record.get("prompt")
    if not isinstance(text, str):
        _refuse("prompt", "must be a string")
    add = record.get("add_special_tokens", True)
    try:
        return texts.encode(text, add_special=add is not False)
    except TokenizerError as error:
        raise RequestError(f"prompt: {error}", param="prompt") from None


def read_ids(record: Mapping[str, Any], vocab: int) -> Rows:
    """The ids that are to be made a text. Raises RequestError."""
    ids: Any = record.get("tokens")
    if not _all(ids, int):
        _refuse("tokens", "must be a list of token ids")
    try:
        return check_tokens(ids, vocab, empty=True)
    except ValueError as error:
        raise RequestError(f"tokens: {error}", param="tokens") from None
