"""Deadlines: they come in time, they can't be dodged, and never after the block."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from fuseboard.board.deadline import deadline


class LateError(Exception):
    """With an argument that has no default: raising by class alone would fail."""

    def __init__(self, what: str) -> None:
        super().__init__(what)


def late() -> Exception:
    return LateError("too late")


def in_a_thread(function):
    """Run it in another thread; its result, or its exception raised here."""
    outcome = []

    def run():
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def here(function):
    return function()


everywhere = pytest.mark.parametrize("where", [here, in_a_thread])


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


@everywhere
def test_a_block_in_time_is_left_alone(where):
    """Its result comes, and nothing later."""

    def block():
        with deadline(0.05, late):
            result = spin(0.001)
        spin(0.1)
        return result

    assert where(block) > 0


@everywhere
def test_a_block_that_is_late_is_stopped(where):
    """With the error that was asked for, soon."""

    def block():
        with deadline(0.05, late):
            spin(30)

    start = time.perf_counter()
    with pytest.raises(LateError, match="too late"):
        where(block)
    assert time.perf_counter() - start < 10


def test_a_sleep_is_interrupted_on_the_main_thread():
    """Signals do that."""
    start = time.perf_counter()
    with pytest.raises(LateError), deadline(0.05, late):
        time.sleep(30)
    assert time.perf_counter() - start < 10


@everywhere
def test_catching_the_error_does_not_help(where):
    """Leaving the block raises it again, chained to what the block made of it."""

    def swallow():
        with deadline(0.05, late):
            try:
                spin(30)
            except LateError:
                pass

    def replace():
        with deadline(0.05, late):
            try:
                spin(30)
            except LateError:
                raise ValueError("mine") from None

    with pytest.raises(LateError):
        where(swallow)
    with pytest.raises(LateError) as caught:
        where(replace)
    assert isinstance(caught.value.__cause__, ValueError)


@everywhere
def test_the_block_s_own_error_passes(where):
    """Where it came in time."""

    def block():
        with deadline(30, late):
            raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        where(block)


@everywhere
@pytest.mark.parametrize(("outer", "inner"), [(0.05, 30), (30, 0.05)])
def test_deadlines_nest(where, outer, inner):
    """The one that is due first is raised, and the other is put away."""

    def block():
        with deadline(outer, lambda: LateError("outer")):
            with deadline(inner, lambda: LateError("inner")):
                spin(30)

    with pytest.raises(LateError, match="outer" if outer < inner else "inner"):
        where(block)


@everywhere
def test_no_error_ever_comes_after_the_block(where):
    """Limits round the block's own length, four thousand times: each either raises or doesn't."""

    def race():
        late_ones = 0
        for i in range(4000):
            try:
                with deadline(2e-5 * (i % 10 + 1), late):
                    spin(2e-5 * (i * 7 % 10 + 1))
            except LateError:
                late_ones += 1
            spin(5e-6)  # outside: an error here fails the test
        return late_ones

    assert where(race) < 4000


@pytest.mark.parametrize("due", [0.02, 0.15])
def test_another_s_timer_rings_when_it_should(due):
    """Where it is due first the watchdog takes over; where later, it goes on after the block."""
    rung = []
    outer, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    previous = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.perf_counter() - start))
    signal.setitimer(signal.ITIMER_REAL, due)
    start = time.perf_counter()
    try:
        with pytest.raises(LateError), deadline(0.08, late):
            spin(30)
        spin(0.2)
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, outer)
    assert len(rung) == 1
    assert rung[0] >= due
