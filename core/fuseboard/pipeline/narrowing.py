"""Further versions of a graph, in narrower numbers: what ``tolerance`` allows plugins to offer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.contracts import GraphKind, Narrowing
from fuseboard.errors import ContractError, LoweringError, PluginError
from fuseboard.fuse.passes import FusionCounter, apply_fusions
from fuseboard.lower.guards import watching_guards
from fuseboard.partition.pins import Pins
from fuseboard.profile.judge.accuracy import Budget, Metric
from fuseboard.profile.judge.rewrites import other_ends
from fuseboard.report.data import GraphReport
from fuseboard.run.failure import Tripped
from fuseboard.torch_api.copies import copy_graph

_HOOK = "fuseboard_narrow"


@dataclass(frozen=True)
class NarrowedGraph:
    """A version of a graph.

    :ivar name: what candidates are called by, after their backends: the format.
    :ivar budget: how far its results may be from float64.
    """

    graph: GraphModule
    name: str
    budget: Budget


class Narrower:
    """Asks plugins for narrower versions of graphs.

    :param tripped: contains a failure, or raises it.
    """

    def __init__(self, session: Session, pins: Pins, tripped: Tripped) -> None:
        self._session = session
        self._pins = pins
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
        limit_s = self._session.settings.hook_limit_s
        for place, first in enumerate(self._ask(plugin, copy_graph(graph), kind)):
            if first.problem:
                report.notes.append(f"{first.format} isn't offered by {plugin}: {first.problem}")
                continue
            for level in levels:
                own = copy_graph(graph)
                with watching_guards(self._session, plugin, own, report.notes):
                    fusions = [
                        fusion
                        for fusion in self._ask(plugin, own, kind)[place].fusions
                        if all(allowed.get(name, 0.0) >= level for name in fusion.nodes)
                    ]
                    numbered = replace(counter, applied=[])
                    done = apply_fusions(own, fusions, plugin, numbered, limit_s, _HOOK)
                if problem := other_ends(graph, own) or _other_results(graph, own):
                    raise ContractError(plugin, _HOOK, problem)
                applied = sum(one.applied for one in done)
                if applied:
                    name = first.format if level == levels[0] else f"{first.format} for {level:g}"
                    report.notes.append(f"{name}: {applied} rewrites by {plugin}: {first.changes}")
                    yield NarrowedGraph(own, name, Budget(level, metric))

    def _ask(self, plugin: str, graph: GraphModule, kind: GraphKind) -> list[Narrowing]:
        answer: list[Narrowing] | None = self._session.call(_HOOK, plugin, graph=graph, kind=kind)
        return answer or []


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
