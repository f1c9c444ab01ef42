"""Embedding rows and wanted rows: exact copies, and nothing else written. One row's logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blocks import TYPES, block_of, dequantized, random_blocks

from pyruntime.driver.program import Program
from pyruntime.ops.rows import embed, gather, packed_logits

COLUMNS = [256, 768, 3584]
QUANTIZED = [name for name in TYPES if name not in ("F32", "F16", "BF16")]
LOGITS_ERROR = 5e-7  # of the sum of the sizes of its products: float32 sums, a fast inverse root


@pytest.mark.smoke
@pytest.mark.parametrize(("live", "rows"), [(1, 1), (5, 8), (130, 130)])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("type_name", TYPES)
def test_embed(
    gpu: Any, rng: np.random.Generator, type_name: str, columns: int, live: int, rows: int
) -> None:
    vocab = 300
    blocks = vocab * columns // block_of(type_name)[0]
    table = random_blocks(type_name, blocks, rng).reshape(vocab, -1)
    ids = np.full(rows, -1, np.int32)  # past the live rows: no token, must not be looked up
    ids[:live] = rng.integers(0, vocab, live)
    ids[live - 1] = vocab - 1
    x = gpu.empty((rows, columns), np.float32)
    program = Program()
    embed(
        program,
        gpu.library,
        rows=gpu.upload(np.array([live], np.int32)),
        max_rows=rows,
        ids=gpu.upload(ids),
        table=gpu.upload(table),
        type_name=type_name,
        x=x,
    )
    gpu.run(program)
    got = gpu.download(x)
    np.testing.assert_array_equal(
        got[:live], dequantized(type_name, table[ids[:live]]).reshape(live, -1)
    )
    assert (got[live:].view(np.uint32) == 0xFFFFFFFF).all()


def test_embed_scales(gpu: Any, rng: np.random.Generator) -> None:
    """One rounding in float32, as Gemma multiplies by the root of the width."""
    table, ids = rng.standard_normal((50, 2304)).astype(np.float16), np.arange(50, dtype=np.int32)
    x, scale, program = gpu.empty((50, 2304), np.float32), 48.0**0.5, Program()
    embed(
        program, gpu.library, rows=gpu.upload(np.array([50], np.int32)), max_rows=50,
        ids=gpu.upload(ids), table=gpu.upload(table.view(np.uint8)), type_name="F16", x=x,
        scale=scale,
    )  # fmt: skip
    gpu.run(program)
    want = table.astype(np.float32) * np.float32(scale)
    np.testing.assert_array_equal(gpu.download(x), want)


@pytest.mark.smoke
@pytest.mark.parametrize(("live", "rows"), [(1, 1), (3, 5), (130, 130)])
@pytest.mark.parametrize(("columns", "width"), [(256, 256), (576, 576), (1024, 2048), (896, 64)])
def test_gather(
    gpu: Any, rng: np.random.Generator, columns: int, width: int, live: int, rows: int
) -> None:
    x = rng.standard_normal((150, columns)).astype(np.float32)
    a = rng.standard_normal((150, width)).astype(np.float16)
    index = np.full(rows, -1, np.int32)
    index[:live] = rng.integers(0, 150, live)
    index[0] = 149
    x_out, a_out = gpu.empty((rows, columns), np.float32), gpu.empty((rows, width), np.float16)
    program = Program()
    gather(
        program,
        gpu.library,
        wanted=gpu.upload(np.array([live], np.int32)),
        max_wanted=rows,
        index=gpu.upload(index),
        x=gpu.upload(x),
        x_out=x_out,
        a=gpu.upload(a),
        a_out=a_out,
    )
    gpu.run(program)
    got_x, got_a = gpu.download(x_out), gpu.download(a_out)
    np.testing.assert_array_equal(got_x[:live], x[index[:live]])
    np.testing.assert_array_equal(got_a[:live], a[index[:live]])
    assert (got_x[live:].view(np.uint32) == 0xFFFFFFFF).all()
    assert (got_a[live:].view(np.uint16) == 0xFFFF).all()


def packed_case(
    gpu: Any, rng: np.random.Generator, type_name: str, columns: int, vocab: int, live: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What was stored, 64 guards included; the truth; sums of the products' sizes."""
    blocks = vocab * columns // block_of(type_name)[0]
    table = random_blocks(type_name, blocks, rng).reshape(vocab, -1)
    x, weight = 30 * rng.standard_normal((1, columns)), rng.standard_normal(columns)
    guarded, program = gpu.empty((1, vocab + 64), np.float32), Program()
    packed_logits(
        program, gpu.library, rows=gpu.upload(np.array([live], np.int32)),
        x=gpu.upload(x.astype(np.float32)), weight=gpu.upload(weight.astype(np.float32)),
        eps=1e-5, table=gpu.upload(table), type_name=type_name,
        c=guarded.view(0, (1, vocab), np.float32),
    )  # fmt: skip
    gpu.run(program)
    x, weight = (a.astype(np.float32).astype(np.float64) for a in (x, weight))
    y = (x / np.sqrt((x**2).mean() + 1e-5) * weight)[0]
    w = dequantized(type_name, table).reshape(vocab, -1).astype(np.float64)
    return gpu.download(guarded)[0], w @ y, np.abs(w) @ np.abs(y)


