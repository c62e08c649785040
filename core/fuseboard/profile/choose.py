"""The rule by which measurements decide."""

from __future__ import annotations

from collections.abc import Sequence

from fuseboard.contracts import Measurement


def choose(measured: Sequence[Measurement], margin: float) -> int:
    """The position of the winner.

    The first one that takes no longer than the fastest, a margin allowed for: what comes later has
    to win by more than that to be worth leaving what is simpler or preferred.

    :param measured: in order of preference; at least one.
    :param margin: a share of the fastest one's time.
    """
    limit_us = min(one.latency_us for one in measured) * (1 + margin)
    return next(i for i, one in enumerate(measured) if one.latency_us <= limit_us)
