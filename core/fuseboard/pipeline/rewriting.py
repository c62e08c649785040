"""Rewrites of whole graphs: every plugin's in order, held against the graphs it was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.contracts import GraphKind, Stage
from fuseboard.errors import ContractError, LoweringError, PluginError, WrongValues
from fuseboard.fuse.passes import FusionCounter, apply_fusions
from fuseboard.lower.guards import watching_guards
from fuseboard.profile.judge.rewrites import example_values, judge_rewrites
from fuseboard.report.data import GraphReport
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.copies import copy_graph

Tripped = Callable[[GraphReport, str, Stage, Exception, str], None]


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
        """The graph after the rewrites of every plugin, less those that fail or are wrong."""
        limit_s = self._session.settings.hook_limit_s
        for plugin in self._session.with_hook("fuseboard_fuse"):
            own = copy_graph(graph)  # a rewrite that fails half way is dropped with it
            try:
                with watching_guards(self._session, plugin, own, report.notes):
                    fusions = self._session.call(
                        "fuseboard_fuse", plugin, graph=own, kind=kind, region=None
                    )
                    done = apply_fusions(own, fusions or [], plugin, counter, limit_s)
                if any(one.applied for one in done):
                    self._judge(graph, own, plugin, report)
                if fusions:
                    report.fusions.extend(done)
                    graph = own
            except (PluginError, LoweringError) as error:
                self._tripped(report, plugin, "fuse", error, "the graph without its rewrites")
        return graph

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
