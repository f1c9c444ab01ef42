"""How text is cut into words before byte-pair merging, by the name in `tokenizer.ggml.pre`.

A GGUF file holds only the name. The expressions are those of each model family's own
`tokenizer.json`, the defaults those that llama.cpp goes by (`src/llama-vocab.cpp`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pyruntime.errors import TokenizerError


@dataclass(frozen=True)
class PreTokenizer:
    """Expressions (Oniguruma syntax) applied one after the other, each cutting out its matches."""

    patterns: tuple[str, ...]
    # A word that is itself a token becomes that token, whatever the merges say.
    ignore_merges: bool = False
    # Whether BOS leads a prompt when the file does not say.
    add_bos: bool = False


def _gpt4_words(digits: str) -> str:
    """Words in the manner of GPT-4: contractions in any case, runs of `digits`, line ends apart."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
        rf"|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_SMOLLM = PreTokenizer((r"\p{N}", _GPT2_WORDS))
_QWEN2 = PreTokenizer((_gpt4_words(r"\p{N}"),))
_LLAMA3 = PreTokenizer((_gpt4_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)

_BY_NAME = {
    "smollm": _SMOLLM,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def by_name(name: str) -> PreTokenizer:
    """The pre-tokenizer called `name`. Raises TokenizerError that lists the supported ones."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise TokenizerError(
            f"tokenizer.ggml.pre: pre-tokenizer {name[:100]!r} is not supported;"
            f" supported: {', '.join(_BY_NAME)}"
        ) from None
