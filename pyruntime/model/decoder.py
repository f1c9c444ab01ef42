"""The forward pass on a GPU as a recorded program: embed, layers, norm, output matrix."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack, suppress
from itertools import chain

import numpy as np

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import CudaError
from pyruntime.model.cache import Cache, Layout, layout_bytes
from pyruntime.model.config import DOWN_SCALE, ModelConfig
from pyruntime.model.live import LiveBlock
from pyruntime.model.pipeline import Pass
from pyruntime.model.replay import Recorded, Replayer
from pyruntime.model.rope import rope_table
from pyruntime.model.streamed import StreamedWeights
from pyruntime.model.weights import Weights
from pyruntime.ops.attention import attention
from pyruntime.ops.attention_choice import choose
from pyruntime.ops.attention_schedule import Schedule, Workspace, workspace_layout
from pyruntime.ops.gemm import gemm
from pyruntime.ops.norm import norm, norm_residual
from pyruntime.ops.qkv import qkv
from pyruntime.ops.rows import embed, gather
from pyruntime.ops.softcap import softcap
from pyruntime.ops.widen import widen

PASSES = 32  # recorded passes kept: one per length, with a cache before or not
TABLE_ROWS = 1 << 16  # positions whose rotary table is made on the host at a time
GATES = {"silu": "swiglu", "gelu": "geglu"}  # epilogues by activation
# What can leave fp16's range in a layer, in order of computation; see `site_name`.
SITES = ("the attention norm", "Q", "K", "V", "the FFN norm", "the input of ffn_down")


def site_name(site: int, layers: int) -> str:
    """The layer and tensor of an overflow site."""
    layer, tensor = divmod(site, len(SITES))
    return "the output norm" if layer == layers else f"layer {layer}: {SITES[tensor]}"


def activation_layout(c: ModelConfig, max_tokens: int) -> Layout:
    """Shape and dtype of every activation buffer. `last_` ones hold the rows that are wanted."""
    q = c.heads * c.head_dim
    layout: Layout = {
        "x": ((max_tokens, c.hidden), "float32"),  # the residual stream
        "normed": ((max_tokens, c.hidden), "float16"),
        "qkv": ((max_tokens, q + 2 * c.kv_heads * c.head_dim), "float32"),
        "q": ((max_tokens, q), "float16"),
        "attended": ((max_tokens, q), "float16"),
        "swiglu": ((max_tokens, c.ffn), "float16"),
        "last_x": ((1, c.hidden), "float32"),
        "last_attended": ((1, q), "float16"),
    }
    if c.post_norms:
        layout["branch"] = layout["x"]  # what x takes in, not normalised yet
    return layout


def _workspace_sizes(c: ModelConfig, max_tokens: int) -> dict[str, int]:
    return {
        "head_dim": c.head_dim,
        "heads": c.heads,
        "max_rows": max_tokens,
        "max_sequences": 1,
        "schedules": len(c.windows),
    }


def activation_bytes(c: ModelConfig, max_tokens: int) -> int:
    """Device bytes of the activation buffers and of attention's workspace."""
    workspace = workspace_layout(**_workspace_sizes(c, max_tokens))
    return layout_bytes(activation_layout(c, max_tokens)) + layout_bytes(workspace)


