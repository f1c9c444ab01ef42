"""Judges the cost model of ops/gemm_choice.py by measured times, and fits its constants to them.

Needs no GPU. A constant is every float of that module, and every float in a dict of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gemm_shapes import Case
from numpy.typing import NDArray

from pyruntime.cubin.spec import KernelSpec
from pyruntime.driver.library import Kernel
from pyruntime.ops import gemm_choice

MEAN, P95 = 1.015, 1.04  # the most that the choices may take of the best rows' time
MISS = 1.01  # choices from here on are listed

# fit: steps of a constant, as factors; how sharply a choice follows the costs; what an error of a
# predicted time weighs beside a time lost (squares of logarithms).
STEPS = (1.3, 1.12, 1.05, 1.02)
SHARPNESS, PREDICTED = 0.008, 0.5


class Limits(NamedTuple):
    """Of a device: what the cost model asks of it."""

    sm_count: int
    smem_per_sm: int
    smem_reserved: int


class Measured(NamedTuple):
    """A case: its rows, how many milliseconds each takes, and which were timed head to head."""

    case: Case
    rows: list[Kernel]
    ms: NDArray[np.float64]
    again: NDArray[np.bool_]
    limits: Limits

    def costs(self) -> NDArray[np.float64]:
        """What the model gives today; infinite for a row that it says does not fit."""
        m, n, k, _ = self.case
        found = gemm_choice.costs(self.rows, m, n, k, self.limits)
        return np.array([found.get(row, math.inf) for row in self.rows])


def measured(record: Mapping[str, Any]) -> Iterator[Measured]:
    """A record's cases, without the rows that the record says have been removed from the table.

    Rows that were timed once stand by that time, in proportion to that of the row which was the
    best when all were timed once.
    """
    limits = Limits(**record["limits"])
    kernels = {
        name: Kernel(
            KernelSpec(name, x["threads"], x["min_blocks"], x["smem_bytes"], 0, x["tile"], (), ()),
            None, 0, x["clusters"],
        )
        for name, x in record["rows"].items()
    }  # fmt: skip
    for figure in record["cases"]:
        quick, again = figure["quick"], figure["ms"]
        first = min(quick, key=quick.__getitem__)
        scale = statistics.median(again[first]) / quick[first]
        names = [name for name in quick if name not in record.get("removed", ())]
        ms = [
            statistics.median(again[name]) if name in again else scale * quick[name]
            for name in names
        ]
        yield Measured(
            Case(*figure["case"]),
            [kernels[name] for name in names],
            np.array(ms),
            np.array([name in again for name in names]),
            limits,
        )


class Verdict(NamedTuple):
    """A choice, and how many times as long as the best row it takes.

    `exact`: both were timed head to head.
    """

    case: Case
    chosen: str
    best: str
    ms: float
    lost: float
    exact: bool


def verdicts(record: Mapping[str, Any]) -> list[Verdict]:
    """Of today's choices, in the record's order."""
    found = []
    for figure in measured(record):
        costs = figure.costs()
        names = [row.name for row in figure.rows]
        chosen = min(range(len(names)), key=lambda i: (costs[i], names[i]))
        # Not one that was timed once: noise makes some of these look fast.
        best = int(np.argmin(np.where(figure.again, figure.ms, math.inf)))
        lost = float(figure.ms[chosen] / figure.ms[best])
        found.append(
            Verdict(
                figure.case, names[chosen], names[best], float(figure.ms[best]), lost,
                bool(figure.again[chosen]),
            )
        )  # fmt: skip
    return found


def judge(record: Mapping[str, Any]) -> tuple[list[str], bool]:
    """The table of misses and the summary; whether the choices are as good as they should be."""
    found = verdicts(record)
    lines = [f"{'case':<30} {'best us':>9} {'lost':>7}  chosen, best"]
    for x in sorted(found, key=lambda x: -x.lost):
        if x.lost >= MISS:
            about = "" if x.exact else " (timed once)"
            lines.append(
                f"{x.case!s:<30} {1e3 * x.ms:>9.1f} {100 * (x.lost - 1):>6.1f}%  "
                f"{x.chosen}{about}, {x.best}"
            )
    lines += [f"FAILED {name}: {text}" for name, text in record["failed"].items()]
    passed, told = not record["failed"], []
    for name, some in _groups(found):
        mean, p95 = _summary([x.lost for x in some])
        told.append(f"{name:<14} {len(some):>4} {_percent(mean)} {_percent(p95)}")
        if name == "all":
            passed &= mean <= MEAN and p95 <= P95
    once = sum(not x.exact for x in found)
    return [
        *lines,
        f"{'':<14} {'':>4} {'mean':>8} {'95 %':>8}   (geometric mean, 95th percentile)",
        *told,
        f"allowed {'':>11} {_percent(MEAN)} {_percent(P95)}: {'ok' if passed else 'NOT MET'}",
        *([f"{once} choices were timed once: measure again with these constants"] if once else []),
    ], passed


def _groups(found: Sequence[Verdict]) -> Iterator[tuple[str, list[Verdict]]]:
    yield "all", list(found)
    for low, high in ((1, 16), (17, 64), (65, 512), (513, 8192)):
        if some := [x for x in found if low <= x.case.m <= high]:
            yield f"m {low}-{high}", some
    for epilogue in sorted({x.case.epilogue for x in found}):
        yield epilogue, [x for x in found if x.case.epilogue == epilogue]


def _summary(lost: Sequence[float]) -> tuple[float, float]:
    """Geometric mean, 95th percentile."""
    return statistics.geometric_mean(lost), float(np.percentile(lost, 95))


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):>7.2f}%"


class Constant(NamedTuple):
    """A float of the cost model's module, or one in a dict of it."""

    name: str
    key: Any = None

    def get(self) -> float:
        found = getattr(gemm_choice, self.name)
        return float(found if self.key is None else found[self.key])

    def set(self, value: float) -> None:
        if self.key is None:
            setattr(gemm_choice, self.name, value)
        else:
            getattr(gemm_choice, self.name)[self.key] = value

    def __str__(self) -> str:
        return self.name + ("" if self.key is None else f"[{self.key!r}]")


