"""`pyruntime synth`: write a GGUF file with a real model's shapes and random weights.

Such a file loads and runs like the real one, at the same speed, and needs no download. Its
activations stay finite and its logits of order 1: every matrix has mean 0 and the standard
deviation 1/sqrt(columns), norms are 1, biases small.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pyruntime.gguf import QuantType


@dataclass(frozen=True)
class Shape:
    """The sizes in a model's config.json."""

    arch: str
    pre: str  # tokenizer.ggml.pre
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    rope_base: float
    eps: float
    tied: bool

    @property
    def biased(self) -> bool:
        """Whether q, k and v have biases."""
        return self.arch == "qwen2"


# fmt: off
MODELS = {
    "qwen2.5-7b": Shape(
        "qwen2", "qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 131072, 1e6, 1e-6, False),
    "qwen2.5-0.5b": Shape(
        "qwen2", "qwen2", 24, 896, 14, 2, 64, 4864, 151936, 32768, 1e6, 1e-6, True),
    "llama-3-8b": Shape(
        "llama", "llama-bpe", 32, 4096, 32, 8, 128, 14336, 128256, 8192, 5e5, 1e-5, False),
    "smollm2-135m": Shape(
        "llama", "smollm", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e5, 1e-5, True),
    "tiny": Shape(
        "qwen2", "qwen2", 2, 256, 4, 2, 64, 512, 512, 4096, 1e6, 1e-6, False),
}
# fmt: on

# All matrices of one type and width are cut from one random pool of blocks, each from another
# place. A prime above every vocabulary here, so that no matrix has two equal rows.
POOL_BLOCKS = 163841

# llama.cpp's choice for rows that are not whole blocks of 256.
FALLBACK = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
}

# Types that gguf-py cannot quantize to: the offset of the fp16 scale d in a block, that of dmin,
# and the ratio dmin / d that gives the values the mean 0 (the middle of the range of the quants).
SCALES: dict[str, tuple[int, int | None, float]] = {
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0),
    "IQ4_NL": (0, None, 0),
    "IQ4_XS": (0, None, 0),
}


@dataclass(frozen=True)
class Tensor:
    """One tensor to write; `shape` is in NumPy order."""

    name: str
    shape: tuple[int, ...]
    type: QuantType

    @property
    def nbytes(self) -> int:
        return self.type.nbytes(math.prod(self.shape))


def tensors(shape: Shape, mix: str) -> Iterator[Tensor]:
    """The tensors of a model in the order of the file. `mix`: Q4_K_M, or one type for all matrices.

    Raises ValueError for a type that does not exist.
    """
    from pyruntime.gguf import by_name

    base, better = ("Q4_K", "Q6_K") if mix.upper() == "Q4_K_M" else (mix, mix)

    def matrix(name: str, rows: int, columns: int, type_name: str = base) -> Tensor:
        quant = by_name(type_name)
        if columns % quant.block:
            quant = by_name(FALLBACK[quant.name])
        return Tensor(f"{name}.weight", (rows, columns), quant)

    def vector(name: str, size: int) -> Tensor:
        return Tensor(name, (size,), by_name("F32"))

    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield matrix("token_embd", shape.vocab, hidden, better if shape.tied else base)
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        chosen = better if _more_bits(layer, shape.layers) else base
        yield vector(f"{block}.attn_norm.weight", hidden)
        for part, rows, type_name in (("q", q, base), ("k", kv, base), ("v", kv, chosen)):
            yield matrix(f"{block}.attn_{part}", rows, hidden, type_name)
            if shape.biased:
                yield vector(f"{block}.attn_{part}.bias", rows)
        yield matrix(f"{block}.attn_output", hidden, q)
        yield vector(f"{block}.ffn_norm.weight", hidden)
        yield matrix(f"{block}.ffn_gate", shape.ffn, hidden)
        yield matrix(f"{block}.ffn_up", shape.ffn, hidden)
        yield matrix(f"{block}.ffn_down", hidden, shape.ffn, chosen)
    yield vector("output_norm.weight", hidden)
    if not shape.tied:
        yield matrix("output", shape.vocab, hidden, better)


def _more_bits(layer: int, layers: int) -> bool:
    """The layers whose attn_v and ffn_down llama.cpp's Q4_K_M stores as Q6_K."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def random_blocks(
    quant: QuantType, count: int, std: float, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """uint8 [count, quant.bytes]: blocks whose values have mean 0 and standard deviation `std`."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    kind = GGMLQuantizationType(quant.id)
    blocks: NDArray[np.uint8]
    if quant.name not in SCALES:
        values = rng.standard_normal((count, quant.block), np.float32) * np.float32(std)
        blocks = quantize(values, kind).view(np.uint8)
        return blocks
    blocks = rng.integers(0, 256, (count, quant.bytes), np.uint8)
    # Each group's scale is its minimum, too, so that its mean is 0.
    if quant.name == "Q2_K":
        blocks[:, :16] = (blocks[:, :16] & 15) * 17
    elif quant.name in ("Q4_K", "Q5_K"):
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    scale_at, min_at, middle = SCALES[quant.name]
    scales = rng.uniform(0.5, 1.5, (count, 1))
    if min_at is None:
        scales *= rng.choice([-1, 1], (count, 1))  # the quants' own mean is not quite 0
    unit = 1.0
    for factor in (1.0, std):
        blocks[:, scale_at : scale_at + 2] = (scales * factor / unit).astype("<f2").view(np.uint8)
        if min_at is not None:
            minima = scales * middle * factor / unit
            blocks[:, min_at : min_at + 2] = minima.astype("<f2").view(np.uint8)
        unit = dequantize(blocks[:4096], kind).std()
    return blocks


