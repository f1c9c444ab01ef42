"""What layers launch: from the residual stream to q, K and V, and from attention back to it.

`Layers` is how it goes with fp16 matrices; another way of multiplying has the same three methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.model.config import DOWN_SCALE, ModelConfig
from pyruntime.model.live import LiveBlock
from pyruntime.model.streamed import StreamedWeights
from pyruntime.model.weights import Weights
from pyruntime.ops.gemm import gemm
from pyruntime.ops.gemm_workspace import GemmWorkspace
from pyruntime.ops.norm import norm, norm_residual
from pyruntime.ops.qkv import qkv

Narrow = Callable[["Working"], "Working"]
Tables = tuple[DeviceArray, DeviceArray]  # rotary: cosines and sines
GATES = {"silu": "swiglu", "gelu": "geglu"}  # epilogues by activation


@dataclass(frozen=True)
class Working:
    """The rows that launches work on.

    Attributes:
        x: float32 [most or more, hidden], the residual stream. attended: float16 [.., q].
        count: int32, how many there are, on the device; `most` at most.
    """

    x: DeviceArray
    attended: DeviceArray
    count: DeviceArray
    most: int


@dataclass(frozen=True)
class Layers:
    """Records the layers of a model with fp16 matrices.

    What every layer begins with is in `normed`, made by the layer before it or by `enter`.

    Attributes:
        activations: see `decoder.activation_layout`.
        workspace: of products, see `ops.gemm.gemm`. kv_dtype, invariant: see `Decoder`.
    """

    # What can leave fp16's range in a layer, in order of computation; see `site_name`.
    sites: ClassVar[tuple[str, ...]] = (
        "the attention norm",
        "Q",
        "K",
        "V",
        "the FFN norm",
        "the input of ffn_down",
    )

    library: Library
    config: ModelConfig
    weights: Weights | StreamedWeights
    activations: Mapping[str, DeviceArray]
    live: LiveBlock
    workspace: GemmWorkspace | None
    kv_dtype: str
    invariant: bool

    def site_name(self, site: int) -> str:
        """The layer and tensor of an overflow site."""
        layer, tensor = divmod(site, len(self.sites))
        if layer == self.config.layers:
            return "the output norm"
        return f"layer {layer}: {self.sites[tensor]}"

    def enter(self, p: Program, rows: Working) -> None:
        """From the embedding to what the first layer begins with."""
        self._begin(p, 0, rows)

    def store(self, p: Program, layer: int, rows: Working, tables: Tables) -> None:
        """From what a layer begins with to `q`, and K and V into the caches."""
        act = self.activations
        qkv(
            p, self.library, a=act["normed"], w=self.weights.layers[layer]["qkv"],
            product=act["qkv"], rows=rows.count, invariant=self.invariant, workspace=self.workspace,
            **self._rotation(layer, rows, tables), alike=self.weights.alike,
        )  # fmt: skip

    def leave(self, p: Program, layer: int, rows: Working, narrow: Narrow | None = None) -> None:
        """From `attended` to what the next layer begins with, or the output matrix.

        narrow: in the last layer, gathers the rows that something is wanted of; others go no
            further.
        """
        if narrow is not None:
            rows = narrow(rows)
        self._output(p, layer, rows)
        self._feed_forward(p, layer, rows)
        self._begin(p, layer + 1, rows)

    def head(
        self, p: Program, normed: DeviceArray, logits: DeviceArray, count: DeviceArray
    ) -> None:
        """The output matrix: float32 [rows, vocab] of float16 [rows, hidden], `count` of them."""
        with p.role("head"):
            gemm(
                p, self.library, a=normed, w=self.weights.outer["output"], c=logits, rows=count,
                max_rows=logits.shape[0], epilogue="f32", invariant=self.invariant,
            )  # fmt: skip

    def _begin(self, p: Program, layer: int, rows: Working) -> None:
        """What a layer begins with; after the last one, the output matrix."""
        weights, post = self.weights, None
        if layer:
            post = weights.layers[layer - 1].get("post_ffw_norm")
        last = layer == self.config.layers
        weight = weights.outer["output_norm"] if last else weights.layers[layer]["attn_norm"]
        self._norm(p, rows, weight, layer * len(self.sites), post)

    def _rotation(self, layer: int, rows: Working, tables: Tables) -> dict[str, Any]:
        """Parameters of `ops.rope.rope` that depend on the model, the caches and the pass."""
        c, live, act, weights = (
            self.config, self.live, self.activations, self.weights.layers[layer]
        )  # fmt: skip
        scaled = self.kv_dtype != "f16"
        return {
            "q": act["q"],
            "live": live.live,
            "sequences": live.stored if scaled else live.sequences,
            "sequence_of": live.sequence_of,
            "positions": live.positions,
            "cosines": tables[0],
            "sines": tables[1],
            "max_rows": rows.most,
            "layer": layer,
            "heads": c.heads,
            "kv_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "interleaved": c.rope.style == "interleaved",
            "overflow": live.overflow,
            "site": layer * len(self.sites) + 1,
            "eps": c.eps,
            "kv_dtype": self.kv_dtype,
            "bias": weights.get("qkv_bias"),
            "q_norm": weights.get("q_norm"),
            "k_norm": weights.get("k_norm"),
        }

    def _output(self, p: Program, layer: int, rows: Working) -> None:
        """`attended` by the matrix behind attention, into the residual stream."""
        branch, joins = self._branch(rows)
        with p.role("o"):
            gemm(
                p, self.library, a=rows.attended, w=self.weights.layers[layer]["attn_output"],
                c=branch, rows=rows.count, max_rows=rows.most, epilogue=joins,
                invariant=self.invariant, workspace=self.workspace,
            )  # fmt: skip

    def _feed_forward(self, p: Program, layer: int, rows: Working) -> None:
        """The gated block, its norm included, into the residual stream."""
        act, weights = self.activations, self.weights.layers[layer]
        live, site = self.live, layer * len(self.sites)
        branch, joins = self._branch(rows)
        post = weights.get("post_attention_norm")
        self._norm(p, rows, weights["ffn_norm"], site + self.sites.index("the FFN norm"), post)
        with p.role("gate_up"):
            gemm(
                p, self.library, a=act["normed"], w=weights["gate_up"], c=act["swiglu"],
                rows=rows.count, max_rows=rows.most, epilogue=GATES[self.config.activation],
                scale=DOWN_SCALE, overflow=live.overflow,
                site=site + self.sites.index("the input of ffn_down"),
                invariant=self.invariant, workspace=self.workspace,
            )  # fmt: skip
        with p.role("down"):
            gemm(
                p, self.library, a=act["swiglu"], w=weights["down"], c=branch,
                rows=rows.count, max_rows=rows.most, epilogue=joins, scale=1 / DOWN_SCALE,
                invariant=self.invariant, workspace=self.workspace,
            )  # fmt: skip

    def _branch(self, rows: Working) -> tuple[DeviceArray, str]:
        """Where what a block adds goes, and the epilogue that takes it there."""
        if self.config.post_norms:
            return self.activations["branch"], "f32"
        return rows.x, "add"

    def _norm(
        self,
        p: Program,
        rows: Working,
        weight: DeviceArray,
        site: int,
        post: DeviceArray | None = None,
    ) -> None:
        """`normed` from x, which takes `branch` in first where that has a norm of its own."""
        act, eps, overflow = self.activations, self.config.eps, self.live.overflow
        if post is None:
            norm(
                p, self.library, x=rows.x, weight=weight, y=act["normed"], rows=rows.count,
                max_rows=rows.most, eps=eps, overflow=overflow, site=site,
            )  # fmt: skip
        else:
            norm_residual(
                p, self.library, branch=act["branch"], post=post, x=rows.x, weight=weight,
                y=act["normed"], rows=rows.count, max_rows=rows.most, eps=eps, overflow=overflow,
                site=site,
            )  # fmt: skip
