"""From times to figures: medians of ratios, bootstrap intervals, geometric means, break-even."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 5000
_TAILS = (100 * (1 - CONFIDENCE) / 2, 100 * (1 + CONFIDENCE) / 2)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_with_interval(samples: Sequence[float], seed: int = 0) -> Estimate:
    """The median and its percentile-bootstrap interval, by SciPy where it is installed.

    Rounds of one process aren't independent of each other, and processes differ: across processes
    the interval is too narrow. ``paired_ratio`` resamples processes as well.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("no samples")
    if values.size == 1:
        return Estimate(float(values[0]), float(values[0]), float(values[0]))
    low, high = (_bootstrap_scipy or _bootstrap_numpy)(values, np.random.default_rng(seed))
    median = float(np.median(values))
    # A percentile is interpolated: between equal samples it can miss them by a rounding.
    return Estimate(median, min(low, median), max(high, median))


def _bootstrap_numpy(values: Floats, rng: np.random.Generator) -> tuple[float, float]:
    drawn = values[rng.integers(values.size, size=(RESAMPLES, values.size))]
    low, high = np.percentile(np.median(drawn, axis=1), _TAILS)
    return float(low), float(high)


def _scipy_bootstrap() -> Callable[[Floats, np.random.Generator], tuple[float, float]] | None:
    try:
        from scipy.stats import bootstrap
    except ImportError:
        return None

    def by_scipy(values: Floats, rng: np.random.Generator) -> tuple[float, float]:
        # The percentile method, as above: BCa isn't defined for medians of tied samples.
        interval = bootstrap(
            (values,),
            np.median,
            n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=rng,
        ).confidence_interval
        return float(interval.low), float(interval.high)

    return by_scipy


_bootstrap_scipy = _scipy_bootstrap()


def paired_ratio(
    numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]], seed: int = 0
) -> Estimate:
    """A ratio of two arms, each measured in several processes; one list of samples a process.

    The figure of a side is the geometric mean over its processes of the median of their samples.
    The interval resamples processes, then samples within them.
    """
    if not (numerators and denominators and all(numerators) and all(denominators)):
        raise ValueError("each side needs a process, and each process a sample")
    rng = np.random.default_rng(seed)
    value = _side(numerators) - _side(denominators)
    drawn = _redrawn_sides(numerators, rng) - _redrawn_sides(denominators, rng)
    low, high = np.percentile(drawn, _TAILS)
    return Estimate(math.exp(value), math.exp(low), math.exp(high))


def _side(processes: Sequence[Sequence[float]]) -> float:
    return float(np.mean([math.log(np.median(p)) for p in processes]))


def _redrawn_sides(processes: Sequence[Sequence[float]], rng: np.random.Generator) -> Floats:
    """``_side`` of ``RESAMPLES`` redrawn sides: as many processes, each with samples redrawn."""
    count = len(processes)
    medians = np.empty((count, RESAMPLES, count))  # process, resample, place that it may be put in
    for index, samples in enumerate(processes):
        values = np.asarray(samples, dtype=np.float64)
        for place in range(count):  # drawn anew for each place: a process may be picked twice
            picks = rng.integers(values.size, size=(RESAMPLES, values.size))
            medians[index, :, place] = np.log(np.median(values[picks], axis=1))
    picked = rng.integers(count, size=(RESAMPLES, count))
    chosen = medians[picked, np.arange(RESAMPLES)[:, None], np.arange(count)]
    sides: Floats = chosen.mean(axis=1)
    return sides


def geometric_mean(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("no values")
    return math.exp(sum(math.log(v) for v in values) / len(values))


def break_even_calls(
    first_s: float, eager_first_s: float, call_s: float, eager_call_s: float
) -> int | None:
    """After how many calls compiling has paid for itself; None: it never does.

    (first call - eager's first call) / (eager's call - the arm's call).
    """
    lead_s = first_s - eager_first_s
    if lead_s <= 0:
        return 0
    gain_s = eager_call_s - call_s
    return math.ceil(lead_s / gain_s) if gain_s > 0 else None
