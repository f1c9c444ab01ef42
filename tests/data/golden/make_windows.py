"""Write the models with sliding windows and capped scores in this folder, and their values.

    python make_windows.py FOLDER

Needs torch and transformers, whose `Gemma2ForCausalLM`, `Gemma3ForCausalLM` and
`MistralForCausalLM` (eager attention, float32, CPU) give the values from the dequantized weights;
the files here are of torch 2.13.0 and transformers 5.24.0. Everything else in a GGUF file is as
llama.cpp's converters write it (`conversion/gemma.py`, `conversion/llama.py`): norm weights of
Gemma hold the 1 that is added to them, rows of Mistral's queries and keys are in the interleaved
order. Keys of the .npz files: `tests/goldens.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

HIDDEN, FFN, WINDOW, CONTEXT = 128, 192, 24, 4096
PROMPTS, GREEDY = (1, 17, 130), 16
CLASSES = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "llama": (MistralConfig, MistralForCausalLM),
}


@dataclass
class Model:
    """A file to write, random weights of `type` in it.

    `stated`: further keys of the file; `options`: those of the transformers config. `vocab` is odd
    where rows of logits shall have no alignment.
    """

    stem: str
    arch: str
    type: Type
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    stated: dict[str, float]
    options: dict[str, Any]
    base: float = 10000.0
    eps: float = 1e-6
    loudness: float = 1.0  # of queries and keys: how far attention is from a mean

    @property
    def gemma(self) -> bool:
        return self.arch != "llama"


CAPS = {"attn_logit_softcapping": 12.0, "final_logit_softcapping": 9.0}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
MODELS = (
    Model(
        "tiny-gemma2-q8_0", "gemma2", Type.Q8_0, 4, 2, 1, 256, 301, CAPS,
        {**CAPS, "query_pre_attn_scalar": 256}, loudness=2.0,
    ),
    Model(
        "tiny-gemma2-q4_0", "gemma2", Type.Q4_0, 3, 4, 2, 128, 300, CAPS,
        {**CAPS, "query_pre_attn_scalar": 128}, loudness=2.0,
    ),
    Model(
        "tiny-gemma3-q8_0", "gemma3", Type.Q8_0, 7, 2, 1, 256, 300, {"rope.scaling.factor": 8.0},
        {"query_pre_attn_scalar": 256, "rope_parameters": GEMMA3_ROPE}, base=1e6, loudness=1.5,
    ),
    Model(
        "tiny-gemma3-q5_1", "gemma3", Type.Q5_1, 7, 4, 2, 64, 301, {},
        {"query_pre_attn_scalar": 64}, base=1e6, loudness=1.5,
    ),
    Model("tiny-mistral-q8_0", "llama", Type.Q8_0, 2, 4, 2, 64, 300, {}, {}, loudness=1.5),
)  # fmt: skip


def draw(model: Model, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights by GGUF name: matrices that keep the size of activations, norms around 1."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    block = {
        "attn_norm": (HIDDEN,),
        "attn_q": (q, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, q),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    if model.gemma:
        block |= {"post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)}
    if model.arch == "gemma3":
        block |= {"attn_q_norm": (model.head_dim,), "attn_k_norm": (model.head_dim,)}
    shapes = {"token_embd": (model.vocab, HIDDEN)}
    for layer in range(model.layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    shapes |= {"output_norm": (HIDDEN,)}
    if not model.gemma:
        shapes |= {"output": (model.vocab, HIDDEN)}
    loud = ("attn_q_norm", "attn_k_norm") if model.arch == "gemma3" else ("attn_q", "attn_k")
    weights = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        values = 1 + values / 10 if len(shape) == 1 else values / np.sqrt(np.float32(shape[1]))
        if name == "token_embd" and model.gemma:
            values *= 2  # logits of a few units: the final cap bends them
        weights[f"{name}.weight"] = values * (model.loudness if name.endswith(loud) else 1)
    return {name: np.asarray(values, np.float32) for name, values in weights.items()}


def write(model: Model, path: Path, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The GGUF file; returns the weights as they can be read from it."""
    writer = gguf.GGUFWriter(path, model.arch)
    writer.add_name(model.stem.rsplit("-", 1)[0].replace("-", " "))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(model.eps)
    writer.add_rope_freq_base(model.base)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_sliding_window(WINDOW)
    writer.add_tokenizer_model("no_vocab")
    if "rope.scaling.factor" in model.stated:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    for key, value in model.stated.items():
        writer.add_float32(f"{model.arch}.{key}", value)
    stored = {}
    for name, values in weights.items():
        kind = model.type if values.ndim == 2 else Type.F32
        packed = quants.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        stored[name] = quants.dequantize(packed, kind).reshape(values.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def translated(model: Model, weights: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The state of the transformers model."""
    ffn_norm = "pre_feedforward_layernorm" if model.gemma else "post_attention_layernorm"
    names = NAMES | {"ffn_norm": ffn_norm}
    state = {}
    for name, values in weights.items():
        *block, part, kind = name.split(".")
        if model.gemma and part.endswith("norm"):
            values = values - 1
        if not model.gemma and part in ("attn_q", "attn_k"):
            pairs = values.reshape(-1, model.head_dim // 2, 2, HIDDEN)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        layer = f"model.layers.{block[1]}." if block else ""
        state[f"{layer}{names[part]}.{kind}"] = torch.from_numpy(np.ascontiguousarray(values))
    return state


def oracle(model: Model, weights: dict[str, np.ndarray]) -> torch.nn.Module:
    config_class, model_class = CLASSES[model.arch]
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": model.base}}
    options = {} if model.arch == "gemma3" else rope
    config = config_class(
        vocab_size=model.vocab,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=model.eps,
        sliding_window=WINDOW,
        attn_implementation="eager",
        tie_word_embeddings=model.gemma,
        use_cache=False,
        **options | model.options,
    )
    network = model_class(config).to(torch.float32).eval()
    missing, unexpected = network.load_state_dict(translated(model, weights), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    network.tie_weights()
    return network


def values_of(network: torch.nn.Module, ids: np.ndarray) -> dict[str, np.ndarray]:
    """What `tests/goldens.py` lists, of one prompt."""

    def logits_of(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            return network(input_ids=torch.tensor([tokens])).logits[0].numpy()

    logits = logits_of(ids.tolist())
    wide = logits.astype(np.float64)
    lse = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) + wide.max(1)
    best = np.argsort(-logits, axis=1, kind="stable")[:, :10]
    greedy, gaps, tokens, last = [], [], ids.tolist(), logits[-1]
    for _ in range(GREEDY):
        second, first = np.sort(last)[-2:]
        greedy.append(int(last.argmax()))
        gaps.append(first - second)
        tokens.append(greedy[-1])
        last = logits_of(tokens)[-1]
    return {
        "ids": ids.astype(np.int32),
        "last_logits": logits[-1],
        "logprobs": wide[np.arange(len(ids) - 1), ids[1:]] - lse[:-1],
        "lse": lse,
        "top10_ids": best.astype(np.int32),
        "top10_logits": np.take_along_axis(logits, best, axis=1),
        "greedy": np.array(greedy, np.int32),
        "greedy_gap": np.array(gaps, np.float32),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for number, model in enumerate(MODELS):
        rng = np.random.default_rng(number)
        weights = write(model, folder / f"{model.stem}.gguf", draw(model, rng))
        network = oracle(model, weights)
        values = {
            f"n{nt}/{key}": value
            for nt in PROMPTS
            for key, value in values_of(network, rng.integers(0, model.vocab, nt)).items()
        }
        np.savez_compressed(folder / f"{model.stem}.npz", **values)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
