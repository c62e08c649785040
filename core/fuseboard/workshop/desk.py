"""The two threads that serve graphs beside calls: one waits for the workshop, the other one loads.

Both are daemons, and wait for graphs by weak references: one that nobody will call isn't worked on.
Their Python work is done in slices; see :mod:`fuseboard.workshop.slices`.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from fuseboard.beside import beside
from fuseboard.errors import ProcessEnds, error_text
from fuseboard.torch_api import internals as torch_internals
from fuseboard.workshop.happenings import Take
from fuseboard.workshop.process import (
    Workshop,
    WorkshopError,
    remove_directories,
    request_directory,
)
from fuseboard.workshop.request import Answer, Request
from fuseboard.workshop.slices import slices

log = logging.getLogger("fuseboard")

#: How long the workshop stays when there is nothing to do.
_IDLE_S = 20.0
#: How long the process's end waits for a thread that is in C++ code, such as an engine's that makes
#: a session. Kernels take milliseconds.
_END_S = 2.0


class Next(Enum):
    """What is to be done for a graph."""

    NOTHING = "nothing beside calls"
    ASK = "ask the workshop"
    LOAD = "load what was chosen"


class Order(Protocol):
    """A graph that is served; see :class:`fuseboard.workshop.life.Life`."""

    limit_s: float

    @property
    def take(self) -> Take:
        """What is given what happens in the workshop. It doesn't hold the graph."""

    @property
    def bytes_to_send(self) -> int:
        """Bytes of inputs and weights."""

    def recall(self) -> Next:
        """See whether an earlier process has asked."""

    def request(self, directory: Path) -> Request | Answer:
        """What to ask the workshop, or its answer where it can't be asked."""

    def answered(self, answer: Answer) -> Next:
        """Take an answer."""

    def load(self) -> Next:
        """Load what was chosen."""

    def compare(self) -> Next:
        """Hold what was chosen against Dynamo's graph on a further call, or of other sizes."""

    def keep_trial(self) -> Next:
        """Keep for later processes how the trial ended."""

    def fail(self, problem: str) -> None:
        """Nothing comes of it."""


_Work = Callable[["weakref.ref[Order]"], None]


