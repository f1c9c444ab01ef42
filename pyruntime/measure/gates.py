"""Whether two arms compute the same: logits of the last row, and greedy text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Gate:
    """A check with its reason in `text`; `figures` are JSON values."""

    name: str
    passed: bool
    text: str
    figures: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """JSON values."""
        return dict(vars(self))


def parity(a: NDArray[np.float32], b: NDArray[np.float32], tolerance: float) -> Gate:
    """Logits [vocab] of the last row; passes if none differs by more than `tolerance`.

    With the tolerance 0 the arms must agree bit for bit.
    """
    finite = bool(np.isfinite(a).all() and np.isfinite(b).all())
    same = bool(np.array_equal(a, b))
    figures: dict[str, Any] = {"bitwise": same, "finite": finite, "tolerance": tolerance}
    if not finite or a.shape != b.shape:
        what = f"shapes {a.shape} and {b.shape}" if finite else "a logit is NaN or infinite"
        return Gate("parity", False, what, figures)
    largest = float(np.abs(a - b).max())
    figures |= {"largest": largest, "kl": _kl(a.astype(np.float64), b.astype(np.float64))}
    text = (
        "logits equal bit for bit"
        if same
        else f"logits differ by at most {largest:.2g} (allowed {tolerance:g}), "
        f"KL {figures['kl']:.1e}"
    )
    return Gate("parity", largest <= tolerance, text, figures)


def greedy(a: list[int], b: list[int], gaps: list[float], tolerance: float) -> Gate:
    """Greedy tokens; they may part only where A's two best logits are a tie within `tolerance`.

    Args:
        gaps: for each token of A, the best logit minus the second best.
        tolerance: of one logit; a tie is a gap of at most twice that.
    """
    if a == b:
        return Gate("greedy", True, f"the same {len(a)} tokens", {"tokens": len(a), "step": None})
    step = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    gap = gaps[step] if step < len(gaps) else 0.0
    passed = gap <= 2 * tolerance
    verdict = "a tie" if passed else "no tie"
    text = f"tokens part at step {step}, where A's two best logits are {gap:.2g} apart: {verdict}"
    return Gate("greedy", passed, text, {"tokens": len(a), "step": step, "gap": gap})


def _kl(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """KL divergence of softmax(q) from softmax(p), in nats."""
    p, q = p - p.max(), q - q.max()
    p, q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
    return float((np.exp(p) * (p - q)).sum())
