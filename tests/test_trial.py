"""The trial: of two programs that answer the user's calls in turn, the faster one wins."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseboard.workshop import trial
from fuseboard.workshop.trial import LOOKS, WARM, Trial


class Clock:
    """Time that passes only in calls of the programs."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(trial.time, "perf_counter", lambda: self.now)

    def program(self, name, times):
        times = itertools.cycle(times)

        def run(x):
            self.now += next(times)
            return name, x

        return run


def decided(clock, first, second, margin=0.03, limit=1000):
    """The winner, and how many calls it took."""
    winners = []
    programs = [clock.program("first", first), clock.program("second", second)]
    test = Trial(programs, margin, winners.append)
    for number in range(limit):
        assert test.call(number)[1] == number
        if winners:
            return winners, number + 1
    raise AssertionError("it didn't end")


@pytest.mark.parametrize(("first", "second", "winner"), [(3e-3, 1e-3, 1), (1e-3, 3e-3, 0)])
def test_a_clear_winner_is_found_at_the_first_look(monkeypatch, first, second, winner):
    """Without noise the fewest calls are enough."""
    winners, calls = decided(Clock(monkeypatch), [first], [second])
    assert winners == [winner]
    assert calls <= 2 * (LOOKS[0] + WARM) + 2


def test_the_second_wins_where_the_first_gains_less_than_the_margin(monkeypatch):
    """It won a comparison before."""
    noisy = [1.0e-3, 1.1e-3, 0.9e-3, 1.05e-3, 0.97e-3]
    winners, calls = decided(Clock(monkeypatch), noisy, [1.01 * t for t in noisy])
    assert winners == [1]
    assert calls <= 2 * (LOOKS[-1] + WARM) + 2


def test_first_calls_dont_count(monkeypatch):
    """They fill caches: here the first one takes a second."""
    clock = Clock(monkeypatch)
    slow_start = iter([1.0])
    fast = clock.program("second", [1e-3])

    def second(x):
        clock.now += next(slow_start, 0.0)
        return fast(x)

    winners = []
    test = Trial([clock.program("first", [2e-3]), second], 0.03, winners.append)
    for number in range(40):
        test.call(number)
    assert winners == [1]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=7),
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=7),
)
def test_every_trial_ends_once(first, second):
    """Whatever calls take, there is one decision, after a bounded number of calls."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        winners, calls = decided(Clock(monkeypatch), first, second)
    assert len(winners) == 1
    assert calls <= 2 * (LOOKS[-1] + WARM) + 2


def test_an_error_of_the_users_passes_and_decides_nothing(monkeypatch):
    """A call that raises isn't timed."""

    def raises(x):
        raise ValueError(x)

    test = Trial([raises, raises], 0.03, lambda winner: pytest.fail("decided"))
    for number in range(100):
        with pytest.raises(ValueError, match=str(number)):
            test.call(number)
    assert test.calls == 0
