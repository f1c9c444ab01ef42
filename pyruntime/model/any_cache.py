"""What K/V caches of every backend share: the tokens they hold, and how these are handed on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pyruntime.errors import CudaError
from pyruntime.model.handover import Exported, describe, misfit
from pyruntime.model.tokens import check_count, check_tokens
from pyruntime.turns import Deadline


def _frozen(own: NDArray[np.int32]) -> NDArray[np.int32]:
    """An array that nobody changes from now on."""
    own.setflags(write=False)
    return own


class Filled(ABC):
    """The tokens whose keys and values fill the first `length` positions of something."""

    # Replaced as a whole, so that a thread sees the old or the new.
    _tokens = np.empty(0, np.int32)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Their ids, int32 [length]. The array never changes; later calls may give another."""
        return _frozen(self._tokens)

    @property
    def length(self) -> int:
        """Positions filled. Assigning to it is `truncate`: what is not known cannot be made so."""
        return len(self._tokens)

    @length.setter
    def length(self, tokens: int) -> None:
        self.truncate(tokens)

    def truncate(self, tokens: int) -> None:
        """Forgets the positions from `tokens` on.

        Raises ValueError if it is negative or beyond `length`. A pass that is storing positions in
        another thread meanwhile counts as having stored them before.
        """
        whole = isinstance(tokens, (int, np.integer)) and not isinstance(tokens, bool)
        if not whole or not 0 <= tokens <= self.length:
            raise ValueError(f"a cache of length {self.length} cannot be cut to {tokens!r}")
        self._tokens = self._tokens[:tokens]

    def clear(self) -> None:
        """Forgets all positions."""
        self._tokens = Filled._tokens

    def append(self, ids: NDArray[np.int32], start: int) -> None:
        """For backends: a pass that began at `length` = `start` has stored `ids` there.

        Nobody writes to `ids` any more. If the cache has been cut since then, it stays as it is:
        what was stored is forgotten, too.
        """
        if len(self._tokens) == start:
            self._tokens = np.concatenate([self._tokens, ids]) if start else ids

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the memory has been freed."""

    def check_open(self) -> None:
        """Raises ValueError if the memory has been freed."""
        if self.closed:
            raise ValueError("this cache has been closed")


class AnyCache(Filled):
    """K/V of one sequence: [layers, kv heads, capacity, head dim] each, K after RoPE.

    They are float16, in NumPy float32. With kv_dtype "e4m3" they are uint8 codes, each row times
    its scale: `k_scale` and `v_scale`, float32 [layers, kv heads, capacity], which are None
    otherwise. `capacity` positions fit, of which the first `length` are filled. `owner` is the
    model that may use it.

    `fork`, `export` and `import_` take their turn among the calls of the model. `timeout` is how
    many seconds they may wait for it (and on a GPU for what an earlier call left under way): None
    is as long as it takes, 0 not at all, and a `Deadline` is one timeout for several calls. They
    raise BusyError if it has run out by then, EngineError in a forked child, and on a GPU also
    EngineError (closed or lost) and CudaError.
    """

    owner: Any
    capacity: int
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any

    @property
    def kv_dtype(self) -> str:
        """What K and V are: "f16" or "e4m3"."""
        return "f16" if self.k_scale is None else "e4m3"

    def fork(self, capacity: int | None = None, *, timeout: float | Deadline | None = None) -> Self:
        """A new cache of the same model, for `capacity` positions (default: as many), that holds a
        copy of the filled ones. From then on the two have nothing to do with each other.

        Raises ValueError if `capacity` is less than `length`, or this cache is closed, and
        OutOfMemoryError.
        """
        wanted = self.capacity if capacity is None else check_count("capacity", capacity)
        with self._entry(timeout):
            tokens = self.tokens
            if wanted < len(tokens):
                raise ValueError(f"a fork for {wanted} positions of {len(tokens)} that are filled")
            other: Self = self.owner.new_cache(wanted)
            try:
                other._fill(self._numbers(), tokens)
            except BaseException:
                with suppress(CudaError):  # the first failure is the one to report
                    other.close()
                raise
            return other

    def export(self, *, timeout: float | Deadline | None = None) -> Exported:
        """A copy of the filled positions in host memory, with all that says what they are.

        Raises ValueError if this cache is closed.
        """
        with self._entry(timeout):
            tokens, arrays = self.tokens, {}
            for name, held in self._numbers().items():
                shape = (*held.shape[:2], len(tokens), *held.shape[3:])
                arrays[name] = np.empty(shape, held.dtype)
                self._copy(arrays[name], held, len(tokens))
            return Exported(self._header(len(tokens)), tokens, arrays)

    def import_(self, exported: Exported, *, timeout: float | Deadline | None = None) -> None:
        """Puts what `export` gave of a cache of the same model in place of what this one holds.

        The dtype must be the same, too: see `Exported.astype` for one of a GPU and one of NumPy.

        Raises HandoverError if it does not fit, naming the field, theirs and ours, and ValueError
        if this cache is closed or `exported` is something else; it is as it was then. If the driver
        fails in between it is empty.
        """
        if not isinstance(exported, Exported):
            raise ValueError(f"exported={exported!r:.100}: what `export` or `Exported.load` gave")
        with self._entry(timeout):
            exported.require(self._header(exported.positions))
            if exported.positions > self.capacity:
                here = f"this one is for {self.capacity}"
                raise misfit(f"there are {exported.positions} positions, and {here}")
            if exported.positions:
                try:
                    check_tokens(exported.tokens, self.owner.config.vocab)
                except ValueError as error:
                    raise misfit(str(error)) from None
            self._fill(exported.arrays, exported.tokens)

    @abstractmethod
    def close(self) -> None:
        """Frees the memory, once no call is at work on the model. Idempotent."""

    @contextmanager
    def _entry(self, timeout: float | Deadline | None = None) -> Iterator[None]:
        """Around what reads or writes the arrays: a turn."""
        with self.owner.turns.turn(timeout):
            self.check_open()
            yield

    @staticmethod
    @abstractmethod
    def _copy(to: Any, source: Any, positions: int) -> None:
        """Copies the first positions of an array [layers, kv heads, positions or more, ...]."""

    def _numbers(self) -> dict[str, Any]:
        """The arrays that hold something of every position, by name."""
        named = {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: array for name, array in named.items() if array is not None}

    def _fill(self, source: Mapping[str, Any], tokens: NDArray[np.int32]) -> None:
        """Takes over arrays by the names of `_numbers`."""
        self.truncate(0)  # whatever fails, nothing that is half written counts
        for name, array in self._numbers().items():
            self._copy(array, source[name], len(tokens))
        self._tokens = np.array(tokens, np.int32)

    def _header(self, positions: int) -> dict[str, Any]:
        dtype = str(np.dtype(self.k.dtype))
        owner = self.owner
        return describe(owner.config, owner.fingerprint, self.kv_dtype, dtype, positions)
