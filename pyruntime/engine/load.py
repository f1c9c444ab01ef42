"""A model file on a device: options, memory, backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any

from pyruntime.engine.interface import Model
from pyruntime.engine.texts import Texts
from pyruntime.gguf import GGUFFile
from pyruntime.model.config import ModelConfig
from pyruntime.model.tokens import check_count
from pyruntime.options import CHOICES, check_options, choose_device, free_memory, sizes

if TYPE_CHECKING:
    from pyruntime.model.footprint import Plan

Progress = Callable[[int], object]


class Engine(Texts):
    """A loaded model. Use `Engine.load`, as a context manager or with `close`.

    `weights` is what they are held as: on a GPU "fp16", "per-layer" or "int8", in NumPy "f32".

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
        super().__init__(model, path, file.metadata, max_tokens, kv_tokens, kv_limit)
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
                more time, the same bits; "int8", packed and multiplied as they are with
                activations that are rounded to 8 bits: the least memory, and less exact; or "auto",
                which is fp16 if that fits, otherwise per-layer, then int8, and on devices where
                int8 is the faster one (compute capability 8.x and 12.x) the other way round. The
                log says what it came to, and so does `Engine.weights`.
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
                context length if that is shorter. With weights "per-layer" it is 8192 at most,
                with "int8" 2048.
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
        if memory_budget is not None:
            check_count("memory_budget", memory_budget, 0)
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
        memory: int | None = None,
        capability: tuple[int, int] | None = None,
        **options: Any,
    ) -> Plan:
        """Device bytes by category that `load` with the same options, one cache and a row of logits
        will hold, and what weights "auto" comes to.

        Nothing is allocated, and a device is asked for its free memory and compute capability only
        if weights are "auto" and `memory` is not given. Counted are our own arrays, not what the
        driver keeps for itself, nor staging buffers while weights are loaded: up to 128 MiB (more
        for rows of over 8 MiB), which are gone before activations and the cache come.

        Args:
            memory: free device memory in bytes. capability: the device's compute capability, such
                as (8, 6), which weights "auto" looks at, too.
            options: those of `load`. Some change nothing here, such as `stream`, `progress`, or an
                `attention` that there is: the workspace is the same for all.

        Raises: as `load` does for the file and the options; for the device, where it is asked.
        """
        bound = signature(cls.load).bind(model, **options)
        bound.apply_defaults()
        given = bound.arguments
        check_options(**{name: given[name] for name in CHOICES})
        limits = {"memory": memory, "memory_budget": given["memory_budget"]}
        known = [check_count(name, n, 0) for name, n in limits.items() if n is not None]
        from pyruntime.hub import resolve
        from pyruntime.model.footprint import plan

        weights, kv_dtype = given["weights"], given["kv_dtype"]
        if memory is None and weights == "auto":
            free, capability = free_memory(given["device"])
            known += [] if free is None else [free]
        with GGUFFile.open(resolve(model)) as file:
            config = ModelConfig.from_gguf(file)
            rows, kv_rows = sizes(config, given["max_tokens"], given["kv_tokens"])
            return plan(
                file, config, max_tokens=rows, kv_tokens=kv_rows, kv_dtype=kv_dtype,
                weights=weights, memory=min(known, default=None), capability=capability,
                invariant=given["exact"] == "invariant",
            )  # fmt: skip
