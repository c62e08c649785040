"""The rule by which measurements decide, and what reports are told of them."""

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


def note_times(timed: Sequence[tuple[CandidateReport, Measurement]], comparison: int) -> None:
    """Write what was measured in one comparison into the candidates' rows.

    :param timed: the first comparison's, or later ones beside the winner so far.
    """
    scale = None  # one of those whose relation to eager is known gives the others theirs
    for told, found in timed:
        if told.name == "eager":
            scale = found.latency_us
        elif told.speedup is not None and scale is None:
            scale = told.speedup * found.latency_us
    for told, found in timed:
        told.latency_us, told.low_us, told.high_us = found.latency_us, found.low_us, found.high_us
        told.comparison = comparison
        told.speedup = scale / found.latency_us if scale and found.latency_us else None
