"""Names and shapes of the tensors that a model consists of, and the check of a file against them.

Names are GGUF's (ggml's docs/gguf.md, "Standardized tensor names"); shapes are in NumPy's order, so
a matrix is [outputs, inputs] and y = x @ W.T.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyruntime.errors import UnsupportedModelError
from pyruntime.gguf.source import shown
from pyruntime.gguf.types import TYPES, type_name

if TYPE_CHECKING:
    from pyruntime.gguf.reader import GGUFFile
    from pyruntime.gguf.tensors import TensorInfo
    from pyruntime.model.config import ModelConfig

log = logging.getLogger("pyruntime")

# What a tensor belongs to: the part of its name before ".weight", ".bias", ".scale", ... A tensor
# of these that is not expected would change the result, so it is refused; of others, it is skipped.
_MODULES = frozenset(
    {
        "token_embd", "output_norm", "output",
        "attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_output",
        "ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "post_attention_norm", "post_ffw_norm",
        # Parts of relatives of these networks, never computed here:
        "attn_qkv", "attn_sinks", "attn_sub_norm", "ffn_gate_inp", "ffn_sub_norm",
        "rope_factors_long", "rope_factors_short",
    }
)  # fmt: skip

_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<module>[^.]*)")


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors by their names without the `blk.<i>.`."""
    hidden, ffn = config.hidden, config.ffn
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q_rows, hidden),
        "attn_k.weight": (kv_rows, hidden),
        "attn_v.weight": (kv_rows, hidden),
        "attn_output.weight": (hidden, q_rows),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (ffn, hidden),
        "ffn_up.weight": (ffn, hidden),
        "ffn_down.weight": (hidden, ffn),
    }
    if config.qkv_bias:
        shapes |= {
            "attn_q.bias": (q_rows,),
            "attn_k.bias": (kv_rows,),
            "attn_v.bias": (kv_rows,),
        }
    if config.qk_norm:
        shapes |= {
            "attn_q_norm.weight": (config.head_dim,),
            "attn_k_norm.weight": (config.head_dim,),
        }
    if config.post_norms:
        shapes |= {
            "post_attention_norm.weight": (hidden,),
            "post_ffw_norm.weight": (hidden,),
        }
    return shapes


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order of use.

    An iterator: `layers` may be nonsense until each layer's tensors have been found.
    """
    yield "token_embd.weight", (config.vocab, config.hidden)
    if config.rope.factors:
        yield "rope_freqs.weight", (config.rope.dim // 2,)
    for layer in range(config.layers):
        for name, shape in layer_shapes(config).items():
            yield f"blk.{layer}.{name}", shape
    yield "output_norm.weight", (config.hidden,)
    if not config.tied:
        yield "output.weight", (config.vocab, config.hidden)


def find_tensor(file: GGUFFile, name: str) -> TensorInfo:
    """The header entry of tensor `name`. Raises UnsupportedModelError if it is missing."""
    if name not in file.tensors:
        raise _refusal(file, name, "is missing")
    return file.tensors[name]


def check_tensor(file: GGUFFile, name: str, shape: tuple[int, ...]) -> None:
    """Raise UnsupportedModelError unless tensor `name` has this shape and a supported type."""
    info = find_tensor(file, name)
    if info.type is None:
        supported = ", ".join(row.name for row in TYPES.values())
        stored = type_name(info.type_id)
        raise _refusal(file, name, f"is stored as {stored}; supported types: {supported}")
    if info.shape != shape:
        raise _refusal(file, name, f"has shape {list(info.shape)}, expected {list(shape)}")


def check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Compare the tensor headers of `file` with what `config` needs.

    Raises UnsupportedModelError for the first tensor that is missing or of a wrong shape or type,
    and for one that is not expected but would change the result (a bias, a scale). Other tensors
    are skipped with one logged warning.
    """
    expected = set()
    for name, shape in tensor_shapes(config):
        if name.startswith("blk.") and name not in file.tensors:
            raise _refusal(file, name, f"is missing; {config.arch}.block_count is {config.layers}")
        check_tensor(file, name, shape)
        expected.add(name)
    extra = [name for name in file.tensors if name not in expected]
    for name in extra:
        part = _NAME.match(name)
        if part and part["module"] in _MODULES and int(part["layer"] or 0) < config.layers:
            problem = f"is not supported for {config.arch}, and skipping it would change the result"
            raise _refusal(file, name, problem)
    if extra:
        first = shown(extra[0])
        log.warning(
            "%s: %d unknown tensors are skipped, '%s' first", file.where(), len(extra), first
        )


def _refusal(file: GGUFFile, name: str, problem: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{file.where(tensor=name)}: {problem}")
