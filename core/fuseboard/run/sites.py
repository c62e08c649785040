"""A region's code, and the places of a graph that call it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from fuseboard.contracts import Boxed, Region
from fuseboard.partition.regions import Cut
from fuseboard.partition.writes import in_place
from fuseboard.report.nodes import modules_text
from fuseboard.run.eager import boxed_function
from fuseboard.run.outputs import Output, common_form


@dataclass(frozen=True)
class Lowered:
    """A region's code.

    :ivar call: takes the region's inputs at ``keeps``, then the prepared values.
    :ivar code: what the backend made, without what was wrapped around it; isomorphic regions
        share it.
    :ivar prepare: takes the region's inputs at ``uses``; None where nothing was hoisted.
    :ivar lower_part: compiles a part of the region's graph in the same way.
    :ivar inner: the regions of the graphs that its higher-order op calls, where these were cut.
    :ivar by_settings: the plugin or function that the settings name, where it rewrote or lowered
        the region instead of its backend.
    """

    region: Region
    call: Boxed
    code: Boxed
    keeps: tuple[int, ...]
    prepare: Boxed | None = None
    uses: tuple[int, ...] = ()
    values: int = 0
    lower_part: Callable[[GraphModule], Boxed] | None = None
    inner: tuple[Site, ...] = ()
    by_settings: str = ""

    @property
    def author(self) -> str:
        """The plugin or function that made the code."""
        return self.by_settings or self.region.backend

    @property
    def blamed(self) -> Region:
        """The region, under the name of its code's author."""
        return replace(self.region, backend=self.author)


@dataclass
class Site:
    """One call of a region in the graph.

    :ivar dynamo_graph_as: where the code is that of Dynamo's graph, what AOTAutograd captured of
        it, before any rewrite.
    :ivar outputs: their form in the last checked call; empty before one.
    :ivar tripped: the author of the code that failed in a call, in place of which eager runs.
    """

    cut: Cut
    lowered: Lowered
    dynamo_graph_as: GraphModule | None = None
    outputs: tuple[Output, ...] = ()
    tripped: str = ""

    @functools.cached_property
    def in_place(self) -> Boxed | None:
        """What writes to the input instead of computing another tensor; None for no write.

        It takes the region's inputs, and returns that one.
        """
        if not self.cut.writes or not self.trusted or self.lowered.prepare is not None:
            return None
        return boxed_function(in_place(self.cut.graph), f"{self.lowered.region.name}_in_place")

    @property
    def is_dynamo_graph(self) -> bool:
        """Whether its code is that of Dynamo's graph, not of the region's own."""
        return self.dynamo_graph_as is not None

    @property
    def is_eager(self) -> bool:
        """Whether its code is the region's graph op by op, which values are held against."""
        return self.lowered.author == "eager" and not self.is_dynamo_graph

    def span(self) -> str:
        """What traces call it: its region, the backend, the user's modules."""
        region = self.lowered.region
        return f"{region.name} [{region.backend}] {modules_text(self.cut.nodes)}".rstrip()

    def with_inner(self) -> Iterator[Site]:
        """The site, and those of the graphs that its region's op calls, at any depth."""
        yield self
        for site in self.lowered.inner:
            yield from site.with_inner()

    @property
    def trusted(self) -> bool:
        """Whether only the board's own code runs."""
        return self.lowered.author == "eager" and self.lowered.call is self.lowered.code

    def see(self, results: Sequence[Any]) -> None:
        """Note the form of a checked call's outputs."""
        self.outputs = common_form([node.meta["val"] for node in self.cut.outputs], results)
