"""Small GGUF files with random weights, written for one test, and ways to spoil them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pyruntime.tools import synth

VOCAB, HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 48, 64, 4, 2, 96, 2
HEAD_DIM_64 = {"*.attention.key_length": 64, "*.attention.value_length": 64}


def keys(arch: str) -> dict[str, Any]:
    """The metadata of a small model of architecture `arch`."""
    return {
        "general.architecture": arch,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.block_count": LAYERS,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
    }


def tensors(
    arch: str, *, head_dim: int = HIDDEN // HEADS, layers: int = LAYERS
) -> dict[str, np.ndarray]:
    """Its weights, float32: matrices ~ N(0, 1/inputs), norms near 1."""
    random = np.random.default_rng(7)
    q, kv = HEADS * head_dim, KV_HEADS * head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (q, HIDDEN),
            "attn_k.weight": (kv, HIDDEN),
            "attn_v.weight": (kv, HIDDEN),
            "attn_output.weight": (HIDDEN, q),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (FFN, HIDDEN),
            "ffn_up.weight": (FFN, HIDDEN),
            "ffn_down.weight": (HIDDEN, FFN),
        }
        if arch == "qwen2":
            block |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if arch in ("qwen3", "gemma3"):
            block |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        if arch in ("gemma2", "gemma3"):
            block |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    shapes |= {"output_norm.weight": (HIDDEN,), "output.weight": (VOCAB, HIDDEN)}
    result = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        if name.endswith("norm.weight"):
            values = 1 + values / 10
        elif len(shape) == 2:
            values /= np.sqrt(np.float32(shape[1]))
        result[name] = values
    return result


def write_model(
    path: Path,
    arch: str = "llama",
    *,
    set_keys: Mapping[str, Any] | None = None,
    set_tensors: Mapping[str, Any] | None = None,
    head_dim: int = HIDDEN // HEADS,
) -> Path:
    """Write the small model, with keys and tensors replaced or added; None removes one.

    In key names `*` stands for the architecture. Values are stored as Python's types suggest
    (int as u32, or u64 where it must; float as f32); a NumPy scalar chooses another width. A
    tensor may be a pair (bytes as uint8 [rows, bytes per row], ggml type).
    """
    metadata = keys(arch)
    metadata |= {key.replace("*", arch): value for key, value in (set_keys or {}).items()}
    writer = gguf.GGUFWriter(path, arch)
    writer.kv_data[0].clear()
    for key, value in metadata.items():
        if value is not None:
            _add_key(writer, key, value)
    for name, value in (tensors(arch, head_dim=head_dim) | dict(set_tensors or {})).items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        elif value is not None:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_talking_model(path: Path, *, head_dim: int = HIDDEN // HEADS, **keys: Any) -> Path:
    """A small model with a vocabulary: letters, digits, "th", and a chat template without a system.

    `keys`: others below `tokenizer.`.
    """
    ends = ["<|begin|>", "<|end|>"]
    pieces = [*ends, *"abcdefghijklmnopqrstuvwxyz0123456789.,:", "Ġ", "Ċ", "th"]
    pieces += [f"<|{n}|>" for n in range(VOCAB - len(pieces))]
    special = {piece for piece in pieces if piece.startswith("<|")}
    template = (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<|begin|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|begin|>assistant:{% endif %}"
    )
    vocabulary: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": pieces,
        "ggml.token_type": [3 if piece in special else 1 for piece in pieces],
        "ggml.merges": ["t h"],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
        "chat_template": template,
    }
    named = {f"tokenizer.{key}": value for key, value in (vocabulary | keys).items()}
    if head_dim == 64:
        named |= HEAD_DIM_64
    return write_model(path, set_keys=named, head_dim=head_dim)


def write_wide_model(
    path: Path, *, tied: bool = False, spoilt: str = "", half: Collection[str] = ()
) -> Path:
    """A small model of Q8_0 matrices whose output matrix is larger than several of its layers.

    `spoilt`: a tensor that gets a weight beyond fp16's range. `half`: those that are fp16.
    """
    kind, random = gguf.GGMLQuantizationType.Q8_0, np.random.default_rng(8)
    matrices = {n: x for n, x in tensors("llama", head_dim=64).items() if x.ndim == 2}
    for name in ("token_embd.weight", "output.weight"):
        matrices[name] = random.standard_normal((3001, HIDDEN), np.float32) / np.float32(8)
    packed: dict[str, Any] = {
        name: x.astype(np.float16) if name in half else (gguf.quants.quantize(x, kind), kind)
        for name, x in matrices.items()
    }
    if tied:
        packed["output.weight"] = None
    if spoilt:
        packed[spoilt][0][-1, :2] = (0xFF, 0x7B)  # the scale of a block: the largest fp16
    keys = {**HEAD_DIM_64, "*.context_length": 512}
    return write_model(path, head_dim=64, set_keys=keys, set_tensors=packed)


def write_hollow_model(path: Path, name: str) -> Path:
    """A model of `pyruntime synth`, its weights a hole in the file: zeros that take no room."""
    shape = synth.MODELS[name]
    infos = list(synth.tensors(shape, "Q4_K_M"))
    with closing(synth._header(path, name, shape, infos)) as writer:
        file = writer.fout[0]
        writer.write_padding(file, file.tell())
        whole = (-(-info.nbytes // writer.data_alignment) for info in infos)
        file.truncate(file.tell() + sum(whole) * writer.data_alignment)
    return path


def write_outlier_model(path: Path) -> Path:
    """A small model with head dim 64 and, in its last layer, one SwiGLU channel of some 1e5.

    Its column of ffn_down is small, so that what the channel adds is as large as what others add.
    """
    values = tensors("llama", head_dim=64)
    block, channel = f"blk.{LAYERS - 1}", 37
    for name in ("gate", "up"):
        values[f"{block}.ffn_{name}.weight"][channel] *= 400
    values[f"{block}.ffn_down.weight"][:, channel] /= 2000
    return write_model(path, head_dim=64, set_keys=HEAD_DIM_64, set_tensors=values)


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kind = gguf.GGUFValueType
    if isinstance(value, np.generic):
        code = {"u": "UINT", "i": "INT", "f": "FLOAT"}[value.dtype.kind]
        writer.add_key_value(key, value.item(), kind[f"{code}{value.itemsize * 8}"])
    elif isinstance(value, bool):
        writer.add_key_value(key, value, kind.BOOL)
    elif isinstance(value, int):
        fits = 0 <= value < 1 << 32
        writer.add_key_value(key, value, kind.UINT32 if fits else kind.INT64)
    elif isinstance(value, float):
        writer.add_key_value(key, value, kind.FLOAT32)
    elif isinstance(value, str):
        writer.add_key_value(key, value, kind.STRING)
    else:
        writer.add_array(key, value)
