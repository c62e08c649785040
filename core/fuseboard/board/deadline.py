"""Stop code that takes too long, in the thread that runs it.

Arming costs microseconds: on the main thread an interval timer of the system, elsewhere an entry
in the heap of one watchdog thread.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

#: The watchdog looks at least this often, which also keeps it inside what a wait may last.
_LONGEST_WAIT_S = 3600.0


class deadline:
    """Raise ``error()`` inside the block once it has run for ``seconds``.

    On the main thread of a POSIX system this is ``SIGALRM``, which interrupts sleeps and waits
    too; unless another interval timer is due before. There, and in other threads, a watchdog
    raises the exception in this thread, which takes effect at the next bytecode: *a blocking C
    call is not interrupted*, the error comes when it returns.

    Code that catches the error can't win: leaving the block raises it again. Once the block has
    been left, nothing is raised any more.
    """

    def __init__(self, seconds: float, error: Callable[[], Exception]) -> None:
        self._seconds = seconds
        self._make_error = error
        self._error: Exception | None = None
        self._timer: _Alarm | _Watch | None = None

    def __enter__(self) -> None:
        self._timer = _Alarm(self) if _Alarm.possible(self._seconds) else _Watch(self)
        self._timer.start(self._seconds)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._timer is not None
        self._timer.stop()
        if self._error is not None and error is not self._error:
            raise self._error from error  # the block caught it, or made another one of it

    def expire(self) -> Exception:
        """The error to raise now; made once."""
        self._error = self._make_error()
        return self._error


class _Alarm:
    """``SIGALRM``, for the main thread. A timer that is due later waits, and then goes on."""

    def __init__(self, owner: deadline) -> None:
        self._owner = owner
        self._over = False
        self._handler: Any = None
        self._timer = (0.0, 0.0)
        self._started = 0.0

    @staticmethod
    def possible(seconds: float) -> bool:
        if not hasattr(signal, "setitimer"):
            return False
        if threading.current_thread() is not threading.main_thread():
            return False
        due, _ = signal.getitimer(signal.ITIMER_REAL)
        # None: a handler that Python didn't set and couldn't put back.
        return (due == 0 or due > seconds) and signal.getsignal(signal.SIGALRM) is not None

    def start(self, seconds: float) -> None:
        # All that _put_back needs is known before ours is armed: it may ring at once.
        self._started = time.monotonic()
        self._timer = signal.setitimer(signal.ITIMER_REAL, 0)
        self._handler = signal.getsignal(signal.SIGALRM)
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))

    def stop(self) -> None:
        if not self._over:
            self._over = True  # from here on a late signal does nothing
            self._put_back()

    def _put_back(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._handler)  # runs a late signal's handler first
        due, interval = self._timer
        if due:
            left = due - (time.monotonic() - self._started)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), interval)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        """Put everything back, then raise: right at any bytecode, even at ``__exit__``'s first."""
        if not self._over:
            self._over = True
            self._put_back()
            raise self._owner.expire()


class _Watch:
    """An entry of the watchdog thread, for other threads.

    Who pops ``_token``, the thread itself or the watchdog, decides: done, or too late.
    """

    def __init__(self, owner: deadline) -> None:
        self._owner = owner
        self._thread = threading.get_ident()
        self._token = [True]
        self._delivered = False

    def start(self, seconds: float) -> None:
        _watchdog.add(time.monotonic() + seconds, self)

    def stop(self) -> None:
        try:
            self._token.pop()
        except IndexError:
            while not self._delivered:  # it is on its way, and must not arrive after the block
                time.sleep(0)

    def is_over(self) -> bool:
        return not self._token

    def ring(self) -> None:
        """Called by the watchdog: raise the error in the thread that armed this."""
        try:
            self._token.pop()
        except IndexError:
            return
        error = self._owner.expire()

        def deliver(cls: type) -> Exception:
            self._delivered = True
            return error

        # CPython takes a class and calls it in the other thread at the moment of raising. This
        # one answers with the error that was made, so what is raised is right wherever it lands.
        carrier = type(type(error).__name__, (type(error),), {"__new__": deliver})
        raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread), ctypes.py_object(carrier)
        )
        if raised != 1:  # no such thread any more: nobody to raise it in
            self._delivered = True


class _Watchdog:
    """One daemon thread for all deadlines; started by the first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, _Watch]] = []
        self._count = itertools.count()
        self._thread: threading.Thread | None = None

    def add(self, when: float, watch: _Watch) -> None:
        with self._changed:
            heapq.heappush(self._heap, (when, next(self._count), watch))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="fuseboard-deadline", daemon=True
                )
                self._thread.start()
            elif self._heap[0][2] is watch:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._heap and self._heap[0][2].is_over():
                    heapq.heappop(self._heap)
                wait = self._heap[0][0] - time.monotonic() if self._heap else _LONGEST_WAIT_S
                if wait > 0:
                    self._changed.wait(min(wait, _LONGEST_WAIT_S))
                    continue
                watch = heapq.heappop(self._heap)[2]
            watch.ring()


_watchdog = _Watchdog()


def _after_fork() -> None:
    global _watchdog
    _watchdog = _Watchdog()  # threads don't survive a fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
