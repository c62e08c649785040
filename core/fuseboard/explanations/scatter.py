"""The picture of error against time: where its points, lines and labels are.

A candidate is a point: the further left, the faster; the lower, the more exact. Errors are on a
logarithmic scale. Numbers are in the units of the picture's view box.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fuseboard.report import choices
from fuseboard.report.data import CandidateReport, GraphReport

WIDTH, HEIGHT = 640, 320
#: Of the part that has points in it.
LEFT, RIGHT, TOP, BOTTOM = 64, WIDTH - 40, 16, HEIGHT - 48
#: Errors below this are drawn there: zeros have no logarithm.
_LEAST = 1e-9
#: So many labels stand at an axis at most.
_LABELS = 5


@dataclass(frozen=True)
class Point:
    """:ivar number: of its row in the table."""

    number: int
    row: choices.ChoiceRow
    x: float
    y: float


@dataclass(frozen=True)
class Label:
    """Text at an axis, or at the line of a budget.

    :ivar at: where on that axis.
    """

    text: str
    at: float


@dataclass(frozen=True)
class Scatter:
    """
    :ivar rows: of the table: all candidates whose error is known.
    :ivar budgets: the errors that candidates are allowed.
    """

    points: list[Point]
    rows: list[tuple[int, choices.ChoiceRow]]
    times: list[Label]
    errors: list[Label]
    budgets: list[Label]


def scatter(graph: GraphReport) -> Scatter | None:
    """The picture of a graph's candidates; None where fewer than two have an error and a time."""
    told = zip(graph.candidates, choices.rows(graph), strict=True)
    known = [(one, row) for one, row in told if one.error is not None]
    drawn = [one for one, _ in known if one.latency_us and math.isfinite(_error(one))]
    if not graph.tolerance or len(drawn) < 2:
        return None
    budgets = sorted({one.tolerance for one in graph.candidates if one.tolerance})
    exponents = [math.log10(value) for value in (*map(_error, drawn), *budgets)]
    low, high = math.floor(min(exponents)), math.floor(max(exponents)) + 1
    slowest_us = max(one.latency_us or 0.0 for one in drawn)

    def x(us: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * us / slowest_us, 1)

    def y(error: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (math.log10(error) - low) / (high - low), 1)

    step = math.ceil((high - low) / _LABELS)
    return Scatter(
        points=[
            Point(number, row, x(one.latency_us or 0.0), y(_error(one)))
            for number, (one, row) in enumerate(known, 1)
            if one in drawn
        ],
        rows=[(number, row) for number, (_, row) in enumerate(known, 1)],
        times=[
            Label(choices.duration(share * slowest_us), x(share * slowest_us))
            for share in (0.25, 0.5, 0.75, 1.0)
        ],
        errors=[Label(f"1e{power}", y(10.0**power)) for power in range(low, high + 1, step)],
        budgets=[Label(f"{value:g}", y(value)) for value in budgets],
    )


def _error(candidate: CandidateReport) -> float:
    return max(candidate.error or 0.0, _LEAST)