def constants() -> list[Constant]:
    """All that can be fitted."""
    found = []
    for name, value in vars(gemm_choice).items():
        if name.isupper() and isinstance(value, float):
            found.append(Constant(name))
        elif name.isupper() and isinstance(value, dict):
            found += [Constant(name, key) for key, x in value.items() if isinstance(x, float)]
    return found


def fit(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Searches one constant after the other until none gets better; the lines that say what to.

    The module's constants stay as they were.
    """
    figures = [figure for record in records for figure in measured(record)]
    searched = constants()
    before = {constant: constant.get() for constant in searched}

    def loss() -> float:
        return _loss(figures)

    try:
        first = loss()
        last = _search(searched, loss)
        found = {constant: constant.get() for constant in searched}
    finally:
        for constant, value in before.items():
            constant.set(value)
    lines = [f"loss {first:.5f} -> {last:.5f} on {len(figures)} cases"]
    for constant, value in found.items():
        old = f"  (was {before[constant]:g})" if value != before[constant] else ""
        lines.append(f"{constant!s:<28} {value:.4g}{old}")
    return lines


def _search(searched: Sequence[Constant], loss: Callable[[], float]) -> float:
    """Leaves the best values that it finds in place; their loss."""
    best = loss()
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for constant in searched:
                for factor in (step, 1 / step):
                    old = constant.get()
                    constant.set(old * factor)
                    if (now := loss()) < best - 1e-7:
                        best, improved = now, True
                        break
                    constant.set(old)
    return best


def _loss(figures: Sequence[Measured]) -> float:
    """The time lost if rows near the cheapest are chosen, too, and how wrong predictions are."""
    lost, apart = [], []
    for figure in figures:
        costs, ms = figure.costs(), np.log(figure.ms / figure.ms.min())
        fits = np.isfinite(costs)
        cost, ms = np.log(costs[fits]), ms[fits]
        weights = np.exp((cost.min() - cost) / SHARPNESS)
        mean = float(weights @ ms / weights.sum())
        lost.append(mean + 8 * mean * mean)  # a large miss is worse than several small ones
        off = cost - np.log(figure.ms[fits])
        near = np.exp(-ms / 0.1)  # predictions of slow rows need not be right
        apart.append((off, near))
    # One clock for all: cycles become milliseconds.
    offs, nears = (np.concatenate(x) for x in zip(*apart, strict=True))
    middle = offs @ nears / nears.sum()
    wrong = float(((offs - middle) ** 2) @ nears / nears.sum())
    return float(np.mean(lost)) + PREDICTED * wrong
