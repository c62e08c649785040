"""Rewrites of whole graphs: every plugin's in order, held against the graphs it was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.contracts import Fusion, GraphKind
from fuseboard.errors import ContractError, LoweringError, PluginError, WrongValues
from fuseboard.fuse.passes import FusionCounter, apply_fusions
from fuseboard.lower.guards import watching_guards
from fuseboard.profile.judge.rewrites import example_values, judge_rewrites
from fuseboard.report.data import GraphReport
from fuseboard.run.failure import Tripped
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.copies import copy_graph


class Rewriter:
    """Asks plugins for rewrites of the graphs of one call of the backend.

    :param inputs: Dynamo's real ones, as long as it waits for the backend.
    :param tripped: contains a failure, or raises it.
    """

    def __init__(
        self, session: Session, inputs: Callable[[], Sequence[Any]], tripped: Tripped
    ) -> None:
        self._session = session
        self._inputs = inputs
        self._tripped = tripped

    def rewrite(
        self, graph: GraphModule, kind: GraphKind, report: GraphReport, counter: FusionCounter
    ) -> GraphModule:
        """The graph after the rewrites of every plugin, less those that fail or are wrong.

        Where the settings name who decides the stage, nobody else is asked if that one answers.
        """
        session = self._session
        hook = "fuseboard_fuse"
        if chosen := session.override("fuse"):

            def decide(own: GraphModule) -> list[Fusion] | None:
                found = session.overriding(hook, graph=own, kind=kind, region=None)
                return None if found is None else found[1]

            rewritten = self._rewritten(graph, chosen, decide, report, counter)
            if rewritten is not None:
                return rewritten
        for plugin in session.with_hook(hook):
            if plugin == chosen:
                continue

            def offer(own: GraphModule, plugin: str = plugin) -> list[Fusion] | None:
                return session.call(hook, plugin, graph=own, kind=kind, region=None)  # type: ignore[no-any-return]

            graph = self._rewritten(graph, plugin, offer, report, counter) or graph
        return graph

    def _rewritten(
        self,
        graph: GraphModule,
        who: str,
        offer: Callable[[GraphModule], list[Fusion] | None],
        report: GraphReport,
        counter: FusionCounter,
    ) -> GraphModule | None:
        """The graph after the rewrites that are offered; None where none are, or they fail."""
        limit_s = self._session.settings.hook_limit_s
        own = copy_graph(graph)  # a rewrite that fails half way is dropped with it
        try:
            with watching_guards(self._session, who, own, report.notes):
                fusions = offer(own)
                done = apply_fusions(own, fusions or [], who, counter, limit_s)
            if any(one.applied for one in done):
                self._judge(graph, own, who, report)
        except (PluginError, LoweringError) as error:
            self._tripped(report, who, "fuse", error, "the graph without its rewrites")
            return None
        if fusions is None:
            return None
        report.fusions.extend(done)
        return own

    def _judge(
        self, graph: GraphModule, rewritten: GraphModule, plugin: str, report: GraphReport
    ) -> None:
        """
        :raises WrongValues: the rewritten graph computes something else.
        :raises ContractError: it has other inputs or outputs, or can't be run.
        """
        if self._session.settings.verify == "off":
            return
        with torch_internals.real_tensors():
            values = example_values(graph, self._inputs())
            verdict = judge_rewrites(graph, rewritten, values)
        if isinstance(verdict, str):
            report.notes.append(f"{plugin}'s rewrites aren't judged by value: {verdict}")
        elif not verdict.ok:
            kind = WrongValues if verdict.by_value else ContractError
            raise kind(plugin, "fuseboard_fuse", verdict.problem)
