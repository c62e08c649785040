"""What happened, as data. Filled while a graph is compiled; trips may be added when it runs."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fuseboard.contracts import GraphKind, Trip
from fuseboard.torch_api.profiler import span
from fuseboard.totals import totals

#: How many graphs are remembered. A report holds strings and numbers only, never a tensor.
REMEMBERED_GRAPHS = 256


@dataclass(frozen=True)
class NodeReport:
    """One op of a graph as captured: where it runs and why.

    :ivar declined: backend name → its reason, for each backend before the chosen one.
    :ivar inputs: names of the nodes and graph inputs that it reads, each once.
    :ivar value: what it computes, such as ``float32[4, 128]``.
    :ivar module: the path of the user's module that it comes from, such as ``layers.0.mlp``.
    """

    name: str
    op: str
    backend: str
    region: str
    reason: str
    source: str = ""
    declined: dict[str, str] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    value: str = ""
    module: str = ""


@dataclass(frozen=True)
class InputReport:
    """An input of a graph.

    :ivar value: as of a :class:`NodeReport`.
    :ivar static: it is a parameter or buffer. Not known of backward graphs: always False there.
    """

    name: str
    value: str = ""
    static: bool = False


@dataclass(frozen=True)
class FusionReport:
    """One rewrite. ``number`` counts through the whole graph and is what ``fuse_skip`` takes."""

    number: int
    name: str
    plugin: str
    nodes: tuple[str, ...]
    applied: bool


@dataclass
class RegionReport:
    """One region: the backend that runs it, what is in it, what its compile took.

    :ivar same_as: the name of the region whose lowered code it shares, or "".
    :ivar loaded: its code came from the cache; nothing was compiled.
    :ivar hoisted: how many values were hoisted out of its calls.
    """

    name: str
    backend: str
    ops: dict[str, int]
    sources: tuple[str, ...] = ()
    whole: bool = False
    signature: str = ""
    same_as: str = ""
    fusions: list[FusionReport] = field(default_factory=list)
    loaded: bool = False
    hoisted: int = 0
    notes: list[str] = field(default_factory=list)
    lower_s: float = 0.0


@dataclass(frozen=True)
class PlaceReport:
    """A place that a narrower version of a graph may change: the op, or the first of several.

    :ivar error: of what comes out of it, relative to its norm, if what goes in is exact. None where
        that isn't known.
    :ivar exact: it stays as it is, or is in what the part's ``rest`` says.
    """

    name: str
    module: str = ""
    error: float | None = None
    exact: bool = False


@dataclass(frozen=True)
class PartReport:
    """The largest part of a graph that was found to be within a budget when it is narrowed.

    :ivar name: of the version: what candidates are called by, after their backends.
    :ivar whole_error: of the graph that is narrowed wherever it may be. None where an earlier
        process found the part, and so ``error``.
    :ivar error: of the part; None where none is within the budget.
    :ivar judged: how many versions were run to find it.
    :ivar rest: what places are in that aren't in this format, such as ``in int8``; "" where
        they are exact.
    """

    name: str
    whole_error: float | None = None
    error: float | None = None
    judged: int = 0
    places: tuple[PlaceReport, ...] = ()
    rest: str = ""


@dataclass
class CandidateReport:
    """A way to run a graph that was considered under the policy ``measured``.

    :ivar name: the backends in it, such as ``mkldnn+eager``.
    :ivar state: ``chosen``, ``slower``, ``failed``, ``inexact`` (its error is larger than may be),
        ``waiting`` to be compiled, or ``untried``.
    :ivar latency_us: the median of its calls; ``low_us`` and ``high_us`` are their quartiles. None
        where it wasn't timed. Times of an earlier comparison are told in terms of the last one:
        multiplied by what the winner so far, which was in both, took later over what it took then.
    :ivar comparison: the number of the comparison in which it was timed: within one, candidates are
        called in turn. None where it wasn't timed in this process.
    :ivar compile_s: what lowering it took, here or in the process that did it.
    :ivar error: how far its results are from float64 where an error is allowed: the largest of its
        results', by ``tolerance_metric``. None where that isn't known.
    :ivar tolerance: the error that it is allowed; None for one that is exact.
    :ivar exact: the places that stay exact in one that is narrowed in part.
    :ivar problem: why it failed or wasn't tried.
    :ivar notes: of its regions once it is out, such as what its key in the cache differed in. Those
        of the one that runs are in the graph's regions.
    """

    name: str
    state: str = "untried"
    latency_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    comparison: int | None = None
    compile_s: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    tolerance: float | None = None
    exact: tuple[str, ...] = ()
    problem: str = ""
    notes: list[str] = field(default_factory=list)

    def scale_times(self, scale: float | None) -> None:
        """Multiply the times; without a scale they are forgotten."""
        for name in ("latency_us", "low_us", "high_us"):
            us = getattr(self, name)
            setattr(self, name, None if us is None or scale is None else us * scale)


@dataclass
class GraphReport:
    """One graph that AOTAutograd gave to the board.

    :ivar name: such as ``inference0``; counts up through the process.
    :ivar frame: Dynamo's compile id and the user's function, such as
        ``0/1 Net.forward (model.py:10)``.
    :ivar call: the number of the backend's call that it belongs to: a joint graph, its forward and
        its backward share it.
    :ivar backends: the backends in order of priority.
    :ivar nodes: the ops in graph order; none of a joint graph, which is only split.
    :ivar outputs: names of the nodes and inputs that it returns, each once.
    :ivar seconds: stage → wall-clock seconds.
    :ivar candidates: under the policy ``measured``, in order of preference.
    :ivar tolerance: the error that candidates may have, in words; "" where all are exact.
    :ivar parts: of narrower versions that are beyond it.
    :ivar decided: how the choice among them was made, in words; "" where there was none.
    :ivar instead: what runs now that something of the chosen one failed in a call, or that the
        graph as a whole lost to Dynamo's own; in a sentence. "" where the chosen one runs.
    :ivar settled: no candidate waits to be tried.
    :ivar left_out: installed backends that had no part in it → why.
    """

    name: str
    kind: GraphKind
    frame: str = ""
    call: int = 0
    backends: tuple[str, ...] = ()
    candidates: list[CandidateReport] = field(default_factory=list)
    tolerance: str = ""
    parts: list[PartReport] = field(default_factory=list)
    decided: str = ""
    instead: str = ""
    settled: bool = True
    left_out: dict[str, str] = field(default_factory=dict)
    inputs: list[InputReport] = field(default_factory=list)
    outputs: tuple[str, ...] = ()
    nodes: list[NodeReport] = field(default_factory=list)
    regions: list[RegionReport] = field(default_factory=list)
    fusions: list[FusionReport] = field(default_factory=list)
    trips: list[Trip] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count what the block takes among a stage's seconds, and show it in traces."""
        start = time.perf_counter()
        try:
            with span(f"{stage} {self.name}"):
                yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + spent
            totals.spent(stage, spent)

    @property
    def eager(self) -> CandidateReport | None:
        """The candidate that is eager alone, if it was timed."""
        found = (candidate for candidate in self.candidates if candidate.name == "eager")
        return next((candidate for candidate in found if candidate.latency_us), None)

    def speedup(self, candidate: CandidateReport) -> float | None:
        """How many times as fast as eager a candidate is: eager's time by its own, as they stand.

        None where one of the two wasn't timed.
        """
        if self.eager is None or not self.eager.latency_us or not candidate.latency_us:
            return None
        return self.eager.latency_us / candidate.latency_us

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for JSON; with each candidate's ``speedup``."""
        values = dataclasses.asdict(self)
        for row, candidate in zip(values["candidates"], self.candidates, strict=True):
            row["speedup"] = self.speedup(candidate)
        return values


