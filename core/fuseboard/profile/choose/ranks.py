"""The ranks of a distributed job compile the same: rank 0 decides, the others do as it decided.

What is measured differs from rank to rank. Were each to follow its own measurements, ranks might
round otherwise, or save other values, and parameters that should stay equal would drift apart.

Ranks talk through the key-value store of their process group, not by collectives: that needs no
GPU, disturbs no collective of the job, has time limits, and names the ranks that are missing. All
ranks must ask for the same things, in the same order among those of one name. Nothing happens where
``torch.distributed`` isn't initialised, or where there is one rank.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from fuseboard.errors import RankError, error_text

T = TypeVar("T")

#: Makes a decision: calls the function, on this rank or on another one.
Decide = Callable[[Callable[[], Any]], Any]

#: How long other ranks are waited for, in seconds: they may be compiling or measuring.
WAIT_S = 600.0
_SLOWEST_POLL_S = 0.1
#: The other ranks wait this much longer than rank 0, so that its error, which names the missing
#: ranks, reaches them.
_GRACE_S = 10.0
#: How many ranks, and how much of a part's text, an error shows.
_SHOWN_RANKS, _SHOWN_TEXT = 8, 80


def decide_alone(decide: Callable[[], T]) -> T:
    """What ``decide`` answers: the job has one rank."""
    return decide()


def decide_on_first_rank(
    decide: Callable[[], T], what: str, *, wait_s: float = WAIT_S, group: Any = None
) -> T:
    """What ``decide`` answers on rank 0, on every rank; it isn't called on the others.

    :param what: names the decision: the same on every rank, and of another text for another thing.
    :param group: the ranks that compile the same; None: all of the job.
    :raises RankError: rank 0 doesn't answer, or ``decide`` raised there. On rank 0 that exception
        itself goes on.
    """
    job = _job(group)
    if job is None:
        return decide()
    place = job.place(what)
    if job.rank == 0:
        try:
            answer = decide()
        except BaseException as error:
            job.post(place, ["raised", error_text(error)])
            raise
        job.post(place, ["answer", answer])
        return answer
    job.wait([place], [0], wait_s, what)
    outcome, value = job.fetch(place)
    if outcome == "raised":
        raise RankError(f"rank 0 failed to decide {what}: {value}")
    return value  # type: ignore[no-any-return]


def several_ranks() -> bool:
    """Whether this process is one of several of a job."""
    return _job(None) is not None


def check_ranks_agree(
    parts: Mapping[str, str], what: str, *, wait_s: float = WAIT_S, group: Any = None
) -> None:
    """See that all ranks have come to the same thing, such as a graph; waits for all of them.

    :param parts: name → text: what has to be equal.
    :raises RankError: a rank has something else, or doesn't come. It is raised on every rank.
    """
    job = _job(group)
    if job is None:
        return
    place = job.place(what)
    # Rank 0 compares and tells the others: were each to ask for all, a thousand ranks would ask a
    # million times.
    if job.rank == 0:
        problem = _compared(job, place, parts, what, wait_s)
        job.post(f"{place}/verdict", problem)
    else:
        job.post(f"{place}/{job.rank}", dict(parts))
        job.wait([f"{place}/verdict"], [0], wait_s + _GRACE_S, what)
        problem = job.fetch(f"{place}/verdict")
    if problem:
        raise RankError(problem)


def _compared(job: _Job, place: str, parts: Mapping[str, str], what: str, wait_s: float) -> str:
    """What is wrong, "" if every rank has rank 0's parts."""
    ranks = range(1, job.size)
    try:
        job.wait([f"{place}/{rank}" for rank in ranks], ranks, wait_s, what)
    except RankError as error:
        return str(error)
    given = {rank: job.fetch(f"{place}/{rank}") for rank in ranks}
    others = [rank for rank, theirs in given.items() if theirs != dict(parts)]
    if not others:
        return ""
    return (
        f"{what} isn't the same on every rank: {_named(others)} and rank 0 differ in "
        f"{_difference(parts, given[others[0]], others[0])}. Ranks have to compile the same graphs "
        "in the same order; check for code that depends on the rank, and for inputs of different "
        "sizes"
    )


@dataclass(frozen=True)
class _Job:
    """This process among the ranks of a group."""

    rank: int
    size: int
    name: str
    store: Any

    def place(self, what: str) -> str:
        """Where the next exchange of this name is held; equal on all ranks."""
        with _counting:
            number = _asked[self.name, what]
            _asked[self.name, what] += 1
        return f"fuseboard/{hashlib.sha256(what.encode()).hexdigest()[:16]}/{number}"

    def post(self, place: str, value: Any) -> None:
        text = base64.b64encode(pickle.dumps(value)).decode()
        try:
            self.store.set(place, text)
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} can't reach the job's store: {error}") from error

    def fetch(self, place: str) -> Any:
        """What is there, after ``wait``. Only ranks of the job, which run the same code, post."""
        try:
            return pickle.loads(base64.b64decode(self.store.get(place)))
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} can't reach the job's store: {error}") from error

    def wait(self, places: Sequence[str], ranks: Sequence[int], wait_s: float, what: str) -> None:
        """Until each of the ranks has posted to its place.

        Asks again and again: a blocking wait would keep other threads from the store, torch's own
        among them, and Ctrl-C from ending it.
        """
        end = time.monotonic() + wait_s
        poll_s = 0.001
        waiting = dict(zip(ranks, places, strict=True))
        try:
            while waiting:
                rank, place = next(iter(waiting.items()))
                if self.store.check([place]):
                    del waiting[rank]
                elif time.monotonic() < end:
                    time.sleep(poll_s)
                    poll_s = min(2 * poll_s, _SLOWEST_POLL_S)
                else:
                    missing = [r for r, place in waiting.items() if not self.store.check([place])]
                    raise RankError(
                        f"rank {self.rank} waited {wait_s:g} s for {_named(missing)} to come to "
                        f"{what}. It failed, is slower than that, or doesn't compile what this "
                        "rank compiles: ranks have to compile the same graphs in the same order"
                    )
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} can't reach the job's store: {error}") from error


#: How often each thing was asked for. Kept when a process group is gone: the next one may have its
#: name and its store, and old entries must not be taken for new ones.
_asked: Counter[tuple[str, str]] = Counter()
_counting = threading.Lock()


def _job(group: Any) -> _Job | None:
    """This process among its ranks; None where there are no other ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if group is None:
        group = dist.group.WORLD
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0 or size < 2 or dist.get_backend(group) == "fake":
        return None  # not of the group, alone in it, or a group without other processes
    return _Job(rank, size, str(group.group_name), group.get_group_store())


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _difference(one: Mapping[str, str], other: Mapping[str, str], rank: int) -> str:
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return "; ".join(
        f"{name} ({_shown(one.get(name))} on rank 0, {_shown(other.get(name))} on rank {rank})"
        for name in names
    )


def _shown(text: str | None) -> str:
    if text is None:
        return "none"
    return repr(text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}...")
