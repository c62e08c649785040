"""What a process is doing and has done, as data: for operators, exporters and health checks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from fuseboard.config import resolve
from fuseboard.contracts import Event
from fuseboard.lower.artifacts import store_at
from fuseboard.report.data import GraphReport
from fuseboard.run import runner
from fuseboard.run.weights import prepared_bytes
from fuseboard.totals import totals
from fuseboard.workshop import reporting
from fuseboard.workshop.desk import desk
from fuseboard.workshop.states import GraphState

_Unit = Literal["seconds", "bytes", ""]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True)


class TripStatus(_Data):
    """A failure that was contained; the fields are those of :class:`fuseboard.Trip`.

    :ivar graph: the name of its report.
    :ivar process: ``user`` or ``workshop``.
    :ivar at_s: when, in seconds since 1970.
    """

    plugin: str
    stage: str
    region: str
    error: str
    instead: str
    source: str
    graph: str
    process: str
    at_s: float


class TripCount(_Data):
    """How often a plugin failed in a stage. Beyond 100 pairs plugins are called ``others``."""

    plugin: str
    stage: str
    count: int


class WorkshopStatus(_Data):
    """The process that tries candidates beside the calls.

    :ivar alive: it runs. It doesn't where there is nothing to do, which is no fault.
    :ivar why_not: why it doesn't run; "" where it does.
    :ivar graphs_asked: graphs that it was given.
    """

    alive: bool
    why_not: str
    graphs_asked: int


class CacheStatus(_Data):
    """The cache on disk that the settings name, and what was looked for in it.

    :ivar size_bytes: what all files take; ``limit_bytes`` is what they may.
    :ivar hits, misses, damaged: searches for an artifact that found it, didn't, found pieces of it:
        of this process, and of its workshop for it.
    """

    directory: str
    size_bytes: int
    limit_bytes: int
    hits: int
    misses: int
    damaged: int


class Status(_Data):
    """One process at one moment. Numbers of what happened only grow; a forked child begins at zero.

    :ivar graphs: state → how many of Dynamo's graphs that may still be called are in it. The states
        are ``watching``, ``loading``, ``trialling``, ``settled`` and ``refused`` (docs/design.md);
        graphs that are compiled within calls are ``trialling`` until they are ``settled``.
    :ivar candidates: state → how many candidates of these graphs are in it; see
        :class:`fuseboard.CandidateReport`. A training graph has those of forward and backward.
    :ivar trips: failures that were contained, in this process and in its workshop.
    :ivar latest_trip: None where there was none.
    :ivar swaps: how often what was compiled took over the calls of a graph.
    :ivar budgets_exceeded: how often what had been chosen within ``tolerance`` was found to be
        farther from float64 on a later call; eager runs since then.
    :ivar compile_s: seconds of compiling, judging and loading, by process: ``user``, where that may
        delay calls, and ``workshop``, its start included.
    :ivar stage_s: of ``user``'s, by stage.
    :ivar prepared_bytes: what is kept of weights in another form, beside the weights.
    """

    pid: int
    graphs: dict[str, int]
    candidates: dict[str, int]
    trips: tuple[TripCount, ...]
    latest_trip: TripStatus | None
    swaps: int
    budgets_exceeded: int
    compile_s: dict[str, float]
    stage_s: dict[str, float]
    prepared_bytes: int
    workshop: WorkshopStatus
    cache: CacheStatus

    def metrics(self) -> tuple[Metric, ...]:
        """The same as metrics, for exporters: always the same ones, with few labels."""
        cache, latest = self.cache, self.latest_trip
        trips: dict[tuple[str, ...], float] = {
            (one.plugin, one.stage): one.count for one in self.trips
        }
        lookups = {"hit": cache.hits, "miss": cache.misses, "damaged": cache.damaged}
        return (
            _by("graphs", "Graphs that can be called", "state", self.graphs),
            _by("candidates", "Candidates of these graphs", "state", self.candidates),
            Metric(
                name="trips",
                help="Failures that were contained",
                counts=True,
                labels=("plugin", "stage"),
                samples=trips,
            ),
            _one(
                "latest_trip_time",
                "When a failure was contained last, since 1970; 0: never",
                0.0 if latest is None else latest.at_s,
                "seconds",
            ),
            _one("swaps", "Graphs whose calls compiled code took over", self.swaps, counts=True),
            _one(
                "budgets_exceeded",
                "Results farther from float64 than the setting tolerance allows",
                self.budgets_exceeded,
                counts=True,
            ),
            _by(
                "compile",
                "Compiling, judging and loading, by process",
                "process",
                self.compile_s,
                "seconds",
                counts=True,
            ),
            _by(
                "stage", "The stages in this process", "stage", self.stage_s, "seconds", counts=True
            ),
            _one(
                "prepared", "What is kept of weights in another form", self.prepared_bytes, "bytes"
            ),
            _one("workshop_alive", "Whether the workshop's process runs", self.workshop.alive),
            _one(
                "workshop_graphs",
                "Graphs that the workshop was given",
                self.workshop.graphs_asked,
                counts=True,
            ),
            _one("cache_size", "Files of the cache", cache.size_bytes, "bytes"),
            _one("cache_limit", "What they may take", cache.limit_bytes, "bytes"),
            _by("cache_lookups", "Searches in the cache", "outcome", lookups, counts=True),
        )


class Metric(_Data):
    """One metric of a status.

    :ivar name: without a prefix and the unit.
    :ivar unit: ``seconds``, ``bytes`` or "".
    :ivar counts: it only grows; else it goes up and down.
    :ivar labels: what samples are told apart by.
    :ivar samples: values of the labels → number.
    """

    name: str
    help: str
    unit: _Unit = ""
    counts: bool = False
    labels: tuple[str, ...] = ()
    samples: dict[tuple[str, ...], float]


def _one(name: str, help: str, value: float, unit: _Unit = "", counts: bool = False) -> Metric:
    return Metric(name=name, help=help, unit=unit, counts=counts, samples={(): value})


def _by(
    name: str,
    help: str,
    label: str,
    values: Mapping[str, float],
    unit: _Unit = "",
    counts: bool = False,
) -> Metric:
    samples: dict[tuple[str, ...], float] = {(key,): value for key, value in values.items()}
    return Metric(name=name, help=help, unit=unit, counts=counts, labels=(label,), samples=samples)


def status() -> Status:
    """What this process is doing and has done. Any thread may ask, at any time.

    It waits for no call and no compile. What it takes grows with the number of graphs and of files
    in the cache: milliseconds.

    :raises SettingsError: the settings are wrong.
    """
    counts, settings, workshop = totals.read(), resolve(), desk().workshop
    store = store_at(settings)
    states, candidates = _graphs()
    return Status(
        pid=os.getpid(),
        graphs=states,
        candidates=candidates,
        trips=tuple(
            TripCount(plugin=plugin, stage=stage, count=count)
            for (plugin, stage), count in sorted(counts.trips.items())
        ),
        latest_trip=None if counts.latest_trip is None else _trip(*counts.latest_trip),
        swaps=counts.swaps,
        budgets_exceeded=counts.exceeded,
        compile_s={"user": sum(counts.stage_s.values()), "workshop": counts.workshop_s},
        stage_s=dict(counts.stage_s),
        prepared_bytes=prepared_bytes(),
        workshop=WorkshopStatus(
            alive=workshop.is_alive, why_not=workshop.why_not_alive, graphs_asked=counts.requests
        ),
        cache=CacheStatus(
            directory=str(store.directory),
            size_bytes=store.total_bytes(),
            limit_bytes=store.limit_bytes,
            **{outcome: counts.lookups[outcome] for outcome in ("hits", "misses", "damaged")},
        ),
    )


def _trip(event: Event, at_s: float) -> TripStatus:
    told = {name: value for name, value in event.details.items() if name != "exceeded"}
    return TripStatus(**told, graph=event.graph, process=event.process, at_s=at_s)


def _graphs() -> tuple[dict[str, int], dict[str, int]]:
    """How many graphs, and how many of their candidates, are in each state."""
    states = {state.name.lower(): 0 for state in GraphState}
    reports: dict[int, GraphReport] = {}
    beside = set()
    for life in reporting.living:
        states[life.state.name.lower()] += 1
        shown = life.shown
        beside |= {life.number, *(report.call for report in shown)}
        reports |= {id(report): report for report in shown}
    within: dict[int, bool] = {}
    for one in runner.living:
        report = one.report
        reports[id(report)] = report
        if report.call not in beside:
            within[report.call] = within.get(report.call, True) and report.settled
    for settled in within.values():
        states[("settled" if settled else "trialling")] += 1
    found = Counter(row.state for report in reports.values() for row in list(report.candidates))
    return states, dict(found)
