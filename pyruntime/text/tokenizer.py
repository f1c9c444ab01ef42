"""Text to token ids and back, from the vocabulary that a GGUF file carries.

Two kinds: byte-level BPE with the pre-tokenizers of `pretokenizers`, and sentencepiece BPE
(Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226), where a space is the character ▁,
text starts with one, and a character without a piece becomes the tokens of its UTF-8 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyruntime.errors import TokenizerError
from pyruntime.text.vocabulary import TokenType, Vocabulary

_SPACE = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")

# GPT-2's characters for bytes: the printable ones stand for themselves, the others follow from 256.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_BYTE_OF_CHAR = {256 + n: byte for n, byte in enumerate(sorted(set(range(256)) - _PRINTABLE))}


class Tokenizer:
    """Encodes and decodes as the model was trained to. Any number of threads may use one.

    `bos_id`, `eos_id`, `unk_id` are None where the model has none; `adds_bos` tells whether BOS is
    put before a text, `adds_space` whether a space is; `eos_ids` are all tokens that end a
    generation; `chat_template` is the Jinja source for `pyruntime.text.chat.render`.
    """

    def __init__(self, vocabulary: Vocabulary, chat_template: str | None = None) -> None:
        self._vocabulary = vocabulary
        self.vocab_size = len(vocabulary.ids)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.unk_id = vocabulary.unk_id
        self.eos_ids = vocabulary.eos_ids
        self.adds_bos = vocabulary.add_bos
        self.adds_space = vocabulary.add_space_prefix
        self.chat_template = chat_template
        types = vocabulary.types
        special = np.isin(types, (TokenType.UNKNOWN, TokenType.CONTROL))
        special[list(vocabulary.eos_ids)] = True
        user_defined = (types == TokenType.USER_DEFINED) & ~special
        self._special = frozenset(np.flatnonzero(special).tolist())
        self._verbatim = self._special | frozenset(np.flatnonzero(user_defined).tolist())
        model = _merging_model(vocabulary)
        self._parsing = self._encoder(model, self._verbatim)
        self._plain = self._encoder(model, self._verbatim - self._special)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """A tokenizer from a GGUF file's metadata.

        Strings are str, numeric arrays NumPy arrays, string arrays sequences of str. Raises
        TokenizerError, naming the key, for a vocabulary that is absent, malformed or of a kind
        that is not supported.
        """
        template = metadata.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise TokenizerError("tokenizer.chat_template: not a string")
        return cls(Vocabulary.from_metadata(metadata), template)

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        goes_on: bool = False,
        parse_special: bool = True,
    ) -> NDArray[np.int32]:
        """The ids of `text`: int32 [tokens].

        `add_special` puts BOS and EOS around it where the model asks for them (leave it off for a
        rendered chat template, which writes its own), and BOS alone before a text that `goes_on`.
        `parse_special` turns the text of a control token into that token; off, it stays ordinary
        text. Raises TokenizerError for text that UTF-8 cannot express (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text: character {error.start} is a lone surrogate") from None
        encoder = self._parsing if parse_special else self._plain
        ids = encoder.encode(text, add_special_tokens=False).ids
        if add_special and self._vocabulary.add_bos:
            ids.insert(0, self.bos_id)
        if add_special and self._vocabulary.add_eos and not goes_on:
            ids.append(self.eos_id)
        return np.array(ids, np.int32)

    def decode(
        self, ids: Sequence[int] | NDArray[np.integer[Any]], *, skip_special: bool = False
    ) -> str:
        """The text of `ids` [tokens], with U+FFFD where their bytes are not UTF-8.

        `skip_special` leaves control tokens out. The space that encoding puts in front of text
        (sentencepiece kind) is removed again. Raises TokenizerError for an id out of range.
        """
        shown = [id for id in self._checked(ids) if not (skip_special and id in self._special)]
        return b"".join(self.pieces(shown)).decode(errors="replace")

    def pieces(
        self, ids: Sequence[int] | NDArray[np.integer[Any]], *, begins: bool = True
    ) -> list[bytes]:
        """The UTF-8 bytes that each of `ids` [tokens] adds to the text, which may cut characters.

        The space that encoding puts in front of text is none of them where the text `begins` with
        these. Raises TokenizerError for an id out of range.
        """
        checked = self._checked(ids)
        pieces = [self._bytes(id) for id in checked]
        if begins and self._vocabulary.add_space_prefix:
            first = next((n for n, id in enumerate(checked) if id not in self._verbatim), None)
            if first is not None:
                pieces[first] = pieces[first].removeprefix(b" ")
        return pieces

    def token(self, id: int) -> str:
        """The text of one token; bytes that are part of a character are shown as `\\xe2`."""
        return self._bytes(self._checked([id])[0]).decode(errors="backslashreplace")

    def _checked(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> list[int]:
        array = np.asarray(ids)
        if array.size == 0:
            return []
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TokenizerError(f"ids: {array.dtype} {array.shape}, not a row of integers")
        wrong = array[(array < 0) | (array >= self.vocab_size)]
        if wrong.size:
            raise TokenizerError(f"token id {wrong[0]} is outside 0..{self.vocab_size - 1}")
        checked: list[int] = array.tolist()
        return checked

    def _bytes(self, id: int) -> bytes:
        """What a token stands for in the UTF-8 text."""
        piece = self._vocabulary.pieces[id]
        if id in self._verbatim:
            return piece.encode()
        if self._vocabulary.pre is None:
            byte = _BYTE_PIECE.fullmatch(piece)
            return bytes.fromhex(byte[1]) if byte else piece.replace(_SPACE, " ").encode()
        try:
            return piece.translate(_BYTE_OF_CHAR).encode("latin-1")
        except UnicodeEncodeError:  # a piece that is no byte string, such as padding
            return piece.encode()

    def _encoder(self, model: Any, verbatim: frozenset[int]) -> Any:
        """A pipeline around `model` that finds the pieces of `verbatim` ids before all else."""
        import tokenizers
        from tokenizers import normalizers, pre_tokenizers

        encoder = tokenizers.Tokenizer(model)
        pre = self._vocabulary.pre
        if pre is None:
            prefix = [normalizers.Prepend(_SPACE)] if self._vocabulary.add_space_prefix else []
            encoder.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
        else:
            words = [
                pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
                for pattern in pre.patterns
            ]
            to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            encoder.pre_tokenizer = pre_tokenizers.Sequence([*words, to_bytes])
        pieces = (self._vocabulary.pieces[id] for id in sorted(verbatim))
        encoder.add_tokens([tokenizers.AddedToken(piece, normalized=False) for piece in pieces])
        return encoder


def _merging_model(vocabulary: Vocabulary) -> Any:
    """The byte-pair merging of `tokenizers`, without anything around it."""
    from tokenizers import models

    pre, unk_id = vocabulary.pre, vocabulary.unk_id
    try:
        return models.BPE(
            vocab=vocabulary.ids,
            merges=vocabulary.merges,
            unk_token=None if pre or unk_id is None else vocabulary.pieces[unk_id],
            fuse_unk=True,
            byte_fallback=pre is None,
            ignore_merges=pre is not None and pre.ignore_merges,
        )
    except Exception as error:  # nothing more specific is raised for half a merge that is no token
        raise TokenizerError(f"tokenizer.ggml.merges: {str(error)[:200]!r}") from None
