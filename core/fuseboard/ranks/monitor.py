"""The thread in which a rank agrees with others beside its calls, and which sees whether they live.

Each rank with something to agree on gives a sign of life now and then, and watches the one before
it, so that what a rank sends doesn't grow with the number of ranks. Who finds that one has fallen
silent tells all. A rank that has nothing to agree on, or ends, says so and isn't watched; then the
one before it is.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fuseboard.errors import RankError, error_text
from fuseboard.forks import fork_safe_lock
from fuseboard.ranks.agreement import RankHasLeft, Steps
from fuseboard.ranks.job import Job

log = logging.getLogger("fuseboard")

#: What is asked again, and how soon, in seconds.
_SOONEST_S, _LATEST_S = 0.01, 0.5
#: Signs of life within the limit.
_BEATS = 8
_ENDED = "ended"
#: How long the end of a process waits for others to see that it isn't dead, in seconds.
_END_S = 2.0


class Signs:
    """The signs of life that a rank gives, and those that it looks for."""

    def __init__(self, job: Job, clock: Callable[[], float]) -> None:
        self._job = job
        self._clock = clock
        self._alive = f"fuseboard/{job.number}/alive"
        self._dead = f"fuseboard/{job.number}/dead"
        self._beats = 0
        self._due = clock()
        #: Of the rank that is watched: its last sign, and when that was seen first.
        self._seen: tuple[int, object, float] = (-1, None, 0.0)

    def tend(self) -> None:
        """Do what is due.

        :raises RankError: a rank is dead.
        """
        now = self._clock()
        if now < self._due:
            return
        self._due = now + self._job.limit_s / _BEATS
        self._beats += 1
        self._job.post(f"{self._alive}/{self._job.rank}", self._beats)
        if dead := self._job.look(self._dead):
            raise RankError(dead)
        self._watch(now)

    def rest(self) -> None:
        """Say that no sign is to be expected: there is nothing to agree on, or the end has come."""
        self._job.post(f"{self._alive}/{self._job.rank}", _ENDED)
        self._due = self._clock()

    def _watch(self, now: float) -> None:
        job = self._job
        for step in range(1, job.size):
            rank = (job.rank - step) % job.size
            sign = job.look(f"{self._alive}/{rank}", _ENDED)
            if sign == _ENDED:
                continue
            if self._seen[:2] != (rank, sign):
                self._seen = rank, sign, now
            elif now - self._seen[2] > job.limit_s:
                problem = (
                    f"rank {rank} has given no sign of life for {job.limit_s:g} s while ranks "
                    "agreed on what to run: its process has ended, or hangs (the setting "
                    "rank_limit_s)"
                )
                job.post(self._dead, problem)
                raise RankError(problem)
            return


@dataclass(frozen=True, eq=False)
class _Task:
    steps: Steps
    failed: Callable[[RankError], None]
    leave: Callable[[], None]


class Monitor:
    """Takes the steps of agreements, one after the other, as long as there are any."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._process = os.getpid()
        self._signs = Signs(job, time.monotonic)
        self._tasks: list[_Task] = []
        self._lock = fork_safe_lock()
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being agreed on."""
        return self._thread is None

    def add(
        self,
        steps: Steps,
        failed: Callable[[RankError], None],
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """Go on with an agreement until it is reached.

        :param failed: is told why it can't be.
        :param leave: tells the others that this process ends before that.
        """
        with self._lock:
            self._tasks.append(_Task(steps, failed, leave))
            if self._thread is None and not self._ends.is_set():
                self._thread = threading.Thread(target=self._run, name="fuseboard", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        poll_s = _SOONEST_S
        while not self._ends.is_set():
            with self._lock:
                tasks = list(self._tasks)
            done: list[_Task] = []
            try:
                if tasks:
                    self._signs.tend()
            except Exception as error:  # no call may wait for a thread that has ended
                for task in tasks:
                    task.failed(_as_rank_error(error))
                done = tasks
            else:
                done = [task for task in tasks if not _goes_on(task)]
            with self._lock:
                self._tasks = [task for task in self._tasks if task not in done]
                if not self._tasks:
                    self._thread = None
                    break
            poll_s = _SOONEST_S if done else min(1.2 * poll_s, _LATEST_S)
            self._ends.wait(poll_s)
        self._rest()

    def _rest(self) -> None:
        with self._lock:
            unfinished = list(self._tasks)
        try:
            self._signs.rest()
            if self._ends.is_set() and unfinished:
                for task in unfinished:
                    task.leave()
                if not self.job.rank:  # it may hold the store, where others are to read that
                    time.sleep(2 * _LATEST_S)
        except RankError:  # there is no store, and so nobody who could ask
            pass

    def end(self) -> None:
        """At the process's end: it isn't taken for dead."""
        if os.getpid() != self._process:
            return
        self._ends.set()
        thread = self._thread
        if thread is not None:
            thread.join(_END_S)


def _goes_on(task: _Task) -> bool:
    """Whether an agreement goes on, after a step."""
    try:
        next(task.steps)
    except StopIteration:
        return False
    except Exception as error:  # no call may wait for a thread that has ended
        if not isinstance(error, RankError):
            with contextlib.suppress(RankError):  # there is no store, and so nobody to be told
                task.leave()
        task.failed(_as_rank_error(error))
        return False
    return True


def _as_rank_error(error: Exception) -> RankError:
    if isinstance(error, RankError):
        return error
    log.error("fuseboard: ranks can't agree", exc_info=error)
    return RankError(f"ranks can't agree: {error_text(error)}")


def wait_for(job: Job, steps: Steps) -> None:
    """Wait until the monitor has taken all steps, in a call that can't go on before.

    :raises RankError: a rank is dead, or it takes too long.
    """
    done, errors = threading.Event(), list[RankError]()

    def until_done() -> Steps:
        try:
            yield from steps
        except RankHasLeft as left:  # a call can't go on without it
            raise RankError(str(left)) from left
        done.set()

    def failed(error: RankError) -> None:
        errors.append(error)
        done.set()

    monitor_of(job).add(until_done(), failed)
    done.wait()  # the steps have limits of their own
    if errors:
        raise errors[0]


_monitors: dict[int, Monitor] = {}
_lock = fork_safe_lock()


def monitor_of(job: Job) -> Monitor:
    """This process's, for a job."""
    with _lock:
        key = id(job.store)
        if key not in _monitors:
            for other in [key for key, monitor in _monitors.items() if monitor.is_idle]:
                del _monitors[other]  # its process group is gone
            _monitors[key] = Monitor(job)
            # A forked child of multiprocessing ends without what atexit knows of.
            multiprocessing.util.Finalize(None, _end, exitpriority=0)
        return _monitors[key]


def _end() -> None:
    for monitor in list(_monitors.values()):
        monitor.end()


atexit.register(_end)


def _after_fork() -> None:
    """A forked child is no rank: its parent is."""
    _monitors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
