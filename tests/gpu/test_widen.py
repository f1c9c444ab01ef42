"""One layer of an e4m3 cache as fp16, bit for bit, and nothing else read or written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_launch import SEQUENCE

from pyruntime.driver.program import Program
from pyruntime.ops.widen import widen
from pyruntime.reference import e4m3

HEAD_DIMS = (64, 96, 128, 256)
# e4m3::Sequence of cuda/core/e4m3.cuh: row0, rows, start, capacity, k, v, the scales of k, of v.
STORED = np.dtype("<i4, <i4, <i4, <i4, <u8, <u8, <u8, <u8")
LAYERS, LAYER = 3, 1
CODES = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)


def halves(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The bits that are expected."""
    return e4m3.widen(codes, scales).astype(np.float16).view(np.uint16)


class Prompt:
    """A cache with random codes in `layer` up to start + rows; all else holds NaN, here and there.

    `slack` positions are free behind them, and the fp16 layer has `room` more than the cache.
    """

    def __init__(
        self, gpu: Any, rng: Any, kv: int, hd: int, *, start: int, rows: int, slack: int, room: int
    ) -> None:
        self.start, self.rows, self.end = start, rows, start + rows
        self.capacity, self.room = self.end + slack, self.end + slack + room
        shape = (LAYERS, kv, self.capacity)
        self.codes = np.full((2, *shape, hd), 0xFF, np.uint8)
        self.scales = np.full((2, *shape), np.nan, np.float32)
        live = np.s_[:, LAYER, :, : self.end]
        self.codes[live] = rng.choice(CODES, self.codes[live].shape)
        # From what is zero in fp16 to its largest number.
        self.scales[live] = 2.0 ** rng.uniform(-36, 7, self.scales[live].shape)
        self.held = [gpu.upload(array) for array in (*self.codes, *self.scales)]
        self.out = [gpu.empty((kv, self.room, hd), np.float16) for _ in "kv"]

    def entries(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the list of caches, and of the list that attention reads."""
        head = (0, self.rows, self.start)
        return (
            (*head, self.capacity, *(a.ptr for a in self.held)),
            (*head, self.room, *(a.ptr for a in self.out), 0),
        )

    def check(self, gpu: Any) -> None:
        for codes, scales, out in zip(self.codes, self.scales, self.out, strict=True):
            got = gpu.download(out).view(np.uint16)
            live = np.s_[LAYER, :, : self.end]
            np.testing.assert_array_equal(got[:, : self.end], halves(codes[live], scales[live]))
            assert (got[:, self.end :] == 0xFFFF).all()


def launch(
    gpu: Any, prompts: list[Prompt], kv: int, hd: int, *, max_positions: int, unused: int = 0
) -> None:
    """`unused` entries past the live ones have null pointers."""
    stored = np.zeros(len(prompts) + unused, STORED)
    sequences = np.zeros(len(prompts) + unused, SEQUENCE)
    stored[len(prompts) :] = (0, 1000, 0, 1000, 0, 0, 0, 0)
    for i, prompt in enumerate(prompts):
        stored[i], sequences[i] = prompt.entries()
    program = Program()
    widen(
        program,
        gpu.library,
        live=gpu.upload(np.array([0, len(prompts), 0, 0], np.int32)),
        stored=gpu.upload(stored.view(np.uint8)),
        sequences=gpu.upload(sequences.view(np.uint8)),
        max_positions=max_positions,
        max_sequences=len(stored),
        layer=LAYER,
        kv_heads=kv,
        head_dim=hd,
    )
    gpu.run(program)


@pytest.mark.smoke
@pytest.mark.parametrize("hd", HEAD_DIMS)
def test_a_layer(gpu: Any, rng: np.random.Generator, hd: int) -> None:
    prompt = Prompt(gpu, rng, 3, hd, start=37, rows=130, slack=5, room=3)
    launch(gpu, [prompt], 3, hd, max_positions=200)
    prompt.check(gpu)


def test_every_code_at_every_kind_of_scale(gpu: Any, rng: np.random.Generator) -> None:
    """Subnormal codes, scales that make fp16 subnormals or zero, ties of both roundings."""
    scales = np.float32([2.0**-33, 1.33e-10, 2.0**-16, 0.01, 1 / 3, 1.0, 65504 / 448])
    prompt = Prompt(gpu, rng, 1, 256, start=0, rows=len(scales), slack=0, room=0)
    prompt.codes[:, LAYER, 0] = np.resize(CODES, 256)
    prompt.scales[:, LAYER, 0] = scales
    for array, values in zip(prompt.held, (*prompt.codes, *prompt.scales), strict=True):
        array.upload(values)
    launch(gpu, [prompt], 1, 256, max_positions=len(scales))
    prompt.check(gpu)


@pytest.mark.parametrize("hd", HEAD_DIMS)
def test_tile_edges(gpu: Any, rng: np.random.Generator, hd: int) -> None:
    """Around the positions of one load, one turn and two, in one block and in many; no slack."""
    (kernel,) = gpu.library.family("widen")
    turn = int(kernel.spec.tile["elements"]) // hd
    edges = {n + d for n in (turn // 2, turn, 2 * turn) for d in (-1, 0, 1)}
    for end in sorted({1, 2, *edges}):
        prompt = Prompt(gpu, rng, 2, hd, start=end - 1, rows=1, slack=0, room=end % 3)
        launch(gpu, [prompt], 2, hd, max_positions=1 if end % 2 else 4096)
        prompt.check(gpu)


def test_one_block_takes_many_turns(gpu: Any, rng: np.random.Generator) -> None:
    """The bound that sizes the grid decides nothing but who works."""
    prompt = Prompt(gpu, rng, 2, 128, start=3000, rows=1001, slack=7, room=0)
    for bound in (1, 100, 4001, 1 << 20):
        launch(gpu, [prompt], 2, 128, max_positions=bound)
        prompt.check(gpu)
        for array in prompt.out:
            array.fill(0xFF)


@pytest.mark.smoke
@pytest.mark.parametrize("hd", HEAD_DIMS)
def test_packed_sequences(gpu: Any, rng: np.random.Generator, hd: int) -> None:
    lengths = ((33, 0), (64, 200), (0, 0), (1, 0), (0, 9), (5, 1000))
    prompts = [
        Prompt(gpu, rng, 2, hd, start=start, rows=rows, slack=i + (rows == 0), room=i % 2)
        for i, (rows, start) in enumerate(lengths)
    ]
    launch(gpu, prompts, 2, hd, max_positions=1005, unused=2)
    for prompt in prompts:
        prompt.check(gpu)


def test_more_elements_than_31_bits_count(gpu: Any, rng: np.random.Generator) -> None:
    """Of the layer, and in front of it: only the touched layer exists, its address is set back.

    The last position in use is the last of its allocation.
    """
    kv, hd, capacity = 33, 64, 1 << 20
    elements = kv * capacity * hd
    assert (kv - 1) * capacity * hd >= 2**31 and LAYER == 1
    if gpu.device.memory()[0] < 5 * elements + 2**29:
        pytest.skip("needs 12 GB of device memory")
    codes = gpu.empty((kv, capacity, hd), np.uint8, fill=0x38)  # 1.0
    scales = gpu.empty((kv, capacity), np.float32, fill=0x3F)
    out = [gpu.empty((kv, capacity, hd), np.float16) for _ in "kv"]
    last = rng.choice(CODES, (3, hd)), np.exp2(rng.uniform(-9, 7, 3)).astype(np.float32)
    end = (kv - 1) * capacity + capacity - 3
    codes.view(end * hd, (3, hd), np.uint8).upload(last[0])
    scales.view(4 * end, (3,), np.float32).upload(last[1])
    pointers = [codes.ptr - elements] * 2 + [scales.ptr - 4 * kv * capacity] * 2
    pointers = [pointer % 2**64 for pointer in pointers]
    stored = np.array([(0, 5, capacity - 5, capacity, *pointers)], STORED)
    sequences = np.array([(0, 5, capacity - 5, capacity, *(a.ptr for a in out), 0)], SEQUENCE)
    program = Program()
    widen(
        program,
        gpu.library,
        live=gpu.upload(np.array([5, 1, 0, 0], np.int32)),
        stored=gpu.upload(stored.view(np.uint8)),
        sequences=gpu.upload(sequences.view(np.uint8)),
        max_positions=capacity,
        max_sequences=1,
        layer=LAYER,
        kv_heads=kv,
        head_dim=hd,
    )
    gpu.run(program)
    plain = np.full((1, 1), 0x3F3F3F3F, np.uint32).view(np.float32).astype(np.float16)
    for array in out:
        tail = gpu.download(array.view(2 * (end - 1) * hd, (4, hd), np.float16))
        np.testing.assert_array_equal(tail[1:].view(np.uint16), halves(*last))
        for position in (0, kv // 2 * capacity, end - 1):  # of heads one after the other
            row = gpu.download(array.view(2 * position * hd, (1, hd), np.float16))
            np.testing.assert_array_equal(row, np.repeat(plain, hd, axis=1))


def test_a_head_dim_that_is_no_whole_number_of_pieces(gpu: Any) -> None:
    arguments: dict[str, Any] = dict.fromkeys(("live", "stored", "sequences", "layer"), 0)
    for hd in (0, 24, 72):
        with pytest.raises(ValueError, match=f"head dim {hd} is no multiple of 16"):
            widen(
                Program(), gpu.library, max_positions=9, max_sequences=1, kv_heads=1, head_dim=hd,
                **arguments,
            )  # fmt: skip
