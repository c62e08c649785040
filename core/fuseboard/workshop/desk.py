"""The two threads that serve graphs beside calls: one asks the workshop, the other one loads.

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
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from fuseboard.beside import beside
from fuseboard.workshop.process import Workshop, WorkshopError, request_directory
from fuseboard.workshop.request import Answer, Request
from fuseboard.workshop.slices import slices

log = logging.getLogger("fuseboard")

#: How long the workshop stays when there is nothing to do.
_IDLE_S = 20.0


class Order(Protocol):
    """A graph that is served; see :class:`fuseboard.workshop.life.Life`."""

    limit_s: float

    @property
    def bytes_to_send(self) -> int:
        """Bytes of inputs and weights."""

    def request(self, directory: Path) -> Request | None:
        """What to ask the workshop; None where that isn't needed."""

    def answered(self, answer: Answer) -> bool:
        """Take an answer. True where something is to be loaded."""

    def load(self) -> None:
        """Load what was chosen."""

    def fail(self, problem: str) -> None:
        """Nothing comes of it."""


class _Thread:
    """Does one thing with each graph of a queue."""

    def __init__(
        self, work: Callable[[weakref.ref[Order]], None], idle: Callable[[], None]
    ) -> None:
        self._work = work
        self._idle = idle
        self._queue: queue.SimpleQueue[weakref.ref[Order]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, order: weakref.ref[Order]) -> None:
        self._queue.put(order)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fuseboard", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # at the end of the process
                    self._thread = None

    def _run(self) -> None:
        while True:
            try:
                order = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                self._idle()
                order = self._queue.get()
            try:
                self._work(order)
            except (
                Exception
            ) as error:  # a bug of the board's; the next graph is served all the same
                log.exception("fuseboard: work beside calls failed")
                alive = order()
                if alive is not None:
                    alive.fail(f"{type(error).__name__}: {error}")
            del order


class Desk:
    """Serves graphs: has each tried in the workshop, then loaded here."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._workshop = Workshop()
        self._asking = _Thread(self._ask, self._workshop.close)
        self._loading = _Thread(self._load, lambda: None)
        self._is_known_to_end = False

    def submit(self, order: Order) -> None:
        """Serve a graph, unless it is gone before its turn comes."""
        if not self._is_known_to_end:
            self._is_known_to_end = True
            # A forked child of multiprocessing ends without what atexit knows of.
            multiprocessing.util.Finalize(None, self.end, exitpriority=0)
        self._asking.put(weakref.ref(order))

    def load(self, order: Order) -> None:
        """Load what was chosen for a graph that has been tried."""
        self._loading.put(weakref.ref(order))

    def _ask(self, order: weakref.ref[Order]) -> None:
        alive = order()
        if alive is None:
            return
        with request_directory(alive.bytes_to_send) as directory:
            with beside(), slices.work():
                request = alive.request(directory)
            answer: Answer | None = Answer()
            if request is not None:
                limit_s = alive.limit_s
                alive = None  # whoever holds the graph may let go of it meanwhile
                try:
                    answer = self._workshop.ask(
                        request, directory, limit_s, lambda: order() is not None
                    )
                except WorkshopError as error:
                    # What ended that process might end this one.
                    why = f"the workshop failed: {error}"
                    answer = Answer(problem=why, only_here=not error.started)
                alive = order()
            if alive is None or answer is None:
                return
            with beside(), slices.work():
                loads = alive.answered(answer)
        if loads:
            self._loading.put(order)

    def _load(self, order: weakref.ref[Order]) -> None:
        alive = order()
        if alive is not None:
            with beside(), slices.work():
                alive.load()

    def end(self) -> None:
        """At this process's end, which waits for nothing."""
        if os.getpid() == self._process:
            self._workshop.end()


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
