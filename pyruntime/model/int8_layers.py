"""Layers whose matrices stay packed and are multiplied with int8 activations.

Products read planes (`ops.quantize`), which norms and the gate write instead of fp16. Matrices that
cannot stay packed are fp16 ones, see `placements.plane_placements`, and go the way of `Layers`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.model.cache import Layout
from pyruntime.model.config import ModelConfig
from pyruntime.model.layers import Layers, Narrow, Tables, Working
from pyruntime.model.planes import PlaneMemo, Source
from pyruntime.model.weights import Weights
from pyruntime.ops.gemm_int8 import gemm_int8
from pyruntime.ops.quantize import (
    GROUP,
    Plane,
    gated_quantize,
    norm_quantize,
    plane_layout,
    quantize,
)
from pyruntime.ops.rope import rope

# Of what planes are made of: the site at which a value that is not finite is told.
SITES = {
    "attn_norm": "the attention norm", "attended": "the output of attention",
    "ffn_norm": "the FFN norm", "gated": "the input of ffn_down",
}  # fmt: skip


@dataclass(frozen=True)
class Int8Options:
    """Ways to make planes, for measuring them against each other.

    Attributes:
        planes: "folded": norms write planes and nothing else. "memo": norms write fp16, of which a
            plane is made for all products that read it. "separate": one for each product. The gate
            writes a plane in any case.
        copy: what writes planes writes fp16, too.
        late: in the last layer, wanted rows are gathered behind the product with attn_output, as
            llama.cpp does it, and not before it. Not where blocks have norms of their own.
    """

    planes: Literal["folded", "memo", "separate"] = "folded"
    copy: bool = False
    late: bool = False


OPTIONS = Int8Options()  # of models that are loaded from now on


def int8_layout(c: ModelConfig, max_tokens: int, names: Collection[str]) -> Layout:
    """Activation buffers that `Int8Layers` has besides those of `Layers`.

    Planes are called by what lies in their rows. `names`: of the weights of all layers.
    """
    widths: dict[str, int] = {"hidden": c.hidden, "attended": c.heads * c.head_dim}
    layout: Layout = {}
    if "gate" in names:
        layout |= dict.fromkeys(("gate", "up"), ((max_tokens, c.ffn), "float16"))
        widths["ffn"] = c.ffn
    for plane, width in widths.items():
        if width % GROUP == 0:  # others are no width of packed matrices
            parts = plane_layout(max_tokens, width)
            layout |= {f"{plane}_{part}": form for part, form in parts.items()}
    return layout


@dataclass(frozen=True)
class Int8Layers(Layers):
    """`Layers` over planes. `memo`: of the pass that was recorded last."""

    sites: ClassVar[tuple[str, ...]] = (
        "the attention norm", "Q", "K", "V", "the output of attention", "the FFN norm",
        "the output of ffn_gate", "the output of ffn_up", "the input of ffn_down",
    )  # fmt: skip

    weights: Weights
    options: Int8Options = Int8Options()
    memo: PlaneMemo = field(default_factory=PlaneMemo)

    def __post_init__(self) -> None:
        """Products copy what belongs to rows that are not live, too (`extents`): it is zeros."""
        for name, array in self.activations.items():
            if name.endswith(("_scales", "_sums")):
                array.fill(0)

    def enter(self, p: Program, rows: Working) -> None:
        """See `Layers.enter`."""
        self.memo.forget()
        super().enter(p, rows)

    def store(self, p: Program, layer: int, rows: Working, tables: Tables) -> None:
        """See `Layers.store`."""
        if "q" not in self._types(layer):
            super().store(p, layer, rows, tables)
            return
        qkv, column = self.activations["qkv"], 0
        source = self._source(layer, "attn_norm", rows, "hidden")
        for name in ("q", "k", "v"):
            self._product(p, name, source, "hidden", rows, qkv, "f32", column=column)
            column += self.weights.layers[layer][name].shape[0]
        rope(p, self.library, qkv=qkv, **self._rotation(layer, rows, tables))

    def leave(self, p: Program, layer: int, rows: Working, narrow: Narrow | None = None) -> None:
        """See `Layers.leave`."""
        if narrow is None or not self.options.late or self.config.post_norms:
            super().leave(p, layer, rows, narrow)
            return
        self._output(p, layer, rows)
        rows = narrow(rows)
        self._feed_forward(p, layer, rows)
        self._begin(p, layer + 1, rows)

    def head(
        self, p: Program, normed: DeviceArray, logits: DeviceArray, count: DeviceArray
    ) -> None:
        """See `Layers.head`."""
        kind = self.weights.planes[0].get("output")
        if kind is None:
            super().head(p, normed, logits, count)
            return
        plane, most = self._plane("hidden"), logits.shape[0]
        quantize(
            p, self.library, x=normed, plane=plane, rows=count, max_rows=most,
            overflow=self.live.overflow, site=self.config.layers * len(self.sites),
        )  # fmt: skip
        with p.role("head"):
            gemm_int8(
                p, self.library, plane=plane, w=self.weights.outer["output"], type_name=kind,
                c=logits, rows=count, max_rows=most, epilogue="f32",
            )  # fmt: skip

    def _begin(self, p: Program, layer: int, rows: Working) -> None:
        if layer == self.config.layers or "q" not in self._types(layer):
            super()._begin(p, layer, rows)
            return
        post = self.weights.layers[layer - 1].get("post_ffw_norm") if layer else None
        source = self._source(layer, "attn_norm", rows, "hidden")
        self._norm_plane(p, source, rows, post)

    def _output(self, p: Program, layer: int, rows: Working) -> None:
        if "attn_output" not in self._types(layer):
            super()._output(p, layer, rows)
            return
        source = self._source(layer, "attended", rows, "attended")
        branch, joins = self._branch(rows)
        self._product(p, "attn_output", source, "attended", rows, branch, joins)

    def _feed_forward(self, p: Program, layer: int, rows: Working) -> None:
        if "gate" not in self._types(layer):
            super()._feed_forward(p, layer, rows)
            return
        act, live = self.activations, self.live
        source = self._source(layer, "ffn_norm", rows, "hidden")
        post = self.weights.layers[layer].get("post_attention_norm")
        self._norm_plane(p, source, rows, post)
        for name in ("gate", "up"):
            self._product(
                p, name, source, "hidden", rows, act[name], "f16", overflow=live.overflow,
                site=self._site(layer, f"the output of ffn_{name}"),
            )  # fmt: skip
        source = self._source(layer, "gated", rows, "ffn")
        with p.role("gated"):
            gated_quantize(
                p, self.library, gate=act["gate"], up=act["up"],
                plane=self._made(source, "ffn"), activation=self.config.activation,
                rows=rows.count, max_rows=rows.most, overflow=live.overflow,
                site=self._site(layer, SITES["gated"]),
                y=act["swiglu"] if self.options.copy else None,
            )  # fmt: skip
        branch, joins = self._branch(rows)
        self._product(p, "down", source, "ffn", rows, branch, joins)

    def _norm_plane(
        self, p: Program, source: Source, rows: Working, post: DeviceArray | None
    ) -> None:
        """The norm `source` of a layer: the plane, or the fp16 rows that one is made of."""
        weight = self.weights.layers[source.layer][source.tensor]
        site = self._site(source.layer, SITES[source.tensor])
        if self.options.planes != "folded":
            self._norm(p, rows, weight, site, post)
            return
        act = self.activations
        with p.role("norm"):
            norm_quantize(
                p, self.library, x=rows.x, weight=weight, plane=self._made(source, "hidden"),
                rows=rows.count, max_rows=rows.most, eps=self.config.eps,
                overflow=self.live.overflow, site=site, post=post,
                branch=act["branch"] if post else None,
                y=act["normed"] if self.options.copy else None,
            )  # fmt: skip

    def _product(
        self,
        p: Program,
        name: str,
        source: Source,
        plane: str,
        rows: Working,
        c: DeviceArray,
        epilogue: str,
        **more: Any,
    ) -> None:
        """The product of a plane with matrix `name` of its source's layer."""
        if self.options.planes == "separate" and source.tensor != "gated":
            self.memo.forget()
        if not self.memo.holds(self._plane(plane), source):
            attended = source.tensor == "attended"
            quantize(
                p, self.library, x=rows.attended if attended else self.activations["normed"],
                plane=self._made(source, plane), rows=rows.count, max_rows=rows.most,
                overflow=self.live.overflow,
                site=self._site(source.layer, SITES[source.tensor]),
            )  # fmt: skip
        self.memo.use(self._plane(plane), source)
        with p.role("o" if name == "attn_output" else name):
            gemm_int8(
                p, self.library, plane=self._plane(plane),
                w=self.weights.layers[source.layer][name],
                type_name=self._types(source.layer)[name], c=c, rows=rows.count,
                max_rows=rows.most, epilogue=epilogue, **more,
            )  # fmt: skip

    def _types(self, layer: int) -> Mapping[str, str]:
        """The types of a layer's planes of weights."""
        return self.weights.planes[1 + layer]

    def _source(self, layer: int, tensor: str, rows: Working, plane: str) -> Source:
        return Source(layer, tensor, rows.most, self._plane(plane).q.shape[1])

    def _site(self, layer: int, tensor: str) -> int:
        return layer * len(self.sites) + self.sites.index(tensor)

    def _made(self, source: Source, name: str) -> Plane:
        """A plane to which a source is about to be quantized."""
        plane = self._plane(name)
        self.memo.note(plane, source)
        return plane

    def _plane(self, name: str) -> Plane:
        return Plane(*(self.activations[f"{name}_{part}"] for part in ("q", "scales", "sums")))
