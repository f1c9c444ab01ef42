"""The configuration of a model, and what is refused because nothing here would honour it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from pyruntime.errors import UnsupportedModelError
from pyruntime.model.architectures import ARCHITECTURES, Activation, Architecture
from pyruntime.model.keys import ArchitectureKeys, value_shown
from pyruntime.model.rope import RopeConfig, RopeScaling, rope_table
from pyruntime.model.tensors import check_tensor, check_tensors, find_tensor

if TYPE_CHECKING:
    from pyruntime.gguf.reader import GGUFFile

# The output of SwiGLU or GeGLU is stored in fp16 multiplied by this, and the product with
# `ffn_down` divided by it: activations up to 2 million survive, and a power of two costs no
# precision.
DOWN_SCALE = 2.0**-5

# What a K/V cache holds: fp16, or e4m3 codes with a float32 scale per head of each position.
KV_DTYPES = ("f16", "e4m3")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder: RMSNorm, GQA attention with RoPE, SwiGLU or GeGLU.

    `hidden` is the width of the residual stream, `ffn` that of the SwiGLU, both in elements;
    `tied`: the embedding is also the output matrix; `eps`: RMSNorm's epsilon.

    `attention_scale` is what a product of query and key is multiplied by, `score_cap` and
    `logit_cap` are c in c tanh(x / c), None for none. `window`: the keys that a row sees at most,
    its own included, in the layers that `is_local` names, where RoPE is `local_rope`; None: all.
    `post_norms`: what a block adds to the residual stream is normalised first.
    """

    arch: str
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_length: int
    eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope: RopeConfig
    attention_scale: float
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    post_norms: bool = False
    score_cap: float | None = None
    logit_cap: float | None = None
    window: int | None = None
    window_period: int = 0
    local_rope: RopeConfig | None = None

    def is_local(self, layer: int) -> bool:
        """Whether `layer` has the sliding window: of `window_period` layers all but the last."""
        period = self.window_period
        return self.window is not None and (period == 0 or (layer + 1) % period != 0)

    def window_of(self, layer: int) -> int | None:
        """The sliding window of `layer`."""
        return self.window if self.is_local(layer) else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows that layers have, None for no window; each once."""
        return tuple(dict.fromkeys(map(self.window_of, range(self.layers))))

    def rope_of(self, layer: int) -> RopeConfig:
        """RoPE in `layer`."""
        return self.local_rope if self.local_rope and self.is_local(layer) else self.rope

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """RoPE in all its forms: a table of each is needed."""
        return (self.rope, self.local_rope) if self.local_rope else (self.rope,)

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> ModelConfig:
        """Read and check the metadata and the tensor headers of `file`; no weight is read.

        Raises UnsupportedModelError, naming file, byte offset and key or tensor, for an
        architecture or option that is not implemented, a key that is missing, of a wrong type or
        out of range, and a tensor that is missing or of a wrong shape or type.
        """
        keys = ArchitectureKeys(file, _architecture(file))
        row = ARCHITECTURES[keys.arch]
        hidden = keys.integer("embedding_length")
        heads = keys.integer("attention.head_count")
        head_dim = _head_dim(keys, hidden, heads)
        kv_heads = keys.integer("attention.head_count_kv", heads)
        if heads % kv_heads:
            problem = f"is {kv_heads}, which does not divide the {heads} heads"
            raise keys.refusal("attention.head_count_kv", problem)
        context_length = keys.integer("context_length")
        layers = keys.integer("block_count")
        window, period = _window(keys, row)
        rope = _rope(keys, row, head_dim, context_length)
        score_cap, logit_cap = _caps(keys, row)
        name = file.metadata.get("general.name")
        config = cls(
            arch=keys.arch,
            name=name if isinstance(name, str) else file.path.stem,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=keys.integer("feed_forward_length"),
            vocab=_vocabulary(keys),
            context_length=context_length,
            eps=_epsilon(keys),
            tied="output.weight" not in file.tensors,
            qkv_bias=row.qkv_bias,
            qk_norm=row.qk_norm,
            rope=rope,
            attention_scale=(hidden // heads if layers == row.wide else head_dim) ** -0.5,
            activation="gelu" if row.gemma else "silu",
            embedding_scale=math.sqrt(hidden) if row.gemma else 1.0,
            post_norms=row.gemma,
            score_cap=score_cap,
            logit_cap=logit_cap,
            window=window,
            window_period=period,
            local_rope=_local_rope(keys, row, rope) if window and row.gemma else None,
        )
        keys.refuse_unread()
        check_tensors(file, config)
        return config


def _window(keys: ArchitectureKeys, row: Architecture) -> tuple[int | None, int]:
    """The sliding window, and after how many layers one has none; (None, 0) without windows."""
    key = "attention.sliding_window"
    if row.windows is None:
        return None, 0
    stated = f"{keys.arch}.{key}" in keys.file.metadata
    window = keys.optional_integer(key) if stated else row.window
    if window is None:
        return None, 0
    # A period is a property of Gemma alone; in other models the key is refused unread.
    return window, keys.integer(f"{key}_pattern", row.windows) if row.windows else 0


def _caps(keys: ArchitectureKeys, row: Architecture) -> tuple[float | None, float | None]:
    """Of scores and of logits."""
    if row.caps:
        scores, logits = row.caps
        return (
            keys.number("attn_logit_softcapping", scores),
            keys.number("final_logit_softcapping", logits),
        )
    return None, keys.optional_number("final_logit_softcapping") if row.gemma else None


def _epsilon(keys: ArchitectureKeys) -> float:
    """RMSNorm's epsilon, which kernels take as a float32."""
    eps = keys.number("attention.layer_norm_rms_epsilon")
    if not 1e-38 < eps < 1:
        raise keys.refusal("attention.layer_norm_rms_epsilon", f"is {eps}, not within 1e-38 and 1")
    return eps


