"""A decoder in NumPy that reads like the paper: embed, layers, norm, output matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyruntime.errors import NumericalError
from pyruntime.model.batch import Batch, Output
from pyruntime.model.config import DOWN_SCALE, KV_DTYPES, ModelConfig
from pyruntime.model.placements import plane_tensors
from pyruntime.model.rope import rope_table
from pyruntime.model.scores import Targets, TokenScores, token_scores
from pyruntime.model.stats import Stats, Warmed
from pyruntime.model.tensors import layer_shapes, tensor_shapes
from pyruntime.model.tokens import check_tokens
from pyruntime.reference import e4m3, int8
from pyruntime.reference.cache import Cache
from pyruntime.reference.functions import (
    Array,
    Rounding,
    causal_attention,
    exact,
    fp16,
    geglu,
    rms_norm,
    rotate,
    softcap,
    swiglu,
)
from pyruntime.reference.memory import require_memory
from pyruntime.turns import Turns

if TYPE_CHECKING:
    from pyruntime.gguf.reader import GGUFFile

ROUNDINGS: dict[str, Rounding] = {"f32": exact, "fp16": fp16, "int8": fp16}
GATES = {"silu": swiglu, "gelu": geglu}


class ReferenceModel:
    """The weights of `file` in float32, and the forward pass over them.

    `precision` "f32" is the oracle. "fp16" does what a good fp16 GPU path does: weights and GEMM
    inputs, Q, K, V and P are rounded to fp16; accumulation, softmax, norms and the residual
    stream stay float32. "int8" does the same but for the products of tensors that have planes
    (`pyruntime.model.placements`): their weights are exact, their inputs rounded to int8
    (`pyruntime.reference.int8`). With `kv_dtype` "e4m3" K and V are stored as
    `pyruntime.reference.e4m3` says and rounded once they are read back; with "f16" they are rounded
    before they are stored.

    `progress` is called after each tensor with its bytes in the file. Raises OutOfMemoryError
    before anything is read if the float32 weights do not fit into memory. `file` is not needed
    after construction. One call at a time: `turns` is there for who has several threads.
    """

    gpu_seconds = 0.0

    def __init__(
        self,
        file: GGUFFile,
        config: ModelConfig,
        *,
        precision: Literal["f32", "fp16", "int8"] = "f32",
        kv_dtype: str = "f16",
        progress: Callable[[int], object] | None = None,
    ) -> None:
        if precision not in ROUNDINGS:
            raise ValueError(f"precision is {precision!r}; known: {', '.join(ROUNDINGS)}")
        if kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype is {kv_dtype!r}; known: {', '.join(KV_DTYPES)}")
        self.config = config
        self.kv_dtype = kv_dtype
        self.turns = Turns()
        self._rounded = ROUNDINGS[precision]
        self._packed = plane_tensors(file, config) if precision == "int8" else frozenset()
        elements = sum(math.prod(shape) for _, shape in tensor_shapes(config))
        require_memory(4 * elements, f"{file.path}: float32 weights")

        def load(name: str) -> Array:
            weight = file.dequantize(name)
            if progress is not None:
                progress(file.tensors[name].nbytes)
            # Vectors (norms, biases) are applied in float32; only GEMM operands are rounded.
            if weight.ndim != 2 or name in self._packed:
                return weight
            return self._rounded(weight, f"tensor '{name}'")

        self._embedding = load("token_embd.weight")
        self._layers = [
            {name: load(f"blk.{layer}.{name}") for name in layer_shapes(config)}
            for layer in range(config.layers)
        ]
        self._output_norm = load("output_norm.weight")
        self._output = self._embedding if config.tied else load("output.weight")
        self.fingerprint = file.fingerprint  # when the file is in the page cache

    def new_cache(self, tokens: int) -> Cache:
        """An empty cache for `tokens` positions. Raises ValueError, OutOfMemoryError."""
        if tokens < 1:
            raise ValueError(f"a cache for {tokens} tokens: at least 1 is needed")
        c = self.config
        rows = (c.layers, c.kv_heads, tokens)
        shape, what = (*rows, c.head_dim), f"K/V cache for {tokens} tokens"
        if self.kv_dtype == "f16":
            require_memory(2 * 4 * math.prod(shape), f"a float32 {what}")
            return Cache(np.zeros(shape, np.float32), np.zeros(shape, np.float32), self)
        require_memory(2 * (math.prod(shape) + 4 * math.prod(rows)), f"an e4m3 {what}")
        k, v = np.zeros((2, *shape), np.uint8)
        k_scale, v_scale = np.zeros((2, *rows), np.float32)
        return Cache(k, v, self, k_scale, v_scale)

    def launches(self) -> dict[str, int]:
        """None: there are no kernels."""
        return {}

    def stats(self) -> Stats:
        """All zero: only passes on a GPU are counted."""
        return Stats()

    def warm(self, passes: Sequence[tuple[int, int, bool, bool]]) -> list[Warmed]:
        """None: there are no graphs."""
        return []

    @property
    def max_prompts(self) -> None:
        """Prompts of one pass: any number, as they are computed one after the other."""

    @property
    def pass_positions(self) -> None:
        """Positions of all prompts of a pass: any number."""

    def forward(
        self, ids: ArrayLike, cache: Cache, *, logits: Literal["last", "all"] = "last"
    ) -> Array:
        """Append `ids` [nt] to `cache` and return float32 [1, vocab], or [nt, vocab] for "all".

        Raises as `run`, and ValueError for ids that are not one row of integers in [0, vocab).
        """
        given: Array = self.run(
            Batch.of_one(check_tokens(ids, self.config.vocab), cache, logits)
        ).logits
        return given

    def run(self, batch: Batch, *, greedy: bool = False) -> Output:
        """Append the prompts of a batch to their caches.

        A `greedy` one has one row of logits, and gives their argmax instead.

        Raises ValueError for a cache of another model or without room for its prompt, and
        NumericalError where a value is not finite; the caches then keep their lengths.
        """
        rows = list(zip(batch.prompts, self._normed(batch), strict=True))
        sums = [x[p.hidden].sum(0, dtype=np.float64) for p, x in rows if len(p.hidden)]
        logits = [self._logits(x[p.logits]) for p, x in rows]
        batch.store()
        if greedy:
            return Output(None, np.array(sums), int(np.concatenate(logits).argmax()))
        return Output(np.concatenate(logits) if len(batch.logits) else None, np.array(sums))

    def replay(self, call: object, *, greedy: bool = False) -> bool:
        """False: there are no graphs."""
        return False

    def score(
        self, batch: Batch, targets: Targets, *, most_bytes: int, top: int = 1
    ) -> TokenScores:
        """`run`, with the scores of tokens after its rows instead of logits.

        Args:
            targets: by the rows whose logits are wanted, counted from 0.
            most_bytes: of logits at a time; one row is always made.
            top: how many of the likeliest tokens, 1 to vocab.
        """
        most = max(most_bytes // (4 * self.config.vocab), 1)
        found = TokenScores.empty(len(targets.rows), top)
        rows = zip(batch.prompts, self._normed(batch), strict=True)
        x = np.concatenate([x[p.logits] for p, x in rows])
        for first in range(0, len(x), most):
            part, own = targets.within(first, first + most)
            found.put(part, token_scores(self._logits(x[first : first + most]), own, top))
        batch.store()
        return found

    def _normed(self, batch: Batch) -> list[Array]:
        """Begins a pass: of each prompt the rows after the output norm, [nt, hidden]; those that
        nothing is wanted of are left undefined."""
        batch.begin(self.check_cache)
        found = []
        for prompt in batch.prompts:
            x = self._body(prompt.ids, prompt.cache)
            kept = np.union1d(prompt.logits, prompt.hidden).astype(np.intp)
            normed = np.empty_like(x)
            normed[kept] = rms_norm(x[kept], self._output_norm, self.config.eps)
            found.append(normed)
        return found

    def check_cache(self, cache: object) -> None:
        """Raises ValueError unless it is an open one of this model."""
        if not isinstance(cache, Cache) or cache.owner is not self:
            raise ValueError(f"this cache belongs to another model than {self.config.name}")
        cache.check_open()

    def _body(self, ids: NDArray[np.int32], cache: Cache) -> Array:
        """The residual stream after the last layer, [nt, hidden]."""
        start = cache.length
        positions = np.arange(start, start + len(ids))
        tables = {rope: rope_table(rope, positions) for rope in self.config.ropes}
        with np.errstate(over="ignore", invalid="ignore"):  # checked by name below
            x = np.float32(self.config.embedding_scale) * self._embedding[ids]
            for layer in range(self.config.layers):
                cos, sin = tables[self.config.rope_of(layer)]
                branch = self._attention(layer, x, cos, sin, cache)
                x = x + self._joining(layer, "post_attention_norm", branch)
                x = x + self._joining(layer, "post_ffw_norm", self._feed_forward(layer, x))
                _require_finite(x, f"the output of layer {layer}")
        return x

    def _logits(self, normed: Array) -> Array:
        """Of rows [n, hidden] after the output norm: [n, vocab]."""
        matrix = "token_embd.weight" if self.config.tied else "output.weight"
        with np.errstate(over="ignore", invalid="ignore"):
            product = self._input(matrix, normed, "the output matrix's input") @ self._output.T
            logits = softcap(product, self.config.logit_cap)
        _require_finite(logits, "the logits")
        return logits

    def close(self) -> None:
        """Gives the weights' memory back; the model cannot be used afterwards. Idempotent."""
        self._layers.clear()
        self._embedding = self._output = self._output_norm = np.empty(0, np.float32)

    def _attention(
        self,
        layer: int,
        x: Array,
        cos: Array,
        sin: Array,
        cache: Cache,
    ) -> Array:
        """One attention block on x [nt, hidden]; fills the layer's cache after its length."""
        c, w = self.config, self._layers[layer]
        normed = rms_norm(x, w["attn_norm.weight"], c.eps)
        q = self._linear(layer, "attn_q", normed).reshape(-1, c.heads, c.head_dim)
        k = self._linear(layer, "attn_k", normed).reshape(-1, c.kv_heads, c.head_dim)
        v = self._linear(layer, "attn_v", normed).reshape(-1, c.kv_heads, c.head_dim)
        if c.qk_norm:
            q = rms_norm(q, w["attn_q_norm.weight"], c.eps)
            k = rms_norm(k, w["attn_k_norm.weight"], c.eps)
        q, k = rotate(q, cos, sin, c.rope.style), rotate(k, cos, sin, c.rope.style)
        keys, values = self._stored(layer, "K", k, cache), self._stored(layer, "V", v, cache)
        q = self._rounded(q, f"layer {layer}: Q")
        attended = causal_attention(
            q, keys, values, self._rounded,
            scale=c.attention_scale, window=c.window_of(layer), cap=c.score_cap,
        )  # fmt: skip
        return self._linear(layer, "attn_output", attended.reshape(len(x), -1))

    def _stored(self, layer: int, name: Literal["K", "V"], rows: Array, cache: Cache) -> Array:
        """Puts rows [nt, kv heads, head dim] after those that `cache` holds, and reads all back.

        Returns [kv heads, length + nt, head dim].
        """
        start, end, what = cache.length, cache.length + len(rows), f"layer {layer}: {name}"
        held, scales = (cache.k, cache.k_scale) if name == "K" else (cache.v, cache.v_scale)
        if scales is None:
            held[layer, :, start:end] = self._rounded(rows, what).swapaxes(0, 1)
            return held[layer, :, :end]
        codes, factors = e4m3.quantize(rows.swapaxes(0, 1))
        held[layer, :, start:end], scales[layer, :, start:end] = codes, factors
        return self._rounded(e4m3.widen(held[layer, :, :end], scales[layer, :, :end]), what)

    def _feed_forward(self, layer: int, x: Array) -> Array:
        """One SwiGLU or GeGLU block on x [nt, hidden]."""
        normed = rms_norm(x, self._layers[layer]["ffn_norm.weight"], self.config.eps)
        gate = self._linear(layer, "ffn_gate", normed)
        up = self._linear(layer, "ffn_up", normed)
        hidden = GATES[self.config.activation](gate, up)
        return self._linear(layer, "ffn_down", DOWN_SCALE * hidden) / DOWN_SCALE

    def _joining(self, layer: int, norm: str, branch: Array) -> Array:
        """What the residual stream takes in of a block's output [nt, hidden]."""
        weight = self._layers[layer].get(f"{norm}.weight")
        return branch if weight is None else rms_norm(branch, weight, self.config.eps)

    def _linear(self, layer: int, name: str, x: Array) -> Array:
        """x W^T + b with the weights `name` of one layer; b where the layer has it."""
        w, matrix = self._layers[layer], f"{name}.weight"
        rounded = self._input(f"blk.{layer}.{matrix}", x, f"layer {layer}: the input of {name}")
        y: Array = rounded @ w[matrix].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def _input(self, matrix: str, x: Array, what: str) -> Array:
        """`x` [nt, inputs] as the product with a tensor reads it."""
        if matrix not in self._packed:
            return self._rounded(x, what)
        if not int8.fits(x):
            raise NumericalError(f"{what} holds a value that is not finite")
        return int8.quantize_rows(x).values


def _require_finite(x: Array, what: str) -> None:
    if not np.isfinite(x).all():
        raise NumericalError(f"{what} holds a value that is not finite")