@dataclass(frozen=True)
class Break:
    """A place where Dynamo ended a graph, or left a function to Python.

    :ivar reason: what it couldn't trace, on one line.
    :ivar function: the user's function that it was tracing.
    :ivar source: the user's line, ``file:line``.
    :ivar stack: how it got there, outermost call first, ``file:line in function``.
    :ivar uncompiled: nothing of ``function`` was compiled; else what precedes the line was.
    :ivar count: how often, where several calls of one function broke at the same line.
    """

    reason: str
    explanation: str
    hints: tuple[str, ...]
    function: str
    source: str
    stack: tuple[str, ...] = ()
    uncompiled: bool = False
    count: int = 1


class Ledger:
    """The reports of this process, newest last, bounded."""

    def __init__(self) -> None:
        self._graphs: deque[GraphReport] = deque(maxlen=REMEMBERED_GRAPHS)
        #: By identity: lists that hold equal graphs, or none yet, are equal.
        self._listeners: dict[int, list[GraphReport]] = {}
        #: What took the place of a report, with the report.
        self._followers: deque[tuple[GraphReport, tuple[GraphReport, ...]]] = deque(
            maxlen=REMEMBERED_GRAPHS
        )

    def add(self, graph: GraphReport) -> None:
        self._graphs.append(graph)
        for listener in list(self._listeners.values()):
            listener.append(graph)

    def replace(self, graph: GraphReport, *others: GraphReport) -> None:
        """Let others take the place of a report, wherever it is still told."""
        if others:
            self._followers.append((graph, others))
        for graphs in (self._graphs, *self._listeners.values()):
            kept = [one for one in graphs if one is not graph and one not in others]
            if len(kept) == len(graphs):
                continue
            graphs.clear()
            graphs.extend([*kept, *others])

    def current(self, graphs: Sequence[GraphReport]) -> list[GraphReport]:
        """These reports, or those that have taken the place of one since."""
        found: list[GraphReport] = []
        for graph in graphs:
            later = next((those for one, those in self._followers if one is graph), (graph,))
            found.extend(later)
        return found

    def graphs(self) -> list[GraphReport]:
        return list(self._graphs)

    def clear(self) -> None:
        self._graphs.clear()

    @contextmanager
    def collect(self) -> Iterator[list[GraphReport]]:
        """The graphs that are added while the context is open; others may be open meanwhile."""
        collected: list[GraphReport] = []
        self._listeners[id(collected)] = collected
        try:
            yield collected
        finally:
            del self._listeners[id(collected)]


ledger = Ledger()
