"""Figures from samples: medians, intervals, means, break-even."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import stats
from benchmarks.protocol import FULL, QUICK, Protocol

ratios = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=40)


@given(ratios)
def test_an_interval_holds_its_median(samples):
    """Low, value and high are in order, and lie within the samples."""
    estimate = stats.median_with_interval(samples)
    assert estimate.low <= estimate.value <= estimate.high
    assert estimate.low >= min(samples) * (1 - 1e-12)
    assert estimate.high <= max(samples) * (1 + 1e-12)
    assert estimate.value == pytest.approx(float(np.median(samples)))


def test_an_interval_covers_the_true_median_about_as_often_as_it_says():
    """Of 200 samples of 30 from a known distribution, 95% of the intervals hold its median."""
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(200):
        estimate = stats.median_with_interval(rng.lognormal(0.0, 0.2, 30).tolist())
        hits += estimate.low <= 1.0 <= estimate.high
    assert 0.90 <= hits / 200 <= 0.99  # a binomial's spread is 1.5%; percentile bootstrap is rough


def test_an_interval_is_the_same_every_time():
    """Two calls on the same samples agree to the bit."""
    samples = [1.0, 1.2, 0.9, 1.1, 1.05]
    assert stats.median_with_interval(samples) == stats.median_with_interval(samples)


def test_scipy_and_numpy_intervals_agree():
    """Where SciPy is installed its percentile interval is numpy's, but for the resampling."""
    if stats._bootstrap_scipy is None:
        pytest.skip("needs SciPy")
    samples = np.random.default_rng(3).normal(1.0, 0.1, 50)
    ours = stats._bootstrap_numpy(samples, np.random.default_rng(0))
    theirs = stats._bootstrap_scipy(samples, np.random.default_rng(1))
    assert ours == pytest.approx(theirs, abs=0.01)  # a tenth of the samples' deviation


def test_no_samples_is_an_error():
    """Nothing measured has no median and no mean."""
    with pytest.raises(ValueError, match="no samples"):
        stats.median_with_interval([])
    with pytest.raises(ValueError, match="no values"):
        stats.geometric_mean([])
    with pytest.raises(ValueError, match="each side"):
        stats.paired_ratio([[1.0], []], [[1.0]])


def test_a_paired_ratio_weighs_processes_alike():
    """The figure is the geometric mean of the processes' medians, side by side."""
    estimate = stats.paired_ratio([[2.0, 2.0, 9.0], [8.0]], [[2.0], [2.0]])
    assert estimate.value == pytest.approx(math.sqrt(2.0 * 8.0) / 2.0)
    assert estimate.low <= estimate.value <= estimate.high


def test_processes_that_differ_widen_a_paired_interval():
    """Spread between processes shows, though each process by itself is steady."""
    steady = stats.paired_ratio([[1.0] * 30] * 3, [[1.0] * 30] * 3)
    spread = stats.paired_ratio([[0.8] * 30, [1.0] * 30, [1.25] * 30], [[1.0] * 30] * 3)
    assert steady.low == steady.high == 1.0
    assert spread.low < 0.95 < 1.05 < spread.high


@given(ratios)
def test_a_geometric_mean_of_inverses_is_the_inverse(values):
    """Which arm is the numerator makes no difference."""
    mean = stats.geometric_mean(values)
    assert stats.geometric_mean([1 / v for v in values]) == pytest.approx(1 / mean)


@pytest.mark.parametrize(
    ("first_s", "eager_first_s", "call_s", "eager_call_s", "expected"),
    [
        (10.0, 0.0, 0.5, 1.0, 20),
        (10.0, 0.5, 0.5, 1.0, 19),
        (10.1, 0.0, 0.5, 1.0, 21),  # 20.2 calls: the 21st pays the rest
        (10.0, 0.0, 1.0, 1.0, None),  # never: no gain
        (10.0, 0.0, 2.0, 1.0, None),  # never: a loss
        (0.1, 0.2, 2.0, 1.0, 0),  # nothing to pay back
    ],
)
def test_break_even(first_s, eager_first_s, call_s, eager_call_s, expected):
    """What compiling cost by what a call saves, rounded up."""
    assert stats.break_even_calls(first_s, eager_first_s, call_s, eager_call_s) == expected


@pytest.mark.parametrize(
    ("calls_s", "steady"),
    [
        ([1.0] * 4, False),  # too few
        ([1.0] * 5, True),
        ([9.0, 1.0, 1.01, 1.02, 1.0, 1.02], True),  # only the last five count
        ([1.0, 1.0, 1.0, 1.0, 1.04], False),
    ],
)
def test_warm_up_ends_when_calls_agree(calls_s, steady):
    """Five calls within 3% of each other."""
    assert Protocol().is_steady(calls_s) is steady


def test_the_protocol_keeps_its_promises():
    """At least 5 warm-up calls that agree within 3% and 30 rounds; quick is quicker."""
    assert FULL.warmup_calls >= 5
    assert FULL.warmup_spread <= 0.03
    assert FULL.rounds >= 30
    assert QUICK.rounds < FULL.rounds
