"""How contestants are timed: in turn, rested or at the power limit. Needs no GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

REGIMES = ("burst", "sustained")
# burst: rest between timings, clocks high, as for a single prompt. sustained: back to back, clocks
# as the power limit holds them; the lead lets them settle and is not counted.
ROUNDS, REST, WORK_MS = 9, 0.015, 4.0
SUSTAINED_ROUNDS, LEAD_MS, SUSTAINED_MS = 3, 50.0, 400.0

OURS = "ours"  # the contestant that all others are compared with

Contestant = TypeVar("Contestant")
Reading = TypeVar("Reading")


def told(error: Exception) -> str:
    """An error on one line, with its type."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def willing(
    makers: Mapping[str, Callable[[], Contestant]], skipped: dict[str, str]
) -> dict[str, Contestant]:
    """What each makes. `skipped` takes who fails, and why: the others go on without it."""
    made = {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except Exception as error:
            skipped[name] = told(error)
    return made


def interleaved(
    contestants: Mapping[str, Contestant],
    timed: Callable[[Contestant], Reading],
    *,
    rounds: int,
    rest: float,
    warm_up: int = 2,
    skipped: dict[str, str] | None = None,
) -> dict[str, list[Reading]]:
    """What `timed` reads of each, one per round; each round in another random order.

    Args:
        rest: seconds before each reading.
        warm_up: rounds before those that count.
        skipped: takes who fails, and why; all but OURS may, and lose what was read of them.
    """
    order, rng = list(contestants), random.Random(0)
    raw: dict[str, list[Reading]] = {name: [] for name in order}
    for round_ in range(warm_up + rounds):
        rng.shuffle(order)
        for name in [x for x in order if x in raw]:
            time.sleep(rest)
            try:
                reading = timed(contestants[name])
            except Exception as error:
                if skipped is None or name == OURS:
                    raise
                skipped[name] = told(error)
                del raw[name]
                continue
            if round_ >= warm_up:
                raw[name].append(reading)
    return raw


def by_unit(
    readings: Mapping[str, Mapping[str, list[Any]]], units: tuple[str, ...]
) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """unit -> regime -> contestant -> raw values, of readings that hold a value of each unit."""
    return {
        unit: {
            regime: {name: [x[i] for x in raw] for name, raw in found.items()}
            for regime, found in readings.items()
        }
        for i, unit in enumerate(units)
    }