def _architecture(file: GGUFFile) -> str:
    key = "general.architecture"
    arch = file.metadata.get(key)
    if isinstance(arch, str) and arch in ARCHITECTURES:
        return arch
    problem = "is missing" if arch is None else f"is {value_shown(arch)}"
    raise UnsupportedModelError(
        f"{file.where(key=key)}: {problem}; supported architectures: {', '.join(ARCHITECTURES)}"
    )


def _head_dim(keys: ArchitectureKeys, hidden: int, heads: int) -> int:
    """Elements per head: stated, or an equal share of the width. Keys, values and RoPE agree."""
    if f"{keys.arch}.attention.key_length" not in keys.file.metadata and hidden % heads:
        problem = f"is {hidden}, which {heads} heads do not divide, and there is no key_length"
        raise keys.refusal("embedding_length", problem)
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if head_dim % 2:
        problem = f"(the head dimension) is {head_dim}; rotary embedding needs an even one"
        raise keys.refusal("attention.key_length", problem)
    for name, what in (
        ("attention.value_length", "values of another length than keys"),
        ("rope.dimension_count", "partial rotary embedding"),
    ):
        if (length := keys.integer(name, head_dim)) != head_dim:
            problem = f"is {length} with a head dimension of {head_dim}; {what} is not supported"
            raise keys.refusal(name, problem)
    return head_dim


def _vocabulary(keys: ArchitectureKeys) -> int:
    """Rows of the embedding, which the stated size, if any, must equal."""
    embedding = find_tensor(keys.file, "token_embd.weight")
    rows = embedding.shape[0]
    if (stated := keys.integer("vocab_size", rows)) != rows:
        problem = f"is {stated}, but 'token_embd.weight' has {rows} rows"
        raise keys.refusal("vocab_size", problem)
    return rows


def _base(keys: ArchitectureKeys, name: str, default: float) -> float:
    base = keys.number(name, default)
    if base <= 1:
        raise keys.refusal(name, f"is {base}; it must be greater than 1")
    return base


def _local_rope(keys: ArchitectureKeys, row: Architecture, rope: RopeConfig) -> RopeConfig | None:
    """RoPE in layers with a window, None if it is as elsewhere."""
    base = _base(keys, "rope.freq_base_swa", row.local_base or rope.base)
    if row.local_base:
        local = RopeConfig(rope.style, rope.dim, base, original_context=rope.original_context)
    else:
        local = replace(rope, base=base)
    return None if local == rope else local


def _rope(keys: ArchitectureKeys, row: Architecture, dim: int, context: int) -> RopeConfig:
    base = _base(keys, "rope.freq_base", 10000.0)
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    # A factor without a type means linear: the key is older than the choice.
    scaling = keys.text("rope.scaling.type", "none" if factor == 1 else "linear")
    if scaling not in ("none", "linear", "yarn"):
        problem = f"is {value_shown(scaling)}; supported: none, linear, yarn"
        raise keys.refusal("rope.scaling.type", problem)
    if scaling != "none" and not row.rope_scaling:
        problem = f"is {value_shown(scaling)}; {keys.arch} is supported without scaling"
        raise keys.refusal("rope.scaling.type", problem)
    if scaling == "none" and factor != 1:
        raise keys.refusal("rope.scaling.factor", f"is {factor} with rope.scaling.type 'none'")
    rope = RopeConfig(
        style=row.rope,
        dim=dim,
        base=base,
        scaling=cast(RopeScaling, scaling),
        factor=factor,
        original_context=keys.integer("rope.scaling.original_context_length", context),
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        factors=_rope_factors(keys.file, dim // 2),
    )
    try:
        rope_table(rope, [0, context])
    except (ArithmeticError, ValueError) as error:
        reason = f"and its neighbours give no usable frequencies ({error})"
        raise keys.refusal("rope.scaling.yarn_beta_fast", reason) from None
    return rope


def _rope_factors(file: GGUFFile, pairs: int) -> tuple[float, ...]:
    name = "rope_freqs.weight"
    if name not in file.tensors:
        return ()
    check_tensor(file, name, (pairs,))
    factors = tuple(float(factor) for factor in file.dequantize(name))
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        where = file.where(tensor=name)
        raise UnsupportedModelError(f"{where}: holds a value that is not finite and positive")
    return factors
