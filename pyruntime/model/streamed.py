"""Weights "per-layer": packed in device memory as the file has them, dequantized a step ahead.

Two slots hold the fp16 matrices of one layer each: while one layer computes, the next one's are
dequantized into the other slot (model/pipeline.py). After the layers the output matrix goes through
the slots in blocks of its rows, which are columns of the logits. The kernels and the values are
those of weights "fp16", so the bits of the logits are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.errors import CudaError
from pyruntime.model.config import ModelConfig
from pyruntime.model.live import NO_OVERFLOW
from pyruntime.model.loader import beyond_fp16
from pyruntime.model.pipeline import SLOTS, Pass, Pipeline, Step
from pyruntime.model.placements import Placement, Source, layer_placements
from pyruntime.model.weights import Weights
from pyruntime.ops.dequant import dequantize
from pyruntime.ops.gemm import ALIGNMENT, choice, gemm

if TYPE_CHECKING:
    from pyruntime.gguf import GGUFFile, TensorInfo

HEAD_ROWS = 1024  # of the output matrix that a slot has room for at least, with their logits
_ALIGNMENT = 256  # bytes, of matrices in a slot
_BLOCK = 128  # a block of the output matrix has a multiple of so many rows; the last one any number


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _matrices(c: ModelConfig, layer: int) -> dict[str, Placement]:
    """The arrays of a layer that are dequantized."""
    placements = layer_placements(c, layer)
    return {name: p for name, p in placements.items() if p.dtype == "float16"}


def _slot_bytes(c: ModelConfig, max_tokens: int) -> int:
    layer = sum(_aligned(p.nbytes) for p in _matrices(c, 0).values())
    rows = min(HEAD_ROWS, -(-c.vocab // _BLOCK) * _BLOCK)
    return max(layer, _aligned((2 * c.hidden + 4 * max_tokens) * rows) + _ALIGNMENT)


def scratch_bytes(c: ModelConfig, max_tokens: int) -> int:
    """Device bytes of the slots, and of the word in which dequantizing leaves its overflows."""
    return SLOTS * _slot_bytes(c, max_tokens) + 4


class StreamedWeights:
    """Weights that `Decoder` takes as it takes `Weights`; in `layers` matrices are views of slots.

    They hold what they should within a pass, `body` and then `head`, and at no other time.

    Args:
        max_tokens: rows of a pass.
        progress: called with the number of file bytes of each piece that has arrived.
        alike: how the rows of q/k/v shall lie, see `pyruntime.ops.qkv`; 0: as in the file.
        invariant: of the product with the output matrix, see `ops.gemm.gemm`.

    Raises:
        OutOfMemoryError, GGUFError, NumericalError: see `Weights`.
    """

    def __init__(
        self,
        file: GGUFFile,
        config: ModelConfig,
        library: Library,
        max_tokens: int,
        progress: Callable[[int], object],
        alike: int = 0,
        invariant: bool = False,
    ) -> None:
        self.alike = alike
        self._invariant = invariant
        self._config, self._library = config, library
        self._output = file.tensors["token_embd.weight" if config.tied else "output.weight"]
        self._checked: list[str] = []  # tensor names; their place is their overflow site
        self._resources = ExitStack()
        own = self._resources.enter_context
        try:
            packed = own(closing(Weights(file, config, library, progress, alike, "per-layer")))
            self.embedding_type, self.outer = packed.embedding_type, packed.outer
            size, nbytes = _slot_bytes(config, max_tokens), scratch_bytes(config, max_tokens)
            scratch = own(closing(DeviceArray(library.device, (nbytes,), np.uint8, what="slots")))
            self._slots = [scratch.view(slot * size, (size,), np.uint8) for slot in range(SLOTS)]
            self._overflow = scratch.view(SLOTS * size, (1,), np.int32)
            self.pipeline = own(closing(Pipeline(library.device)))
            views = [_views(config, slot) for slot in self._slots]
            self.layers = [held | views[i % SLOTS] for i, held in enumerate(packed.layers)]
            self._fills = [self._fill(file, layer) for layer in range(config.layers)]
            self._head_fills = [self._head_fill(*block) for block in self._blocks(1)]
            self._check(file)
        except BaseException:
            with suppress(CudaError):  # the first failure is the one to report
                self.close()
            raise

    def body(self, sections: Sequence[Program], kept: int) -> Pass:
        """The part of a pass before the output matrix, of which it dequantizes the first block.

        Args:
            sections: what comes before the first layer, and each layer from its first matrix on.
            kept: the rows of which `head` may be asked for; 0: there will be no head.
        """
        before, *layers = sections
        steps = [Step(fill, use) for fill, use in zip(self._fills, layers, strict=True)]
        if kept:
            steps.append(Step(self._head_fill(*self._blocks(kept)[0]), use=Program()))
        return Pass(before, steps=steps, pipeline=self.pipeline)

    def head(
        self,
        before: Program,
        after: Program,
        *,
        normed: DeviceArray,
        wanted: DeviceArray,
        logits: DeviceArray,
        kept: int,
        ready: bool = True,
    ) -> Pass:
        """The rest of it: logits = normed · output matrixᵀ.

        Args:
            before: what makes `normed`. after: what is done with the logits.
            normed: float16 [wanted rows or more, hidden].
            wanted: int32, the count of wanted rows on the device.
            logits: float32 [wanted rows, vocab].
            kept: what `body` was told.
            ready: whether this is the first head after that body.
        """
        steps = self._head(normed, wanted, logits, kept, ready)
        return Pass(before, after, steps, self.pipeline)

    def _fill(self, file: GGUFFile, layer: int) -> Program:
        """Dequantizes the matrices of a layer into its slot."""
        program, arrays = Program(), self.layers[layer]
        for name, placement in _matrices(self._config, layer).items():
            for source in placement.sources:
                tensor = file.tensors[source.tensor]
                self._dequantize(program, tensor, arrays[tensor.name], arrays[name], source)
        return program

    def _dequantize(
        self,
        program: Program,
        tensor: TensorInfo,
        packed: DeviceArray,
        out: DeviceArray,
        source: Source,
    ) -> None:
        """Records the dequantization of `packed`, rows of `tensor`, to where `source` says."""
        assert tensor.type is not None  # unknown types were refused with the config
        if tensor.name not in self._checked:
            self._checked.append(tensor.name)
        with program.role("dequantize"):
            dequantize(
                program, self._library, type_name=tensor.type.name, source=packed,
                rows=packed.shape[0], columns=tensor.shape[1], out=out, row0=source.row0,
                row_step=source.row_step, overflow=self._overflow,
                site=self._checked.index(tensor.name),
            )  # fmt: skip

    def _blocks(self, count: int) -> list[tuple[DeviceArray, int, int]]:
        """Slot, first row and rows of each block of the output matrix, for `count` rows at most."""
        c = self._config
        row_bytes = 2 * c.hidden + (4 * count if count > 1 else 0)
        rows = (self._slots[0].nbytes - _ALIGNMENT) // row_bytes // _BLOCK * _BLOCK
        firsts = range(0, c.vocab, rows)
        return [
            (self._slots[(c.layers + i) % SLOTS], first, min(rows, c.vocab - first))
            for i, first in enumerate(firsts)
        ]

    def _head_fill(self, slot: DeviceArray, first: int, rows: int) -> Program:
        """Dequantizes a block of the output matrix to the start of a slot."""
        program = Program()
        whole = self.outer["embedding" if self._config.tied else self._output.name]
        out = slot.view(0, (rows, self._config.hidden), np.float16)
        part = whole.rows(first, first + rows)
        self._dequantize(program, self._output, part, out, Source(self._output.name))
        return program

    def _head(
        self, normed: DeviceArray, wanted: DeviceArray, logits: DeviceArray, kept: int, ready: bool
    ) -> list[Step]:
        """The output matrix, block by block; each gives some columns of the logits. If `ready` the
        first one is there already.

        Columns of a single row are dense. Those of several are not, and one that is not aligned,
        after others of an odd length, is no place for whole columns: such a block is made behind
        the weights in the slot, and copied from there.
        """
        c, (count, _) = self._config, logits.shape
        # As for the whole product: rows of the table that split k round otherwise than others.
        kernel = choice(self._library, "f32", count, c.vocab, c.hidden, self._invariant, False)
        blocks = self._blocks(kept)
        fills = [self._head_fill(*b) for b in blocks] if kept > 1 else list(self._head_fills)
        if ready:
            fills[0] = Program()
        steps = []
        for fill, (slot, first, rows) in zip(fills, blocks, strict=True):
            w, after = slot.view(0, (rows, c.hidden), np.float16), None
            if count == 1 and not logits.ptr % ALIGNMENT:
                out = logits.view(4 * first, (1, rows), np.float32)
            else:
                out = slot.view(_aligned(w.nbytes), (count, rows), np.float32)
                to = logits.ptr + 4 * first
                after = partial(_copy_block, to=to, pitch=4 * c.vocab, block=out)
            use = Program()
            with use.role("head"):
                gemm(
                    use, self._library, a=normed, w=w, c=out, rows=wanted, max_rows=count,
                    epilogue="f32", kernel=kernel,
                )  # fmt: skip
            steps.append(Step(fill, use, after))
        return steps

    def _check(self, file: GGUFFile) -> None:
        """Dequantizes everything once, as no pass looks at the word that says what overflowed."""
        self._overflow.upload(np.array([NO_OVERFLOW]))
        with self._library.device.current():
            for program in (*self._fills, *self._head_fills):
                program.run(self.pipeline.stream)
            self.pipeline.stream.synchronize()
        if (site := int(np.asarray(self._overflow)[0])) != NO_OVERFLOW:
            raise beyond_fp16(file, self._checked[site])

    def close(self) -> None:
        """Frees all weights and the slots. Idempotent."""
        self._resources.close()


def _views(c: ModelConfig, slot: DeviceArray) -> dict[str, DeviceArray]:
    """The matrices of a layer in a slot."""
    views, at = {}, 0
    for name, placement in _matrices(c, 0).items():
        views[name] = slot.view(at, placement.shape, placement.dtype)
        at += _aligned(placement.nbytes)
    return views


def _copy_block(stream: Stream, *, to: int, pitch: int, block: DeviceArray) -> None:
    count, columns = block.shape
    stream.copy_columns(to, pitch, block.ptr, 4 * columns, count)
