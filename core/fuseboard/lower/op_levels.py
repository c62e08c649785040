"""Regions at the level of ops that a plugin wants, from one graph for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.contracts import Region
from fuseboard.errors import LoweringError
from fuseboard.lower.decompose import decompose
from fuseboard.torch_api.copies import copy_graph

#: A plugin, and the signature of a region that was decomposed for it.
LevelKey = tuple[str, str]


@dataclass(frozen=True)
class OpLevels:
    """Decomposes regions, or knows how another process has decomposed them.

    :ivar carried: graphs that another process has decomposed, None for those that it left as they
        were. Where it is given, nothing is traced in this one.
    :ivar kept: where to keep them for another process; None where there is none.
    """

    session: Session
    carried: Mapping[LevelKey, GraphModule | None] | None = None
    kept: dict[LevelKey, GraphModule | None] | None = None

    def at_level_of(self, plugin: str, region: Region) -> GraphModule:
        """A copy of the region's graph, decomposed as the plugin asks for.

        :raises LoweringError: another process has decomposed other regions.
        """
        key = plugin, region.signature
        if self.carried is not None:  # no need to load what a backend decomposes with
            if key not in self.carried:
                raise LoweringError(f"{region.name} was cut otherwise elsewhere")
            return copy_graph(self.carried[key] or region.graph)
        graph = copy_graph(region.graph)
        table = self.session.call("fuseboard_decompositions", plugin, kind=region.kind)
        if table:
            graph = decompose(graph, table)
        if self.kept is not None:
            self.kept[key] = copy_graph(graph) if table else None
        return graph
