"""What an audit concludes: findings, what acting on them is worth, and the rule that decides.

The value of a lever is share x (1 - 1/speed-up) of the whole (Amdahl 1967), worked out before any
code is written, and held against a bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Lever(Enum):
    """How large a change a finding calls for."""

    REWRITE = "rewrite"
    SMALL = "small lever"


@dataclass(frozen=True)
class Finding:
    """Something seen in one line of evidence ("structure", "resources" or "behaviour").

    `lever` is None for what is only worth knowing.
    """

    line: str
    text: str
    lever: Lever | None = None


@dataclass(frozen=True)
class Cost:
    """What is at stake.

    Attributes:
        share: of the whole's time that the kernel takes, 0 to 1; None if unknown.
        gain: how many times as fast it could be; None if unknown.
        gain_from: where `gain` comes from.
        bar: what a change must bring, as a fraction of the whole's time.
    """

    share: float | None
    gain: float | None
    gain_from: str
    bar: float

    @property
    def value(self) -> float | None:
        """Fraction of the whole's time that the gain would save."""
        if self.share is None or self.gain is None:
            return None
        return self.share * (1 - 1 / self.gain)


@dataclass(frozen=True)
class Verdict:
    """The conclusion, and the rule with the figures that led to it."""

    word: str
    rule: str


def decide(
    cost: Cost, findings: Sequence[Finding], contradictions: Sequence[str], unknown: Sequence[str]
) -> Verdict:
    """The verdict: rewrite, small lever, book it, close, or undecided; the first rule that applies.

    Args:
        unknown: lines of evidence that are missing, and so may hide a finding. Below the bar the
            cost decides without them; above it a rewrite may hide in an unknown structure.
    """
    levers = [finding.lever for finding in findings if finding.lever]
    bar, value = f"the bar of {cost.bar:.1%}", cost.value
    if contradictions:
        return Verdict("undecided", "lines of evidence contradict one another")
    if cost.share is None:
        return Verdict("undecided", "its share of the whole is unknown (--share)")
    if cost.share < cost.bar:
        return Verdict("close", f"{cost.share:.2%} of the whole: all of it is below {bar}")
    if value is not None and value < cost.bar:
        if levers:
            return Verdict("book it", f"the mechanism is real, but {value:.2%} is below {bar}")
        missing = f" (unknown: {', '.join(unknown)})" if unknown else ""
        return Verdict("close", f"no lever is seen{missing}, and {value:.2%} is below {bar}")
    if not levers and unknown:
        return Verdict("undecided", f"no lever is seen; unknown: {', '.join(unknown)}")
    if not levers and value is not None:
        return Verdict("book it", f"{value:.2%} clears {bar}, but nothing shows what to change")
    if not levers:
        return Verdict("close", "no line of evidence shows a lever")
    if value is None:
        return Verdict("undecided", "the possible gain is unknown (--gain, or a record with peaks)")
    if Lever.REWRITE in levers:
        return Verdict("rewrite", f"{value:.2%} clears {bar}, and the structure is at fault")
    if "structure" in unknown:
        return Verdict("undecided", f"{value:.2%} clears {bar}, but the structure is unknown")
    return Verdict("small lever", f"{value:.2%} clears {bar}, and the structure may stay")
