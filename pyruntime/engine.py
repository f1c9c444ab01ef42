"""The engine: one object that takes token ids to logits and K/V, on a GPU or in NumPy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyruntime.errors import EngineError
from pyruntime.gguf import GGUFFile
from pyruntime.model import calls
from pyruntime.model.any_cache import AnyCache
from pyruntime.model.batch import Batch, Output, Rows
from pyruntime.model.calls import Call, Gathered, Hidden, named
from pyruntime.model.config import ModelConfig
from pyruntime.model.packing import Part, passes
from pyruntime.model.scores import Targets, TokenScores
from pyruntime.model.scoring import Score, Scored, windows
from pyruntime.model.stats import Stats, Warmed
from pyruntime.model.tokens import check_tokens
from pyruntime.options import check_options, choose_device, free_memory, sizes
from pyruntime.turns import Deadline, Turns

if TYPE_CHECKING:
    from pyruntime.model.footprint import Plan
    from pyruntime.text.tokenizer import Tokenizer

LOGITS_BYTES = 256 << 20  # of logits at a time, where only log-probabilities are wanted

Progress = Callable[[int], object]
Ids = Sequence[int] | NDArray[np.integer[Any]]
Logits = Literal["none", "last", "all"] | Sequence[int] | NDArray[np.integer[Any]]
Timeout = float | Deadline | None


class Model(calls.Model, Protocol):
    """What a backend offers."""

    config: ModelConfig
    fingerprint: str
    turns: Turns
    gpu_seconds: float

    def new_cache(self, tokens: int) -> Any: ...
    def run(self, batch: Batch) -> Output: ...
    def score(self, batch: Batch, targets: Targets, *, most_bytes: int) -> TokenScores: ...
    def launches(self) -> dict[str, int]: ...
    def stats(self) -> Stats: ...
    def warm(self, passes: Sequence[tuple[int, int, bool]]) -> list[Warmed]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Result:
    """What a prefill gives for a prompt.

    Attributes:
        logits: float32 [rows, vocab] for the rows that were asked for, complete, None for "none"; a
            NumPy array, or an array in device memory that `np.asarray` copies and any
            `from_dlpack` shares.
        hidden: float32 [1, hidden], a NumPy array: the state after the output norm of the last row
            ("last"), or the mean over all rows ("mean"); None if it was not asked for.
        cache: the cache that was passed in, or None.
        tokens: how many ids were processed. reused: how many before them the cache held already.
        timings: seconds of the whole call, all its prompts included: "wall", and on a GPU "gpu"
            (between events around the passes).
        path: the backend and device that did it, such as "cuda:0 (NVIDIA H200)" or "cpu (NumPy)",
            the attention kernel, exact and kv_dtype where others than the default were asked for,
            and weights where they are "per-layer".
    """

    logits: Any
    hidden: Any
    cache: AnyCache | None
    tokens: int
    reused: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    path: str = ""


class Engine:
    """A loaded model. Use `Engine.load`, as a context manager or with `close`.

    `weights` is what they are held as: on a GPU "fp16" or "per-layer", in NumPy "f32".

    Calls from several threads are served one after the other, in the order in which they come.
    """

    def __init__(
        self,
        model: Model,
        path: str,
        file: GGUFFile,
        max_tokens: int,
        kv_tokens: int,
        kv_limit: int | None,
        weights: str,
    ) -> None:
        self._model = model
        self._kv_limit = kv_limit
        self._metadata = file.metadata
        self._cache: Any = None
        self._closed = False
        self.config = model.config
        self.path = path
        self.max_tokens = max_tokens
        self.kv_tokens = kv_tokens
        self.weights = weights

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        weights: str = "auto",
        attention: str = "auto",
        kv_dtype: str = "f16",
        max_tokens: int | None = None,
        kv_tokens: int | None = None,
        memory_budget: int | None = None,
        graphs: str = "auto",
        overlap: str = "auto",
        exact: str = "fast",
        stream: int | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """Loads a GGUF model.

        Args:
            model: a path, an alias such as "smollm2", or "hf:owner/repo/file.gguf".
            device: "auto" (the first GPU, or NumPy with a warning), "cpu", or "cuda:N".
            weights: on a GPU "fp16", dequantized when loaded; "per-layer", packed as in the file
                and dequantized one layer ahead of the layer at work, in every pass: less memory,
                more time, the same bits; or "auto", the first of the two that fits.
                `Engine.weights` tells which it is.
            attention: "auto" (the fastest kernel), "invariant" (the fastest that gives a row the
                same bits however its prompt was cut), or a variant by name: "wgmma" (Hopper's),
                "fast" (mma.sync, on every GPU), or a step of its history, "r46_base", "r46",
                "r48", "r50" or "r57", for head dims 64 and 128.
            kv_dtype: what K/V caches hold: "f16", or "e4m3", 8-bit floats with a scale per head of
                each position, in about half the memory and of less accuracy (docs/kv-cache.md).
            graphs: "auto" captures a pass into a CUDA graph when its bucket of lengths is met for
                the second time (or by `warm`), and replays it from then on: less work for the
                host, which short prompts wait for; "off" does not (GPU only). The same bits.
                `stats` tells how passes were run.
            exact: "fast", or "invariant": a row's logits, hidden state, K and V have the same bits
                whatever its neighbours are, however its prompt was cut or packed, and whichever
                bucket it is in (GPU only; attention is "invariant", too). Products are then by
                one kind of kernel, which is slower for few rows.
            overlap: "auto" lets a kernel start under the tail of the one before where the GPU can
                (sm_90 and newer); "off" does not (GPU only), for measuring and debugging. The same
                bits.
            max_tokens: rows of one pass; longer prompts take several. Default 4096, or the model's
                context length if that is shorter. With weights "per-layer" it is 8192 at most.
            kv_tokens: the longest prompt without a cache of its own; those that share a pass have
                no more positions together, each in whole sixteens. By default the internal cache
                begins with `max_tokens` positions (or 4096) and grows up to the context length.
            memory_budget: the most device memory, in bytes, that the total of `plan` may come to
                (GPU only).
            stream: the address of a CUDA stream to run on; default: one of its own (GPU only).
            progress: called with the file bytes of each piece loaded.

        Raises:
            GGUFError, UnsupportedModelError: the file. DriverNotFoundError, ArchMismatchError,
            CubinError: the device. OutOfMemoryError: with both numbers. ValueError: an option.
            FileNotFoundError, DownloadError: no such model.
        """
        from pyruntime.hub import resolve

        check_options(weights, attention, kv_dtype, graphs, overlap, exact)
        with GGUFFile.open(resolve(model)) as file:
            config = ModelConfig.from_gguf(file)
            kv_limit = kv_tokens
            max_tokens, kv_tokens = sizes(config, max_tokens, kv_tokens)
            ordinal = choose_device(device)
            stored = f", K/V {kv_dtype}" if kv_dtype != "f16" else ""
            if ordinal is None:
                from pyruntime.reference.model import ReferenceModel

                if memory_budget is not None or stream is not None:
                    raise ValueError("memory_budget and stream are for a GPU; this is the CPU")
                if weights != "auto":
                    raise ValueError(f"weights={weights!r} is for a GPU: NumPy works in float32")
                if "off" in (graphs, overlap):
                    raise ValueError("graphs and overlap are for a GPU: NumPy has neither")
                for name, value in (("attention", attention), ("exact", exact)):
                    if value == "invariant":
                        raise ValueError(
                            f"{name}='invariant': NumPy does not promise it: its sums may round "
                            "otherwise where a prompt is cut otherwise"
                        )
                if attention != "auto":
                    raise ValueError(f"attention={attention!r} names a GPU kernel: NumPy has none")
                reference = ReferenceModel(file, config, kv_dtype=kv_dtype, progress=progress)
                path = "cpu (NumPy)" + stored
                return cls(reference, path, file, max_tokens, kv_tokens, kv_limit, "f32")
            from pyruntime.model.gpu import GpuModel

            gpu = GpuModel(
                file,
                config,
                ordinal=ordinal,
                max_tokens=max_tokens,
                kv_tokens=kv_tokens,
                memory_budget=memory_budget,
                weights=weights,
                stream=stream,
                attention=attention,
                overlap=overlap != "off",
                graphs=graphs != "off",
                kv_dtype=kv_dtype,
                invariant=exact == "invariant",
                progress=progress or (lambda _: None),
            )
            path = gpu.device_name + (f", attention {attention}" if attention != "auto" else "")
            mode = gpu.weights_mode
            path += f", weights {mode}" if mode != "fp16" else ""
            path += f", exact {exact}" if exact != "fast" else ""
            return cls(gpu, path + stored, file, gpu.max_tokens, kv_tokens, kv_limit, mode)

    @classmethod
    def plan(
        cls,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        weights: str = "auto",
        attention: str = "auto",
        kv_dtype: str = "f16",
        max_tokens: int | None = None,
        kv_tokens: int | None = None,
        memory_budget: int | None = None,
        graphs: str = "auto",
        overlap: str = "auto",
        exact: str = "fast",
        stream: int | None = None,
        memory: int | None = None,
    ) -> Plan:
        """Device bytes by category that `load` with the same options, one cache and a row of logits
        will hold, and what weights "auto" comes to.

        Nothing is allocated, and a device is asked for its free memory only if weights are "auto"
        and `memory` does not give it. `stream` changes nothing, nor does an `attention` that there
        is: the workspace is the same for all. Counted are our own arrays, not what the driver keeps
        for itself, nor staging buffers while weights are loaded: up to 128 MiB (more for rows of
        over 8 MiB).

        Args:
            memory: free device memory in bytes.

        Raises: as `load` does for the file and the options; for the device, where it is asked.
        """
        check_options(weights, attention, kv_dtype, graphs, overlap, exact)
        from pyruntime.hub import resolve
        from pyruntime.model.footprint import plan

        if memory is None and weights == "auto":
            memory = free_memory(device)
        known = [bytes_ for bytes_ in (memory, memory_budget) if bytes_ is not None]
        with GGUFFile.open(resolve(model)) as file:
            config = ModelConfig.from_gguf(file)
            rows, kv_rows = sizes(config, max_tokens, kv_tokens)
            return plan(
                file, config, max_tokens=rows, kv_tokens=kv_rows, kv_dtype=kv_dtype,
                weights=weights, memory=min(known, default=None),
            )  # fmt: skip

    @property
    def model(self) -> Model:
        """The backend; on a GPU a `pyruntime.model.gpu.GpuModel`, which measurements go into."""
        return self._model

    @property
    def fingerprint(self) -> str:
        """By which to tell models apart, see `GGUFFile.fingerprint`."""
        return self._model.fingerprint

    @property
    def has_vocabulary(self) -> bool:
        """Whether the file holds a vocabulary, so that there is a `tokenizer`."""
        return self._metadata.get("tokenizer.ggml.model", "no_vocab") != "no_vocab"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file's own vocabulary. Raises TokenizerError."""
        from pyruntime.text.tokenizer import Tokenizer

        return Tokenizer.from_metadata(self._metadata)

    def new_cache(self, tokens: int) -> Any:
        """An empty K/V cache for `tokens` positions. Raises ValueError, OutOfMemoryError."""
        self._check_open()
        return self._model.new_cache(tokens)

    @overload
    def prefill(
        self,
        ids: Ids,
        *,
        cache: AnyCache | None = ...,
        reuse: bool = ...,
        logits: Logits = ...,
        hidden: Hidden = ...,
        timeout: Timeout = ...,
    ) -> Result: ...

    @overload
    def prefill(
        self,
        ids: Sequence[Ids],
        *,
        cache: Sequence[AnyCache] | None = ...,
        reuse: bool = ...,
        logits: Logits | Sequence[Logits] = ...,
        hidden: Hidden = ...,
        timeout: Timeout = ...,
    ) -> list[Result]: ...

    def prefill(
        self,
        ids: Any,
        *,
        cache: Any = None,
        reuse: bool = False,
        logits: Any = "last",
        hidden: Hidden = None,
        timeout: Timeout = None,
    ) -> Result | list[Result]:
        """Runs a prompt, or a list of prompts packed into as few passes as they fit, unpadded.

        Args:
            ids: token ids, a sequence or int array of shape [nt], nt >= 1; or a list or tuple of
                such prompts, of any lengths: then the results are a list, in their order.
            cache: continue this cache; without one the call leaves no state behind. For a list of
                prompts a list of as many different caches.
            reuse: `ids` is not what comes after the cache's tokens, but all of the prompt: what the
                cache holds of its beginning is kept, the rest forgotten, and only what is missing
                is run, from the first row on that something is wanted of. See `Result.reused`.
            logits: of the "last" row, of "all", of "none", or of the rows at these positions of
                `ids` (ascending; negative ones count from the end). For a list of prompts
                positions are a list with those of each.
            hidden: also the hidden state: see `Result`.
            timeout: seconds that the call may take, waiting for its turn and then for the GPU;
                NumPy looks at the time between passes. None: as long as it takes. 0: it does not
                wait for other calls, and may then take as long as it takes. A
                `pyruntime.turns.Deadline` is one timeout for several calls.

        Raises:
            BusyError: the time ran out before the call's turn came.
            WaitTimeoutError: it ran out later. What the GPU still does is waited for by the next
                call, within its own timeout.
            ValueError: bad ids, a timeout that is none, a cache of another engine or kv_dtype, more
                than the cache (or `kv_tokens`) holds, or more than the model's context length.
            NumericalError: a value left its range; the text names layer and tensor.
            CudaError, EngineError: see `pyruntime.errors`.

        Whatever is raised, all caches are as long as before, or with `reuse` as what was kept.
        """
        deadline = Deadline.of(timeout)
        if calls.several(ids):
            return self._prefill(ids, cache, logits, hidden, deadline, reuse)
        started, asked = time.perf_counter(), self._call(ids, cache, logits, None, hidden)
        return self._given([asked], started, deadline, reuse)[0]

    def _prefill(
        self,
        prompts: Any,
        cache: Any,
        logits: Any,
        hidden: Hidden,
        deadline: Deadline,
        reuse: bool = False,
    ) -> list[Result]:
        """Of several prompts."""
        started, count = time.perf_counter(), len(prompts)
        each = logits if isinstance(logits, (list, tuple)) else [logits] * count
        caches = [None] * count if cache is None else cache
        for name, given in (("cache", caches), ("logits", each)):
            if not isinstance(given, (list, tuple)) or len(given) != count:
                raise ValueError(f"{name}: a list of {count} is needed, one for each prompt")
        asked = zip(prompts, caches, each, range(count), strict=True)
        named_calls = named(asked, lambda parts: self._call(*parts, hidden))
        return self._given(named_calls, started, deadline, reuse)

    def _call(self, ids: Any, cache: Any, logits: Any, place: int | None, hidden: Hidden) -> Call:
        tokens = check_tokens(ids, self.config.vocab)
        nt = len(tokens)
        rows = calls.wanted_logits(logits, nt), calls.wanted_hidden(hidden, nt)
        return Call(tokens, cache, *rows, place=place)

    def _given(
        self, asked: Sequence[Call], started: float, deadline: Deadline, reuse: bool
    ) -> list[Result]:
        """What comes of calls that began at `started`."""
        if reuse and any(call.cache is None for call in asked):
            raise ValueError("reuse=True: there is no cache to reuse")
        gathered = Gathered(asked)

        def step(batch: Batch, parts: list[Part]) -> None:
            gathered.take(batch, parts, self._model.run(batch))

        timings = self._run(asked, step, deadline, reuse)
        timings["wall"] = time.perf_counter() - started
        return [
            Result(
                gathered.logits(i), gathered.hidden(i), call.cache, len(call.ids), call.reused,
                dict(timings), self.path,
            )
            for i, call in enumerate(asked)
        ]  # fmt: skip

    def _run(
        self,
        asked: Sequence[Call],
        step: Callable[[Batch, list[Part]], object],
        deadline: Deadline,
        reuse: bool = False,
    ) -> dict[str, float]:
        """Makes the passes of all calls, and returns the seconds that the GPU took, if one did."""
        model = self._model
        self._check_closed()
        with model.turns.turn(deadline):
            self._check_closed()
            context, most = self.config.context_length, self._kv_limit
            calls.check_room(model, asked, context, most=most, reuse=reuse)
            for call in asked if reuse else ():
                call.reuse()
            stateless = [len(call.ids) for call in asked if call.cache is None]
            scratch = self._scratch(max(stateless)) if stateless else None
            seconds = calls.run(
                model, asked, step, rows=self.max_tokens, scratch=scratch, deadline=deadline
            )
        return {"gpu": seconds} if seconds else {}

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
        if isinstance(prompts, str) or isinstance(continuations, str):
            raise ValueError("prompts and continuations: a list is needed, even for one text")
        if len(prompts) != len(continuations):
            raise ValueError(f"{len(prompts)} prompts and {len(continuations)} continuations")
        pairs = zip(prompts, continuations, strict=True)
        texts = named(pairs, lambda pair: self.tokenize_pair(*pair))
        return self._score(texts, logits_bytes, deadline)

    def _score(
        self, texts: Sequence[tuple[Rows, Rows]], most: int, deadline: Deadline
    ) -> list[Score]:
        if most < 1:
            raise ValueError(f"logits_bytes={most}: at least 1")
        scored = Scored(texts)

        def step(batch: Batch, parts: list[Part]) -> None:
            targets = scored.targets(batch, parts)
            scored.take(parts, self._model.score(batch, targets, most_bytes=most))

        if scored.calls:
            self._run(scored.calls, step, deadline)
        return scored.results()

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
        window = longest if window is None else window
        stride = max(window // 2, 1) if stride is None else stride
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
        if isinstance(texts, str):
            raise ValueError("texts: a list is needed, even for one text")
        prompts = named(texts, lambda text: self.tokenize(text, ends=True))
        found = self._prefill(prompts, None, "none", pooling, deadline) if prompts else []
        vectors = np.concatenate([np.empty((0, self.config.hidden)), *(r.hidden for r in found)])
        if normalize:
            vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors.astype(np.float32)

    def generate(self, ids: ArrayLike, n: int, *, timeout: Timeout = None) -> list[int]:
        """Up to `n` greedy tokens after `ids`, each the argmax of the logits; stops before EOS.

        Each token is a call of its own, between which other threads have their turns; `timeout` is
        that of all of them, see `prefill`.

        Raises: as `prefill`; ValueError if n < 0.
        """
        deadline = Deadline.of(timeout)
        if n < 0:
            raise ValueError(f"n is {n}; it must not be negative")
        prompt = check_tokens(ids, self.config.vocab)
        self._check_open()
        with self._model.turns.turn(deadline):
            cache = self.new_cache(len(prompt) + max(n, 1))
        step: Ids = prompt
        out: list[int] = []
        stop = self._stop_ids
        while len(out) < n:
            logits = np.asarray(self.prefill(step, cache=cache, timeout=deadline).logits)
            token = int(logits[-1].argmax())
            if token in stop:
                break
            out.append(token)
            step = [token]
        return out

    def warm(
        self,
        lengths: Iterable[int],
        *,
        logits: Literal["none", "last", "all"] = "last",
        continues: bool = False,
        timeout: Timeout = None,
    ) -> list[Warmed]:
        """Makes single prompts of these lengths ready: records their passes and captures them.

        Nothing is run. A length serves all of its bucket (docs/embedding.md), a longer one than
        `max_tokens` gets each of its passes. The cache behind calls without one is made, too: a
        `new_cache` that is longer than it drops all graphs, so make that first.

        Args:
            logits: that the prompts will be asked for, as of `prefill`.
            continues: they go on with a cache that holds something, as the steps of `generate` do.
            timeout: see `prefill`; captures are not interrupted.

        Returns: what was done, by kind of pass, in the order in which the lengths need them. On
            the CPU nothing is.

        Raises: as `prefill`; ValueError also for lengths of more kinds than are kept.
        """
        deadline, wanted = Deadline.of(timeout), list(lengths)
        most = self.config.context_length
        if not continues:
            most = min(most, self._kv_limit or most)
        for n in wanted:
            if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 1 <= n <= most:
                raise ValueError(f"lengths: {n!r} is not one of 1 to {most} tokens")
        if logits not in ("none", "last", "all"):
            raise ValueError(f"logits={logits!r}: 'none', 'last' or 'all'")
        kinds = []
        for n in map(int, wanted):
            for (part,) in passes([n], rows=self.max_tokens):
                rows, ends = part.last - part.first, part.last == n
                kept = {"none": 0, "last": int(ends), "all": rows}[logits]
                kinds.append((rows, kept, not (continues or part.first)))
        self._check_closed()
        with self._model.turns.turn(deadline):
            self._check_closed()
            if wanted and not continues:
                self._scratch(max(wanted))
            return self._model.warm(kinds)

    def launches(self) -> dict[str, int]:
        """How often each kernel was launched since `load` began; empty on the CPU.

        A kernel that is absent never ran.
        """
        self._check_open()
        return self._model.launches()

    def stats(self) -> Stats:
        """How passes were run since `load`: as graphs, or launch by launch. On the CPU all zero."""
        self._check_open()
        return self._model.stats()

    @cached_property
    def _stop_ids(self) -> frozenset[int]:
        # A model without a vocabulary has no end-of-sequence token.
        return frozenset(self.tokenizer.eos_ids if self.has_vocabulary else ())

    def _scratch(self, tokens: int) -> Any:
        """The cache behind calls without one."""
        if self._cache is None or self._cache.capacity < tokens:
            self._cache = None  # give the smaller one back first
            self._cache = self._model.new_cache(max(tokens, self.kv_tokens))
        return self._cache

    def _check_closed(self) -> None:
        if self._closed:
            raise EngineError("this engine has been closed")

    def _check_open(self) -> None:
        self._check_closed()
        self._model.turns.check_process()

    def close(self) -> None:
        """Gives all memory back, after the call that is served now. Idempotent.

        Calls that wait for their turn are refused. Results and caches in use keep their memory.
        """
        if self._model.turns.forked:
            return
        self._closed = True
        with self._model.turns.turn():
            self._cache = None
            self._model.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Engine {self.config.name} on {self.path}{state}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
