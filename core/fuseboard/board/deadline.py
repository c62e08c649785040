"""Stop code that takes too long, where that can be done: on the main thread, by ``SIGALRM``."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class deadline:
    """Raise ``error()`` inside the block once it has run for ``seconds``.

    The signal interrupts sleeps and waits too. It takes effect at the next bytecode: *a blocking C
    call is not interrupted*, the error comes when it returns. Code that catches the error can't
    win: leaving the block raises it again. Once the block has been left, nothing is raised any
    more.

    Nothing is stopped in other threads and on Windows, where only an exception that may come while
    a lock is held could do it; nor where another interval timer is due before. What plugins compile
    beside calls is compiled on the main thread of a process of its own.
    """

    def __init__(self, seconds: float, error: Callable[[], Exception]) -> None:
        self._seconds = seconds
        self._make_error = error
        self._error: Exception | None = None
        self._is_over = True
        self._handler: Any = None
        self._timer = (0.0, 0.0)  # another one, which is due later: it waits, and then goes on
        self._started = 0.0

    def __enter__(self) -> None:
        if not _possible(self._seconds):
            return
        # All that _put_back needs is known before the timer is armed: it may ring at once.
        self._is_over = False
        self._started = time.monotonic()
        self._timer = signal.setitimer(signal.ITIMER_REAL, 0)
        self._handler = signal.getsignal(signal.SIGALRM)
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, max(self._seconds, 1e-6))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_over:
            self._is_over = True  # from here on a late signal does nothing
            self._put_back()
        if self._error is not None and error is not self._error:
            raise self._error from error  # the block caught it, or made another one of it

    def _put_back(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._handler)  # runs a late signal's handler first
        due, interval = self._timer
        if due:
            left = due - (time.monotonic() - self._started)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), interval)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        """Put everything back, then raise: right at any bytecode, even at ``__exit__``'s first."""
        if not self._is_over:
            self._is_over = True
            self._put_back()
            self._error = self._make_error()
            raise self._error


def _possible(seconds: float) -> bool:
    if not hasattr(signal, "setitimer"):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    due, _ = signal.getitimer(signal.ITIMER_REAL)
    # None: a handler that Python didn't set and couldn't put back.
    return (due == 0 or due > seconds) and signal.getsignal(signal.SIGALRM) is not None
