"""The trial: of two programs that answer the user's calls in turn, the faster one wins."""

from __future__ import annotations

import itertools
import operator
import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseboard.workshop import trial
from fuseboard.workshop.trial import LOOKS, MOST_CALLS, WARM, Trial


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


class Sized(Clock):
    """Programs whose calls take time by their size."""

    def program(self, name, us_of):
        def run(size):
            self.now += us_of(size)
            return name, size

        return run

    def decided(self, first, second, sizes, passed_by=()):
        """The winner, and how many calls it took."""
        winners = []
        programs = [self.program("first", first), self.program("second", second)]
        test = Trial(programs, 0.03, winners.append, lambda args: args[0])
        for number, size in enumerate(sizes):
            if number in passed_by:
                test.pass_by()
            else:
                assert test.call(size)[1] == size
            if winners:
                return winners, number + 1
        raise AssertionError("it didn't end")


@pytest.mark.parametrize(("share", "winner"), [(0.9, 1), (1.3, 0)])
def test_calls_of_the_same_sizes_are_compared(monkeypatch, share, winner):
    """A tenth decides, where sizes make calls a hundred times as long as others."""
    sizes = random.Random(0).choices(range(1, 101), k=MOST_CALLS)
    times = partial(operator.mul, 1e-3), partial(operator.mul, share * 1e-3)
    winners, _ = Sized(monkeypatch).decided(*times, sizes)
    assert winners == [winner]


def test_what_won_before_stays_where_no_sizes_come_again(monkeypatch):
    """After a bounded number of calls."""
    times = partial(operator.mul, 1e-3), partial(operator.mul, 9e-3)
    winners, calls = Sized(monkeypatch).decided(*times, range(1, 1000))
    assert (winners, calls) == ([1], MOST_CALLS)


def test_first_calls_of_sizes_count_where_there_are_no_others(monkeypatch):
    """They are better than nothing."""
    times = partial(operator.mul, 1e-3), partial(operator.mul, 9e-3)
    sizes = [1 + number // 2 for number in range(1000)]
    winners, calls = Sized(monkeypatch).decided(*times, sizes)
    assert (winners, calls) == ([0], MOST_CALLS)


def test_calls_that_are_passed_by_end_it_too(monkeypatch):
    """Those that Dynamo's graph answers for their sizes; two pairs decide nothing."""
    times = partial(operator.mul, 1e-3), partial(operator.mul, 9e-3)
    passed_by = range(6, 1000)
    winners, calls = Sized(monkeypatch).decided(*times, [3] * 1000, passed_by)
    assert (winners, calls) == ([1], MOST_CALLS)


def test_an_error_of_the_users_passes_and_decides_nothing(monkeypatch):
    """A call that raises isn't timed."""

    def raises(x):
        raise ValueError(x)

    test = Trial([raises, raises], 0.03, lambda winner: pytest.fail("decided"))
    for number in range(100):
        with pytest.raises(ValueError, match=str(number)):
            test.call(number)
    assert test.calls == 0
