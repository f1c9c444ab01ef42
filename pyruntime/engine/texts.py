"""What is made of prefills: scores, perplexity, vectors and greedy tokens, of texts or of ids."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyruntime.engine.interface import Ids, Model, Timeout
from pyruntime.engine.prefills import Prefills
from pyruntime.gguf import Value
from pyruntime.model.any_cache import AnyCache
from pyruntime.model.batch import Batch, Rows
from pyruntime.model.calls import Call, greedy, named, wanted_logits
from pyruntime.model.packing import Part
from pyruntime.model.scores import GREEDY, TokenScores
from pyruntime.model.scoring import Score, Scored, ScoredRows, windows
from pyruntime.model.tokens import check_count, check_list, check_tokens
from pyruntime.turns import Deadline

if TYPE_CHECKING:
    from pyruntime.text.tokenizer import Tokenizer

LOGITS_BYTES = 256 << 20  # of logits at a time, where only log-probabilities are wanted


class Texts(Prefills):
    """Prefills, and the tokenizer that a file describes.

    Args:
        metadata: of the GGUF file. The others: see `Prefills`.
    """

    def __init__(
        self,
        model: Model,
        path: str,
        metadata: Mapping[str, Value],
        max_tokens: int,
        kv_tokens: int,
        kv_limit: int | None,
    ) -> None:
        super().__init__(model, path, max_tokens, kv_tokens, kv_limit)
        self._metadata = metadata

    @property
    def has_vocabulary(self) -> bool:
        """Whether the file holds a vocabulary, so that there is a `tokenizer`."""
        return self._metadata.get("tokenizer.ggml.model", "no_vocab") != "no_vocab"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file's own vocabulary. Raises TokenizerError."""
        from pyruntime.text.tokenizer import Tokenizer

        return Tokenizer.from_metadata(self._metadata)

    def tokenize(self, text: str | Ids, *, begins: bool = True, ends: bool = False) -> Rows:
        """The ids of a text, or ids as they are, checked, which may be none: int32 [nt].

        With BOS where the text `begins`, and then EOS where it `ends`, if the model has them there:
        `embed` takes texts that begin and end, `score` and `perplexity` such that begin.

        Raises: ValueError: bad ids. TokenizerError: text without a vocabulary.
        """
        if not isinstance(text, str):
            return check_tokens(text, self.config.vocab, empty=True)
        return self.tokenizer.encode(text, add_special=begins, goes_on=not ends)

    def tokenize_pair(self, prompt: str | Ids, continuation: str | Ids) -> tuple[Rows, Rows]:
        """The ids of a prompt and of its continuation, int32 [nt] each, as `score` takes them.

        Of two texts the whole is tokenized, and the tokens after as many as the prompt alone comes
        to are the continuation's.

        Raises: as `tokenize`; ValueError for a continuation that adds no token to its prompt.
        """
        context = self.tokenize(prompt)
        if isinstance(prompt, str) and isinstance(continuation, str):
            rest = self.tokenize(prompt + continuation)[len(context) :]
            if continuation and not len(rest):
                raise ValueError(
                    f"together with its prompt {continuation!r:.100} makes no more tokens than the "
                    "prompt alone: give token ids"
                )
            return context, rest
        return context, self.tokenize(continuation, begins=False)

    def score(
        self,
        prompts: Sequence[str | Ids],
        continuations: Sequence[str | Ids],
        *,
        logits_bytes: int = LOGITS_BYTES,
        timeout: Timeout = None,
    ) -> list[Score]:
        """How likely each continuation is after its prompt, token by token.

        The token at index i of prompt and continuation together has the log-probability
        log softmax(logits of row i - 1)[token], and is greedy if it is their argmax. All pairs are
        packed into as few passes as they fit; those that differ in nothing but their last token,
        such as answers to choose from, are run once.

        Args:
            prompts, continuations: token ids, or texts; as many of the one as of the other. See
                `tokenize_pair` for two texts. A prompt may be empty.
            logits_bytes: what logits may take at a time.
            timeout: see `prefill`.

        Raises: as `prefill`; TokenizerError for text without a vocabulary.
        """
        deadline = Deadline.of(timeout)
        prompts = check_list("prompts", prompts, "text")
        continuations = check_list("continuations", continuations, "text")
        if len(prompts) != len(continuations):
            raise ValueError(f"{len(prompts)} prompts and {len(continuations)} continuations")
        pairs = zip(prompts, continuations, strict=True)
        texts = named(pairs, lambda pair: self.tokenize_pair(*pair))
        return self._score(texts, logits_bytes, deadline)

    def _score(
        self, texts: Sequence[tuple[Rows, Rows]], most: int, deadline: Deadline
    ) -> list[Score]:
        check_count("logits_bytes", most)
        scored = Scored(texts)

        def step(_: Any, asked: Sequence[Call], batch: Batch, parts: Sequence[Part]) -> None:
            targets = scored.targets(batch, parts)
            scored.take(parts, self._model.score(batch, targets, most_bytes=most))

        if scored.calls:
            self._run(scored.calls, step, deadline)
        return scored.results()

    def score_rows(
        self,
        prompts: Sequence[Ids],
        rows: Sequence[Ids],
        tokens: Sequence[Ids],
        *,
        top: int = 1,
        cache: Sequence[AnyCache] | None = None,
        logits_bytes: int = LOGITS_BYTES,
        timeout: Timeout = None,
    ) -> tuple[list[TokenScores], dict[str, float]]:
        """`prefill` of a list of prompts, with scores of one token per row instead of logits.

        Args:
            prompts: token ids of each.
            rows: of each the positions of its ids that are followed by what is scored, ascending,
                one at least.
            tokens: of each as many tokens as rows, those that follow; -1: the likeliest.
            top: how many of the likeliest tokens are told, 1 to the vocabulary.
            cache: see `prefill`. logits_bytes: what logits may take at a time.

        Returns: the scores of each prompt's rows, and the seconds of the call, as
            `Result.timings` has them.

        Raises: as `prefill`.
        """
        started, deadline, vocab = time.perf_counter(), Deadline.of(timeout), self.config.vocab
        check_count("logits_bytes", logits_bytes)
        if (top := check_count("top", top)) > vocab:
            raise ValueError(f"top={top}: 1 to the {vocab} tokens of the vocabulary")
        texts = check_list("prompts", prompts, "prompt")
        count = len(texts)
        caches = check_list("cache", [None] * count if cache is None else cache, "prompt", count)
        places = check_list("rows", rows, "prompt", count)
        following = check_list("tokens", tokens, "prompt", count)
        parts = zip(texts, caches, places, range(count), strict=True)
        asked = named(parts, lambda part: self._call(*part, None))
        pairs = zip(following, asked, strict=True)
        targets = named(pairs, lambda pair: _targets(*pair, vocab))
        scored = ScoredRows(asked, targets)

        def step(_: Any, asked: Sequence[Call], batch: Batch, parts: Sequence[Part]) -> None:
            wanted = scored.targets(batch, parts)
            found = self._model.score(batch, wanted, most_bytes=logits_bytes, top=top)
            scored.take(batch, parts, found)

        timings = self._run(asked, step, deadline) if asked else {}
        timings["wall"] = time.perf_counter() - started
        return scored.results(), timings

    def perplexity(
        self,
        text: str | Ids,
        *,
        window: int | None = None,
        stride: int | None = None,
        logits_bytes: int = LOGITS_BYTES,
        timeout: Timeout = None,
    ) -> float:
        """exp of the mean negative log-likelihood of a text's tokens, all but the first one.

        A text that is longer than a window is read in several, as
        https://huggingface.co/docs/transformers/perplexity does: each token is scored once, after
        what precedes it in the first window that reaches it.

        Args:
            window: tokens; by default the context length, or `kv_tokens` if that is less.
            stride: tokens from one window to the next, less than `window`; by default half of it.
            logits_bytes, timeout: see `score`.

        Raises: as `score`; ValueError for a text of fewer than two tokens.
        """
        deadline = Deadline.of(timeout)
        ids = self.tokenize(text)
        longest = min(self.config.context_length, self.kv_tokens)
        window = longest if window is None else check_count("window", window)
        stride = max(window // 2, 1) if stride is None else check_count("stride", stride)
        if window < 2 or not 1 <= stride < window:
            raise ValueError(f"window={window}, stride={stride}: at least 2, and 1 to less than it")
        if len(ids) < 2:
            raise ValueError(f"the perplexity of {len(ids)} tokens: at least 2 are needed")
        scores = self._score(windows(ids, window, stride), logits_bytes, deadline)
        return float(np.exp(-np.mean([x for score in scores for x in score.log_probs])))

    def embed(
        self,
        texts: Sequence[str | Ids],
        *,
        pooling: Literal["mean", "last"] = "mean",
        normalize: bool = False,
        timeout: Timeout = None,
    ) -> NDArray[np.float32]:
        """A vector for each text: float32 [texts, hidden].

        Args:
            texts: or token ids.
            pooling: of the states after the output norm: their "mean", or the "last" one.
            normalize: to length 1.
            timeout: see `prefill`.

        Raises: as `prefill`; TokenizerError for text without a vocabulary.
        """
        deadline = Deadline.of(timeout)
        if pooling not in ("mean", "last"):
            raise ValueError(f"pooling={pooling!r}: 'mean' or 'last'")
        given = check_list("texts", texts, "text")
        prompts = named(given, lambda text: self.tokenize(text, ends=True))
        found = self._prefill(prompts, None, "none", pooling, deadline) if prompts else []
        vectors = np.concatenate([np.empty((0, self.config.hidden)), *(r.hidden for r in found)])
        if normalize:
            vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors.astype(np.float32)

    def generate(
        self, ids: ArrayLike, n: int, *, cache: AnyCache | None = None, timeout: Timeout = None
    ) -> list[int]:
        """Up to `n` greedy tokens after `ids`, each the argmax of the logits.

        It stops before EOS, and where the model's context or the `cache` is full. Each token is a
        call of its own, between which other threads have their turns.

        Args:
            cache: continue this one, such as one that was imported: `ids` are what comes after its
                tokens, and it grows by them and by each token that another one was made after. None
                makes one for this call.
            timeout: of all calls together, see `prefill`.

        Raises: as `prefill`; ValueError if n < 0. The cache has grown by then as by the calls that
            were over, so no token is lost.
        """
        deadline = Deadline.of(timeout)
        n = check_count("n", n, 0)
        prompt, most = check_tokens(ids, self.config.vocab), self.config.context_length
        if isinstance(cache, AnyCache):
            most = min(most, cache.capacity) - cache.length
        room = max(most - len(prompt), 0)  # for tokens that another one is made after
        n = min(n, room + 1)
        if cache is None:
            cache = self.new_cache(len(prompt) + min(n, room), timeout=deadline)
        out: list[int] = []
        step, stop = prompt, self._stop_ids
        while len(out) < n:
            call = Call(step, cache, wanted_logits("last", len(step)))
            self._run([call], greedy, deadline)
            token: int = call.found
            if token in stop:
                break
            out.append(token)
            step = np.array([token], np.int32)
        return out

    @cached_property
    def _stop_ids(self) -> frozenset[int]:
        # A model without a vocabulary has no end-of-sequence token.
        return frozenset(self.tokenizer.eos_ids if self.has_vocabulary else ())


def _targets(tokens: Ids, call: Call, vocab: int) -> Rows:
    """Of each row of a call. Raises ValueError."""
    found = np.array(tokens)  # a copy, as another thread may change what was given
    if found.shape != call.logits.shape or found.dtype.kind not in "iu":
        raise ValueError(f"{len(call.logits)} rows, and tokens {found.dtype} {found.shape}")
    if found.min() < GREEDY or found.max() >= vocab:
        raise ValueError(f"tokens from {found.min()} to {found.max()}; there are {vocab}")
    return found.astype(np.int32)
