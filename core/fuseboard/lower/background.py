"""Compile beside the user's calls, in one child process at a time, and wait for all of it.

The process that is being tuned does nothing but wait for the child, which has a lower priority; so
calls in the meantime share the processor with it and nothing else.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import multiprocessing.util
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from fuseboard.config.model import Settings
from fuseboard.errors import LoweringError, error_text
from fuseboard.living import Living
from fuseboard.lower.caching import Deferred, Token
from fuseboard.lower.isolated import LoweringRequest, LoweringResult
from fuseboard.lower.isolation import answer_in_child
from fuseboard.torch_api.state import StateGuard

log = logging.getLogger("fuseboard")

#: Comparisons of a graph that may follow each other: what is compiled elsewhere, what only this
#: process can compile, what there was no memory for beside others.
_ROUNDS = 8
#: How long the end of a process waits for its killed child to be gone, and the files with it.
_END_S = 5.0


@dataclass(frozen=True)
class Job:
    """A region to compile.

    :ivar limit_s: what its backend has, and ``origin``, where that was set.
    :ivar done: is told the result, and how many seconds it took, in the worker's thread.
    :ivar wanted: whether anybody still waits for it: a graph may be gone before its turn comes.
    """

    token: Token
    request: LoweringRequest
    limit_s: float
    origin: str
    done: Callable[[Token, LoweringResult, float], None]
    wanted: Callable[[], bool]


class Settling(Protocol):
    """A graph that hasn't been decided for good."""

    @property
    def name(self) -> str: ...
    @property
    def settled(self) -> bool: ...

    @property
    def waiting(self) -> int:
        """How much is still to be done for it beside calls, such as regions to be compiled."""

    def forked(self) -> None:
        """In a forked child: what another process compiles isn't waited for."""

    def settle(self) -> bool:
        """Decide now, on inputs that were kept; False where that needs another call."""


class Tuning(Settling, Protocol):
    """One whose regions are compiled here; see :class:`fuseboard.profile.choose.tuner.Tuner`."""

    def compiled(
        self, candidate: Any, token: Token, result: LoweringResult, seconds: float
    ) -> None:
        """Take what was compiled for a candidate, in the worker's thread."""


class Worker:
    """A thread that has jobs done in child processes, one after another.

    It is the process's that made it: a fork inherits the object, and leaves thread and child alone.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._child: int | None = None
        #: No child, nor any files for one, are there.
        self._idle = threading.Event()
        self._idle.set()
        self._ending = False

    def submit(self, job: Job) -> None:
        self._jobs.put(job)
        with self._lock:
            if self._thread is not None or self._ending:
                return
            thread = threading.Thread(target=self._work, name="fuseboard", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # at the end of the process: the graph stays undecided
                return
            self._thread = thread
            # A forked child of multiprocessing ends without what atexit knows of.
            multiprocessing.util.Finalize(None, self.end, exitpriority=0)

    def end(self) -> None:
        """At this process's end: the child goes, and its files with it. No other one is started.

        The thread, which has to be a daemon for that, isn't waited for: it waits for jobs for ever.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            self._ending = True
        self._idle.wait(_END_S)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if not job.wanted():
                continue
            with self._lock:
                if self._ending:
                    return
                self._idle.clear()
            start = time.perf_counter()
            result = self._answer(job)
            if self._ending:
                return
            job.done(job.token, result, time.perf_counter() - start)

    def _answer(self, job: Job) -> LoweringResult:
        """What a child process answers; it is ended when nobody waits for it any more."""

        def wanted() -> bool:
            return job.wanted() and not self._ending

        try:
            return answer_in_child(job.request, job.limit_s, job.origin, self._started, wanted)
        except LoweringError as error:
            return LoweringResult(error=str(error), for_good=error.for_good)
        except Exception as error:  # such as a full disk; the thread has to go on
            return LoweringResult(error=error_text(error), for_good=False)
        finally:
            with self._lock:
                self._child = None
            self._idle.set()

    def _started(self, process: int) -> None:
        with self._lock:
            self._child = process
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, process, 10)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the child for the block, so that what is timed in it has the machine to itself."""
        self._signal("SIGSTOP")
        try:
            yield
        finally:
            self._signal("SIGCONT")

    def _signal(self, name: str) -> None:
        if not hasattr(signal, name) or os.getpid() != self._process:
            return  # on Windows; in a fork
        with self._lock:
            if self._child is not None:
                try:
                    os.killpg(self._child, getattr(signal, name))
                except (ProcessLookupError, PermissionError):
                    pass  # it has just ended


#: Of the graphs that are compiled beside their calls.
numbers = itertools.count()

worker = Worker()
_unsettled: Living[Settling] = Living()


def add(graph: Settling) -> None:
    """Let :func:`wait` know of a graph."""
    _unsettled.add(graph)


def leave(graph: object) -> None:
    """Let :func:`wait` forget a graph that no call will run."""
    _unsettled.discard(graph)


def compile_for(graph: Tuning, candidate: Any, later: Deferred, settings: Settings) -> None:
    """Have a region of one of a graph's candidates compiled, unless the graph is gone by then."""
    assert later.request is not None
    owner = weakref.ref(graph)

    def done(token: Token, result: LoweringResult, seconds: float) -> None:
        alive = owner()
        if alive is not None:
            alive.compiled(candidate, token, result, seconds)

    def wanted() -> bool:
        return owner() is not None

    limit_s, origin = settings.hook_limit_s, settings.origin("hook_limit_s")
    worker.submit(Job(later.token, later.request, limit_s, origin, done, wanted))


