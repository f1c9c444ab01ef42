"""The engine: one object that takes token ids to logits and K/V, on a GPU or in NumPy."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyruntime.errors import EngineError
from pyruntime.gguf import GGUFFile
from pyruntime.model.config import ModelConfig
from pyruntime.model.stats import Stats
from pyruntime.model.tokens import check_tokens
from pyruntime.options import check_options, choose_device, free_memory, sizes

if TYPE_CHECKING:
    from pyruntime.model.footprint import Plan
    from pyruntime.text.tokenizer import Tokenizer

Progress = Callable[[int], object]


class Cache(Protocol):
    """K/V of one sequence: float [layers, kv heads, capacity, head dim] each, K after RoPE.

    With kv_dtype "e4m3" they are uint8 codes, each row times its scale: `k_scale` and `v_scale`,
    float32 [layers, kv heads, capacity], which are None otherwise.
    """

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    length: int

    @property
    def kv_dtype(self) -> str: ...

    @property
    def capacity(self) -> int: ...


class Model(Protocol):
    """What a backend offers."""

    config: ModelConfig
    kv_dtype: str

    def new_cache(self, tokens: int) -> Any: ...
    def forward(self, ids: ArrayLike, cache: Any, *, logits: Literal["last", "all"]) -> Any: ...
    def launches(self) -> dict[str, int]: ...
    def stats(self) -> Stats: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Result:
    """What a prefill gives.

    Attributes:
        logits: float32 [1, vocab] ("last") or [nt, vocab] ("all"); a NumPy array, or an array in
            device memory of which `np.asarray` makes a copy.
        hidden: reserved for hidden states; None.
        cache: the cache that was passed in, or None.
        tokens: how many ids were processed.
        timings: seconds: "wall", and on a GPU "gpu" (between events around the passes).
        path: the backend and device that did it, such as "cuda:0 (NVIDIA H200)" or "cpu (NumPy)",
            the attention kernel and kv_dtype where others than the default were asked for, and
            weights where they are "per-layer".
    """

    logits: Any
    hidden: Any
    cache: Cache | None
    tokens: int
    timings: dict[str, float] = field(default_factory=dict)
    path: str = ""


class Engine:
    """A loaded model. Use `Engine.load`, as a context manager or with `close`.

    `weights` is what they are held as: on a GPU "fp16" or "per-layer", in NumPy "f32".

    Calls from several threads are served one after the other.
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
        self._process = os.getpid()
        self._kv_limit = kv_limit
        self._metadata = file.metadata
        self._cache: Any = None
        self._closed = False
        self._lock = threading.RLock()
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
            graphs: "auto" captures a pass into a CUDA graph when its length is met for the second
                time, and replays it from then on: less work for the host, which short prompts wait
                for; "off" does not. The same bits. `stats` tells how passes were run. NumPy ignores
                this and `overlap`.
            exact: "fast"; other values are refused until they exist.
            overlap: "auto" lets a kernel start under the tail of the one before where the GPU can
                (sm_90 and newer); "off" does not, for measuring and debugging. The same bits.
            max_tokens: rows of one pass; longer prompts take several. Default 4096, or the model's
                context length if that is shorter. With weights "per-layer" it is 8192 at most.
            kv_tokens: the longest prompt without a cache of its own. By default the internal cache
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
                if attention == "invariant":
                    raise ValueError(
                        "attention='invariant': NumPy does not promise it: its sums may round "
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
                progress=progress or (lambda _: None),
            )
            path = gpu.device_name + (f", attention {attention}" if attention != "auto" else "")
            mode = gpu.weights_mode
            path += f", weights {mode}" if mode != "fp16" else ""
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

    def prefill(
        self,
        ids: ArrayLike,
        *,
        cache: Cache | None = None,
        logits: Literal["last", "all"] = "last",
        hidden: None = None,
    ) -> Result:
        """Runs a prompt.

        Args:
            ids: token ids, a sequence or int array of shape [nt], nt >= 1.
            cache: continue this cache; without one the call leaves no state behind.
            logits: for the last row, or for all.

        Raises:
            ValueError: bad ids, a cache of another engine or kv_dtype, more than the cache (or
                `kv_tokens`) holds, or more than the model's context length.
            NumericalError: a value left its range; the text names layer and tensor.
            CudaError, EngineError: see `pyruntime.errors`.
        """
        if hidden is not None:
            raise ValueError(f"hidden={hidden!r} is not supported")
        if logits not in ("last", "all"):
            raise ValueError(f"logits={logits!r}: 'last' or 'all'")
        tokens = check_tokens(ids, self.config.vocab)
        started = time.perf_counter()
        self._check_open()
        with self._lock:
            self._check_open()
            target = cache if cache is not None else self._scratch(len(tokens))
            parts, gpu_seconds = self._run(tokens, target, logits)
        out = parts[-1] if logits == "last" or len(parts) == 1 else np.concatenate(parts)
        timings = {"wall": time.perf_counter() - started}
        if gpu_seconds:
            timings["gpu"] = gpu_seconds
        return Result(out, None, cache, len(tokens), timings, self.path)

    def _run(
        self, tokens: NDArray[np.int32], cache: Any, logits: Literal["last", "all"]
    ) -> tuple[list[Any], float]:
        """Logits of each pass, and GPU seconds. A prompt is stored whole or not at all."""
        start, parts, gpu_seconds = cache.length, [], 0.0
        if not isinstance(start, int) or not 0 <= start <= cache.capacity:
            raise ValueError(f"the cache's length is {start!r}, not within 0 and {cache.capacity}")
        if cache.kv_dtype != self._model.kv_dtype:
            raise ValueError(
                f"this cache holds {cache.kv_dtype}; the engine was loaded with "
                f"kv_dtype={self._model.kv_dtype!r}"
            )
        for most, what in (
            (cache.capacity, "the cache's {} positions"),
            (self.config.context_length, "the model's context of {} tokens"),
        ):
            if start + len(tokens) > most:
                raise ValueError(f"{len(tokens)} tokens after {start} exceed {what.format(most)}")
        try:
            for first in range(0, len(tokens), self.max_tokens):
                chunk = tokens[first : first + self.max_tokens]
                part = self._model.forward(chunk, cache, logits=logits)
                # Of a prompt in one pass the array itself, of many passes copies on the host.
                parts.append(part if len(chunk) == len(tokens) else np.asarray(part))
                gpu_seconds += getattr(self._model, "gpu_seconds", 0.0)
        except BaseException:
            cache.length = start
            raise
        return parts, gpu_seconds

    def generate(self, ids: ArrayLike, n: int) -> list[int]:
        """Up to `n` greedy tokens after `ids`, each the argmax of the logits; stops before EOS.

        Raises: as `prefill`; ValueError if n < 0.
        """
        if n < 0:
            raise ValueError(f"n is {n}; it must not be negative")
        prompt = check_tokens(ids, self.config.vocab)
        cache = self.new_cache(len(prompt) + max(n, 1))
        step: ArrayLike = prompt
        out: list[int] = []
        stop = self._stop_ids
        while len(out) < n:
            logits = np.asarray(self.prefill(step, cache=cache).logits)
            token = int(logits[-1].argmax())
            if token in stop:
                break
            out.append(token)
            step = [token]
        return out

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
        """The cache behind calls without one, emptied."""
        if self._kv_limit is not None and tokens > self._kv_limit:
            raise ValueError(
                f"{tokens} tokens without a cache; this engine was loaded with "
                f"kv_tokens={self._kv_limit}"
            )
        if self._cache is None or self._cache.capacity < tokens:
            self._cache = None  # give the smaller one back first
            self._cache = self._model.new_cache(max(tokens, self.kv_tokens))
        self._cache.length = 0
        return self._cache

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this engine has been closed")
        if self._process != os.getpid():
            raise EngineError("this engine belongs to the parent process: load one after the fork")

    def close(self) -> None:
        """Gives all memory back. Idempotent. Results and caches in use keep theirs."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._closed = True
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