@pytest.mark.smoke
@pytest.mark.parametrize("columns", [*COLUMNS, 8192])
@pytest.mark.parametrize("type_name", QUANTIZED)
def test_packed_logits(gpu: Any, rng: np.random.Generator, type_name: str, columns: int) -> None:
    """In float32 throughout; rows that end within a warp's, and within a block's."""
    for vocab in (1, 75, 300):
        got, want, sizes = packed_case(gpu, rng, type_name, columns, vocab)
        assert (np.abs(got[:vocab] - want) <= LOGITS_ERROR * sizes).all(), vocab
        assert (got[vocab:].view(np.uint32) == 0xFFFFFFFF).all()


@pytest.mark.parametrize(("type_name", "columns"), [("Q8_0", 576), ("Q8_0", 896), ("Q6_K", 2304)])
def test_packed_logits_of_a_large_vocabulary(
    gpu: Any, rng: np.random.Generator, type_name: str, columns: int
) -> None:
    """Blocks stride over the table. A row may end within a warp's 32 units."""
    got, want, sizes = packed_case(gpu, rng, type_name, columns, 50_003)
    assert (np.abs(got[:50_003] - want) <= LOGITS_ERROR * sizes).all()
    assert (got[50_003:].view(np.uint32) == 0xFFFFFFFF).all()


def test_packed_logits_of_no_row(gpu: Any, rng: np.random.Generator) -> None:
    got, _, _ = packed_case(gpu, rng, "Q8_0", 256, 75, live=0)
    assert (got.view(np.uint32) == 0xFFFFFFFF).all()


def test_what_does_not_fit_is_refused(gpu: Any) -> None:
    count, ids = gpu.empty((1,), np.int32), gpu.empty((4,), np.int32)
    table, x = gpu.empty((10, 128), np.uint8), gpu.empty((4, 64), np.float32)
    good = {
        "rows": count, "max_rows": 4, "ids": ids, "table": table, "type_name": "F16", "x": x,
    }  # fmt: skip
    for bad in (
        {"x": gpu.empty((4, 32), np.float32)},
        {"x": gpu.empty((4, 64), np.float16)},
        {"type_name": "Q8_0"},
        {"max_rows": 5},
    ):
        with pytest.raises(ValueError, match="embed"):
            embed(Program(), gpu.library, **{**good, **bad})
    a, a_out = gpu.empty((10, 64), np.float16), gpu.empty((4, 64), np.float16)
    good = {
        "wanted": count, "max_wanted": 4, "index": ids, "x": x, "x_out": x, "a": a, "a_out": a_out,
    }  # fmt: skip
    for bad in (
        {"a_out": gpu.empty((4, 32), np.float16)},
        {"a": gpu.empty((10, 64), np.float32)},
        {"max_wanted": 5},
    ):
        with pytest.raises(ValueError, match="gather"):
            gather(Program(), gpu.library, **{**good, **bad})
