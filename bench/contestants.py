"""Products and whole prefills, ours and the libraries', ready to be timed. Needs torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from regimes import OURS, willing
from stopwatch import Contestant, Gpu, Graph, Stopwatch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pyruntime import Engine
from pyruntime.driver.library import Kernel
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.model.config import ModelConfig
from pyruntime.model.placements import layer_placements
from pyruntime.ops.gemm import GATED, OUTPUTS, gemm
from pyruntime.ops.gemm_choice import choose

ROTATED = 256 << 20  # bytes of weights that products go through in turn: more than L2 holds
TOLERANCE = 2e-3  # of a whole product in fp16, in relative norm
LIKE = "f16"  # the epilogue that does what cuBLAS does


def products(
    gpu: Gpu, product: Mapping[str, Any], m: int, mma: bool, skipped: dict[str, str]
) -> dict[str, Contestant]:
    """C [m, n] = A Wᵀ by name: "ours", "cublas", and "fused", ours with what a model needs done.

    Args:
        mma: "mma" takes part, too: the row of the mma.sync engine that would be chosen.
        skipped: see `regimes.willing`.

    Raises:
        ArithmeticError: ours is not what cuBLAS computes. What either of these two raises.
    """
    n, k, epilogue = product["n"], product["k"], product["epilogue"]
    copies = -(-ROTATED // (2 * n * k))
    a, torch_a = gpu.normal(m, k)
    w, torch_w = gpu.normal(copies * n, k)
    rows, overflow = (DeviceArray(gpu.device, (1,), np.int32).fill(0) for _ in range(2))
    rows.upload(np.array([m], np.int32))
    out = torch.empty(m, n, dtype=torch.float16, device="cuda")
    transposed = [torch_w[i * n : (i + 1) * n].T for i in range(copies)]

    def cublas(calls: int) -> torch.Tensor:
        for i in range(calls):
            torch.mm(torch_a, transposed[i % copies], out=out)
        return out

    def ours(epilogue: str, engine: str | None = None, scale: float = 2.0**-12) -> Contestant:
        able = [
            row
            for row in gpu.library.family("gemm")
            if row.spec.tile["epilogue"] == epilogue and engine in (None, row.spec.tile["engine"])
        ]
        row = choose(able, m, n, k, gpu.device)
        width = n // 2 if epilogue in GATED else n
        c = DeviceArray(gpu.device, (m, width), OUTPUTS[epilogue]).fill(0)
        view = torch.as_tensor(c, device="cuda")

        def record(calls: int, row: Kernel = row) -> Program:
            program = Program()
            for i in range(calls):
                start = i % copies * n
                gemm(
                    program, gpu.library, a=a, w=w.rows(start, start + n), c=c, rows=rows,
                    max_rows=m, epilogue=epilogue, scale=scale, overflow=overflow, kernel=row,
                )  # fmt: skip
            return program

        programs = {1: record(1)}

        def enqueue(calls: int) -> torch.Tensor:
            if calls not in programs:
                programs[calls] = record(calls)
            programs[calls].run(gpu.stream)
            return view

        return Contestant(enqueue, row.name, programs[1].launches)

    like = ours(LIKE, scale=1.0)
    apart = float((like.enqueue(1).float() - cublas(1).float()).norm() / out.float().norm())
    if not apart < TOLERANCE:
        raise ArithmeticError(f"{like.note} and cuBLAS are {apart:.2g} apart in relative norm")
    more = {"fused": partial(ours, epilogue)}
    if mma:
        more["mma"] = partial(ours, LIKE, "mma")
    return {OURS: like, "cublas": Contestant(cublas, "torch.mm"), **willing(more, skipped)}


class Prefill(Protocol):
    """Something that is a prefill, or takes its place."""

    def reading(self, ms: float, lead: float = 0.0) -> tuple[float, float, float]:
        """Milliseconds for its caller and on the GPU, and MHz after it.

        Medians of what fits into about `ms`, at least one, after `lead` that do not count.
        """


class Called:
    """A prefill that is called and waited for. `call` gives the GPU's milliseconds, or None."""

    def __init__(self, watch: Stopwatch, call: Callable[[], float | None]) -> None:
        self._watch, self._call = watch, call
        call()

    def reading(self, ms: float, lead: float = 0.0) -> tuple[float, float, float]:
        """See `Prefill`."""
        self._for(lead)
        walls, gpus = zip(*(self._for(ms) or [self._once()]), strict=True)
        return statistics.median(walls), statistics.median(gpus), self._watch.mhz()

    def _for(self, ms: float) -> list[tuple[float, float]]:
        end, found = time.perf_counter() + 1e-3 * ms, []
        while time.perf_counter() < end:
            found.append(self._once())
        return found

    def _once(self) -> tuple[float, float]:
        started = time.perf_counter()
        gpu = self._call()
        wall = 1e3 * (time.perf_counter() - started)
        return wall, wall if gpu is None else gpu


