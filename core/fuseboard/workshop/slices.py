"""Python work beside calls, in slices that calls don't notice.

A thread that holds Python's global lock keeps each op of a call waiting for up to
``sys.getswitchinterval()``, 5 ms, and a call has hundreds of ops. So the board's own threads look,
at each call of a function in them, whether they should let go:

* While a call is under way they pause. One that takes very long lets them have a little meanwhile,
  since they may hold a lock that it waits for.
* A loop that makes one call after the other would leave them nothing. So a call that ends waits
  for them, as long as a share of what calls took since it last did. Where it waited for longer, as
  for an engine's code that holds the lock throughout, the next ones owe so much less. Nothing is
  owed to work that doesn't pause: kernels, and engines that make their sessions, run without the
  lock, on another core.
* The first call of a graph waits a share of what Dynamo's trace took, which is seconds: what an
  earlier process chose is loaded then, or most of it is.
* At the process's end they stop: a thread that comes back from C++ code once the interpreter is
  gone would be unwound through it, and the process aborted.
* Between calls they work in bursts, with rests in which another thread gets the lock at once.

The profile function costs these threads as much CPU time as their work, most of it what Python does
to call it. A shorter ``sys.setswitchinterval`` would cost them nothing, and gets more done beside
long ops; but it is the whole process's, so that who reads it meanwhile and puts it back later would
keep it for good, and calls of small ops would take many times as long: each op waits for the lock.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fuseboard.errors import ProcessEnds

#: How long a burst lasts, and the rest after it.
BURST_S, REST_S = 0.0003, 0.0002
#: While a call is under way: how long the pause lasts until there is a little work all the same.
PAUSE_S, LITTLE_S = 0.1, 0.002
#: The share of calls' time that is given to the work after them; the least that is given, and the
#: most for short calls.
SHARE, LEAST_S, MOST_S = 0.2, 0.001, 0.015
#: The share of traces' time that is given to it after them.
TRACE_SHARE = 0.12
#: How much of what calls have waited for too long is made up for, at most.
DEBT_S = 0.1

_clock = time.perf_counter


class Slices:
    """When the board's own threads may run Python code.

    Counters are changed without a lock where Python's own makes that safe enough: one that is off
    by one costs a pause, never an answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._workers = 0
        #: How many of the workers have paused.
        self._waiting = 0
        self._owed_s = 0.0
        #: When the trace began that is under way, and what the last one took.
        self._trace_began: float | None = None
        self._traced_s = 0.0
        #: No call is under way, or the work has a slice of its own.
        self._open = threading.Event()
        self._open.set()
        self._until = 0.0
        #: Those that work.
        self._threads: set[threading.Thread] = set()

    # --- calls ----------------------------------------------------------------------------------

    def enter(self) -> float:
        """A call begins. Returns when, for :meth:`leave`."""
        with self._lock:
            self._calls += 1
            if self._workers:
                self._until = 0.0
                self._open.clear()
        return _clock()

    def trace_begins(self, _: object = None) -> None:
        """Dynamo traces, which is Python work of the user's thread and no shorter than a call."""
        self._trace_began = self.enter()

    def trace_ends(self, _: object = None) -> None:
        """A trace is over; what is owed for it, the call after it pays."""
        with self._lock:
            began, self._trace_began = self._trace_began, None
            if began is None:  # it wasn't seen: torch was reset, or this is a forked child
                return
            self._traced_s = _clock() - began
            self._calls = max(self._calls - 1, 0)
            if not self._calls:
                self._open.set()

    def pay_for_trace(self, wait: Callable[[float], object]) -> None:
        """The call has its answer for which Dynamo traced; it waits for a slice of the work.

        :param wait: returns once there is no work, or after so many seconds.
        """
        with self._lock:
            slice_s, self._traced_s = TRACE_SHARE * self._traced_s, 0.0
            self._until = _clock() + slice_s
            self._open.set()
        wait(slice_s)

    def leave(self, began: float) -> None:
        """A call ends; it waits for a slice of the work that is owed."""
        ended = _clock()
        took = ended - began
        with self._lock:
            self._calls = max(self._calls - 1, 0)  # a fork in a call has forgotten it
            if not self._calls:
                self._open.set()
            if not self._workers:
                return
            owed_s = self._owed_s + SHARE * took
            slice_s = self._owed_s = min(owed_s, max(SHARE * took, MOST_S))
            if not self._waiting or slice_s < LEAST_S:
                return
            self._until = ended + slice_s
            self._open.set()
        time.sleep(slice_s)
        self._owed_s = max(self._owed_s - (_clock() - ended), -DEBT_S)

    # --- the work -------------------------------------------------------------------------------

    @contextmanager
    def work(self) -> Iterator[None]:
        """Do the block's Python work beside calls; in a thread of the board's."""
        with self._lock:
            self._workers += 1
            if self._calls:  # one is under way that began when there was no work
                self._open.clear()
        thread = threading.current_thread()
        self._threads.add(thread)
        before = sys.getprofile()
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(before)
            self._threads.discard(thread)
            with self._lock:
                self._workers -= 1

    def end(self, limit_s: float) -> None:
        """At the process's end: stop the threads that work, and return once they have, or after so
        many seconds.
        """
        threads = tuple(self._threads - {threading.current_thread()})
        for thread in threads:
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(ProcessEnds))
        self._open.set()
        until = _clock() + limit_s
        for thread in threads:  # what it holds is freed by C++ code, too
            thread.join(max(until - _clock(), 0.0))

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        # Functions written in C are left out, as are ends: there are three of these for each call
        # of a Python function, and it is soon called again.
        if event == "call" and _clock() > self._until:
            self._pause()

    def _pause(self) -> None:
        with self._lock:
            self._waiting += 1
        if self._calls:
            self._open.wait(PAUSE_S)
            burst = LITTLE_S if self._calls else BURST_S
        else:
            time.sleep(REST_S)
            burst = BURST_S
        with self._lock:
            self._waiting -= 1
        # A call that begins in between sets it to 0 once more; at worst it meets one burst.
        self._until = max(self._until, _clock() + burst)


slices = Slices()


def _after_fork() -> None:
    """A forked child has none of the threads whose calls and work were counted."""
    slices.__init__()  # type: ignore[misc]  # calls under way hold the object, so it stays


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
