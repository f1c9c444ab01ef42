"""Products that models have, at prompt lengths drawn at random: what bench/gemm_choice.py times.

Needs no GPU. The two sets have no product (n, k, epilogue) in common: constants are fitted to one
and judged on the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

LONGEST = 8192
SPECIAL = (1, 1, 2, 8, 16, 17, 32, 64, 65, 128, 129, 256, 512, 1024, 2048, 3325, 4096, LONGEST)
SPECIAL_SHARE = 0.3  # of the lengths are from SPECIAL; the others log-uniform from 1 to LONGEST
HEAD_ROWS = 64  # the most rows of which logits are wanted
HEAD_SHARE = 0.06  # of the cases are the output matrix
COUNTS = {"fit": 240, "held-out": 200}
SEEDS = {"fit": 1, "held-out": 2}
# All layer products of this model at these lengths are among those that are fitted.
ALWAYS, LENGTHS = "qwen2.5-7b", (1, 16, 64, 128, 512, 2048, 4096, 8192)


@dataclass(frozen=True)
class Sizes:
    """Of a model: what its config.json says; `q` and `kv` are heads x head dim."""

    hidden: int
    q: int
    kv: int
    ffn: int
    vocab: int
    gate: str = "swiglu"
    joins: str = "add"  # "f32" where a norm stands between a block and the residual stream

    def products(self) -> Iterator[Product]:
        """Of a layer."""
        yield Product(self.q + 2 * self.kv, self.hidden, "f32")
        yield Product(self.hidden, self.q, self.joins)
        yield Product(2 * self.ffn, self.hidden, self.gate)
        yield Product(self.hidden, self.ffn, self.joins)

    def head(self) -> Product:
        return Product(self.vocab, self.hidden, "f32")


class Product(NamedTuple):
    """A [m, k] · W [n, k]ᵀ and what follows it."""

    n: int
    k: int
    epilogue: str


class Case(NamedTuple):
    """A product of m rows."""

    m: int
    n: int
    k: int
    epilogue: str

    @property
    def flop(self) -> int:
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.epilogue} {self.m} x {self.n} x {self.k}"


_GEMMA = {"gate": "geglu", "joins": "f32"}
MODELS = {
    "fit": {
        "qwen2.5-1.5b": Sizes(1536, 1536, 256, 8960, 151936),
        "qwen2.5-7b": Sizes(3584, 3584, 512, 18944, 152064),
        "qwen2.5-14b": Sizes(5120, 5120, 1024, 13824, 152064),
        "llama-3.2-1b": Sizes(2048, 2048, 512, 8192, 128256),
        "llama-3-8b": Sizes(4096, 4096, 1024, 14336, 128256),
        "gemma-2-2b": Sizes(2304, 2048, 1024, 9216, 256000, **_GEMMA),
        "gemma-3-4b": Sizes(2560, 2048, 1024, 10240, 262208, **_GEMMA),
        "smollm2-360m": Sizes(960, 960, 320, 2560, 49152),
        "phi-3-mini": Sizes(3072, 3072, 3072, 8192, 32064),
    },
    "held-out": {
        "qwen2.5-0.5b": Sizes(896, 896, 128, 4864, 151936),
        "qwen2.5-3b": Sizes(2048, 2048, 256, 11008, 151936),
        "qwen3-4b": Sizes(2560, 4096, 1024, 9728, 151936),
        "llama-3.2-3b": Sizes(3072, 3072, 1024, 8192, 128256),
        "mistral-7b": Sizes(4096, 4096, 1024, 14336, 32768),
        "gemma-2-9b": Sizes(3584, 4096, 2048, 14336, 256000, **_GEMMA),
        "gemma-3-1b": Sizes(1152, 1024, 256, 6912, 262144, **_GEMMA),
        "smollm2-135m": Sizes(576, 576, 192, 1536, 49152),
        "smollm2-1.7b": Sizes(2048, 2048, 2048, 8192, 49152),
        "phi-3-medium": Sizes(5120, 5120, 1280, 17920, 32064),
    },
}


def products(which: str) -> tuple[list[Product], list[Product]]:
    """Of the layers, and the output matrices, of a set's models; each once."""
    layers = dict.fromkeys(p for sizes in MODELS[which].values() for p in sizes.products())
    heads = dict.fromkeys(sizes.head() for sizes in MODELS[which].values())
    if which == "held-out":
        fitted = {product for found in products("fit") for product in found}
        return [p for p in layers if p not in fitted], [p for p in heads if p not in fitted]
    return list(layers), list(heads)


def cases(which: str) -> list[Case]:
    """The cases of "fit" or "held-out": the same in every process, none twice."""
    rng = random.Random(SEEDS[which])
    layers, heads = products(which)
    found: dict[Case, None] = {}
    if which == "fit":
        always = MODELS[which][ALWAYS].products()
        found |= {Case(m, *product): None for product in always for m in LENGTHS}
    while len(found) < COUNTS[which]:
        head = rng.random() < HEAD_SHARE
        most = HEAD_ROWS if head else LONGEST
        drawn = [m for m in SPECIAL if m <= most]
        special = rng.random() < SPECIAL_SHARE
        m = rng.choice(drawn) if special else round(most ** rng.random())
        found[Case(m, *rng.choice(heads if head else layers))] = None
    return list(found)
