"""What came of a claim, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.stats import Estimate

Verdict = Literal["yes", "within the interval", "no", "not measured"]


@dataclass(frozen=True)
class Finding:
    """A claim and what came of it.

    :ivar holds: ``within the interval``: the figure falls short, but its interval reaches.
    """

    claim: str
    measured: str
    holds: Verdict
    data: dict[str, Any] = field(default_factory=dict)


def verdict(holds: bool) -> Verdict:
    return "yes" if holds else "no"


def judge_at_least(estimate: Estimate, limit: float) -> Verdict:
    if estimate.value >= limit:
        return "yes"
    return "within the interval" if estimate.high >= limit else "no"