class Replayed:
    """A graph in a prefill's place. GPU time stands for the caller's, too."""

    def __init__(self, gpu: Gpu, watch: Stopwatch, contestant: Contestant) -> None:
        self._watch, self._graph = watch, Graph(gpu, contestant, watch)

    def reading(self, ms: float, lead: float = 0.0) -> tuple[float, float, float]:
        """See `Prefill`."""
        found, mhz = self._watch.reading(self._graph, ms, lead)
        return found, found, mhz


def our_prefill(watch: Stopwatch, engine: Engine, nt: int) -> Called:
    """Of `nt` tokens, logits of the last."""
    ids = np.random.default_rng(0).integers(0, engine.config.vocab, nt)
    return Called(watch, lambda: 1e3 * engine.prefill(ids).timings["gpu"])


class Libraries:
    """The products of a model by cuBLAS and its attention by cuDNN, and nothing else of it.

    As in our prefill, after the last layer's attention only the last row is worked on. Everything
    is random-normal: nothing depends on what was computed before.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        shapes = layer_placements(config, 0)
        names = ("qkv", "attn_output", "gate_up", "down")
        self._layers = [
            {name: _weight(*shapes[name].shape) for name in names} for _ in range(config.layers)
        ]
        self._head = _weight(config.vocab, config.hidden)

    def contestant(self, nt: int) -> Contestant:
        """A call stands for a prefill of `nt` tokens."""
        c, head = self._config, self._head
        q = _normal(nt, c.heads, c.head_dim).transpose(0, 1)[None]
        keys, values = (_normal(1, c.kv_heads, nt, c.head_dim) for _ in range(2))
        inputs = {name: _normal(nt, weight.shape[0]) for name, weight in self._layers[0].items()}
        outputs = {
            name: torch.empty(nt, weight.shape[1], dtype=torch.float16, device="cuda")
            for name, weight in self._layers[0].items()
        }
        logits = torch.empty(1, c.vocab, dtype=torch.float16, device="cuda")

        def enqueue(calls: int) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                for _ in range(calls):
                    rows = nt
                    for layer, weights in enumerate(self._layers, 1):
                        for name, weight in weights.items():
                            torch.mm(inputs[name][:rows], weight, out=outputs[name][:rows])
                            if name == "qkv":
                                scaled_dot_product_attention(
                                    q, keys, values, is_causal=True, enable_gqa=True
                                )
                                rows = 1 if layer == c.layers else nt
                    torch.mm(inputs["qkv"][:1], head, out=logits)
            return logits

        return Contestant(enqueue, f"{4 * c.layers + 1} products, {c.layers} attentions")


def _normal(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float16, device="cuda").normal_()


def _weight(n: int, k: int) -> torch.Tensor:
    """A view [k, n] of a matrix [n, k] whose products are of order 1."""
    return torch.empty(n, k, dtype=torch.float16, device="cuda").normal_(std=k**-0.5).T


def transformers_prefill(watch: Stopwatch, config: ModelConfig) -> Callable[[int], Called]:
    """Hugging Face's model of the same shapes in bf16, by the number of tokens.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import AutoModelForCausalLM, Qwen2Config

    shape = Qwen2Config(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.eps,
        tie_word_embeddings=config.tied,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()

    def prefill(nt: int) -> Called:
        ids = torch.randint(config.vocab, (1, nt), device="cuda")

        def call() -> None:
            with torch.inference_mode():
                model(input_ids=ids, use_cache=True, logits_to_keep=1)
            torch.cuda.synchronize()

        return Called(watch, call)

    return prefill
