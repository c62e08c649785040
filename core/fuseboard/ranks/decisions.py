"""Decisions about a graph that is compiled within its calls: one rank makes them, all follow."""

from __future__ import annotations

import weakref
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
        self._leads = False
        wait_for(job, self._meet())
        if self._leads:  # the others are to see that it lives, as long as there may be decisions
            alive = weakref.ref(self)
            monitor_of(job).add(_while(lambda: alive() is not None), lambda error: None)

    def _meet(self) -> Steps:
        self._leads = yield from self._agreement.meet()

    def decide(self, decide: Callable[[], T]) -> T:
        """What ``decide`` answers on the rank that leads; it isn't called on the others.

        :raises RankError: that rank doesn't answer, or ``decide`` raised there. On that rank the
            exception itself goes on.
        """
        key = f"decision/{next(self._numbers)}"
        if self._leads:
            try:
                answer = decide()
            except BaseException as error:
                self._agreement.post(key, ("", error_text(error)))
                raise
            self._agreement.post(key, (answer, ""))
            return answer
        answer, problem = self._taken(key)
        if problem:
            raise RankError(f"the rank that leads failed to decide on {self._what}: {problem}")
        return answer

    def _taken(self, key: str) -> Any:
        taken: list[Any] = []

        def take() -> Steps:
            taken.append((yield from self._agreement.next(key)))

        wait_for(self._job, take())
        return taken[0]


def _while(goes_on: Callable[[], bool]) -> Steps:
    while goes_on():
        yield
