"""Timing of alternatives in turn, so that what the machine does meanwhile hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import Any

from fuseboard.board.session import current_session
from fuseboard.contracts import Measurement

#: Rounds that are always measured, and at most.
MIN_ROUNDS, MAX_ROUNDS = 5, 200


def measure(calls: Sequence[Callable[[], Any]], budget_s: float) -> list[Measurement]:
    """Time calls against each other, as the stage ``measure`` decides; for use by plugins.

    :param budget_s: seconds for all of it, warm-up excluded.
    :returns: one measurement per call: median and quartiles, in microseconds.
    """
    session = current_session()
    if session is None:
        return measure_calls(calls, budget_s)
    _, measurements = session.first("fuseboard_measure", calls=calls, budget_s=budget_s)
    return measurements  # type: ignore[no-any-return]


def measure_calls(calls: Sequence[Callable[[], Any]], budget_s: float) -> list[Measurement]:
    """The default of ``fuseboard_measure``: interleaved rounds by the wall clock.

    Each round calls every alternative once, in an order that rotates. Stops when the budget is
    spent, after at least five rounds (so one call that takes long can go past the budget).
    """
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + budget_s
    for number in range(MAX_ROUNDS):
        for position in range(len(calls)):
            which = (position + number) % len(calls)
            start = time.perf_counter()
            calls[which]()
            times[which].append(1e6 * (time.perf_counter() - start))
        if number + 1 >= MIN_ROUNDS and time.perf_counter() >= end:
            break
    return [_summary(samples) for samples in times]


def _summary(samples: list[float]) -> Measurement:
    low, median, high = quantiles(samples, n=4, method="inclusive")
    return Measurement(latency_us=median, low_us=low, high_us=high, calls=len(samples))
