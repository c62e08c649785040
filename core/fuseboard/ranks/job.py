"""How the ranks of a job talk: through the key-value store of their process group.

Not by collectives: that needs no GPU, disturbs no collective of the job, has time limits, and names
the ranks that are missing. Only ranks of the job, which run the same code, write there.
"""

from __future__ import annotations

import base64
import hashlib
import os
import pickle
import weakref
from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch.distributed as dist

from fuseboard.errors import RankError
from fuseboard.forks import fork_safe_lock

#: How long a rank that lives is waited for, in seconds: it may be compiling or measuring, and have
#: other graphs to do that for first. A request to the workshop alone may take ``hook_limit_s``.
WAIT_S = 3600.0


@dataclass(frozen=True)
class Job:
    """This process among the ranks that compile the same.

    :param store: has ``set``, ``get``, ``check`` and ``add``.
    :param limit_s: how long a rank may give no sign of life.
    :param number: of its process group: a store may outlive one.
    """

    rank: int
    size: int
    name: str
    store: Any
    limit_s: float
    number: int = 1

    def place(self, what: str) -> str:
        """Where the next thing of this name is agreed on; equal on all ranks."""
        with _counting:
            number = _asked[self.name, what]
            _asked[self.name, what] += 1
        return f"fuseboard/{hashlib.sha256(what.encode()).hexdigest()[:16]}/{number}"

    def post(self, key: str, value: Any) -> None:
        """Write a value.

        :raises RankError: the store is gone; so for the others.
        """
        self._ask("set", key, base64.b64encode(pickle.dumps(value)).decode())

    def look(self, key: str, default: Any = None) -> Any:
        """What is there; ``default`` where nothing is yet."""
        if not self._ask("check", [key]):
            return default
        return pickle.loads(base64.b64decode(self._ask("get", key)))

    def count(self, key: str, more: int = 1) -> int:
        """How many there are with these."""
        return int(self._ask("add", key, more))

    def _ask(self, operation: str, *what: Any) -> Any:
        try:
            return getattr(self.store, operation)(*what)
        except Exception as error:  # a store may be of the user's own class, and raise anything
            raise RankError(
                f"rank {self.rank} can't reach the job's store, which rank 0 or the launcher "
                f"holds: it has ended, or the network failed ({error})"
            ) from error


#: How often each thing was asked for. Kept when a process group is gone: the next one may have its
#: name and its store, and old entries must not be taken for new ones.
_asked: Counter[tuple[str, str]] = Counter()
_counting = fork_safe_lock()
#: For each process group its number, which is equal on ranks that were in all of them, and a
#: connection of the board's own: a call of torch's that waits holds the group's, and whoever holds
#: that keeps the server alive, whose entries the next group would read.
_groups: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()
_numbers = count(1)
#: The group that was there when this process was forked. Its parent is a rank of that.
_parents: Any = None


def job_of(limit_s: float) -> Job | None:
    """The job of which this process is a rank; None where there are no other ranks."""
    if not several_ranks():
        return None
    group = dist.group.WORLD
    assert group is not None
    with _counting:
        if group not in _groups:
            store: Any = group.get_group_store()
            try:
                own = store.clone()
            except Exception:  # a class of the user's needn't have it
                own = store
            _groups[group] = next(_numbers), own
        number, own = _groups[group]
    size, name = dist.get_world_size(), str(group.group_name)
    return Job(dist.get_rank(), size, name, own, limit_s, number)


def several_ranks() -> bool:
    """Whether this process is one of several of a job."""
    return (
        dist.is_available()
        and dist.is_initialized()
        and dist.group.WORLD is not _parents
        and dist.get_world_size() > 1
        and dist.get_backend() != "fake"  # a group without other processes
    )


def _after_fork() -> None:
    """A forked child is no rank, and leaves its parent's connections alone: its parent is one."""
    global _parents
    _parents = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