class Decoder:
    """Activation buffers for up to `max_tokens` rows, and passes over them, which `replayer` runs.

    `variant` names the attention kernel, see `ops.attention_choice.choose`; `kv_dtype` is what the
    caches hold. From an e4m3 cache each layer is widened into `staging`, an fp16 cache of one
    layer, right before its attention: that is what attention reads, and the next layer overwrites
    it.
    """

    def __init__(
        self,
        library: Library,
        config: ModelConfig,
        weights: Weights | StreamedWeights,
        max_tokens: int,
        replayer: Replayer,
        variant: str = "auto",
        kv_dtype: str = "f16",
    ) -> None:
        self.config = config
        self.replayer = replayer
        self.staging: Cache | None = None
        self.max_tokens = max_tokens
        self._library = library
        self._weights = weights
        self._variant = variant
        self._kv_dtype = kv_dtype
        self.activations: dict[str, DeviceArray] = {}
        self._tables: list[tuple[DeviceArray, DeviceArray]] = []  # one for each of config.ropes
        self._workspace: Workspace | None = None
        self._passes: OrderedDict[tuple[int, bool, bool], Recorded] = OrderedDict()
        self.live = LiveBlock(library.device, max_tokens)
        try:
            for name, (shape, dtype) in activation_layout(config, max_tokens).items():
                what = f"activation {name}"
                self.activations[name] = DeviceArray(library.device, shape, dtype, what=what)
            self._workspace = Workspace(library, **_workspace_sizes(config, max_tokens))
        except BaseException:
            with suppress(CudaError):  # the first failure is the one to report
                self.close()
            raise

    def reserve_positions(self, positions: int) -> None:
        """Makes the rotary tables, and `staging` if there is one, cover `positions` positions."""
        if positions <= self.positions:
            return
        if self._kv_dtype != "f16":  # no program holds its address: the live block does
            self.staging = Cache(None, self._library, self.config, positions, layers=1)
        shape = (positions, self.config.rope.dim // 2)
        tables = []
        for form in self.config.ropes:
            cosines, sines = (
                DeviceArray(self._library.device, shape, np.float32, what="rotary table")
                for _ in range(2)
            )
            for first in range(0, positions, TABLE_ROWS):
                last = min(first + TABLE_ROWS, positions)
                host = rope_table(form, np.arange(first, last))
                cosines.rows(first, last).upload(host[0])
                sines.rows(first, last).upload(host[1])
            tables.append((cosines, sines))
        self._forget()  # they hold the old tables' addresses
        self._tables = tables

    @property
    def positions(self) -> int:
        """What the rotary tables and `staging` cover."""
        return self._tables[0][0].shape[0] if self._tables else 0

    def recorded(self, rows: int, *, every_row: bool, fresh: bool) -> Recorded:
        """Everything up to the output norm, for `rows` rows; the result is `normed`.

        Each layer begins a section with its first matrix product, before which no matrix is read.
        Without `every_row` only the one row that the live block wants passes the last layer's
        output projection and feed-forward block. `fresh`: the cache is empty before; the program
        of a continuation is right for that too, but attention is then divided for many keys.
        """
        key = (rows, every_row, fresh)
        if key not in self._passes:
            program, weights = self._record(rows, every_row, fresh), self._weights
            body = Pass(program)
            if isinstance(weights, StreamedWeights):
                body = weights.body(program.sections, rows if every_row else 1)
            self._passes[key] = Recorded(body)
            if len(self._passes) > PASSES:
                self._drop(*next(iter(self._passes.items())))
        self._passes.move_to_end(key)
        return self._passes[key]

    def head(self, recorded: Recorded, logits: DeviceArray) -> Pass:
        """What comes after: the output matrix. Logits are float32 [wanted, vocab].

        The caller keeps them alive while it runs, and until then asks for no other head.
        """
        normed, wanted, weights = self.activations["normed"], self.live.wanted, self._weights
        if isinstance(weights, StreamedWeights):
            after = Program()
            self._cap(after, logits)
            return weights.head(after, normed=normed, wanted=wanted, logits=logits)
        if recorded.head is None:
            head = Program()
            with head.role("head"):
                gemm(
                    head, self._library, a=normed, w=weights.outer["output"], c=logits,
                    rows=wanted, max_rows=logits.shape[0], epilogue="f32",
                )  # fmt: skip
            self._cap(head, logits)
            recorded.head = Pass(head)
        for launch, name in zip(recorded.head.before.launches, ("c", "x"), strict=False):
            launch.point(name, logits)
        return recorded.head

    def _drop(self, key: tuple[int, bool, bool], recorded: Recorded) -> None:
        del self._passes[key]
        self.replayer.drop(recorded)

    def _cap(self, program: Program, logits: DeviceArray) -> None:
        cap = self.config.logit_cap
        if cap is not None:
            softcap(
                program, self._library, x=logits, cap=cap, rows=self.live.wanted,
                max_rows=logits.shape[0],
            )  # fmt: skip

    def _record(self, rows: int, every_row: bool, fresh: bool) -> Program:
        c, w, live, lib, act = (
            self.config, self._weights, self.live, self._library, self.activations
        )  # fmt: skip
        p = Program()
        schedules = self._schedules(rows, rows if fresh else None)
        with p.role("schedule"):
            for schedule in schedules.values():
                schedule.record(p)
        x, attended, count = act["x"], act["attended"], live.rows
        joins = "f32" if c.post_norms else "add"
        with p.role("embed"):
            embed(
                p, lib, table=w.outer["embedding"], type_name=w.embedding_type, ids=live.ids, x=x,
                rows=live.rows, max_rows=rows, scale=c.embedding_scale,
            )  # fmt: skip
        self._norm(p, x, w.layers[0]["attn_norm"], count, rows, 0)
        for layer, weights in enumerate(w.layers):
            site = layer * len(SITES)
            p.cut()
            self._attention(p, schedules[c.window_of(layer)], layer, rows, site + 1)
            if layer == c.layers - 1 and not every_row:
                with p.role("gather"):
                    gather(
                        p, lib, x=x, a=attended, x_out=act["last_x"], a_out=act["last_attended"],
                        index=live.wanted_rows, wanted=live.wanted, max_wanted=1,
                    )  # fmt: skip
                x, attended, count, rows = act["last_x"], act["last_attended"], live.wanted, 1
            with p.role("o"):
                gemm(
                    p, lib, a=attended, w=weights["attn_output"], c=act.get("branch", x),
                    rows=count, max_rows=rows, epilogue=joins,
                )  # fmt: skip
            post = weights.get("post_attention_norm")
            self._norm(p, x, weights["ffn_norm"], count, rows, site + 4, post)
            with p.role("gate_up"):
                gemm(
                    p, lib, a=act["normed"], w=weights["gate_up"], c=act["swiglu"],
                    rows=count, max_rows=rows, epilogue=GATES[c.activation],
                    scale=DOWN_SCALE, overflow=live.overflow, site=site + 5,
                )  # fmt: skip
            with p.role("down"):
                gemm(
                    p, lib, a=act["swiglu"], w=weights["down"], c=act.get("branch", x),
                    rows=count, max_rows=rows, epilogue=joins, scale=1 / DOWN_SCALE,
                )  # fmt: skip
            last = layer == c.layers - 1
            following = w.outer["output_norm"] if last else w.layers[layer + 1]["attn_norm"]
            post = weights.get("post_ffw_norm")
            self._norm(p, x, following, count, rows, site + len(SITES), post)
        return p

    def _norm(
        self,
        p: Program,
        x: DeviceArray,
        weight: DeviceArray,
        count: DeviceArray,
        rows: int,
        site: int,
        post: DeviceArray | None = None,
    ) -> None:
        """`normed` from x, which takes `branch` in first where that has a norm of its own."""
        y, eps, overflow = self.activations["normed"], self.config.eps, self.live.overflow
        if post is None:
            norm(
                p, self._library, x=x, weight=weight, y=y, rows=count, max_rows=rows, eps=eps,
                overflow=overflow, site=site,
            )  # fmt: skip
        else:
            norm_residual(
                p, self._library, branch=self.activations["branch"], post=post, x=x, weight=weight,
                y=y, rows=count, max_rows=rows, eps=eps, overflow=overflow, site=site,
            )  # fmt: skip

    def _schedules(self, rows: int, keys: int | None) -> dict[int | None, Schedule]:
        """How attention is divided, by window."""
        c, live = self.config, self.live
        found: dict[int | None, Schedule] = {}
        for place, window in enumerate(c.windows):
            choice = choose(
                self._library, head_dim=c.head_dim, heads=c.heads, kv_heads=c.kv_heads,
                max_rows=rows, max_keys=keys, window=window, capped=c.score_cap is not None,
                variant=self._variant,
            )  # fmt: skip
            found[window] = Schedule(
                self._library, choice, live=live.live, sequences=live.sequences, heads=c.heads,
                kv_heads=c.kv_heads, max_rows=rows, max_sequences=1, window=window,
                workspace=self._workspace, place=place,
            )  # fmt: skip
        return found

    def _attention(self, p: Program, schedule: Schedule, layer: int, rows: int, site: int) -> None:
        """From `normed` to `attended`, storing K and V in the cache on the way."""
        c, live, act, weights = self.config, self.live, self.activations, self._weights.layers
        if not self._tables:
            raise RuntimeError("reserve_positions comes first")
        cosines, sines = self._tables[c.ropes.index(c.rope_of(layer))]
        scaled = self._kv_dtype != "f16"
        qkv(
            p,
            self._library,
            a=act["normed"],
            w=weights[layer]["qkv"],
            product=act["qkv"],
            q=act["q"],
            rows=live.rows,
            live=live.live,
            sequences=live.stored if scaled else live.sequences,
            sequence_of=live.sequence_of,
            positions=live.positions,
            cosines=cosines,
            sines=sines,
            max_rows=rows,
            layer=layer,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            interleaved=c.rope.style == "interleaved",
            alike=self._weights.alike,
            overflow=live.overflow,
            site=site,
            eps=c.eps,
            kv_dtype=self._kv_dtype,
            bias=weights[layer].get("qkv_bias"),
            q_norm=weights[layer].get("q_norm"),
            k_norm=weights[layer].get("k_norm"),
        )
        if scaled:
            widen(
                p, self._library, live=live.live, stored=live.stored, sequences=live.sequences,
                max_positions=cosines.shape[0], max_sequences=1, layer=layer, kv_heads=c.kv_heads,
                head_dim=c.head_dim,
            )  # fmt: skip
        attention(
            p,
            schedule,
            q=act["q"],
            out=act["attended"],
            layer=0 if scaled else layer,
            scale=c.attention_scale,
            softcap=c.score_cap,
        )

    def _forget(self) -> None:
        """Drops all passes; one that fails keeps no other."""
        with ExitStack() as drops:
            for item in list(self._passes.items()):
                drops.callback(self._drop, *item)

    def close(self) -> None:
        """Frees activations, tables and the live block. Idempotent."""
        with ExitStack() as resources:  # one that fails keeps no other
            for array in (*self.activations.values(), *chain.from_iterable(self._tables)):
                resources.callback(array.close)
            for part in (self.staging, self._workspace, self.live):
                if part is not None:
                    resources.callback(part.close)
            resources.callback(self._forget)  # the last in is the first out
