"""Decisions about a graph that is compiled within its calls: one rank makes them, all follow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, TypeVar

from fuseboard.errors import RankError, error_text
from fuseboard.ranks.agreement import Agreement, Steps
from fuseboard.ranks.job import Job
from fuseboard.ranks.monitor import monitor_of, wait_for

T = TypeVar("T")

#: Makes a decision: calls the function, on this rank or on another one.
Decide = Callable[[Callable[[], Any]], Any]


def decide_alone(decide: Callable[[], T]) -> T:
    """What ``decide`` answers: the job has one rank."""
    return decide()


class Decisions:
    """What ranks that meet at a graph decide, one thing after the other.

    The rank that comes to a decision first makes it: another one may be unable to come before this
    one goes on, as in a pipeline, whose later stages come to their backwards first.

    What decides must not wait for other ranks, as a collective does: they wait for it.

    :param parts: name → text: the graph, and what decisions about it depend on.
    :param what: names the graph to people.
    :raises RankError: another rank has the graph, and other settings.
    """

    def __init__(self, job: Job, parts: Mapping[str, str], what: str) -> None:
        self._job = job
        self._what = what
        self._agreement = Agreement.about(job, parts, what)
        self._numbers = count()
        wait_for(job, self._meet())

    def _meet(self) -> Steps:
        yield from self._agreement.meet()

    def decide(self, decide: Callable[[], T]) -> T:
        """What ``decide`` answers on the rank that comes first; it isn't called on the others.

        :raises RankError: that rank doesn't answer, or ``decide`` raised there. On that rank the
            exception itself goes on.
        """
        key = f"decision/{next(self._numbers)}"
        if self._agreement.claims(key):
            over = threading.Event()  # until then the others are to see that it lives
            monitor_of(self._job).add(_until(over), lambda error: None)
            try:
                answer = decide()
            except BaseException as error:
                self._agreement.post(key, ("", error_text(error)))
                raise
            finally:
                over.set()
            self._agreement.post(key, (answer, ""))
            return answer
        answer, problem = self._taken(key)
        if problem:
            raise RankError(f"another rank failed to decide on {self._what}: {problem}")
        return answer

    def _taken(self, key: str) -> Any:
        taken: list[Any] = []

        def take() -> Steps:
            taken.append((yield from self._agreement.next(key)))

        wait_for(self._job, take())
        return taken[0]


def _until(over: threading.Event) -> Steps:
    while not over.is_set():
        yield