def _vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Tokens of a byte-level BPE: the 256 bytes in GPT-2's letters, a few words, fillers, an end.

    With them the merges that make the words.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    letters = [chr(byte if byte in plain else next(others)) for byte in range(256)]
    space = letters[0x20]
    merges = ["t h", "th e", f"{space} the", "i n", "a n", "an d", f"{space} and"]
    tokens = letters + [merge.replace(" ", "") for merge in merges]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size - 1)]
    return [*tokens, "<|endoftext|>"], merges


def _header(part: Path, name: str, shape: Shape, infos: list[Tensor]) -> Any:
    """A gguf.GGUFWriter of a file that is complete up to the data of the tensors."""
    import gguf
    import numpy as np

    tokens, merges = _vocabulary(shape.vocab)
    normal, control, unused = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
    words = 256 + len(merges)
    writer = gguf.GGUFWriter(part, shape.arch)
    writer.add_name(f"{name} (synthetic)")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.pre)
    writer.add_token_list(tokens)
    writer.add_token_types([normal] * words + [unused] * (shape.vocab - words - 1) + [control])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(shape.vocab - 1)
    writer.add_eos_token_id(shape.vocab - 1)
    writer.add_add_bos_token(False)
    for info in infos:
        kind = gguf.GGMLQuantizationType(info.type.id)
        writer.add_tensor_info(info.name, info.shape, np.dtype("f4"), info.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def _data(info: Tensor, pools: dict[object, memoryview], rng: np.random.Generator) -> Iterator[Any]:
    """The bytes of a tensor in large pieces. `pools` keeps the random blocks between calls."""
    import numpy as np

    if len(info.shape) == 1:
        bias = info.name.endswith(".bias")
        yield (rng.normal(0, 0.1, info.shape) if bias else np.ones(info.shape)).astype("<f4").data
        return
    columns = info.shape[-1]
    if (info.type, columns) not in pools:
        blocks = random_blocks(info.type, POOL_BLOCKS, columns**-0.5, rng)
        pools[info.type, columns] = blocks.reshape(-1).data
    pool = pools[info.type, columns]
    start, left = int(rng.integers(POOL_BLOCKS)) * info.type.bytes, info.nbytes
    while left:
        piece = pool[start : start + left]
        yield piece
        start, left = 0, left - len(piece)


def write(path: Path, name: str, shape: Shape, mix: str = "Q4_K_M", seed: int = 0) -> int:
    """Write a model to `path`, which appears only when it is complete, and return its tensors.

    Raises OSError, and ValueError for an unknown `mix`; the text names the file.
    """
    infos = list(tensors(shape, mix))
    total = sum(info.nbytes for info in infos)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():
            raise OSError("exists and is no file")
        free = shutil.disk_usage(path.parent).free
        if free < total:
            raise OSError(f"needs {total / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB left")
        _write(part, name, shape, infos, seed)
        part.replace(path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return len(infos)


def _write(part: Path, name: str, shape: Shape, infos: list[Tensor], seed: int) -> None:
    import numpy as np
    from tqdm import tqdm

    rng = np.random.default_rng(seed)
    pools: dict[object, memoryview] = {}
    total = sum(info.nbytes for info in infos)
    with (
        closing(_header(part, name, shape, infos)) as writer,
        tqdm(desc="writing", total=total, unit="B", unit_scale=True, disable=None) as bar,
    ):
        file = writer.fout[0]
        writer.write_padding(file, file.tell())
        for info in infos:
            for piece in _data(info, pools, rng):
                file.write(piece)
                bar.update(piece.nbytes)
            writer.write_padding(file, info.nbytes)


def main(argv: list[str] | None = None) -> int:
    """The command. Raises OSError and ValueError, as `write` does."""
    from pyruntime.commands.options import add_json, print_json

    parser = argparse.ArgumentParser("pyruntime synth", description=__doc__)
    parser.add_argument("model", choices=MODELS, help="whose shapes to take")
    parser.add_argument("path", type=Path, help="the .gguf file to write")
    parser.add_argument("--type", default="Q4_K_M", help="Q4_K_M (default), or one type: Q8_0, F16")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default 0)")
    add_json(parser)
    args = parser.parse_args(argv)
    shape = MODELS[args.model]
    if args.layers is not None:
        shape = replace(shape, layers=args.layers)
    if shape.layers < 1 or args.seed < 0:
        parser.error("--layers must be at least 1, --seed at least 0")
    start = time.perf_counter()
    count = write(args.path, args.model, shape, args.type, args.seed)
    seconds = time.perf_counter() - start
    size = args.path.stat().st_size
    if args.json:
        record = {"path": str(args.path), "bytes": size, "tensors": count, "seconds": seconds}
        print_json("synth", record)
    else:
        print(f"{args.path}: {size / 1e9:.3f} GB, {count} tensors, {seconds:.1f} s")
    return 0