def unsettled() -> list[Settling]:
    """The graphs that aren't decided for good."""
    return [graph for graph in _unsettled if not graph.settled]


def settled() -> bool:
    """Whether every graph that was compiled so far is decided for good. It does no work itself.

    False as well where a graph needs another call for that.
    """
    return not unsettled()


def wait(timeout_s: float | None = None, progress: bool = True) -> bool:
    """Wait until every graph that was compiled so far has settled.

    What is still being compiled is waited for, then candidates are verified and timed on each
    graph's first inputs, in this thread. A graph whose inputs weren't kept (copies
    would take too much memory, or a weight is gone) settles in its next call instead.

    :param timeout_s: seconds; None waits as long as it takes.
    :param progress: show a line on standard error, where that is a terminal; it is gone at the end.
    :returns: whether all have settled.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    rounds = 0  # in which nothing was compiling
    with _shown(progress) as show:
        while True:
            pending = unsettled()
            compiling = [graph for graph in pending if graph.waiting]
            compared = [graph for graph in pending if graph not in compiling and graph.settle()]
            show(len(_unsettled) - len(unsettled()), len(_unsettled))
            if not compiling:
                rounds += 1
                due = any(not graph.settled for graph in compared)
                due = due or any(graph not in pending for graph in unsettled())
                if rounds < _ROUNDS and due:
                    continue  # something is due that wasn't before
                break
            if end is not None and time.monotonic() >= end:
                break
            time.sleep(0.05)
    return not unsettled()


@contextmanager
def _shown(progress: bool) -> Iterator[Callable[[int, int], None]]:
    """A line of progress that tells (settled, all) graphs."""
    if not progress or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with StateGuard():  # importing rich draws from Python's generator of random numbers
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as p:
        task = p.add_task("fuseboard: settling")
        yield lambda done, total: p.update(
            task, description=f"fuseboard: {done} of {total} graphs settled"
        )


def _end() -> None:
    """Of this process: the worker is its own, though a fork inherits what is registered."""
    worker.end()


atexit.register(_end)


def _after_fork() -> None:
    """A forked child has neither the thread nor the graphs' child process."""
    global worker
    worker = Worker()
    graphs = list(_unsettled)
    _unsettled.clear()
    for graph in graphs:
        graph.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
