"""Prompts of any lengths into forward passes: whole ones side by side, long ones cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pyruntime.model.batch import whole_regions


class Part(NamedTuple):
    """Tokens [first, last) of prompt `prompt`, whose keys and values begin at `region`."""

    prompt: int
    first: int
    last: int
    region: int


def passes(
    lengths: Sequence[int],
    *,
    starts: Sequence[int] | None = None,
    rows: int,
    prompts: int | None = None,
    positions: int | None = None,
) -> Iterator[list[Part]]:
    """Yields the parts of each pass, prompts in their order.

    A prompt of up to `rows` tokens is not cut. A longer one gets passes of its own.

    Args:
        lengths: tokens of each prompt. starts: positions cached before each; 0 by default.
        rows: of a pass at most. prompts: of a pass at most; None: any number.
        positions: of a pass at most, where all prompts but the last take whole regions; None: any
            number. A pass of one prompt is not held to it.
    """
    held: list[Part] = []
    used = region = 0
    for prompt, length in enumerate(lengths):
        end = (starts[prompt] if starts else 0) + length
        if held and (
            used + length > rows
            or len(held) == prompts
            or (positions is not None and region + end > positions)
        ):
            yield held
            held, used, region = [], 0, 0
        if length > rows:
            for first in range(0, length, rows):
                yield [Part(prompt, first, min(first + rows, length), 0)]
            continue
        held.append(Part(prompt, 0, length, region))
        used, region = used + length, region + whole_regions(end)
    if held:
        yield held
