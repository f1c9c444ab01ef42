"""The vocabulary in a GGUF file's metadata, checked.

Keys and token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (section
"Tokenizer"). Defaults and the tokens that end generation: llama.cpp, `src/llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pyruntime.errors import TokenizerError
from pyruntime.text import pretokenizers
from pyruntime.text.pretokenizers import PreTokenizer

# Tokens that end generation: by key and, as files rarely name them all, by text. A plain piece
# with such a text is none of them: "</s>" is an HTML tag in the vocabulary of Qwen2.
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_END_TEXTS = {
    "</s>",
    "<EOT>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<|file_sep|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<reponame>",
}

T = TypeVar("T", bool, int, str)


class TokenType(IntEnum):
    """What a piece is (`tokenizer.ggml.token_type`)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The pieces of a tokenizer and the rules that go with them.

    `ids` maps each piece to its id and is ordered by id; `types` is int32 [len(ids)], values of
    `TokenType`. `merges` are in order of rank. `pre` is None for the sentencepiece kind, which
    does not cut text into words.
    """

    ids: dict[str, int]
    types: NDArray[np.int32]
    merges: list[tuple[str, str]]
    pre: PreTokenizer | None
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool

    @cached_property
    def pieces(self) -> list[str]:
        """The piece of each id."""
        return list(self.ids)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Vocabulary:
        """Read the `tokenizer.ggml.*` keys. Raises TokenizerError that names the key at fault."""
        keys = _Keys(metadata)
        model = keys.get("model", str)
        if model in ("no_vocab", "none"):
            raise keys.error("model", f"{model!r}: the file has token ids only, no vocabulary")
        if model not in ("gpt2", "llama"):
            raise keys.error("model", f"{model[:100]!r} is not supported; supported: gpt2, llama")
        spm = model == "llama"
        pre = None if spm else pretokenizers.by_name(keys.get("pre", str))

        ids = _pieces(keys)
        types = keys.numbers("token_type", "iu", len(ids), default=TokenType.NORMAL)
        bos_id = keys.token_id("bos", ids, default=1 if spm else None)
        eos_id = keys.token_id("eos", ids, default=2 if spm else None)
        ends = {eos_id, *(keys.token_id(name, ids) for name in _END_KEYS)}
        ends |= {
            ids[text]
            for text in _END_TEXTS.intersection(ids)
            if types[ids[text]] != TokenType.NORMAL
        }
        add_bos = keys.get("add_bos_token", bool, default=pre is None or pre.add_bos)
        add_eos = keys.get("add_eos_token", bool, default=False)
        if add_bos and bos_id is None:
            raise keys.error("bos_token_id", "missing, but prompts are to begin with it")
        if add_eos and eos_id is None:
            raise keys.error("eos_token_id", "missing, but prompts are to end with it")
        return cls(
            ids=ids,
            types=types.astype(np.int32),
            merges=_merges_by_score(keys, ids, types) if spm else _merges(keys, ids),
            pre=pre,
            bos_id=bos_id,
            eos_id=eos_id,
            unk_id=keys.token_id("unknown", ids, default=0 if spm else None),
            eos_ids=frozenset(id for id in ends if id is not None),
            add_bos=add_bos,
            add_eos=add_eos,
            add_space_prefix=spm and keys.get("add_space_prefix", bool, default=True),
        )


class _Keys:
    """Typed access to the keys below `tokenizer.ggml.`; every error names the key."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def error(self, key: str, problem: str) -> TokenizerError:
        return TokenizerError(f"tokenizer.ggml.{key}: {problem}")

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if value is None:
            raise self.error(key, "missing")
        if type(value) is not kind:
            raise self.error(key, f"a value of type {type(value).__name__}, not {kind.__name__}")
        return value

    def strings(self, key: str) -> Sequence[str]:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            raise self.error(key, "missing")
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise self.error(key, "not an array of strings")
        return value

    def numbers(
        self, key: str, kinds: str, length: int, default: float | None = None
    ) -> NDArray[Any]:
        """`length` numbers of a dtype whose kind is one of `kinds`."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None and default is not None:
            return np.full(length, default)
        if value is None:
            raise self.error(key, "missing")
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            raise self.error(key, "not an array of numbers of the right type")
        if value.shape != (length,):
            raise self.error(key, f"{value.size} entries for {length} tokens")
        return value

    def token_id(self, name: str, ids: dict[str, int], default: int | None = None) -> int | None:
        key = f"{name}_token_id"
        if default is None and f"tokenizer.ggml.{key}" not in self._metadata:
            return None
        id = self.get(key, int, default)
        if not 0 <= id < len(ids):
            raise self.error(key, f"{id} is not among the {len(ids)} tokens")
        return id


def _pieces(keys: _Keys) -> dict[str, int]:
    """Each piece's id. As in llama.cpp, an empty piece gets a name of its own."""
    pieces = [text or f"[EMPTY_{id}]" for id, text in enumerate(keys.strings("tokens"))]
    ids = {piece: id for id, piece in enumerate(pieces)}
    if len(ids) < len(pieces):
        again = next(id for id, piece in enumerate(pieces) if ids[piece] != id)
        piece = pieces[again]
        raise keys.error("tokens", f"{piece[:100]!r} is both {again} and {ids[piece]}")
    if not ids:
        raise keys.error("tokens", "no tokens")
    return ids


def _merges(keys: _Keys, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of `tokenizer.ggml.merges`, each written as two pieces with a space between.

    Only their unions are looked up here; the halves are when a model is built of them.
    """
    merges = [
        (left, right)
        for left, _, right in (merge.partition(" ") for merge in keys.strings("merges"))
    ]
    if not all(map(ids.__contains__, map("".join, merges))):
        rank = next(i for i, pair in enumerate(merges) if "".join(pair) not in ids)
        problem = "does not join two tokens into a third"
        merge = keys.strings("merges")[rank]
        raise keys.error("merges", f"entry {rank}, {merge[:100]!r}, {problem}")
    return merges


def _merges_by_score(
    keys: _Keys, ids: dict[str, int], types: NDArray[Any]
) -> list[tuple[str, str]]:
    """The merges that sentencepiece's rule amounts to: the pair whose union scores best first.

    Every split of a piece into two pieces is one merge, with the score of the whole.
    """
    scores = keys.numbers("scores", "fiu", len(ids))
    if not np.isfinite(scores).all():
        raise keys.error("scores", "a score that is not finite")
    # Text must not merge into a control token, so that a prompt cannot forge one.
    unmergeable = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE)
    mergeable = ~np.isin(types, unmergeable)
    pieces = {piece for piece, ok in zip(ids, mergeable.tolist(), strict=True) if ok}
    ranked = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in zip(ids, scores.tolist(), strict=True)
        if piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    ranked.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in ranked]
