"""A graph that several ranks have: one asks the workshop, and all swap at the same call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fuseboard.errors import RankError
from fuseboard.ranks.agreement import Agreement
from fuseboard.ranks.job import Job
from fuseboard.ranks.monitor import monitor_of
from fuseboard.workshop.request import Answer

Run = Callable[..., Any]


class Member(Protocol):
    """This rank's graph; see :class:`fuseboard.workshop.life.Life`."""

    def lead(self) -> None:
        """Ask the workshop, or see what an earlier process was answered."""

    def follow(self, answer: Answer) -> None:
        """Take what another rank's workshop answered."""

    def swap(self) -> Run:
        """Decide for what was chosen. Returns what answers calls from now on."""

    def fail(self, problem: str) -> None:
        """Dynamo's own graph answers all calls."""


class Together:
    """What stands between a graph's calls and the job's decision.

    :param put: lets calls go to a program.
    """

    def __init__(self, job: Job, member: Member, put: Callable[[Run], None]) -> None:
        self._job = job
        self._member = member
        self._put = put
        self._agreement: Agreement | None = None
        self._lock = threading.Condition()
        self._calls = 0
        #: The call from which on none goes by without a verdict.
        self._bound: int | None = None
        #: What calls from that one on are answered by, once all ranks are bound.
        self._program: Run | None = None
        #: Why ranks can't agree.
        self.error: RankError | None = None

    def begin(self, parts: Mapping[str, str], what: str) -> None:
        """Agree from now on.

        :param parts: what the choice depends on.
        """
        self._agreement = Agreement.about(self._job, parts, what)
        steps = self._agreement.steps(self)
        monitor_of(self._job).add(steps, self._failed, self._agreement.leave)

    def check(self) -> None:
        """
        :raises RankError: ranks can't agree. Nobody is to wait for that twice.
        """
        if self.error is not None:
            self._member.fail(str(self.error))
            raise self.error

    # --- for the graph --------------------------------------------------------------------------

    def answered(self, answer: Answer) -> None:
        """This rank leads, and knows the answer."""
        if self._agreement is not None:
            self._agreement.answered(answer, swaps=answer.program is not None)

    def loaded(self) -> None:
        """This rank has what was chosen."""
        if self._agreement is not None:
            self._agreement.loaded()

    def failed(self, problem: str) -> None:
        """Nothing comes of it on this rank."""
        if self._agreement is not None:
            self._agreement.answered(Answer(problem=problem), swaps=False)
            self._agreement.loaded(problem)

    def counting(self, own: Run) -> Run:
        """Answers calls by Dynamo's graph, and counts them, until ranks swap."""

        def run(*args: Any) -> Any:
            program = self._due()
            if self.error is not None:  # the user has to know, once; the graph itself is right
                self._put(own)
                raise self.error
            return (program or own)(*args)

        return run

    def _due(self) -> Run | None:
        """What answers this call instead of Dynamo's graph, from the agreed one on."""
        with self._lock:
            number = self._calls
            self._calls += 1
            if self._bound is None or number < self._bound:
                return None
            # The verdict has come long ago, unless calls are quicker than the ranks' store.
            self._lock.wait_for(lambda: not self._waits_at(number))
            if self._program is not None:
                self._put(self._program)
            return self._program

    def _waits_at(self, number: int) -> bool:
        """Whether a call is bound, and there is no verdict."""
        is_bound = self._bound is not None and number >= self._bound
        return is_bound and self._program is None and self.error is None

    # --- what ranks agree on, in the monitor's thread --------------------------------------------

    def lead(self) -> None:
        self._member.lead()

    def follow(self, answer: Answer) -> None:
        self._member.follow(answer)

    def calls(self) -> int:
        return self._calls

    def bind(self, call: int) -> bool:
        with self._lock:
            if self._calls > call:
                return False
            self._bound = call
            return True

    def verdict(self, goes: bool) -> None:
        program = self._member.swap() if goes else None
        with self._lock:
            self._program = program
            if not goes:
                self._bound = None
            self._lock.notify_all()

    def swap(self) -> None:
        self._put(self._member.swap())

    def refuse(self, problem: str) -> None:
        self._member.fail(f"ranks agreed on that: {problem}")
        with self._lock:
            self._bound = None
            self._lock.notify_all()

    def _failed(self, error: RankError) -> None:
        with self._lock:
            self.error = error
            self._lock.notify_all()
