"""Rewrites of whole graphs, Dynamo's first: every plugin's, held against the graphs before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.contracts import Fusion, GraphKind, Verdict
from fuseboard.errors import ContractError, LoweringError, PluginError, WrongValues, containable
from fuseboard.fuse.interruptions import opens_a_level
from fuseboard.fuse.passes import FusionCounter, apply_fusions
from fuseboard.lower.guards import watching_guards
from fuseboard.profile.judge.dynamo_rewrites import judge_dynamo_rewrites
from fuseboard.profile.judge.rewrites import example_values, judge_rewrites
from fuseboard.report.data import GraphReport
from fuseboard.run.failure import Tripped, describe
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.copies import copy_graph
from fuseboard.torch_api.dynamo_graphs import copy_dynamo_graph, drop_values, note_values


class Rewriter:
    """Asks plugins for rewrites of the graphs of one call of the backend.

    :param inputs: Dynamo's real ones, as long as it waits for the backend.
    :param tripped: contains a failure, or raises it.
    :ivar decompositions: what graphs are captured with: op → function.
    """

    def __init__(
        self, session: Session, inputs: Callable[[], Sequence[Any]], tripped: Tripped
    ) -> None:
        self._session = session
        self._inputs = inputs
        self._tripped = tripped
        self.decompositions: dict[Any, Callable[..., Any]] = {}

    def rewrite(
        self, graph: GraphModule, kind: GraphKind, report: GraphReport, counter: FusionCounter
    ) -> GraphModule:
        """The graph after the rewrites of every plugin, less those that fail or are wrong.

        Where the setting ``stages.fuse`` names a plugin or function that answers, it alone decides.
        """
        session, hook = self._session, "fuseboard_fuse"
        level = _Level(hook, copy_graph, self._judged, report, counter)
        if chosen := session.override("fuse"):

            def decide(own: GraphModule) -> list[Fusion] | None:
                found = session.overriding(hook, graph=own, kind=kind, region=None)
                return None if found is None else found[1]

            rewritten = self._rewritten(graph, chosen, decide, level)
            if rewritten is not None:
                return rewritten
        for plugin in session.with_hook(hook):
            if plugin != chosen:
                arguments = {"kind": kind, "region": None}
                offer = self._offer(level, plugin, arguments)
                graph = self._rewritten(graph, plugin, offer, level) or graph
        return graph

    def rewrite_dynamo_graph(
        self, graph: GraphModule, report: GraphReport, counter: FusionCounter
    ) -> GraphModule:
        """Dynamo's graph after the rewrites of every plugin, for AOTAutograd to capture."""
        hook = "fuseboard_fuse_dynamo"
        level = _Level(hook, copy_dynamo_graph, self._judge_dynamo_graph, report, counter)
        plugins = self._session.with_hook(hook)
        if not plugins:
            return graph
        if any(map(opens_a_level, graph.graph.nodes)):
            report.notes.append("Dynamo's graph isn't rewritten: it has levels of torch.func in it")
            return graph
        current = copy_dynamo_graph(graph)
        try:
            with torch_internals.real_tensors():
                note_values(current, self._inputs())
        except containable() as error:  # the user's own, or a limit of fake tensors
            report.notes.append(f"Dynamo's graph isn't rewritten: {describe(error)}")
            return graph
        for plugin in plugins:
            offer = self._offer(level, plugin, {})
            current = self._rewritten(current, plugin, offer, level) or current
        if not any(one.applied for one in report.fusions):
            return graph
        drop_values(current)
        return current

    def _offer(self, level: _Level, plugin: str, arguments: dict[str, Any]) -> _Offer:
        def offer(own: GraphModule) -> list[Fusion] | None:
            answer: list[Fusion] | None = self._session.call(
                level.hook, plugin, graph=own, **arguments
            )
            return answer

        return offer

    def _rewritten(
        self, graph: GraphModule, who: str, offer: _Offer, level: _Level
    ) -> GraphModule | None:
        """The graph after the rewrites that are offered; None where none are, or they fail."""
        report, limit_s = level.report, self._session.settings.hook_limit_s
        own = level.copy(graph)  # a rewrite that fails half way is dropped with it
        try:
            with watching_guards(self._session, who, own, report.notes):
                own.meta["decompositions"] = self.decompositions
                fusions = offer(own)
                own.meta.pop("decompositions", None)
                done = apply_fusions(own, fusions or [], who, level.counter, limit_s, level.hook)
            if any(one.applied for one in done):
                self._judge(graph, own, who, level)
        except (PluginError, LoweringError) as error:
            self._tripped(report, who, "fuse", error, "the graph without its rewrites")
            return None
        if fusions is None:
            return None
        report.fusions.extend(done)
        # What was written to the graph when it was asked for is neither counted nor judged.
        return own if any(one.applied for one in done) else graph

    def _judge(
        self, graph: GraphModule, rewritten: GraphModule, plugin: str, level: _Level
    ) -> None:
        """
        :raises WrongValues: the rewritten graph computes something else.
        :raises ContractError: it has other inputs or outputs, or can't be run.
        """
        if self._session.settings.verify == "off":
            return
        with torch_internals.real_tensors():
            verdict = level.judged(graph, rewritten)
        if isinstance(verdict, str):
            level.report.notes.append(f"{plugin}'s rewrites aren't judged by value: {verdict}")
        elif not verdict.ok:
            kind = WrongValues if verdict.by_value else ContractError
            raise kind(plugin, level.hook, verdict.problem)

    def _judged(self, graph: GraphModule, rewritten: GraphModule) -> Verdict | str:
        return judge_rewrites(graph, rewritten, example_values(graph, self._inputs()))

    def _judge_dynamo_graph(self, graph: GraphModule, rewritten: GraphModule) -> Verdict | str:
        return judge_dynamo_rewrites(graph, rewritten, self._inputs())


_Offer = Callable[[GraphModule], list[Fusion] | None]


@dataclass(frozen=True)
class _Level:
    """Graphs of one kind, and what is done with them.

    :ivar judged: the verdict on a rewritten graph, from that before; a text where there is none.
    """

    hook: str
    copy: Callable[[GraphModule], GraphModule]
    judged: Callable[[GraphModule, GraphModule], Verdict | str]
    report: GraphReport
    counter: FusionCounter
