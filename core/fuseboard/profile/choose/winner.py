"""The rule by which measurements decide, and what reports say of them."""

from __future__ import annotations

from collections.abc import Sequence

from fuseboard.contracts import Measurement
from fuseboard.report.data import CandidateReport


def choose(measured: Sequence[Measurement], margin: float) -> int:
    """The position of the winner.

    The first one that takes no longer than the fastest, a margin allowed for: what comes later has
    to win by more than that to be worth leaving what is simpler or preferred.

    :param measured: in order of preference; at least one.
    :param margin: a share of the fastest one's time.
    """
    limit_us = min(one.latency_us for one in measured) * (1 + margin)
    return next(i for i, one in enumerate(measured) if one.latency_us <= limit_us)


def note_times(
    timed: Sequence[tuple[CandidateReport, Measurement]],
    comparison: int,
    rows: Sequence[CandidateReport] = (),
) -> None:
    """Write what was measured in one comparison into the candidates' rows.

    The machine may be slower or faster than it was in an earlier comparison. The winner so far is
    in both, so the times of the others are multiplied by what it takes now over what it took then:
    all times of a graph can be held against each other. Where nothing is in both, the others lose
    their times.

    :param rows: all of the graph's candidates.
    """
    scale = None
    for row, found in timed:
        if row.latency_us and found.latency_us:
            scale = found.latency_us / row.latency_us
            break
    now = {id(row) for row, _ in timed}
    for row in rows:
        if id(row) not in now:
            row.scale_times(scale)
    for row, found in timed:
        row.latency_us, row.low_us, row.high_us = found.latency_us, found.low_us, found.high_us
        row.comparison = comparison
