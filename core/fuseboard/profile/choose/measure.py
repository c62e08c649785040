"""Timing of alternatives in turn, so that disturbances of the machine hit all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import Any

import torch

from fuseboard.board.session import current_session
from fuseboard.contracts import Measurement
from fuseboard.hookspecs import hookimpl
from fuseboard.partition.garbage import collection_paused

#: Rounds that are measured where the budget allows, and at most.
MIN_ROUNDS, MAX_ROUNDS = 5, 200
#: Fewer rounds are decided by noise: so many are made, for up to this many budgets of time.
FEW_ROUNDS, PATIENCE = 3, 5
#: Rounds end before the budget where every median is known to a share of itself.
NARROW = 0.01
#: What is so many times slower than the fastest isn't called again after its first rounds.
HOPELESS = 2.0
_WARM_ROUNDS = 2


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


@hookimpl(specname="fuseboard_measure")
def measure_calls(calls: Sequence[Callable[[], Any]], budget_s: float) -> list[Measurement]:
    """The default of ``fuseboard_measure``: interleaved rounds.

    Each round calls every alternative once, in an order that rotates. The first call of each warms
    it up, and how long these took says how many rounds there are at least: five where the budget
    has room for as many, three where five budgets have. It ends when the budget is spent or every
    median is known closely. What is hopelessly slow takes part in the first rounds only.
    """
    with collection_paused():
        return [_summary(samples) for samples in _rounds(calls, budget_s)]


def _rounds(calls: Sequence[Callable[[], Any]], budget_s: float) -> list[list[float]]:
    clock = _clock()
    warm_s = sum(1e-6 * clock(call) for call in calls)
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + budget_s
    affordable = budget_s / max(warm_s, 1e-9)
    least = max(1, min(MIN_ROUNDS, int(affordable)), min(FEW_ROUNDS, int(PATIENCE * affordable)))
    for number in range(MAX_ROUNDS):
        quickest = min((sorted(t)[len(t) // 2] for t in times if t), default=0.0)
        for position in range(len(calls)):
            which = (position + number) % len(calls)
            samples = times[which]
            if len(samples) >= _WARM_ROUNDS and min(samples) > HOPELESS * quickest > 0:
                continue
            samples.append(clock(calls[which]))
        late = time.perf_counter() >= end
        if number + 1 >= least and (late or all(map(_is_narrow, times))):
            break
    return times


def _clock() -> Callable[[Callable[[], Any]], float]:
    """How long one call takes, in microseconds: by CUDA's events where CUDA is in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return _cuda_us
    return _wall_us


def _wall_us(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def _cuda_us(call: Callable[[], Any]) -> float:
    """The time from the first launch to the end of the last kernel, at least that of launching."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start = time.perf_counter()
    begin.record()
    call()
    end.record()
    launched_us = 1e6 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    return max(1e3 * float(begin.elapsed_time(end)), launched_us)


def _is_narrow(samples: list[float]) -> bool:
    """Whether the median's standard error, from the quartiles, is a small share of it."""
    if len(samples) < 2 * MIN_ROUNDS:
        return False
    low, median, high = quantiles(samples, n=4, method="inclusive")
    return bool(0.93 * (high - low) / len(samples) ** 0.5 <= NARROW * median)


def _summary(samples: list[float]) -> Measurement:
    if len(samples) == 1:
        return Measurement(samples[0], samples[0], samples[0], calls=1)
    low, median, high = quantiles(samples, n=4, method="inclusive")
    return Measurement(latency_us=median, low_us=low, high_us=high, calls=len(samples))