class _Thread:
    """Does what is put into its queue, for one graph after the other.

    :param idle: is called where there has been nothing to do for a while.
    """

    def __init__(self, idle: Callable[[], None]) -> None:
        self._idle = idle
        self._queue: queue.SimpleQueue[tuple[_Work, weakref.ref[Order]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._done = threading.Condition()
        self._left = 0
        self._thread: threading.Thread | None = None
        #: The process ends, and takes its files away from what is being done.
        self._ending = False

    def put(self, work: _Work, order: weakref.ref[Order]) -> None:
        with self._done:
            self._left += 1
        self._queue.put((work, order))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fuseboard", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # at the end of the process
                    self._thread = None

    def _run(self) -> None:
        try:
            self._serve()
        except ProcessEnds:
            pass

    def _serve(self) -> None:
        while True:
            try:
                work, order = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                self._idle()
                work, order = self._queue.get()
            try:
                work(order)
            except Exception as error:  # a bug of the board's; the next graph is served
                if self._ending:
                    return
                log.exception("fuseboard: work beside calls failed")
                alive = order()
                if alive is not None:
                    alive.fail(error_text(error))
            del order
            with self._done:
                self._left -= 1
                self._done.notify_all()

    def end(self) -> None:
        """From now on failures say nothing."""
        self._ending = True

    def wait(self, limit_s: float) -> None:
        """Return once all is done that was put into the queue, or after so many seconds."""
        with self._done:
            self._done.wait_for(lambda: not self._left, limit_s)


class Desk:
    """Serves graphs: has each tried in the workshop, unless an earlier process had, then loaded.

    What is known already isn't kept waiting by what is being tried.

    :ivar workshop: the process that tries.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self.workshop = Workshop()
        self._asking = _Thread(self.workshop.close)
        self._loading = _Thread(lambda: None)
        self._is_known_to_end = False

    def submit(self, order: Order) -> None:
        """Serve a graph, unless it is gone before its turn comes."""
        if not self._is_known_to_end:
            self._is_known_to_end = True
            # A forked child of multiprocessing ends without what atexit knows of.
            multiprocessing.util.Finalize(None, self.end, exitpriority=0)
        watch_dynamo()  # torch may have been reset
        self._loading.put(self._recall, weakref.ref(order))

    def pay_for_trace(self) -> None:
        """In a graph's first call: wait a little for what an earlier process chose for it."""
        slices.pay_for_trace(self._loading.wait)

    def wait_for_known(self, limit_s: float = 60.0) -> None:
        """Wait until what earlier processes have left was looked for, and what was found loaded."""
        self._loading.wait(limit_s)

    def load(self, order: Order) -> None:
        """Load what was chosen for a graph that has been tried."""
        self._loading.put(self._load, weakref.ref(order))

    def compare(self, order: Order) -> None:
        """Compare what was chosen for a graph on a call that it has kept."""
        self._loading.put(self._compare, weakref.ref(order))

    def keep_trial(self, order: Order) -> None:
        """Keep how a graph's trial ended."""
        self._loading.put(self._keep_trial, weakref.ref(order))

    def _go_on(self, order: weakref.ref[Order], what: Next) -> None:
        if what is Next.ASK:
            self._asking.put(self._ask, order)
        elif what is Next.LOAD:
            self._loading.put(self._load, order)

    def _recall(self, order: weakref.ref[Order]) -> None:
        self._do(order, lambda alive: alive.recall())

    def _load(self, order: weakref.ref[Order]) -> None:
        self._do(order, lambda alive: alive.load())

    def _compare(self, order: weakref.ref[Order]) -> None:
        self._do(order, lambda alive: alive.compare())

    def _keep_trial(self, order: weakref.ref[Order]) -> None:
        self._do(order, lambda alive: alive.keep_trial())

    def _do(self, order: weakref.ref[Order], step: Callable[[Order], Next]) -> None:
        """Let a graph that somebody may still call take a step, and do what is to follow it."""
        alive = order()
        if alive is not None:
            with beside(), slices.work():
                what = step(alive)
            self._go_on(order, what)

    def _ask(self, order: weakref.ref[Order]) -> None:
        alive = order()
        if alive is None:
            return
        with request_directory(alive.bytes_to_send) as directory:
            with beside(), slices.work():
                request = alive.request(directory)
            limit_s, take = alive.limit_s, alive.take
            alive = None  # whoever holds the graph may let go of it meanwhile
            answer: Answer | None
            if isinstance(request, Answer):
                answer = request
            else:
                answer = self._answer(request, directory, limit_s, order, take)
        if answer is not None:
            self._do(order, lambda alive: alive.answered(answer))

    def _answer(
        self,
        request: Request,
        directory: Path,
        limit_s: float,
        order: weakref.ref[Order],
        take: Take,
    ) -> Answer | None:
        def take_beside(happening: Mapping[str, Any]) -> None:
            with beside(), slices.work():
                take(happening)

        def wanted() -> bool:
            return order() is not None

        try:
            return self.workshop.ask(request, directory, limit_s, wanted, take_beside)
        except WorkshopError as error:
            problem = f"the workshop failed: {error}"
            log.warning("fuseboard: %s: %s", request.frame, problem)
            # What ended that process might end this one.
            return Answer(problem=problem, only_here=not error.started)

    def end(self) -> None:
        """At this process's end, which waits for nothing but the op that a thread is at."""
        if os.getpid() == self._process:
            self._asking.end()
            self._loading.end()
            slices.end(_END_S)
            self.workshop.end()
            remove_directories()


def watch_dynamo() -> None:
    """Let the threads pause for traces, and be given a share of their time."""
    torch_internals.watch_dynamo(slices.trace_begins, slices.trace_ends)


_desk = Desk()


def desk() -> Desk:
    """This process's."""
    return _desk


def _end() -> None:
    _desk.end()


atexit.register(_end)


def _after_fork() -> None:
    """A forked child has neither the threads nor the workshop."""
    global _desk
    _desk = Desk()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
