"""Token ids as text, token by token: what a completion's `text`, `tokens` and `text_offset` are."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pyruntime.engine import Engine
from pyruntime.errors import TokenizerError
from pyruntime.model.batch import Rows

T = TypeVar("T")

_Decoder = getincrementaldecoder("utf-8")


class Texts:
    """The vocabulary of an engine. Any number of threads may use one.

    A model without a vocabulary takes no text, and the text of a token is its id after a space.

    Attributes:
        stop_ids: the tokens that end a completion.
        adds_bos: whether `encode` begins with a token that stands for none of the text.
    """

    def __init__(self, engine: Engine) -> None:
        self.tokenizer = engine.tokenizer if engine.has_vocabulary else None
        self.stop_ids = frozenset(self.tokenizer.eos_ids if self.tokenizer else ())
        self.adds_bos = self.tokenizer is not None and self.tokenizer.adds_bos
        # Of each token, as soon as it was asked for.
        self._pieces: list[bytes | None] = [None] * engine.config.vocab
        self._quoted: list[str | None] = [None] * engine.config.vocab

    def encode(self, text: str, *, add_special: bool = True) -> Rows:
        """The ids of `text`, int32 [tokens], as a prompt: BOS where the model has it, never EOS.

        Raises TokenizerError: no vocabulary, or text that UTF-8 cannot express.
        """
        if self.tokenizer is None:
            raise TokenizerError("this model has no vocabulary: give token ids instead of text")
        return self.tokenizer.encode(text, add_special=add_special, goes_on=True)

    def pieces(
        self, ids: Sequence[int] | NDArray[np.integer[Any]], *, begins: bool = True
    ) -> list[bytes]:
        """What each of `ids` adds to the text: see `Tokenizer.pieces`."""
        if begins and self.tokenizer is not None and self.tokenizer.adds_space:
            return self._made(np.asarray(ids).tolist(), begins=True)
        return self._looked_up(self._pieces, ids)

    def quoted(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> list[str]:
        """How each token is shown, as JSON has it; bytes that are part of a character look like
        `\\xe2`."""
        return self._looked_up(self._quoted, ids)

    def _looked_up(
        self, table: list[T | None], ids: Sequence[int] | NDArray[np.integer[Any]]
    ) -> list[T]:
        """What a table has of these, which are below the model's vocabulary."""
        wanted = ids.tolist() if isinstance(ids, np.ndarray) else ids
        found: list[Any] = [*map(table.__getitem__, wanted)]
        if None in found:
            new = [id for id, there in zip(wanted, found, strict=True) if there is None]
            for id, piece in zip(new, self._made(new), strict=True):
                self._quoted[id] = json.dumps(piece.decode(errors="backslashreplace"))
                self._pieces[id] = piece
            found = [*map(table.__getitem__, wanted)]
        return found

    def _made(self, ids: list[int], *, begins: bool = False) -> list[bytes]:
        if self.tokenizer is None:
            return [b" %d" % id for id in ids]
        # Rows of the embedding beyond the vocabulary stand for nothing.
        size = self.tokenizer.vocab_size
        found = iter(self.tokenizer.pieces([id for id in ids if id < size], begins=begins))
        return [next(found) if id < size else b"" for id in ids]


def joined(pieces: Iterable[bytes]) -> str:
    """The text of `pieces`, with U+FFFD where it is not UTF-8."""
    return b"".join(pieces).decode(errors="replace")


class Offsets:
    """Where in the text, in characters, each piece begins that is taken."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._decoder = _Decoder("replace")
        self._whole = True  # no character has begun and not ended

    def take(self, pieces: Sequence[bytes]) -> list[int]:
        """Of each of the next pieces."""
        starts, at, whole = list[int](), self._at, self._whole
        if whole and b"".join(pieces).isascii():
            *starts, self._at = accumulate(map(len, pieces), initial=at)
            return starts
        for piece in pieces:
            starts.append(at)
            if whole and piece.isascii():
                at += len(piece)
            else:
                at += len(self._decoder.decode(piece))
                whole = not self._decoder.getstate()[0]
        self._at, self._whole = at, whole
        return starts


class Reply:
    """The text of a completion, piece by piece, up to the first of its stop strings.

    Attributes:
        text: so far, without characters whose bytes are not all there.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.text = ""
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._decoder = _Decoder("replace")

    def take(self, piece: bytes) -> bool:
        """Adds a piece; returns whether a stop string is there, at which the text was cut."""
        return self._add(self._decoder.decode(piece))

    def end(self) -> None:
        """No piece follows: the bytes of an unfinished character become U+FFFD."""
        self._add(self._decoder.decode(b"", final=True))

    def _add(self, more: str) -> bool:
        start = max(len(self.text) - self._longest + 1, 0)
        self.text += more
        found = [at for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    @property
    def settled(self) -> int:
        """How many characters no stop string can take back any more."""
        size = len(self.text)
        for held in range(min(self._longest - 1, size), 0, -1):
            if any(stop.startswith(self.text[size - held :]) for stop in self._stop):
                return size - held
        return size
