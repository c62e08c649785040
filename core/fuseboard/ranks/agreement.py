"""One rank's part in what a job decides about a graph.

Ranks meet at a place named by the graph. One of them leads: rank 0 where it comes in time, else the
first that has waited long enough, as in a pipeline, where each rank has a part of the model. It
finds out what is the fastest, the others take its answer. All load that, and those that have a
program to run instead of Dynamo's graph agree on the call from which on they do.

That is a vote in two rounds. The leader proposes a call that it hasn't come to. Each rank that
hasn't either is bound by that: it won't pass the call without the verdict. When all are bound the
verdict is to go, else another call is proposed, farther away. Nobody waits in a call unless calls
come faster than the ranks can tell each other.

What is here are generators: each step looks at the store, at once, and yields where it has to look
again later. Nothing here knows of threads or clocks but by its arguments, so that many ranks can be
simulated in one process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping
from itertools import count
from math import inf
from typing import Any, Protocol

from fuseboard.errors import RankError
from fuseboard.ranks.job import WAIT_S, Job

#: How long ranks wait for rank 0 to lead, and a leader for others to come, in seconds.
GRACE_S = 5.0
#: How many calls ahead a swap is proposed at first, and how much farther each time it was too near.
_AHEAD, _FARTHER = 4, 4
_SHOWN_TEXT = 80

#: What the choice depends on that is no matter of the graph or the machine: where ranks come with
#: the same graph, on machines of the same kind, and differ in these, something is set up wrongly.
COMPARED = ("settings", "backends", "rewriters", "torch", "fuseboard", "python", "code")

Steps = Generator[None, None, None]


class RankHasLeft(Exception):
    """A rank that lives, or ended in order, takes no part in a decision, which is no failure."""


class Host(Protocol):
    """The graph that is agreed on; see :class:`fuseboard.workshop.together.Together`."""

    def lead(self) -> None:
        """Find out what is the fastest, and tell :meth:`Agreement.answered`."""

    def follow(self, answer: Any) -> None:
        """Load what another rank found, and tell :meth:`Agreement.loaded`."""

    def calls(self) -> int:
        """How many calls there were."""

    def bind(self, call: int) -> bool:
        """Let no call from this one on go by without a verdict; False where it is over already."""

    def verdict(self, goes: bool) -> None:
        """All ranks are bound, so that the swap is made there; or they aren't, and it isn't."""

    def swap(self) -> None:
        """The others have swapped before this rank came: do it now."""

    def refuse(self, problem: str) -> None:
        """A rank can't load it: Dynamo's graph runs on all of them."""


class Agreement:
    """
    :param parts: name → text: what has to be equal on all ranks that meet, such as settings.
    :param what: names the graph to people.
    :param clock: seconds.
    """

    def __init__(
        self, job: Job, place: str, parts: Mapping[str, str], what: str, clock: Callable[[], float]
    ) -> None:
        self._job = job
        self._place = place
        self._parts = dict(parts)
        self._what = what
        self._clock = clock
        self._answer: tuple[Any, bool] | None = None
        self._loaded: str | None = None

    @classmethod
    def about(cls, job: Job, parts: Mapping[str, str], what: str) -> Agreement:
        """The next one about a graph.

        :param parts: the graph, and what decisions about it depend on.
        """
        same = {name: text for name, text in parts.items() if name not in COMPARED}
        compared = {name: parts[name] for name in COMPARED if name in parts}
        place = job.place(repr(sorted(same.items())))
        return cls(job, place, compared, what, time.monotonic)

    def answered(self, answer: Any, swaps: bool) -> None:
        """This rank has found out what is the fastest.

        :param swaps: there is a program to be run instead of Dynamo's graph.
        """
        self._answer = answer, swaps

    def loaded(self, problem: str = "") -> None:
        """This rank could run what was chosen, or can't for some reason."""
        self._loaded = problem

    def steps(self, host: Host) -> Steps:
        """The way to the decision.

        :raises RankError: another rank has other settings or plugins, or is dead.
        """
        try:
            yield from self._steps(host)
        except RankHasLeft as left:
            host.refuse(str(left))

    def _steps(self, host: Host) -> Steps:
        mine = self._job.count(f"{self._place}/came")
        leads = yield from self.meet()
        if leads:
            host.lead()
            yield from self._until(lambda: self._answer is not None, "its own answer", inf)
            assert self._answer is not None
            answer, swaps = self._answer
            self.post("answer", (answer, swaps))
        else:
            answer, swaps = yield from self.next("answer")
            host.follow(answer)
        if not swaps:
            return
        yield from self._until(lambda: self._loaded is not None, "its own program", inf)
        if leads:
            yield from self._conduct(host)
        else:
            yield from self._take_part(host, mine)

    def meet(self) -> Generator[None, None, bool]:
        """Find who leads; returned is whether this rank does. Others compare themselves with it.

        :raises RankError: the leader has other settings or plugins.
        """
        job, patience = self._job, self._clock() + GRACE_S
        while job.rank and self._clock() < patience and not self._look("leader"):
            yield
        if not self._look("leader") and self.claims("leader"):
            self.post("leader", (job.rank, self._parts))
            return True
        rank, parts = yield from self.next("leader")
        if parts != self._parts:
            problem = (
                f"{self._what} isn't compiled alike on every rank: rank {job.rank} and rank {rank} "
                f"differ in {_difference(parts, self._parts, rank, job.rank)}"
            )
            self.post("failed", (problem, True))
            raise RankError(problem)
        return False

    def claims(self, what: str) -> bool:
        """Whether this rank is the first to come to something."""
        return self._count(f"{what}/claims") == 1

    def leave(self) -> None:
        """Tell the others that this rank can't go on before it is decided: Dynamo's graph runs."""
        self.post("failed", (f"rank {self._job.rank} left before ranks agreed", False))

    # --- the vote -------------------------------------------------------------------------------

    def _conduct(self, host: Host) -> Steps:
        patience = self._clock() + GRACE_S
        while (voters := self._count("came", 0)) < self._job.size and self._clock() < patience:
            yield
        # Those that come later, if any, aren't waited for.
        self.post("voters", voters)
        self._vote("ready", self._loaded or "")
        problem = yield from self._result("ready", voters)
        ahead = _AHEAD
        for number in count():
            call = host.calls() + ahead
            self.post(f"{number}/call", (call, problem))
            if problem:
                host.refuse(problem)
                return
            self._vote(f"{number}/bound", "" if host.bind(call) else "late")
            is_late = yield from self._result(f"{number}/bound", voters)
            self.post(f"{number}/verdict", not is_late)
            host.verdict(not is_late)
            if not is_late:
                return
            ahead *= _FARTHER

    def _take_part(self, host: Host, mine: int) -> Steps:
        voters = yield from self.next("voters")
        votes = mine <= voters  # else it comes late, and does what the others decide
        if votes:
            self._vote("ready", self._loaded or "")
        for number in count():
            call, problem = yield from self.next(f"{number}/call")
            if problem := problem or ("" if votes else self._loaded):
                host.refuse(problem)
                return
            if votes:
                self._vote(f"{number}/bound", "" if host.bind(call) else "late")
            goes = yield from self.next(f"{number}/verdict")
            if votes:
                host.verdict(goes)
            elif goes:
                host.swap()
            if goes:
                return

    def _vote(self, subject: str, problem: str) -> None:
        if problem:  # before the vote is counted
            self.post(f"{subject}/problem", f"rank {self._job.rank}: {problem}")
        self._count(subject)

    def _result(self, subject: str, voters: int) -> Generator[None, None, str]:
        """Returned is a problem of one of the voters, "" where none has any."""
        yield from self._until(lambda: self._count(subject, 0) >= voters, subject)
        return self._look(f"{subject}/problem") or ""

    # --- the store ------------------------------------------------------------------------------

    def _count(self, key: str, more: int = 1) -> int:
        return self._job.count(f"{self._place}/{key}", more)

    def post(self, key: str, value: Any) -> None:
        self._job.post(f"{self._place}/{key}", value)

    def _look(self, key: str) -> Any:
        return self._job.look(f"{self._place}/{key}")

    def next(self, key: str) -> Generator[None, None, Any]:
        """Returned is what another rank posts there."""
        found = None

        def is_there() -> bool:
            nonlocal found
            found = self._look(key)
            return found is not None

        yield from self._until(is_there, key)
        return found

    def _until(self, is_done: Callable[[], bool], key: str, limit_s: float = WAIT_S) -> Steps:
        """
        :raises RankError: another rank failed.
        :raises RankHasLeft: one has ended in order, or it takes too long.
        """
        end = self._clock() + limit_s
        while not is_done():
            if failed := self._look("failed"):
                problem, raises = failed
                raise (RankError if raises else RankHasLeft)(problem)
            if self._clock() >= end:  # though all live
                problem = (
                    f"rank {self._job.rank} waited {limit_s:g} s for other ranks to agree on "
                    f"{self._what} ({key})"
                )
                self.post("failed", (problem, False))
                raise RankHasLeft(problem)
            yield


def _difference(
    one: Mapping[str, str], other: Mapping[str, str], rank: int, other_rank: int
) -> str:
    """What differs, by name; of settings, which are JSON, those that do."""
    differs = []
    for name in sorted(one.keys() | other.keys()):
        ours, theirs = one.get(name, ""), other.get(name, "")
        if ours == theirs:
            continue
        first, second = _entries(ours), _entries(theirs)
        for entry in sorted(first.keys() | second.keys()):
            if first.get(entry) != second.get(entry):
                values = [f"{_shown(first.get(entry))} on rank {rank}"]
                values.append(f"{_shown(second.get(entry))} on rank {other_rank}")
                differs.append(f"{name}{f': {entry}' if entry else ''} ({', '.join(values)})")
    return "; ".join(differs)


def _entries(text: str) -> dict[str, str]:
    """The values in a text by name: of JSON, or of plugins that are told apart by semicolons."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if isinstance(values, dict):
        return {name: repr(value) for name, value in values.items()}
    if ";" in text or " " in text:
        return {entry.split()[0]: entry for entry in text.split("; ") if entry.strip()}
    return {"": text}


def _shown(text: str | None) -> str:
    if text is None:
        return "none"
    return text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}..."
