"""Further versions of a graph, in narrower numbers: what ``tolerance`` allows plugins to offer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.contracts import GraphKind, Narrowing
from fuseboard.errors import ContractError, LoweringError, PluginError
from fuseboard.fuse.passes import FusionCounter, apply_fusions
from fuseboard.lower.guards import watching_guards
from fuseboard.partition.pins import Pins
from fuseboard.pipeline.mixing import (
    SHARE_OF_PART,
    SHARE_WITH_REST,
    Judge,
    Place,
    by_worth,
    expected_within,
    largest_part,
)
from fuseboard.profile.judge.accuracy import Budget, Metric, NotMeasured
from fuseboard.profile.judge.rewrites import example_values, other_ends
from fuseboard.ranks.job import several_ranks
from fuseboard.report.data import GraphReport, PartReport, PlaceReport
from fuseboard.report.nodes import module_path
from fuseboard.run.failure import Tripped
from fuseboard.torch_api.copies import copy_graph

_HOOK = "fuseboard_narrow"


@dataclass(frozen=True)
class NarrowedGraph:
    """A version of a graph.

    :ivar name: what candidates are called by, after their backends, such as ``in bfloat16``.
    :ivar budget: how far its results may be from float64.
    :ivar plugin: which offers it.
    :ivar places: that are narrowed.
    :ivar only: narrows some of them in a copy of the exact graph, or of a version of it.
    :ivar error: of its results, as measured on the inputs of the call that is compiled; None where
        it wasn't.
    :ivar exact: names of nodes that are left as they are, so that the rest is within the budget.
    :ivar rest: another version that narrows those, as far as it can; "" where they stay exact.
    """

    graph: GraphModule
    name: str
    budget: Budget
    plugin: str
    places: tuple[Place, ...]
    only: Callable[[GraphModule, Collection[Place]], GraphModule]
    error: float | None = None
    exact: tuple[str, ...] = ()
    rest: str = ""


class Narrower:
    """Asks plugins for narrower versions of graphs.

    :param inputs: Dynamo's real ones, as long as it waits for the backend.
    :param tripped: contains a failure, or raises it.
    """

    def __init__(
        self, session: Session, pins: Pins, inputs: Callable[[], Sequence[Any]], tripped: Tripped
    ) -> None:
        self._session = session
        self._pins = pins
        self._inputs = inputs
        self._tripped = tripped

    def is_wanted(self, kind: GraphKind) -> bool:
        """Whether the settings allow graphs of a kind any error."""
        settings = self._session.settings
        tolerance = settings.tolerance
        allowed = any(tolerance.values()) if isinstance(tolerance, dict) else bool(tolerance)
        return allowed and (kind == "inference" or settings.tolerance_training)

    def versions(
        self, graph: GraphModule, kind: GraphKind, report: GraphReport, counter: FusionCounter
    ) -> Iterator[NarrowedGraph]:
        """One for each format and each of the errors that are allowed.

        Where modules are allowed different errors, a version narrows those that are allowed as
        much as its results are, so that nothing is narrowed beyond what is said of it.
        """
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        allowed = self._pins.tolerances(nodes)
        levels = sorted(set(allowed.values()) - {0.0}, reverse=True)
        for plugin in self._session.with_hook(_HOOK):
            try:
                yield from self._offered(plugin, graph, kind, report, counter, allowed, levels)
            except (PluginError, LoweringError) as error:
                self._tripped(report, plugin, "fuse", error, "the graph in its own numbers")

    def _offered(
        self,
        plugin: str,
        graph: GraphModule,
        kind: GraphKind,
        report: GraphReport,
        counter: FusionCounter,
        allowed: Mapping[str, float],
        levels: list[float],
    ) -> Iterator[NarrowedGraph]:
        metric = Metric.of(self._session)
        for number, first in enumerate(self._ask(plugin, copy_graph(graph), kind)):
            if first.problem:
                report.notes.append(f"{first.format} isn't offered by {plugin}: {first.problem}")
                continue
            narrowed = partial(self._narrowed, plugin, number, kind, report)
            for level in levels:
                wanted = [
                    fusion.nodes
                    for fusion in first.fusions
                    if all(allowed.get(name, 0.0) >= level for name in fusion.nodes)
                ]
                own, places = narrowed(graph, replace(counter, applied=[]), wanted)
                if places:
                    name = f"in {first.format}"
                    name = name if level == levels[0] else f"{name} for {level:g}"
                    report.notes.append(
                        f"{name}: {len(places)} rewrites by {plugin}: {first.changes}"
                    )
                    yield NarrowedGraph(
                        own,
                        name,
                        Budget(level, metric),
                        plugin,
                        places,
                        partial(_graph_of, narrowed),
                    )

    def _narrowed(
        self,
        plugin: str,
        number: int,
        kind: GraphKind,
        report: GraphReport,
        graph: GraphModule,
        counter: FusionCounter,
        places: Collection[Place],
    ) -> tuple[GraphModule, tuple[Place, ...]]:
        """A copy of a graph that is narrowed in some places, and where it was.

        :param number: of the narrowing among those that the plugin offers.
        """
        own = copy_graph(graph)
        limit_s = self._session.settings.hook_limit_s
        with watching_guards(self._session, plugin, own, report.notes):
            offered = self._ask(plugin, own, kind)[number].fusions
            fusions = [fusion for fusion in offered if fusion.nodes in places]
            done = apply_fusions(own, fusions, plugin, counter, limit_s, _HOOK)
        if problem := other_ends(graph, own) or _other_results(graph, own):
            raise ContractError(plugin, _HOOK, problem)
        return own, tuple(one.nodes for one in done if one.applied)

    def _ask(self, plugin: str, graph: GraphModule, kind: GraphKind) -> list[Narrowing]:
        answer: list[Narrowing] | None = self._session.call(_HOOK, plugin, graph=graph, kind=kind)
        return answer or []

    # --- parts ----------------------------------------------------------------------------------

    def with_parts(
        self,
        versions: Sequence[NarrowedGraph],
        graph: GraphModule,
        captured: GraphModule,
        report: GraphReport,
        decided: Mapping[str, tuple[str, ...]] | None,
    ) -> Iterator[NarrowedGraph]:
        """The versions, each with its error; and the largest part of each that has too large a one.

        :param graph: exact.
        :param captured: the same before other rewrites.
        :param decided: names of an earlier process's candidates → the nodes that stay exact in
            them. None where nothing was decided.
        """
        judge = self._judge(captured) if decided is None and versions else None
        for number, version in enumerate(versions):
            wider = [one for one in versions[:number] if one.budget == version.budget][::-1]
            try:
                if decided is not None:
                    yield from self._decided(version, wider, graph, report, decided)
                elif judge is not None:
                    yield from self._judged(version, wider, graph, report, judge)
                else:
                    yield version
            except (PluginError, LoweringError) as error:
                instead = "the graph in its own numbers"
                self._tripped(report, version.plugin, "fuse", error, instead)

    def _judge(self, captured: GraphModule) -> Judge | None:
        """None where errors can't be measured now: then the choice finds that, and tells it.

        Ranks would find different parts, on their own inputs.
        """
        inputs = None if several_ranks() else example_values(captured, self._inputs())
        try:
            return None if inputs is None else Judge(captured, inputs, Metric.of(self._session))
        except NotMeasured:
            return None

    def _decided(
        self,
        version: NarrowedGraph,
        wider: Sequence[NarrowedGraph],
        graph: GraphModule,
        report: GraphReport,
        decided: Mapping[str, tuple[str, ...]],
    ) -> list[NarrowedGraph]:
        part: NarrowedGraph | None = None
        for who, exact in decided.items():
            _, found, rest = f"{who}{_ELSE}".partition(f" partly {version.name}{_ELSE}")
            places = tuple(place for place in version.places if not set(exact) & set(place))
            if found and places:
                part = _part_of(version, places, None, graph)
                rest = rest.removesuffix(_ELSE)
                part = next((_with_rest(part, one) for one in wider if one.name == rest), part)
                break
        if part is None:
            return [version]
        report.parts.append(_part_report(version, part, 0, graph, {}))
        return [version, part]

    def _judged(
        self,
        version: NarrowedGraph,
        wider: Sequence[NarrowedGraph],
        graph: GraphModule,
        report: GraphReport,
        judge: Judge,
    ) -> list[NarrowedGraph]:
        budget = version.budget
        try:
            error = judge.error(version.graph)
            version = replace(version, error=error)
            if not budget.excess_at_choice(error) or len(version.places) < 2:
                return [version]
            places, errors = by_worth(graph, version.graph, version.places, judge.inputs)
            limit = SHARE_OF_PART * budget.tolerance
            found = largest_part(
                places,
                lambda some: judge.error(version.only(graph, some)),
                limit,
                expected_within(places, errors, error, limit),
            )
            part = _part_of(version, found.places, found.error, graph)
            if found.places:
                part = _narrowed_further(part, wider, judge)
        except NotMeasured:  # the choice tells it
            return [version]
        report.parts.append(_part_report(version, part, found.judged, graph, errors))
        return [version, part] if found.places else [version]


#: Stands in the name of a part before what narrows the rest.
_ELSE = ", else "


def _part_of(
    version: NarrowedGraph, places: tuple[Place, ...], error: float | None, graph: GraphModule
) -> NarrowedGraph:
    left = [place for place in version.places if place not in places]
    return replace(
        version,
        graph=version.only(graph, places),
        name=f"partly {version.name}",
        places=places,
        error=error,
        exact=tuple(name for place in left for name in place),
    )


def _narrowed_further(
    part: NarrowedGraph, wider: Sequence[NarrowedGraph], judge: Judge
) -> NarrowedGraph:
    """A part with the rest in the first of other formats that keeps it within the budget."""
    for other in wider:
        if any(name in part.exact for place in other.places for name in place):
            both = _with_rest(part, other)
            error = judge.error(both.graph)
            if error <= SHARE_WITH_REST * part.budget.tolerance:
                return replace(both, error=error)
    return part


def _with_rest(part: NarrowedGraph, other: NarrowedGraph) -> NarrowedGraph:
    name = f"{part.name}{_ELSE}{other.name}"
    return replace(part, graph=other.only(part.graph, other.places), name=name, rest=other.name)


def _part_report(
    version: NarrowedGraph,
    part: NarrowedGraph,
    judged: int,
    graph: GraphModule,
    errors: Mapping[Place, float],
) -> PartReport:
    nodes = {node.name: node for node in graph.graph.nodes}
    places = tuple(
        PlaceReport(
            place[0], module_path(nodes[place[0]]), errors.get(place), place not in part.places
        )
        for place in version.places
    )
    return PartReport(version.name, version.error, part.error, judged, places, part.rest)


def _graph_of(
    narrowed: Callable[..., tuple[GraphModule, tuple[Place, ...]]],
    graph: GraphModule,
    places: Collection[Place],
) -> GraphModule:
    """A graph with places narrowed that may be: the counter has let them pass before."""
    return narrowed(graph, FusionCounter(), places)[0]


def _other_results(before: GraphModule, after: GraphModule) -> str:
    """Which output has another form than it had; "" where none has."""
    old, new = (one.graph.output_node().all_input_nodes for one in (before, after))
    for was, now in zip(old, new, strict=True):
        forms = [_form(node.meta.get("val")) for node in (was, now)]
        if forms[0] != forms[1]:
            return f"the output {was.name} is {forms[1]} now, not {forms[0]}"
    return ""


def _form(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} of {tuple(value.shape)} with strides {value.stride()}"
