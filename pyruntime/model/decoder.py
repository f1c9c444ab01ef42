"""The forward pass on a GPU as a recorded program: embed, layers, norm, output matrix."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from pyruntime.driver.graph import Graph
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import CudaError
from pyruntime.model.batch import Batch, Rows, ascending, runs
from pyruntime.model.buckets import bucket
from pyruntime.model.cache import Cache, Layout, layout_bytes
from pyruntime.model.config import ModelConfig
from pyruntime.model.int8_layers import Int8Layers, Int8Options, int8_layout
from pyruntime.model.layers import Layers, Working
from pyruntime.model.live import LiveBlock, max_sequences
from pyruntime.model.pipeline import Pass
from pyruntime.model.replay import Recorded, Replayer
from pyruntime.model.rope import rope_table
from pyruntime.model.streamed import StreamedWeights
from pyruntime.model.weights import Weights
from pyruntime.ops.attention import attention
from pyruntime.ops.attention_choice import choose
from pyruntime.ops.attention_schedule import Schedule, Workspace, workspace_layout
from pyruntime.ops.gemm_workspace import WORKSPACE_LAYOUT, GemmWorkspace
from pyruntime.ops.rows import embed, gather, has_packed_logits, packed_logits
from pyruntime.ops.scores import scores
from pyruntime.ops.softcap import softcap
from pyruntime.ops.widen import widen

PASSES = 96  # recorded passes kept, one per `Shape`; 4096 rows have 95 buckets
TABLE_ROWS = 1 << 16  # positions whose rotary table is made on the host at a time


class Shape(NamedTuple):
    """What a pass is recorded for; it serves all batches that are no larger.

    Attributes:
        rows: of all prompts. longest: of one of them. sequences: prompts.
        kept: rows that something is wanted of: 0, or all, or up to the prompts that a pass may
            have. Others than these do not pass what follows attention in the last layer.
        fresh: nothing is cached before; what is recorded otherwise is right for that too, but
            attention is then divided for many keys.
        greedy: of the one row that is kept, the likeliest token is found behind its logits.
    """

    rows: int
    longest: int
    sequences: int
    kept: int
    fresh: bool
    greedy: bool = False

    @classmethod
    def of(cls, batch: Batch, max_tokens: int, greedy: bool = False) -> Shape:
        """That of the bucket of a batch, see `model.buckets`."""
        prompts, kept = len(batch.prompts), len(batch.kept)
        return cls.holding(
            batch.rows, batch.longest, prompts, kept, batch.fresh, max_tokens, greedy
        )

    @classmethod
    @lru_cache(1024)
    def holding(
        cls,
        rows: int,
        longest: int,
        sequences: int,
        kept: int,
        fresh: bool,
        max_tokens: int,
        greedy: bool = False,
    ) -> Shape:
        """The one that serves passes with so many rows, and so on."""
        most = max_sequences(max_tokens)
        whole = cls(
            bucket(rows, max_tokens), bucket(longest, max_tokens), bucket(sequences, most),
            bucket(kept, most), fresh, greedy,
        )  # fmt: skip
        return whole if kept <= most and kept < rows else whole.with_all()

    @classmethod
    @lru_cache(1024)
    def single(
        cls, rows: int, max_tokens: int, kept: int = 1, fresh: bool = True, greedy: bool = False
    ) -> Shape:
        """That of one prompt of `rows` tokens."""
        return cls.holding(rows, rows, 1, kept, fresh, max_tokens, greedy)

    def with_all(self) -> Shape:
        """The same with all rows kept."""
        return self._replace(kept=self.rows)

    @property
    def every_row(self) -> bool:
        """Whether all rows are kept."""
        return self.kept == self.rows

    @property
    def exact(self) -> bool:
        """Whether all passes that it serves keep so many rows."""
        return not self.kept or bucket(self.kept - 1, self.kept) < self.kept

    def gathered(self, batch: Batch) -> Rows:
        """The rows of a batch that are gathered: those that are kept, in the last layer; where all
        are, those whose logits are wanted, before the output matrix.
        """
        return batch.logits if self.kept == self.rows else batch.kept


class Piece(NamedTuple):
    """Rows [first, first + rows) of `normed`, of which logits are wanted.

    Attributes:
        counted: int32 [1], `rows` on the device. before: rows of the pieces before it.
        scattered: they are the rows of `normed` that the live block names at these places.
    """

    first: int
    rows: int
    counted: DeviceArray
    before: int
    scattered: bool = False


def activation_layout(
    c: ModelConfig, max_tokens: int, names: Collection[str] | None = None, copy: bool = False
) -> Layout:
    """Shape and dtype of every activation buffer. `last_` ones hold the rows that are kept.

    names: of weights "int8" what the arrays of layers are called. copy: see `Int8Options`.
    """
    q, kept = c.heads * c.head_dim, max_sequences(max_tokens)
    layout: Layout = {
        "x": ((max_tokens, c.hidden), "float32"),  # the residual stream
        "normed": ((max_tokens, c.hidden), "float16"),
        "qkv": ((max_tokens, q + 2 * c.kv_heads * c.head_dim), "float32"),
        "q": ((max_tokens, q), "float16"),
        "attended": ((max_tokens, q), "float16"),
        "counts": ((max_tokens + 1,), "int32"),  # of n rows, for launches that take them there
        "targets": ((2 * max_tokens + 1,), "int32"),  # first ones of rows, and tokens that follow
        "scores": ((max_tokens, 3), "int32"),  # see `model.readout.Scorer`
        "spans": ((kept, 2), "int32"),  # of a prompt's rows that are summed: the first, how many
        "last_x": ((kept, c.hidden), "float32"),
        "last_attended": ((kept, q), "float16"),
        "last_normed": ((kept, c.hidden), "float16"),
    }
    if c.post_norms:
        layout["branch"] = layout["x"]  # what x takes in, not normalised yet
    if names is None or copy or "gate_up" in names:
        layout["swiglu"] = ((max_tokens, c.ffn), "float16")
    if names is not None:
        layout |= int8_layout(c, max_tokens, names)
    return layout


def _workspace_sizes(c: ModelConfig, max_tokens: int) -> dict[str, int]:
    return {
        "head_dim": c.head_dim,
        "heads": c.heads,
        "max_rows": max_tokens,
        "max_sequences": max_sequences(max_tokens),
        "schedules": len(c.windows),
    }


def activation_bytes(c: ModelConfig, max_tokens: int, names: Collection[str] | None = None) -> int:
    """Device bytes of the activation buffers and of the workspaces of attention and products.

    names: see `activation_layout`.
    """
    attention = workspace_layout(**_workspace_sizes(c, max_tokens))
    layouts = [activation_layout(c, max_tokens, names), attention]
    if names is None:
        layouts.append(WORKSPACE_LAYOUT)
    return sum(map(layout_bytes, layouts))


class Decoder:
    """Activation buffers for up to `max_tokens` rows, and passes over them, which `replayer` runs.

    `variant` names the attention kernel, see `ops.attention_choice.choose`. With `invariant`, too,
    a row has the same bits in every pass: products are then by rows of the table that agree
    (`ops.gemm_choice.invariant`), and where a launch could do the work of its neighbours, either
    every pass has it so or none, whatever its shape. `kv_dtype` is what the caches hold. From an
    e4m3 cache each layer is widened into `staging`, an fp16 cache of one layer, right before its
    attention: that is what attention reads, and the next layer overwrites it. `int8` says how the
    products of weights "int8" get their activations; None: other weights.
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
        invariant: bool = False,
        int8: Int8Options | None = None,
    ) -> None:
        self.config = config
        self.invariant = invariant
        self.replayer = replayer
        self.staging: Cache | None = None
        self.max_tokens = max_tokens
        self._library = library
        self._weights = weights
        self._variant = variant
        self._kv_dtype = kv_dtype
        # Whether a single row's logits are of the table as it is packed, not of its fp16 matrix,
        # which those of several rows are of.
        self._packed_logits = (
            config.tied
            and not invariant
            and has_packed_logits(library, weights.embedding_type, config.hidden)
        )
        self.activations: dict[str, DeviceArray] = {}
        self._tables: list[tuple[DeviceArray, DeviceArray]] = []  # one for each of config.ropes
        self._workspace: Workspace | None = None
        # Not for the output matrix: of weights "per-layer" it is multiplied in blocks of its rows,
        # which would be divided otherwise. Nor for what weights "int8" leave to it.
        self._gemm_workspace: GemmWorkspace | None = None
        self._passes: OrderedDict[Shape, Recorded] = OrderedDict()
        self.live = LiveBlock(library.device, max_tokens)
        try:
            names = frozenset().union(*weights.layers) if int8 else None
            layout = activation_layout(config, max_tokens, names, bool(int8 and int8.copy))
            for name, (shape, dtype) in layout.items():
                what = f"activation {name}"
                self.activations[name] = DeviceArray(library.device, shape, dtype, what=what)
            self._counts = self.activations["counts"]
            self._counts.upload(np.arange(max_tokens + 1))
            self._workspace = Workspace(library, **_workspace_sizes(config, max_tokens))
            if int8 is None:
                self._gemm_workspace = GemmWorkspace(library)
            parts = (
                self.activations, self.live, self._gemm_workspace, kv_dtype, invariant,
            )  # fmt: skip
            if int8 is not None:
                assert isinstance(weights, Weights)
                self.layers: Layers = Int8Layers(library, config, weights, *parts, int8)
            else:
                self.layers = Layers(library, config, weights, *parts)
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

    def recorded(self, shape: Shape) -> Recorded:
        """Everything up to the output norm; the result is the kept rows of `normed`.

        Each layer begins a section with its first matrix product, before which no matrix is read.
        """
        found = self._passes.get(shape)
        if found is None:
            program, weights = self._record(shape), self._weights
            body = Pass(program)
            if isinstance(weights, StreamedWeights):
                alone = shape.kept == 1 and self._packed_logits  # then no matrix is needed
                body = weights.body(program.sections, 0 if alone else shape.kept)
            self._passes[shape] = found = Recorded(shape, self.live, body)
            if len(self._passes) > PASSES:
                self._drop(*next(iter(self._passes.items())))
        self._passes.move_to_end(shape)
        return found

    def pieces(self, shape: Shape, batch: Batch, most: int | None = None) -> list[Piece]:
        """The rows of `normed` whose logits a batch wants, up to `most` at a time.

        Each piece reads the whole output matrix. So rows that do not follow one another are
        gathered where that makes fewer pieces.
        """
        wanted, most, counted = len(batch.logits), most or shape.rows, self.live.wanted
        in_all = batch.rows if shape.every_row else len(batch.kept)
        if 0 < wanted == len(batch.kept) == in_all <= most:
            return [Piece(0, wanted, counted, 0)]
        index = batch.logits if shape.every_row else batch.kept_places(batch.logits)
        parts, wide = runs(index, most), min(most, max_sequences(self.max_tokens))
        scattered = shape.every_row and -(-len(index) // wide) < len(parts)
        if scattered:
            parts = runs(ascending(0, len(index)), wide)
        found, before = [], 0
        for first, count in parts:
            part = counted if count == len(batch.kept) else self._counts.rows(count, count + 1)
            found.append(Piece(first, count, part, before, scattered))
            before += count
        return found

    def head(self, recorded: Recorded, piece: Piece, logits: DeviceArray) -> Pass:
        """What comes after such a body: the output matrix, and what is greedy of its shape.

        Logits: float32 [rows, vocab].

        The caller keeps them alive while it runs, and until then asks for no other head.
        """
        whole = piece.rows == recorded.shape.kept
        head = recorded.head if whole else None
        if head is None:
            head = self._head(piece, logits, recorded.shape)
            if not whole or isinstance(self._weights, StreamedWeights):
                return head
            recorded.head = head
        recorded.point(logits)
        return head

    def make_head(self, recorded: Recorded, logits: DeviceArray) -> None:
        """Makes `recorded.head`. Logits: of all rows that are kept."""
        self.head(recorded, Piece(0, recorded.shape.kept, self.live.wanted, 0), logits)

    def _head(self, piece: Piece, logits: DeviceArray, shape: Shape) -> Pass:
        weights, rows, program = self._weights, piece.rows, Program()
        if rows == 1 and self._packed_logits:
            return self._packed_head(piece, logits, shape)
        normed = self._gathered(program, piece)
        if isinstance(weights, StreamedWeights):
            after = Program()
            self._end(after, logits, piece, shape)
            return weights.head(
                program, after, normed=normed, wanted=piece.counted, logits=logits,
                kept=shape.kept, ready=not piece.before,
            )  # fmt: skip
        self.layers.head(program, normed, logits, piece.counted)
        self._end(program, logits, piece, shape)
        return Pass(program)

    def _packed_head(self, piece: Piece, logits: DeviceArray, shape: Shape) -> Pass:
        """The output norm and the output matrix for a piece of one row, without fp16 between.

        Rounding the matrix is an error of its own in every logit of a row, and the same in every
        pass: where a channel of `normed` is large and its column far from 0, the largest of all.
        """
        weights, program = self._weights, Program()
        place = piece.first
        x = self.activations["x" if shape.every_row and not piece.scattered else "last_x"]
        if piece.scattered:
            self._gathered(program, piece)
            place = 0
        with program.role("head"):
            packed_logits(
                program, self._library, rows=piece.counted, x=x.rows(place, place + 1),
                weight=weights.outer["output_norm"], eps=self.config.eps,
                table=weights.outer["embedding"], type_name=weights.embedding_type, c=logits,
            )  # fmt: skip
        self._end(program, logits, piece, shape)
        return Pass(program)

    def _gathered(self, program: Program, piece: Piece) -> DeviceArray:
        """The rows of a piece, one after the other: float16 [rows, hidden]. Those of x, too, where
        a piece is scattered: `last_x`."""
        act, last = self.activations, piece.first + piece.rows
        if not piece.scattered:
            return act["normed"].rows(piece.first, last)
        with program.role("gather"):
            gather(
                program, self._library, x=act["x"], a=act["normed"], x_out=act["last_x"],
                a_out=act["last_normed"], index=self.live.wanted_rows.rows(piece.first, last),
                wanted=piece.counted, max_wanted=piece.rows,
            )  # fmt: skip
        return act["last_normed"].rows(0, piece.rows)

    def launches(self) -> Counter[str]:
        """Launches that recorded passes had and that are not counted yet, by kernel name."""
        found = Counter[str]()
        for recorded in list(self._passes.values()):
            for part, times in recorded.uncounted():
                for kernel, count in part.counts.items():
                    found[kernel.name] += count * times
        return found

    def graphs(self) -> list[Graph]:
        """Those of recorded passes."""
        return [graph for recorded in list(self._passes.values()) for graph in recorded.graphs]

    def _drop(self, shape: Shape, recorded: Recorded) -> None:
        del self._passes[shape]
        self.replayer.drop(recorded)

    def _end(self, program: Program, logits: DeviceArray, piece: Piece, shape: Shape) -> None:
        """What is done with the products of a head."""
        cap, lib, rows = self.config.logit_cap, self._library, piece.counted
        if cap is not None:
            softcap(program, lib, x=logits, cap=cap, rows=rows, max_rows=logits.shape[0])
        if shape.greedy:
            scores(program, lib, rows=rows, max_rows=1, logits=logits, **self.live.greedy)

    def _record(self, shape: Shape) -> Program:
        c, w, live, lib, act = (
            self.config, self._weights, self.live, self._library, self.activations
        )  # fmt: skip
        if not self._tables:
            raise RuntimeError("reserve_positions comes first")
        p, layers = Program(), self.layers
        schedules = self._schedules(shape)
        with p.role("schedule"):
            for schedule in schedules.values():
                schedule.record(p)
        rows = Working(act["x"], act["attended"], live.rows, shape.rows)
        with p.role("embed"):
            embed(
                p, lib, table=w.outer["embedding"], type_name=w.embedding_type, ids=live.ids,
                x=rows.x, rows=rows.count, max_rows=rows.most, scale=c.embedding_scale,
            )  # fmt: skip
        layers.enter(p, rows)
        for layer in range(c.layers):
            p.cut()
            layers.store(p, layer, rows, self._tables[c.ropes.index(c.rope_of(layer))])
            if layer == c.layers - 1 and not shape.kept:
                break
            self._attention(p, schedules[c.window_of(layer)], layer)
            narrow = None
            if layer == c.layers - 1 and not shape.every_row:
                narrow = partial(self._wanted, p, shape.kept)
            layers.leave(p, layer, rows, narrow)
        return p

    def _wanted(self, p: Program, kept: int, rows: Working) -> Working:
        """The rows that something is wanted of, one after the other."""
        act, live = self.activations, self.live
        x, attended = act["last_x"], act["last_attended"]
        with p.role("gather"):
            gather(
                p, self._library, x=rows.x, a=rows.attended, x_out=x, a_out=attended,
                index=live.wanted_rows, wanted=live.wanted, max_wanted=kept,
            )  # fmt: skip
        return Working(x, attended, live.wanted, kept)

    def _schedules(self, shape: Shape) -> dict[int | None, Schedule]:
        """How attention is divided, by window."""
        c, live, longest = self.config, self.live, shape.longest
        found: dict[int | None, Schedule] = {}
        for place, window in enumerate(c.windows):
            choice = choose(
                self._library, head_dim=c.head_dim, heads=c.heads, kv_heads=c.kv_heads,
                max_rows=longest, max_keys=longest if shape.fresh else None,
                max_sequences=-(-shape.rows // longest),  # as if all were that long
                window=window, capped=c.score_cap is not None, variant=self._variant,
            )  # fmt: skip
            found[window] = Schedule(
                self._library, choice, live=live.live, sequences=live.sequences, heads=c.heads,
                kv_heads=c.kv_heads, max_rows=longest, max_sequences=shape.sequences,
                window=window, workspace=self._workspace, place=place,
            )  # fmt: skip
        return found

    def _attention(self, p: Program, schedule: Schedule, layer: int) -> None:
        """From `q` and the caches to `attended`."""
        c, live, act = self.config, self.live, self.activations
        scaled = self._kv_dtype != "f16"
        if scaled:
            widen(
                p, self._library, live=live.live, stored=live.stored, sequences=live.sequences,
                max_positions=self.positions, max_sequences=schedule.max_sequences, layer=layer,
                kv_heads=c.kv_heads, head_dim=c.head_dim,
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
            for part in (self.staging, self._workspace, self._gemm_workspace, self.live):
                if part is not None:
                    resources.callback(part.close)
            resources.callback(self._forget)  # the last in is the first out
