"""A model on a GPU: weights, buffers, caches, and the forward pass, for one call at a time."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from pyruntime.driver import api
from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Launch
from pyruntime.driver.stream import Stream
from pyruntime.errors import (
    BusyError,
    CudaError,
    EngineError,
    NumericalError,
    OutOfMemoryError,
    UnsupportedModelError,
    WaitTimeoutError,
)
from pyruntime.model import int8_layers, pipeline
from pyruntime.model.batch import Batch, Output, whole_regions
from pyruntime.model.cache import Cache, Region
from pyruntime.model.calls import Call
from pyruntime.model.config import ModelConfig
from pyruntime.model.decoder import PASSES, Decoder, Piece, Shape
from pyruntime.model.footprint import cache_bytes, plan, tell_choice, tell_fp16
from pyruntime.model.live import NO_OVERFLOW, max_sequences
from pyruntime.model.pipeline import Pass
from pyruntime.model.readout import Pooled, Scorer
from pyruntime.model.replay import Recorded, Replayer
from pyruntime.model.scores import Targets, TokenScores
from pyruntime.model.stats import Stats, Warmed
from pyruntime.model.streamed import StreamedWeights
from pyruntime.model.tokens import check_tokens
from pyruntime.model.underway import Underway
from pyruntime.model.weights import Weights
from pyruntime.ops.attention_choice import choose
from pyruntime.ops.qkv import alike_heads
from pyruntime.turns import NEVER, Deadline, Turns

if TYPE_CHECKING:
    from pyruntime.gguf import GGUFFile


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)
FLOAT32 = np.dtype(np.float32)


class GpuModel:
    """The weights of `file` on device `ordinal`, and what runs them.

    Attributes:
        turns: whose call is served, see `pyruntime.turns`.
        weights: the arrays; `weights_mode`: "fp16" (dequantized at load), "per-layer" (packed,
            dequantized a layer ahead, see `model.streamed`) or "int8" (packed, and multiplied as
            they are, see `model.int8_layers`).
        max_tokens, max_prompts: rows and prompts of one forward pass at most.

    Args:
        max_tokens: rows of one forward pass; "per-layer" and "int8" take no more than
            `footprint.PASS_TOKENS` says.
        kv_tokens: positions that the rotary tables cover at first, and the size of the cache that
            is counted when memory is checked before anything is allocated.
        memory_budget: the most bytes that `plan` may come to; all that is free by default.
        weights: "fp16", "per-layer", "int8", or "auto", see `model.footprint.plan`.
        stream: a foreign stream's handle (an address), or None for one of its own.
        attention: the attention kernel, see `ops.attention_choice.choose`.
        overlap: whether launches of a pass may overlap, see `Program.enqueue`.
        graphs: whether passes that come again become graphs, see `model.replay`.
        kv_dtype: what caches hold, "f16" or "e4m3", see `model.cache.Cache`.
        invariant: whether a row has the same bits whatever its pass holds besides; attention is
            then "invariant", too.
        progress: called with the file bytes of each piece that has arrived.

    Raises:
        DriverNotFoundError, ArchMismatchError, CubinError: no device to run on.
        UnsupportedModelError: a size that the kernels do not cover.
        ValueError: an unknown attention kernel.
        OutOfMemoryError: the text gives the bytes needed and free.
    """

    def __init__(
        self,
        file: GGUFFile,
        config: ModelConfig,
        *,
        ordinal: int = 0,
        max_tokens: int,
        kv_tokens: int,
        memory_budget: int | None = None,
        weights: str = "auto",
        stream: int | None = None,
        attention: str = "auto",
        overlap: bool = True,
        graphs: bool = True,
        kv_dtype: str = "f16",
        invariant: bool = False,
        progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.config = config
        self.kv_dtype = kv_dtype
        self.invariant = invariant
        self.overlap = overlap
        self.gpu_seconds = 0.0  # of the last forward pass, its logits and scores
        self.host_span = (0.0, 0.0)  # and its first enqueue and end of waiting (perf_counter)
        self.turns = Turns()
        self._nothing = np.empty((0, config.hidden), np.float32)  # sums of hidden states
        self._lost = ""  # the failure that lost the device's context, if one did
        self._resources = ExitStack()
        self._underway = Underway()
        self._at_work = _AtWork(self)
        streams = self._underway.streams
        weakref.finalize(self, _abandon, self._resources, streams).atexit = False
        self._open = True
        try:
            self._load(
                file, ordinal, max_tokens, kv_tokens, memory_budget, weights, stream, attention,
                graphs, progress,
            )  # fmt: skip
        except BaseException:
            with suppress(CudaError):  # the first failure is the one to report
                self.close()
            raise

    def _load(
        self,
        file: GGUFFile,
        ordinal: int,
        max_tokens: int,
        kv_tokens: int,
        memory_budget: int | None,
        mode: str,
        stream: int | None,
        attention: str,
        graphs: bool,
        progress: Callable[[int], object],
    ) -> None:
        config, invariant = self.config, self.invariant
        attention = "invariant" if invariant else attention
        self.device = self._owned(Device(ordinal))
        self.library = library = self._owned(Library(self.device))
        _check_sizes(file, config, library, attention)
        planned = plan(
            file, config, max_tokens=max_tokens, kv_tokens=kv_tokens, kv_dtype=self.kv_dtype,
            weights=mode, memory=self._allowed(memory_budget), invariant=invariant,
            capability=self.device.compute_capability,
        )  # fmt: skip
        self._check_memory(planned.nbytes, memory_budget)
        self.weights_mode, self.max_tokens = planned.weights, planned.max_tokens
        self.max_prompts = max_sequences(self.max_tokens)
        self.device.spare.most = planned.nbytes["logits"]  # so that no more is held than planned
        if mode == "auto":
            tell_choice(planned, self.device_name)
        if planned.weights == "int8":
            tell_fp16(file, config)
        packed, int8 = self.weights_mode == "per-layer", self.weights_mode == "int8"
        urgent = packed and not pipeline.URGENT_FILLS
        self._current = self.device.current()
        self._stream = self._owned(Stream(self.device, stream, urgent=urgent))
        self._streams = [self._stream]
        alike = alike_heads(
            library, heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim,
            interleaved=config.rope.style == "interleaved", bias=config.qkv_bias,
            norm=config.qk_norm, kv_dtype=self.kv_dtype,
        )  # fmt: skip
        weights: Weights | StreamedWeights
        if packed:
            weights = StreamedWeights(
                file, config, library, self.max_tokens, progress, alike, invariant
            )
            self._streams.append(weights.pipeline.stream)
        else:
            alike = 0 if int8 else alike
            weights = Weights(file, config, library, progress, alike, self.weights_mode)
        self.weights = self._owned(weights)
        self._replayer = self._owned(Replayer(self._stream, overlap=self.overlap, graphs=graphs))
        self._decoder = self._owned(
            Decoder(
                library, config, weights, self.max_tokens, self._replayer, attention,
                self.kv_dtype, invariant, int8_layers.OPTIONS if int8 else None,
            )
        )  # fmt: skip
        self._decoder.reserve_positions(kv_tokens)
        # Sizes are refused here, not later.
        self._decoder.recorded(Shape.single(self.max_tokens, self.max_tokens))
        self.fingerprint = file.fingerprint  # when the file is in the page cache

    def _owned(self, resource: T) -> T:
        self._resources.callback(resource.close)
        return resource

    @contextmanager
    def _entry(self) -> Iterator[None]:
        """One call at a time, on a device that works; what loses its context is remembered."""
        with self.turns.turn():
            self._make_ready()
            try:
                yield
            except CudaError as error:
                self._note(error)
                raise

    def _make_ready(self) -> None:
        """Waits for what an earlier call left under way. Raises EngineError: closed or lost."""
        if self._underway.streams:
            self._finish()
        if self._lost:
            raise EngineError(f"the device context was lost by an earlier failure: {self._lost}")
        if not self._open:
            raise EngineError("this engine has been closed")

    def _note(self, error: CudaError) -> None:
        if error.code in api.STICKY:
            self._lost = self._lost or str(error)

    def _allowed(self, budget: int | None) -> int:
        free, _ = self.device.memory()
        return free if budget is None else min(free, budget)

    def _check_memory(self, needs: Mapping[str, int], budget: int | None) -> None:
        free, total = self.device.memory()
        needed = sum(needs.values())
        if needed > self._allowed(budget):
            self.device.free_spare()
        if needed > self._allowed(budget):
            parts = ", ".join(f"{name} {nbytes:,}" for name, nbytes in needs.items())
            limit = "" if budget is None else f", the budget is {budget:,}"
            raise OutOfMemoryError(
                f"{needed:,} bytes of device memory are needed ({parts}); "
                f"{free:,} of {total:,} are free on {self.device.name}{limit}"
            )

    @property
    def device_name(self) -> str:
        """Such as "cuda:0 (NVIDIA H200)"."""
        return f"cuda:{self.device.ordinal} ({self.device.name})"

    def launches(self) -> dict[str, int]:
        """Launches so far by kernel name, those of loading included."""
        return dict(Counter(self.library.launches()) + self._decoder.launches())

    def stats(self) -> Stats:
        """How passes were run so far."""
        return self._replayer.stats(self._decoder.graphs())

    def warm(self, passes: Sequence[tuple[int, int, bool, bool]]) -> list[Warmed]:
        """Records passes of one prompt and captures them, where that has not been done.

        Args:
            passes: of each its rows, those of them whose logits are wanted, whether nothing is
                cached before, and whether it is greedy; passes of one bucket are made ready once.

        Raises:
            ValueError: more than are kept, `PASSES`; nothing has been done.
            OutOfMemoryError: no room for the logits of a pass, which its graph is made with.
            CudaError, EngineError: as `run`.
        """
        with self._entry():
            shapes = [
                Shape.single(rows, self.max_tokens, kept, fresh, greedy)
                for rows, kept, fresh, greedy in passes
            ]
            shapes = list(dict.fromkeys(shapes))
            if len(shapes) > PASSES:
                raise ValueError(f"{len(shapes)} kinds of passes; {PASSES} are kept")
            return [self._warm(shape) for shape in shapes]

    def _warm(self, shape: Shape) -> Warmed:
        started = time.perf_counter()
        recorded, logits = self._decoder.recorded(shape), None
        if shape.kept and recorded.whole is None and self._replayer.makes_whole(recorded):
            logits = self._logits(shape.kept)
            if recorded.head is None:
                self._decoder.make_head(recorded, logits)
        with self.device.current():
            graph = self._replayer.warm(recorded, logits)
        ms = 1e3 * (time.perf_counter() - started)
        nbytes = graph.nbytes if graph else 0
        return Warmed(shape.rows, shape.kept, shape.fresh, graph is not None, ms, nbytes)

    def new_cache(self, tokens: int) -> Cache:
        """An empty cache for `tokens` positions. Raises ValueError, OutOfMemoryError."""
        if tokens < 1:
            raise ValueError(f"a cache for {tokens} tokens: at least 1 is needed")
        with self._entry():
            needs = cache_bytes(self.config, tokens, self.kv_dtype)
            if tokens <= self._decoder.positions:  # what caches share is there already
                needs = {"kv_cache": needs["kv_cache"]}
            self._check_memory(needs, None)
            self._decoder.reserve_positions(tokens)
            return Cache(self, self.library, self.config, tokens, self.kv_dtype)

    @property
    def pass_positions(self) -> int | None:
        """Positions of all prompts of a pass at most, all but the last in whole regions; None: any
        number."""
        return None if self.kv_dtype == "f16" else self._decoder.positions

    def forward(
        self,
        ids: ArrayLike,
        cache: Cache,
        *,
        logits: Literal["last", "all"] = "last",
        out: DeviceArray | None = None,
    ) -> DeviceArray:
        """Appends `ids` [nt], nt <= max_tokens, to `cache`; waits for the result.

        Args:
            logits: "last" gives float32 [1, vocab], "all" float32 [nt, vocab].
            out: the array to write to instead of a new one: of that shape, on a 16-byte boundary.

        Raises: as `run`.
        """
        batch = Batch.of_one(check_tokens(ids, self.config.vocab), cache, logits)
        given: DeviceArray = self.run(batch, out=out).logits
        return given

    def run(self, batch: Batch, *, out: DeviceArray | None = None, greedy: bool = False) -> Output:
        """Appends the prompts of a batch to their caches; waits for the result.

        Args:
            out: where logits go instead of to a new array: float32 [rows, vocab], on a 16-byte
                boundary.
            greedy: logits of one row are wanted, and nothing else: their argmax is given instead,
                found on the GPU; of equal ones the first.

        Raises:
            ValueError: another `out`, more rows than `max_tokens`, more prompts than
                `max_prompts`, more than a cache holds or than there is staging for; nothing has
                changed.
            NumericalError: a value left fp16's range; the caches keep their lengths.
            CudaError: the driver failed; if it lost the context, all later calls are refused.
            EngineError: closed, forked, or lost.
            WaitTimeoutError: the time of the turn ran out; the caches keep their lengths.
        """
        if out is not None:
            shape = (len(batch.logits), self.config.vocab)
            if out.shape != shape or out.dtype != FLOAT32 or out.ptr % 16:
                raise ValueError(
                    f"logits of shape {list(shape)} do not go to an {out} at {out.ptr:#x}: it must "
                    "be float32 of that shape and 16-byte aligned"
                )
        with self._entry():
            form = self._begin(batch, greedy)
            self._underway.begin(self._streams, batch, out)
            with self._at_work:
                recorded, pooled = self._decoder.recorded(form), None
                if len(batch.hidden):
                    pooled = self._pooled(batch, form)
                out = self._run(batch, recorded, out, pooled.passes() if pooled else ())
                sums = pooled.download() if pooled else self._nothing
            batch.store()
            if greedy:  # while the turn lasts: the next one's pass overwrites it
                return Output(None, sums, self._decoder.live.likeliest)
        return Output(out, sums)

    def replay(self, call: Call, *, greedy: bool = False) -> bool:
        """`run` of a call whose only pass is a graph as a whole; `call.found` is what it gives.

        False where there is no such graph, or anything else to the pass, which `run` sees to or
        refuses: then nothing has been done. No hidden states are wanted, the turn is the caller's,
        and the cache is an open one of this model.

        Raises: NumericalError, CudaError, OutOfMemoryError, WaitTimeoutError as `run`.
        """
        underway, decoder = self._underway, self._decoder
        if underway.streams or self._lost or not self._open or decoder.staging is not None:
            return False
        cache, rows = call.cache, call.logits
        start, count, kept = cache.length, len(call.ids), len(rows)
        if start + count > cache.capacity or count > self.max_tokens:
            return False
        form = Shape.single(count, self.max_tokens, kept, not start, greedy)
        recorded, out = decoder.recorded(form), None
        if recorded.whole is None:
            return False
        try:
            underway.begin(self._streams, call)
            decoder.live.fill([call], [start], rows)
            with self._current:
                enqueued = time.perf_counter()
                if kept:
                    out = self._logits(kept)
                    underway.hold(out)
                replayed = self._replayer.replay(recorded, out)
                if replayed:
                    self._ended(enqueued)
            underway.end()
        except BaseException as error:
            self._at_work.fail(error)
            raise
        if replayed:
            cache.append(call.ids, start)
            call.found = decoder.live.likeliest if greedy else out
        return replayed

    def score(
        self, batch: Batch, targets: Targets, *, most_bytes: int, top: int = 1
    ) -> TokenScores:
        """`run`, with the scores of tokens after its rows instead of logits.

        Args:
            targets: by the rows whose logits are wanted, counted from 0.
            most_bytes: of logits at a time; one row is always made.
            top: how many of the likeliest tokens, 1 to vocab.

        Raises: as `run`.
        """
        vocab = self.config.vocab
        most = max(most_bytes // (4 * vocab), 1)
        found = TokenScores.empty(len(targets.rows), top)
        with self._entry():
            form, decoder = self._begin(batch), self._decoder
            pieces = decoder.pieces(form, batch, most)
            rows = max((piece.rows for piece in pieces), default=0)
            shape, what = (rows, vocab), "logits of a piece"
            logits = DeviceArray(self.device, shape, FLOAT32, what=what, spare=True)
            self._underway.begin(self._streams, batch, logits)
            with self._at_work:
                recorded = decoder.recorded(form)
                scorer = Scorer(
                    self.library, decoder.activations, partial(decoder.head, recorded), pieces,
                    targets, logits, top,
                )  # fmt: skip
                for part in scorer.parts:
                    passes = scorer.passes(part)
                    if part.start == 0:
                        self._run(batch, recorded, None, passes, headless=True)
                    else:
                        self._go_on(passes)
                    scorer.download(part, found)
            batch.store()
        return found

    def _begin(self, batch: Batch, greedy: bool = False) -> Shape:
        """Begins a pass, if there is room: in its turn, as another call may have filled a cache."""
        batch.begin(self.check_cache)
        if batch.rows > self.max_tokens:
            raise _too_much(batch.rows, "tokens", self.max_tokens)
        if len(batch.prompts) > self.max_prompts:
            raise _too_much(len(batch.prompts), "prompts", self.max_prompts)
        if self.kv_dtype != "f16":
            most, count = self._decoder.positions, self._places(batch)[-1]
            if count > most:
                raise _too_much(count, "positions in 8-bit caches", most)
        return Shape.of(batch, self.max_tokens, greedy)

    def _pooled(self, batch: Batch, shape: Shape) -> Pooled:
        """Of the hidden states that a batch wants."""
        places = batch.hidden if shape.every_row else batch.kept_places(batch.hidden)
        return Pooled(self.library, self._decoder.activations, batch, places)

    def recorded(self, rows: int) -> list[Launch]:
        """The launches of a prefill of `rows` tokens that wants the last one's logits."""
        with self._entry():
            return self._launches(Shape.single(rows, self.max_tokens), self._logits(1))

    def _launches(self, shape: Shape, out: DeviceArray) -> list[Launch]:
        decoder, recorded = self._decoder, self._decoder.recorded(shape)
        last = Piece(0, 1, decoder.live.wanted, 0)
        return recorded.body.launches + decoder.head(recorded, last, out).launches

    @contextmanager
    def staged(self, ids: ArrayLike, cache: Cache) -> Iterator[tuple[list[Launch], Stream]]:
        """For measuring: the launches of `forward(ids, cache)`, and the stream to run them on.

        Their live values are in place until the block ends, and other calls wait. They write to
        `cache` from its length on, which stays; run again they compute the same again.

        Raises:
            EngineError: weights are "per-layer": one stream is not how those launches run.
        """
        if self.weights_mode == "per-layer":
            raise EngineError(
                "launches are timed with weights='fp16' or 'int8'; those of 'per-layer' run on two "
                "streams"
            )
        batch = Batch.of_one(check_tokens(ids, self.config.vocab), cache, "last")
        with self._entry(), self.device.current():
            form, out = self._begin(batch), self._logits(1)
            launches = self._launches(form, out)
            self._underway.begin(self._streams, batch, out)
            with self._at_work:
                staging = self._decoder.staging
                staged = None if staging is None else self._staged(batch, staging)
                self._decoder.live.fill(batch.prompts, batch.starts, form.gathered(batch), staged)
                self._decoder.live.upload(self._stream)
                yield launches, self._stream
                self._settle()

    def check_cache(self, cache: Any) -> None:
        """Raises ValueError unless it is an open one of this model."""
        if getattr(cache, "owner", None) is not self:
            raise ValueError(
                f"this cache belongs to another model than {self.config.name} on {self.device_name}"
            )
        if cache.closed:
            cache.check_open()

    def _run(
        self,
        batch: Batch,
        recorded: Recorded,
        out: DeviceArray | None,
        after: Iterable[Pass] = (),
        *,
        headless: bool = False,
    ) -> DeviceArray | None:
        """The pass, its logits, and what comes `after`; waits for it, and looks what it left.

        What the GPU need not wait for is done while it is at work. Returns the logits: `out` or a
        new array, or None where none are wanted or the pass is `headless`.
        """
        decoder, replayer = self._decoder, self._replayer
        staged = None if decoder.staging is None else self._staged(batch, decoder.staging)
        rows = recorded.shape.gathered(batch)
        decoder.live.fill(batch.prompts, batch.starts, rows, staged)
        wanted = 0 if headless else len(batch.logits)
        with self._current:
            enqueued = time.perf_counter()
            replayed = False
            whole = recorded.whole is not None or (recorded.runs and replayer.makes_whole(recorded))
            if whole and not after and wanted == len(batch.kept) == recorded.shape.kept:
                if wanted:
                    if out is None:
                        out = self._logits(wanted)
                        self._underway.hold(out)
                    if recorded.head is None:
                        decoder.make_head(recorded, out)
                replayed = replayer.replay(recorded, out if wanted else None)
            if not replayed:
                out = self._in_parts(batch, recorded, wanted, out, after)
            self._ended(enqueued)
        return out

    def _ended(self, enqueued: float) -> None:
        """Waits for a pass whose first enqueue was then, and looks what it left.

        Raises: NumericalError; WaitTimeoutError: the turn's time ran out.
        """
        deadline, replayer, decoder = self.turns.deadline, self._replayer, self._decoder
        if not self._stream.finish(None if deadline is NEVER else deadline.work_left()):
            raise deadline.over("the GPU was still at work on a pass")
        self.host_span = enqueued, time.perf_counter()
        self.gpu_seconds = replayer.ended.elapsed(replayer.started) / 1e3
        if (site := decoder.live.overflow_site) != NO_OVERFLOW:
            where = decoder.layers.site_name(site)
            raise NumericalError(f"{where} holds a value beyond fp16's ±65504 or a NaN")

    def _in_parts(
        self,
        batch: Batch,
        recorded: Recorded,
        wanted: int,
        out: DeviceArray | None,
        after: Iterable[Pass],
    ) -> DeviceArray | None:
        """Enqueues what `_run` does, which is not replayed as a whole; returns the logits."""
        decoder, replayer = self._decoder, self._replayer
        follows = replayer.run(recorded)
        if wanted:
            if out is None:
                out = self._logits(wanted)
                self._underway.hold(out)
            for piece in decoder.pieces(recorded.shape, batch):
                follows = replayer.follow(self._head(recorded, piece, out), follows)
        for made in after:
            follows = replayer.follow(made, follows)
        replayer.end(recorded)
        return out

    def _go_on(self, heads: Iterable[Pass]) -> None:
        """More of what comes after the body of the last pass; waits for it."""
        stream, replayer = self._stream, self._replayer
        (enqueued, _), seconds = self.host_span, self.gpu_seconds
        with self.device.current():
            stream.record(replayer.started)
            for head in heads:
                replayer.follow(head)
            stream.record(replayer.ended)
            self._ended(enqueued)
        self.gpu_seconds += seconds

    def _logits(self, rows: int) -> DeviceArray:
        shape = (rows, self.config.vocab)
        return DeviceArray(self.device, shape, FLOAT32, what="logits", spare=True)

    def _head(self, recorded: Recorded, piece: Piece, logits: DeviceArray) -> Pass:
        """What makes the logits of a piece."""
        if piece.rows < logits.shape[0]:
            logits = logits.rows(piece.before, piece.before + piece.rows)
        return self._decoder.head(recorded, piece, logits)

    def _staged(self, batch: Batch, staging: Cache) -> list[Region]:
        """Where the keys and values of each prompt are widened to."""
        places = zip(self._places(batch), batch.prompts, batch.starts, strict=False)
        return [staging.region(at, start + len(p.ids)) for at, p, start in places]

    @staticmethod
    def _places(batch: Batch) -> list[int]:
        """Where each prompt's positions would begin if they shared a cache, and where the last
        one's would end."""
        places = [0]
        for prompt, start in zip(batch.prompts, batch.starts, strict=True):
            places[-1] = whole_regions(places[-1])
            places.append(places[-1] + start + len(prompt.ids))
        return places

    def _settle(self) -> None:
        self._underway.begin(self._streams)  # a call within a block of `staged` may have ended it
        self._finish(Deadline())

    def _finish(self, deadline: Deadline | None = None) -> None:
        """Waits for what an earlier call left under way; `deadline` instead of the turn's.

        Raises BusyError: the time ran out.
        """
        deadline = deadline or self.turns.deadline
        try:
            if not self._underway.wait(deadline.left):
                raise BusyError(
                    f"busy: within {deadline.timeout:g} s the GPU did not finish what is left of "
                    "an earlier call, whose time ran out"
                )
        except CudaError as error:
            self._note(error)
        self._underway.end()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """A block during which no call is at work, nor the GPU for one that is over."""
        with self.turns.turn():
            self._finish(Deadline())
            yield

    def close(self) -> None:
        """Gives all device memory back. Idempotent. Caches and results free their own."""
        if self.turns.forked:
            return  # the driver's state is the parent's
        with self.turns.turn():
            self._open = False
            self._finish(Deadline())
            if self._lost:
                return  # there is nothing left to free
            try:
                self._resources.close()
            except CudaError as error:
                self._note(error)
                if not self._lost:
                    raise


