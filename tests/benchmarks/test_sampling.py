"""What a sampling session costs: the blocks that are timed, and the verdict on them."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest

from benchmarks import sampling
from benchmarks.models import MODELS
from benchmarks.protocol import Protocol
from fuseboard import SamplingError


def process(sampled: float, again: float = 1.0, counts=(100, 101)):
    """A worker's values: two calls a second without a session, and these ratios."""
    off = [0.5, 0.6, 0.5]
    ratios = {
        "off": 1.0,
        "off again": again,
        "sampled": sampled,
        "sampled, blocking": 1.2,
        "sampled, native": 1.5,
    }
    return {
        "seconds": {kind: [ratio * x for x in off] for kind, ratio in ratios.items()},
        "samples": {"sampled": list(counts), "sampled, native": [90]},
    }


def test_the_models_exist():
    """A model that was renamed would fail only after minutes."""
    assert set(sampling.MODELS) <= set(MODELS)


@pytest.mark.parametrize(
    ("ratios", "holds"),
    [((1.02, 1.02), "yes"), ((1.2, 1.2), "no"), ((1.01, 1.08), "within the interval")],
)
def test_the_claim_is_judged_by_the_slowdown(ratios, holds):
    """1.03 or less; where processes differ, the interval may reach it."""
    finding = sampling.sampling_finding("claim", [process(ratio) for ratio in ratios])
    assert finding.holds == holds
    assert "off again 1.000 [1.000, 1.000], sampled 1." in finding.measured
    assert "sampled, native 1.500" in finding.measured
    assert "100 samples a block" in finding.measured


def test_rounds_are_compared_with_their_own_time_without():
    """A machine that slows down in the course of rounds has no part in it."""
    drifting = process(1.0)
    drifting["seconds"]["off"] = [0.5, 1.0, 2.0]
    drifting["seconds"]["sampled"] = [0.55, 1.1, 2.2]
    assert sampling.slowdown([drifting], "sampled").value == pytest.approx(1.1)


def test_blocks_without_samples_keep_no_claim():
    """A sampler that sleeps costs nothing, and shows nothing."""
    finding = sampling.sampling_finding("claim", [process(1.0, counts=(100, 0))])
    assert finding.holds == "no"
    assert finding.measured.startswith("a block without samples")


def test_each_round_has_a_block_of_each_kind_in_a_changing_order(monkeypatch):
    """The session is entered around the calls, which take the inputs in turn."""
    monkeypatch.setattr(sampling, "BLOCK_S", 0.0)
    entered, calls = [], []

    @contextmanager
    def session(kind):
        entered.append(kind)
        yield

    protocol = Protocol(rounds=6, burst_s=1.0)
    seconds = sampling.measure_blocks(calls.append, [(1,), (2,)], 0.25, protocol, session)
    assert {kind: len(values) for kind, values in seconds.items()} == dict.fromkeys(
        sampling.KINDS, 6
    )
    count = len(sampling.KINDS)
    rounds = [tuple(entered[i : i + count]) for i in range(0, len(entered), count)]
    assert all(set(block) == set(sampling.KINDS) for block in rounds)
    assert len(set(rounds)) > 1
    assert Counter(calls) == {1: 60, 2: 60}  # 4 calls a block, of 30 blocks
    assert all(value > 0 for values in seconds.values() for value in values)


def test_sessions_are_py_spy_s_and_count_their_samples():
    """A real one, short; kinds without a session are none."""
    sessions = sampling.Sessions()
    with sessions("off"), sessions("off again"):
        pass
    assert sessions.samples == {}
    try:
        with sessions("sampled"):
            sum(range(20_000_000))
    except SamplingError as error:
        pytest.skip(f"needs py-spy: {error}")
    (count,) = sessions.samples["sampled"]
    assert count > 5


def test_a_block_goes_on_until_its_time_is_up(monkeypatch):
    """However slow the calls become; what is noted is the time of one."""
    monkeypatch.setattr(sampling, "BLOCK_S", 0.05)
    seconds = sampling.measure_blocks(
        time.sleep, [(0.01,)], 0.01, Protocol(rounds=1), lambda kind: nullcontext()
    )
    assert all(0.01 <= value < 0.05 for (value,) in seconds.values())
