"""What has happened in this process so far, counted.

The reports of graphs are bounded in number, so whoever wants to know how much has happened asks
here. Counting takes a lock for an addition; nobody's code runs under it.

A workshop counts for nobody. It sends what happens in it to the process that asked it, which counts
it: see :mod:`fuseboard.workshop.happenings`.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from fuseboard.forks import fork_safe_lock

if TYPE_CHECKING:  # for commands that do without torch
    from fuseboard.contracts import Event

Lookup = Literal["hits", "misses", "damaged"]

#: So many of the latest misses are remembered.
_MISSES = 32


@dataclass(frozen=True)
class Missed:
    """What wasn't in the cache.

    :ivar what: the backend that it was looked for, or ``the whole call``.
    :ivar differs: the parts of the key in which the nearest entry of the same graph differs → what
        they are here, and there. Empty where there is no such entry.
    """

    what: str
    differs: Mapping[str, tuple[str, str]]

    @classmethod
    def of(cls, parts: Mapping[str, str], nearest: Mapping[str, str] | None) -> Missed:
        names = () if nearest is None else differing(parts, nearest)
        other = nearest or {}
        return cls(
            parts.get("backend", ""),
            {name: (parts.get(name, ""), other.get(name, "")) for name in names},
        )


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the parts in which two keys differ."""
    return tuple(
        name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)
    )


#: So many pairs of plugin and stage are told apart among trips; users name functions of their own.
_MOST_PAIRS = 100
#: What the plugins of further pairs are called.
OTHERS = "others"


@dataclass
class Counts:
    """
    :ivar trips: (plugin, stage) → how many.
    :ivar latest_trip: as the event tells it, with seconds since 1970.
    :ivar exceeded: how often results of calls were farther from float64 than they may be.
    :ivar swaps: how often what was compiled took over the calls of a graph.
    :ivar stage_s: stage → seconds spent in it by this process.
    :ivar workshop_s: seconds for which this process's workshop was at work, its start included.
    :ivar requests: graphs that the workshop was given.
    :ivar lookups: in the cache, by this process and its workshop.
    :ivar misses: the latest ones.
    """

    trips: Counter[tuple[str, str]] = field(default_factory=Counter)
    latest_trip: tuple[Event, float] | None = None
    exceeded: int = 0
    swaps: int = 0
    stage_s: Counter[str] = field(default_factory=Counter)
    workshop_s: float = 0.0
    requests: int = 0
    lookups: Counter[str] = field(default_factory=Counter)
    misses: deque[Missed] = field(default_factory=lambda: deque(maxlen=_MISSES))


class Totals:
    """The counts of this process. A forked child begins at zero.

    :ivar sent_to: in a workshop, what takes a happening as plain data; None elsewhere.
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self.begin()

    def begin(self) -> None:
        """Forget what was counted."""
        self._counts = Counts()
        self.sent_to: Callable[[Mapping[str, Any]], None] | None = None

    def happened(self, event: Event) -> bool:
        """Count an event. Returns whether observers are told of it here."""
        if self.sent_to is not None:
            self.sent_to({"event": vars(event)})
            return False
        with self._lock:
            counts, here = self._counts, event.process == "user"
            if event.name == "trip":
                pair = event.details["plugin"], event.details["stage"]
                if pair not in counts.trips and len(counts.trips) >= _MOST_PAIRS:
                    pair = OTHERS, pair[1]
                counts.trips[pair] += 1
                counts.latest_trip = event, time.time()
                counts.exceeded += here and bool(event.details.get("exceeded"))
            elif event.name == "choose":
                counts.swaps += here and event.details["winner"] != "eager"
        return True

    def looked_up(self, outcome: Lookup, missed: Missed | None = None) -> None:
        """Count a search in the cache."""
        if self.sent_to is not None:
            self.sent_to({"lookup": outcome, "missed": missed and vars(missed)})
            return
        with self._lock:
            self._counts.lookups[outcome] += 1
            if missed is not None:
                self._counts.misses.append(missed)

    def spent(self, stage: str, seconds: float) -> None:
        with self._lock:
            self._counts.stage_s[stage] += seconds  # type: ignore[assignment]  # a Counter of floats

    def asked_workshop(self, seconds: float) -> None:
        """Count a graph that was given to the workshop, and for how long it was at work on it."""
        with self._lock:
            self._counts.requests += 1
            self._counts.workshop_s += seconds

    def read(self) -> Counts:
        """A copy."""
        with self._lock:
            counts = self._counts
            return replace(
                counts,
                trips=Counter(counts.trips),
                stage_s=Counter(counts.stage_s),
                lookups=Counter(counts.lookups),
                misses=deque(counts.misses),
            )


totals = Totals()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=totals.begin)