class _AtWork:
    """A block that enqueues work and waits for it; `Underway.begin` comes first.

    Where the block fails, what it did start is waited for here: it reads the live block. Where its
    time has run out, or that wait is interrupted, too, the next call does (`GpuModel._finish`).

    A model holds one for all its calls, so that does not hold the model: what is dropped goes at
    once then, not when the garbage collector comes, which knows nothing of device memory.
    """

    __slots__ = ("_model", "_underway")

    def __init__(self, model: GpuModel) -> None:
        self._model, self._underway = weakref.ref(model), model._underway

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._underway.end()
        else:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The end of a block that failed."""
        model = self._model()
        if model is not None and isinstance(error, CudaError):
            model._note(error)  # before the wait fails for the same reason
        # A block that was never left may be dropped in another thread's turn.
        if model is not None and not isinstance(error, (WaitTimeoutError, GeneratorExit)):
            model._settle()


def _too_much(count: int, what: str, most: int) -> ValueError:
    return ValueError(f"{count} {what} in one pass; this model was loaded for {most}")


def _abandon(resources: ExitStack, underway: list[Stream]) -> None:
    """Frees what an engine held that was dropped without `close`, when no stream uses it."""
    if api.forked:
        return
    with suppress(CudaError):
        for stream in underway:
            stream.synchronize()
    with suppress(CudaError):
        resources.close()


def _check_sizes(file: GGUFFile, c: ModelConfig, library: Library, attention: str) -> None:
    """Refuses, by name, what the kernels do not cover."""
    try:
        choose(
            library, head_dim=c.head_dim, heads=c.heads, kv_heads=c.kv_heads, max_rows=1,
            window=c.window, capped=c.score_cap is not None, variant=attention,
        )  # fmt: skip
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{file.path}: {error}") from None
    sizes = {"embedding_length": c.hidden, "feed_forward_length": c.ffn}
    for name, size in sizes.items():
        if size % 8:
            raise UnsupportedModelError(
                f"{file.path}: {c.arch}.{name} is {size}; the kernels need a multiple of 8"
            )
