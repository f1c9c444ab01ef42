"""The model "pyruntime" of EleutherAI's lm-evaluation-harness (extra `eval`).

Importing this module registers it; docs/clients/lm-eval.md shows its use. What a model owes the
harness is stated by `lm_eval.api.model`; where that leaves a choice, such as which tokens are cut
off, this one does as the harness's own `hf`.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pyruntime.engine import Engine
from pyruntime.errors import TokenizerError, ToolError
from pyruntime.text.chat import conversation

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import (
        get_rolling_token_windows,
        make_disjoint_window,
        simple_parse_args_string,
    )
    from tqdm import tqdm
except ImportError as error:
    raise ToolError(
        f"the lm-evaluation-harness cannot be imported ({error}): "
        "pip install 'pyruntime-cuda[eval]' brings it"
    ) from error

MODEL = "pyruntime"
CHUNK_PASSES = 4  # full passes between two steps of the progress bar and of the harness's cache
NO_EFFECT = ("temperature", "top_p", "top_k", "min_p", "typical_p")  # where do_sample is False
CUT = "\x1fhere the answer goes on\x1f"

Encoded = tuple[tuple[str, str] | None, list[int], list[int]]

log = logging.getLogger("lm_eval.pyruntime")


@register_model(MODEL)
class PyruntimeLM(TemplateLM):  # type: ignore[misc]
    """An engine, as the harness sees it.

    Args:
        pretrained: what `Engine.load` takes as a model, or an engine, which stays open.
        device: as for `Engine.load`.
        max_length: tokens that a request may have, of which those before its last ones are cut off;
            by default the model's context length, or `kv_tokens` if that is given.
        prefix_token_id: what stands before a text that nothing precedes; by default BOS, or EOS
            where the model has no BOS.
        batch_size, max_batch_size: no effect: requests are packed into passes of `max_tokens`
            rows, and answers are generated side by side as far as `kv_tokens` positions hold them.
        trust_remote_code: no effect: what the harness passes on where its data sets need it.
        options: of `Engine.load`.

    Raises:
        ValueError: no `pretrained`, an unknown option, or a `max_length` beyond the context.
        TokenizerError: a model without a vocabulary. Others: as `Engine.load`.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike[str] | Engine | None = None,
        *,
        device: str = "auto",
        max_length: int | None = None,
        prefix_token_id: int | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        trust_remote_code: object = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if pretrained is None:
            raise ValueError("no model: --model_args pretrained=FILE.gguf names it")
        known = inspect.signature(Engine.load).parameters.keys() - {"model", "progress"}
        for name in options.keys() - known:
            raise ValueError(
                f"model_args {name}={options[name]!r}: unknown; there are pretrained, max_length, "
                f"prefix_token_id, {', '.join(sorted(known))}"
            )
        if isinstance(pretrained, Engine):
            self.engine, self._name = pretrained, pretrained.config.name
        else:
            self.engine = Engine.load(pretrained, device=device, **options)
            self._name = str(pretrained)
        self.tokenizer = self.engine.tokenizer
        limits = (self.engine.config.context_length, options.get("kv_tokens"))
        most = min(limit for limit in limits if limit is not None)
        self.max_length: int = most if max_length is None else max_length
        if not 1 <= self.max_length <= most:
            raise ValueError(f"model_args max_length={max_length}: 1 to {most} for this model")
        self._prefix = prefix_token_id
        self.tokenizer.token(self.prefix_token_id)  # one that there is not is refused here

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> PyruntimeLM:
        """From "name=value,name=value", see `create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> PyruntimeLM:
        """From `--model_args`, which go before options of the command line such as `--device`."""
        given = {k: v for k, v in (additional_config or {}).items() if v is not None}
        return cls(**{**given, **arg_dict})

    # Text

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text. Raises TokenizerError."""
        if self.tokenizer.eos_id is None:
            raise TokenizerError("this model has no EOS token")
        return int(self.tokenizer.eos_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that nothing precedes. Raises TokenizerError."""
        if self._prefix is not None:
            return self._prefix
        return self.eot_token_id if self.tokenizer.bos_id is None else int(self.tokenizer.bos_id)

    @property
    def max_gen_toks(self) -> int:
        """Tokens of an answer at most, where its task says nothing."""
        return 256

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids, after BOS where the model has it there and the text has not."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(
                string, self.tokenizer.token(self.prefix_token_id)
            )
        ids: list[int] = self.tokenizer.encode(
            string, add_special=add_special_tokens, goes_on=True
        ).tolist()
        return ids

    @property
    def tokenizer_name(self) -> str:
        """What the harness names its files of requests by."""
        return self._name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt for messages; without a generation prompt it ends within the last of them.

        A system message that the template refuses is left out. Raises TokenizerError.
        """
        if not add_generation_prompt:
            *before, last = chat_history
            chat_history = [*before, {**last, "content": last["content"] + CUT}]
        try:
            text = self._conversation(chat_history, add_generation_prompt)
        except TokenizerError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            text = self._conversation(others, add_generation_prompt)
            log.warning("the chat template refuses the system message, which is left out")
        return text.partition(CUT)[0]

    def _conversation(self, messages: list[dict[str, str]], prompt: bool) -> str:
        return conversation(self.tokenizer, messages, add_generation_prompt=prompt)

    # Likelihood

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each text, read in windows of `max_length` tokens."""
        windows = [list(self._windows(request.args[0])) for request in requests]
        scored = iter(
            self._loglikelihood_tokens([w for part in windows for w in part], disable_tqdm)
        )
        totals = []
        for request, part in zip(requests, windows, strict=True):
            totals.append(sum((next(scored)[0] for _ in part), 0.0))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def _windows(self, text: str) -> Iterator[Encoded]:
        for window in get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
        ):
            context, continuation = make_disjoint_window(window)
            yield None, context, continuation

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Of each continuation the log-probability, and whether it is the greedy one.

        Raises ValueError for a continuation of no token, or of more than `max_length`.
        """
        pairs = [self._pair(*request) for request in requests]
        cut = sum(len(context) < len(r[1]) for (context, _), r in zip(pairs, requests, strict=True))
        if cut:
            log.warning(
                "%d of %d requests are longer than max_length=%d: cut off on the left",
                cut, len(requests), self.max_length,
            )  # fmt: skip
        answers: list[Any] = [None] * len(requests)
        runs = [[*context, *continuation][:-1] for context, continuation in pairs]
        order = sorted(range(len(runs)), key=lambda i: (-len(runs[i]), runs[i]))
        # Neighbours that differ in nothing but the last token are run once.
        rows = [
            0 if n and runs[i] == runs[order[n - 1]] else len(runs[i]) for n, i in enumerate(order)
        ]
        started = time.perf_counter()
        with tqdm(total=len(pairs), desc="loglikelihood", disable=disable_tqdm) as bar:
            for chunk in _chunks(order, rows, CHUNK_PASSES * self.engine.max_tokens):
                contexts, continuations = zip(*(pairs[i] for i in chunk), strict=True)
                scores = self.engine.score(contexts, continuations)
                for i, score in zip(chunk, scores, strict=True):
                    answers[i] = (score.total, score.is_greedy)
                    if (key := requests[i][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answers[i])
                bar.update(len(chunk))
        seconds = time.perf_counter() - started
        log.info(
            "%d requests, %d tokens in %.3f s, %.0f tok/s on %s",
            len(pairs), sum(rows), seconds, sum(rows) / seconds, self.engine.path,
        )  # fmt: skip
        return answers

    def _pair(
        self, texts: tuple[str, str] | None, context: list[int], continuation: list[int]
    ) -> tuple[list[int], list[int]]:
        """Context and continuation, of which the last token is not run, in `max_length` tokens."""
        if not 1 <= len(continuation) <= self.max_length:
            shown = "" if texts is None else f" {_shortened(texts[1])}"
            raise ValueError(
                f"the continuation{shown} is of {len(continuation)} tokens; it must be of 1 to "
                f"max_length={self.max_length}"
            )
        return context[-(self.max_length + 1 - len(continuation)) :], continuation

    # Answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The greedy answer to each request, up to what it is to stop at.

        Raises ValueError for what asks for another answer than the greedy one, and where no token
        is left for a prompt.
        """
        asked = [self._asked(*request.args) for request in requests]
        answers = [""] * len(requests)
        positions = [len(ids) + most for ids, most, _ in asked]
        order = sorted(range(len(asked)), key=lambda i: -positions[i])
        held = [positions[i] for i in order]
        with tqdm(total=len(asked), desc="generate_until", disable=disable_tqdm) as bar:
            for chunk in _chunks(order, held, self.engine.kv_tokens):
                texts = self._generate([asked[i] for i in chunk])
                for i, text in zip(chunk, texts, strict=True):
                    answers[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
                bar.update(len(chunk))
        return answers

    def _asked(self, context: str, gen_kwargs: dict[str, Any]) -> tuple[list[int], int, list[str]]:
        """Prompt ids, the most tokens of the answer, and texts that end it."""
        kwargs = normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)
        until, most = kwargs.pop("until"), kwargs.pop("max_gen_toks")
        if kwargs.pop("do_sample"):
            asked = {k: gen_kwargs[k] for k in ("do_sample", *NO_EFFECT) if k in gen_kwargs}
            named = ", ".join(f"{name}={value!r}" for name, value in asked.items())
            raise ValueError(
                f"generation with {named}: only greedy decoding is supported; "
                "--gen_kwargs do_sample=False asks for it"
            )
        for name in kwargs.keys() - set(NO_EFFECT):
            raise ValueError(f"generation with {name}={kwargs[name]!r}: not supported")
        if not 0 <= most < self.max_length:
            raise ValueError(
                f"max_gen_toks={most} leaves no token for the prompt; it must be less than "
                f"max_length={self.max_length}"
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        if len(ids) + most > self.max_length:
            log.warning("a prompt of %d tokens is cut off on the left", len(ids))
        eos = self.tokenizer.token(self.eot_token_id)
        return ids[-(self.max_length - most) :], most, handle_stop_sequences(until, eos)

    def _generate(self, asked: Sequence[tuple[list[int], int, list[str]]]) -> list[str]:
        """Answers side by side: a pass takes the next token of all that have not ended."""
        engine, ends = self.engine, self.tokenizer.eos_ids
        caches = [engine.new_cache(len(ids) + most) for ids, most, _ in asked]
        steps = {i: ids for i, (ids, most, _) in enumerate(asked) if most}
        out: list[list[int]] = [[] for _ in asked]
        while steps:
            results = engine.prefill(list(steps.values()), cache=[caches[i] for i in steps])
            for i, result in zip(list(steps), results, strict=True):
                token = int(np.asarray(result.logits)[-1].argmax())
                _, most, until = asked[i]
                if token not in ends:
                    out[i].append(token)
                text = self._decoded(out[i])
                ended = token in ends or len(out[i]) == most
                if ended or any(stop and stop in text for stop in until):
                    del steps[i]
                else:
                    steps[i] = [token]
        return [
            postprocess_generated_text(self._decoded(ids), until, None)
            for ids, (_, _, until) in zip(out, asked, strict=True)
        ]

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special=True)

    def get_model_info(self) -> dict[str, str]:
        """What the harness's records say of the model."""
        engine = self.engine
        return {"model_name": engine.config.name, "model_path": engine.path}


def _chunks(places: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """`places` in their order, in chunks whose `sizes` come to at most `most`, or of one."""
    chunk: list[int] = []
    used = 0
    for place, size in zip(places, sizes, strict=True):
        if chunk and used + size > most:
            yield chunk
            chunk, used = [], 0
        chunk.append(place)
        used += size
    if chunk:
        yield chunk


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
