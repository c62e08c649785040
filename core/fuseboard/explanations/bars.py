"""The chart of a graph's candidates: where its bars, whiskers and lines are.

Lengths are shares of the chart's width, from 0 to 100.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuseboard.report import choices
from fuseboard.report.data import GraphReport

#: The chart ends at so many times the slowest median at most: a wide interval mustn't squeeze all.
_WIDEST = 1.5


@dataclass(frozen=True)
class Bar:
    """A candidate's row: what is drawn, and the same in words.

    :ivar length: of the bar, the median; None where it wasn't timed.
    :ivar low: where the whisker begins and ``high`` where it ends, the quartiles.
    :ivar cut: the whisker goes on beyond the chart.
    """

    row: choices.ChoiceRow
    length: float | None = None
    low: float = 0.0
    high: float = 0.0
    cut: bool = False


@dataclass(frozen=True)
class Chart:
    """:ivar eager: where the reference line is; None where eager wasn't timed."""

    bars: list[Bar]
    eager: float | None


def chart(graph: GraphReport) -> Chart:
    """A bar for each candidate, in order of preference."""
    timed = [candidate for candidate in graph.candidates if candidate.latency_us]
    slowest = max((_us(candidate.latency_us) for candidate in timed), default=0.0)
    highest = max((_us(candidate.high_us) for candidate in timed), default=0.0)
    end_us = max(slowest, min(highest, _WIDEST * slowest)) or 1.0
    bars = []
    for candidate, row in zip(graph.candidates, choices.rows(graph), strict=True):
        if not candidate.latency_us:
            bars.append(Bar(row))
            continue
        low = 100 * _us(candidate.low_us, candidate.latency_us) / end_us
        high = 100 * _us(candidate.high_us, candidate.latency_us) / end_us
        length = 100 * candidate.latency_us / end_us
        bars.append(Bar(row, length, min(low, 100.0), min(high, 100.0), high > 100.0001))
    base = graph.eager
    return Chart(bars, None if base is None else 100 * _us(base.latency_us) / end_us)


def _us(value: float | None, otherwise: float = 0.0) -> float:
    return otherwise if value is None else value
