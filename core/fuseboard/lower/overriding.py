"""Regions whose rewrites or code the settings leave to somebody else: ``stages.fuse``, ``lower``.

Who is named there is asked before the region's own backend, and is contained as a backend is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.contracts import Fusion, LoweredRegion, Region
from fuseboard.errors import LoweringError, containable
from fuseboard.lower.caching import Task
from fuseboard.lower.guards import watching_guards
from fuseboard.lower.op_levels import OpLevels
from fuseboard.report.data import GraphReport
from fuseboard.run.failure import contained, describe, trip
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.copies import copy_graph

T = TypeVar("T")

#: A stage, and the signature of a region in which the settings' choice for the stage decided.
Decided = tuple[str, str]


def given_to(region: Region, plugin: str, session: Session) -> Region:
    """The region with what is that plugin's own."""
    return dataclasses.replace(region, backend=plugin, options=session.options(plugin))


@dataclass(frozen=True)
class Overriding:
    """
    :ivar decided: what was decided so far; in another process where ``levels`` come from one.
    """

    session: Session
    report: GraphReport
    decided: set[Decided]
    levels: OpLevels

    @property
    def _is_carried(self) -> bool:
        return self.levels.carried is not None

    def fuse(self, region: Region, graph: GraphModule, apply: Callable[..., T]) -> T | None:
        """What ``apply`` makes of (the rewrites, the graph they are of, who offers them).

        :param graph: the region's, as its backend would be given it. It isn't changed.
        """

        def ask(who: str) -> T | None:
            shown = self._shown(who, region, graph)
            found = self.session.overriding(
                "fuseboard_fuse",
                graph=shown.graph,
                kind=region.kind,
                region=shown,
                options=shown.options,
            )
            fusions: list[Fusion] | None = None if found is None else found[1]
            return None if fusions is None else apply(fusions, shown.graph, who)

        return self._ask("fuse", region, ask)

    def lower(self, task: Task) -> LoweredRegion | None:
        """The region's code; None where that is left to its backend."""

        def ask(who: str) -> LoweredRegion | None:
            region, graph = task.region, task.region.graph
            if self.session.has(who):
                graph = self.levels.at_level_of(who, region)
            shown = self._shown(who, region, graph)
            with torch_internals.isolated_tracing(torch_internals.fake_mode_of(task.inputs)):
                found = self.session.overriding("fuseboard_lower", region=shown, inputs=task.inputs)
            # The board could only give an artifact to the backend, whose it isn't.
            return None if found is None else dataclasses.replace(found[1], artifact=None)

        return self._ask("lower", task.region, ask)

    def _shown(self, who: str, region: Region, graph: GraphModule) -> Region:
        """A region with a copy of a graph; to a plugin with its own options."""
        if self.session.has(who):
            region = given_to(region, who, self.session)
        return dataclasses.replace(region, graph=copy_graph(graph))

    def _ask(
        self, stage: Literal["fuse", "lower"], region: Region, ask: Callable[[str], T | None]
    ) -> T | None:
        """
        :raises RegionError: it fails, and the policy is to raise.
        :raises LoweringError: it answers otherwise than in the process where it was judged.
        """
        who = self.session.override(stage)
        key = stage, region.signature
        if not who or (self._is_carried and key not in self.decided):
            return None
        try:
            with watching_guards(self.session, who, region.graph, self.report.notes):
                answer = ask(who)
        except containable() as error:  # a function of the user's may raise anything
            if self._is_carried:
                raise LoweringError(f"{who} failed in this process: {describe(error)}") from error
            contained(self.session, dataclasses.replace(region, backend=who), stage, error)
            instead = f"{region.backend} without it"
            trip(self.session, self.report, who, stage, region.name, error, instead, region.source)
            return None
        if answer is not None:
            self.decided.add(key)
        elif self._is_carried:
            raise LoweringError(f"{who} answered in another process, and doesn't in this one")
        return answer
