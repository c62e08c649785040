"""Deadlines: they come in time, they can't be dodged, and never after the block."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import nullcontext, suppress

import pytest

from fuseboard.board.deadline import deadline


class LateError(Exception):
    """With an argument that has no default: raising by class alone would fail."""

    def __init__(self, what: str) -> None:
        super().__init__(what)


def late() -> Exception:
    return LateError("too late")


def spin(seconds: float) -> int:
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        count += 1
    return count


@pytest.fixture(autouse=True)
def _leaves_no_trace():
    """Whatever timer and handler there were (pytest-timeout has its own) are there afterwards."""
    running = signal.getitimer(signal.ITIMER_REAL)[0] > 0
    handler = signal.getsignal(signal.SIGALRM)
    yield
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == running
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_block_in_time_is_left_alone():
    """Its result comes, and nothing later."""
    with deadline(0.5, late):
        result = spin(0.001)
    spin(0.6)
    assert result > 0


def test_a_block_that_is_late_is_stopped():
    """With the error that was asked for, soon."""
    start = time.perf_counter()
    with pytest.raises(LateError, match="too late"), deadline(0.05, late):
        spin(30)
    assert time.perf_counter() - start < 10


def test_a_sleep_is_interrupted():
    """Signals do that."""
    start = time.perf_counter()
    with pytest.raises(LateError), deadline(0.05, late):
        time.sleep(30)
    assert time.perf_counter() - start < 10


def test_catching_the_error_does_not_help():
    """Leaving the block raises it again, chained to what the block made of it."""

    def swallow():
        with deadline(0.05, late), suppress(LateError):
            spin(30)

    def replace():
        with deadline(0.05, late):
            try:
                spin(30)
            except LateError:
                raise ValueError("mine") from None

    with pytest.raises(LateError):
        swallow()
    with pytest.raises(LateError) as caught:
        replace()
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_block_s_own_error_passes():
    """Where it came in time."""
    with pytest.raises(KeyError, match="own"), deadline(30, late):
        raise KeyError("own")


@pytest.mark.parametrize(("outer", "inner"), [(0.05, 30), (30, 0.05)])
def test_deadlines_nest(outer, inner):
    """The one that is due first is raised, and the other is put away."""
    first = "outer" if outer < inner else "inner"
    with (
        pytest.raises(LateError, match=first),
        deadline(outer, lambda: LateError("outer")),
        deadline(inner, lambda: LateError("inner")),
    ):
        spin(30)


def test_no_error_ever_comes_after_the_block():
    """Limits round the block's own length, four thousand times: each either raises or doesn't."""
    late_ones = 0
    for i in range(4000):
        try:
            with deadline(2e-5 * (i % 10 + 1), late):
                spin(2e-5 * (i * 7 % 10 + 1))
        except LateError:
            late_ones += 1
        spin(5e-6)  # outside: an error here fails the test
    assert late_ones < 4000


def test_other_threads_are_left_alone():
    """Nothing could stop them where no lock is held."""
    results = []

    def work():
        with deadline(0.01, late):
            spin(0.05)
        results.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert results == ["done"]


@pytest.mark.parametrize("due", [0.02, 0.15])
def test_another_s_timer_rings_when_it_should(due):
    """Where it is due first, it alone rings; where later, it goes on after the block."""
    rung = []
    outer, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    previous = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.perf_counter() - start))
    signal.setitimer(signal.ITIMER_REAL, due)
    start = time.perf_counter()
    try:
        stopped = pytest.raises(LateError) if due > 0.08 else nullcontext()
        with stopped, deadline(0.08, late):
            spin(0.2)
        spin(0.2)
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, outer)
    assert len(rung) == 1
    assert rung[0] >= due
