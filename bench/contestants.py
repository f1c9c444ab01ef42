"""Ours and the libraries' ways to do the same work on the same memory, as functions to be timed.

Needs torch. Each builder gives name -> function; the functions of products and attention enqueue
`LAUNCHES` calls on the shared stream, those of prefills run one and wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention_launches import Prompt
from pyruntime.tools.synth import MODELS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pyruntime import Engine
from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.ops.attention_choice import choose
from pyruntime.ops.gemm import OUTPUTS, gemm

ROTATED = 256 << 20  # bytes of weights that one timing goes through
LAUNCHES = 8  # of one timing
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}

Contestants = dict[str, Callable[[], object]]


class Gpu:
    """Device 0, with our kernels, and with `stream`, which is torch's current `torch_stream`."""

    def __init__(self) -> None:
        self.device = Device(0)
        self.library = Library(self.device)
        self.torch_stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.torch_stream)
        self.stream = Stream(self.device, self.torch_stream.cuda_stream)

    def normal(self, *shape: int) -> tuple[DeviceArray, torch.Tensor]:
        """Random-normal fp16, as our array and as torch's view of it."""
        array = DeviceArray(self.device, shape, np.float16)
        view = torch.as_tensor(array, device="cuda")
        return array, view.normal_()


def products(gpu: Gpu, case: Mapping[str, Any], m: int) -> Contestants:
    """C [m, n] = A Wᵀ: ours with its epilogue, cuBLAS without one."""
    n, k, epilogue = case["n"], case["k"], case["epilogue"]
    copies = -(-ROTATED // (2 * n * k))
    a, torch_a = gpu.normal(m, k)
    w, torch_w = gpu.normal(copies * n, k)
    width = n // 2 if epilogue == "swiglu" else n
    c = DeviceArray(gpu.device, (m, width), OUTPUTS[epilogue]).fill(0)
    rows, overflow = (DeviceArray(gpu.device, (1,), np.int32) for _ in range(2))
    rows.upload(np.array([m], np.int32))
    program = Program()
    for i in range(LAUNCHES):
        start = i % copies * n
        gemm(
            program, gpu.library, a=a, w=w.rows(start, start + n), c=c, rows=rows, max_rows=m,
            epilogue=epilogue, scale=2.0**-12, overflow=overflow,
        )  # fmt: skip
    out = torch.empty(m, n, dtype=torch.float16, device="cuda")
    transposed = [torch_w[i * n : (i + 1) * n].T for i in range(copies)]

    def cublas() -> None:
        for i in range(LAUNCHES):
            torch.mm(torch_a, transposed[i % copies], out=out)

    return {"ours": lambda: program.run(gpu.stream), "cublas": cublas}


def attentions(gpu: Gpu, case: Mapping[str, Any], nt: int) -> Contestants:
    """Causal attention of one sequence.

    Raises:
        ArithmeticError: ours and cuDNN's results are further apart than fp16 explains.
    """
    heads, kv_heads, head_dim = case["heads"], case["kv_heads"], case["head_dim"]
    q, torch_q = gpu.normal(nt, heads * head_dim)
    out, torch_out = gpu.normal(nt, heads * head_dim)
    k, torch_k = gpu.normal(kv_heads, nt, head_dim)
    v, torch_v = gpu.normal(kv_heads, nt, head_dim)
    choice = choose(
        gpu.library, head_dim=head_dim, heads=heads, kv_heads=kv_heads, max_rows=nt, max_keys=nt
    )
    prompt = Prompt(gpu.library, gpu.stream, q=q, out=out, k=k, v=v)
    program = prompt.program(choice, LAUNCHES)
    by_head = torch_q.view(nt, heads, head_dim).transpose(0, 1)[None]
    keys, values = torch_k[None], torch_v[None]

    def library(backend: SDPBackend, times: int = LAUNCHES) -> torch.Tensor:
        with sdpa_kernel(backend):
            for _ in range(times):
                result = scaled_dot_product_attention(
                    by_head, keys, values, is_causal=True, enable_gqa=True
                )
        return result

    prompt.run(program)
    theirs = library(SDPBackend.CUDNN_ATTENTION, 1)[0].transpose(0, 1).reshape(nt, -1)
    apart = float((theirs.float() - torch_out.float()).abs().max())
    if not apart < 0.01:
        raise ArithmeticError(f"ours and cuDNN's results are {apart} apart")
    return {
        "ours": lambda: prompt.run(program),
        **{name: partial(library, backend) for name, backend in BACKENDS.items()},
    }


class Prefills:
    """A whole model twice: a GGUF file in ours, its shapes with random weights in transformers."""

    def __init__(self, case: Mapping[str, Any], path: Path, most: int) -> None:
        self._engine = Engine.load(path, device="cuda:0", max_tokens=most)
        self._model = _transformers(case["name"])

    def contestants(self, nt: int) -> Contestants:
        """A prefill of `nt` tokens, logits of the last."""
        ids = np.random.default_rng(0).integers(0, self._engine.config.vocab, nt)
        both: Contestants = {"ours": lambda: self._engine.prefill(ids)}
        if self._model is not None:
            torch_ids = torch.as_tensor(ids, device="cuda")[None]

            def theirs() -> None:
                with torch.inference_mode():
                    self._model(input_ids=torch_ids, use_cache=True, logits_to_keep=1)
                torch.cuda.synchronize()

            both["transformers"] = theirs
        return both


def _transformers(name: str) -> Any:
    """The shapes of `name` in bf16; None where transformers is not installed."""
    try:
        from transformers import AutoModelForCausalLM, Qwen2Config
    except ModuleNotFoundError:
        return None
    shape = MODELS[name]
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.eps,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
