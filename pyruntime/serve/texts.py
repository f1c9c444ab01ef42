"""Token ids as text, token by token: what a completion's `text`, `tokens` and `text_offset` are."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pyruntime.engine import Engine
from pyruntime.errors import TokenizerError
from pyruntime.model.batch import Rows

S = TypeVar("S", bound=np.generic)
Ids: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Objects: TypeAlias = NDArray[np.object_]

CUT = -1  # the length of bytes that are not whole characters
_UNMADE = -2
_AT_ONCE = 256  # tokens: others wait for the interpreter for about a millisecond
_Decoder = getincrementaldecoder("utf-8")
_quote = json.JSONEncoder().encode


class Texts:
    """The vocabulary of an engine. Any number of threads may use one.

    A model without a vocabulary takes no text, and the text of a token is its id after a space.

    Attributes:
        stop_ids: the tokens that end a completion.
        adds_bos: whether `encode` begins with a token that stands for none of the text.
        changes_start: whether a token may add something else where a text begins.
    """

    def __init__(self, engine: Engine) -> None:
        self.tokenizer = engine.tokenizer if engine.has_vocabulary else None
        self.stop_ids = frozenset(self.tokenizer.eos_ids if self.tokenizer else ())
        self.adds_bos = self.tokenizer is not None and self.tokenizer.adds_bos
        self.changes_start = self.tokenizer is not None and self.tokenizer.adds_space
        # Of each token, as soon as it was asked for; its length is set last.
        vocab = engine.config.vocab
        self._pieces: Objects = np.empty(vocab, np.object_)
        self._quoted: Objects = np.empty(vocab, np.object_)
        self._looks = np.empty(vocab, np.int32)
        self._lengths = np.full(vocab, _UNMADE, np.int32)
        self._first: dict[str, int] = {}  # of those that look the same

    def encode(self, text: str, *, add_special: bool = True) -> Rows:
        """The ids of `text`, int32 [tokens], as a prompt: BOS where the model has it, never EOS.

        Raises TokenizerError: no vocabulary, or text that UTF-8 cannot express.
        """
        if self.tokenizer is None:
            raise TokenizerError("this model has no vocabulary: give token ids instead of text")
        return self.tokenizer.encode(text, add_special=add_special, goes_on=True)

    def pieces(self, ids: Ids, *, begins: bool = True) -> list[bytes]:
        """What each of `ids` adds to the text: see `Tokenizer.pieces`."""
        if begins and self.changes_start:
            return self._made(np.asarray(ids).tolist(), begins=True)
        found: list[bytes] = self._looked_up(self._pieces, ids).tolist()
        return found

    def piece(self, id: int) -> bytes:
        """What a token adds to a text that has begun."""
        found: bytes | None = self._pieces[id]
        return self.pieces([id], begins=False)[0] if found is None else found

    def quoted(self, ids: Ids) -> Objects:
        """How each token is shown, str in the shape of `ids`, as JSON has it; bytes that are part
        of a character look like `\\xe2`."""
        return self._looked_up(self._quoted, ids)

    def shown(self, ids: Ids) -> tuple[Objects, NDArray[np.int32]]:
        """As `quoted`, and a number that is the same for tokens that are shown alike."""
        return self.quoted(ids), self._looks[ids]

    def lengths(self, ids: Ids) -> NDArray[np.int32]:
        """The characters of the piece of each of `ids`, or CUT."""
        return self._looked_up(self._lengths, ids)

    def fill(self) -> None:
        """Makes what there is to know of every token, so that no answer has to.

        Of 152,000 tokens that is 24 MB, and half a second in which others take turns.
        """
        for first in range(0, len(self._lengths), _AT_ONCE):
            self.lengths(np.arange(first, min(first + _AT_ONCE, len(self._lengths))))

    def _looked_up(self, table: NDArray[S], ids: Ids) -> NDArray[S]:
        """What a table has of these, which are below the model's vocabulary."""
        wanted = np.asarray(ids, np.intp)
        new = wanted[self._lengths[wanted] == _UNMADE]
        if new.size:
            made = new.tolist()
            for id, piece in zip(made, self._made(made), strict=True):
                name = _quote(piece.decode(errors="backslashreplace"))
                self._quoted[id], self._pieces[id] = name, piece
                self._looks[id] = self._first.setdefault(name, id)
                self._lengths[id] = _length(piece)
        found: NDArray[S] = table[wanted]
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


def _length(piece: bytes) -> int:
    """Its characters; CUT: it is not UTF-8 by itself."""
    if piece.isascii():
        return len(piece)
    try:
        return len(piece.decode())
    except UnicodeDecodeError:
        return CUT


class Offsets:
    """Where in the text, in characters, each piece begins that is taken."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._decoder = _Decoder("replace")
        self._whole = True  # no character has begun and not ended

    def take(self, pieces: Sequence[bytes], lengths: Iterable[int] | None = None) -> list[int]:
        """Of each of the next pieces, whose `lengths` are looked for if they are not given."""
        starts, at, whole = list[int](), self._at, self._whole
        sizes = map(_length, pieces) if lengths is None else lengths
        for piece, size in zip(pieces, sizes, strict=True):
            starts.append(at)
            if whole and size != CUT:
                at += size
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
