"""Which region a sampled stack was in, told by the generated functions on it.

Each function that fuseboard generates has a file name of its own, ``<fuseboard:NAME:NUMBER>``, and
its text stays in ``linecache``. In a runner (:mod:`fuseboard.lower.runner`) each call of a region
follows a line ``site = N``; a runner that only passes its list on has no such line and one region.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fuseboard.contracts import StackFrame
from fuseboard.report.data import GraphReport, ledger

_FILE = re.compile(r"^<fuseboard:(?P<name>.+):\d+>$")
_GRAPH = re.compile(r"^(?:forward|backward|inference)\d+$")
_SITE = re.compile(r"^\s*site(?:_\d+)? = (?P<number>-?\d+)$")


@dataclass(frozen=True)
class Place:
    """Where a line of a runner belongs.

    :ivar region: such as ``inference0.region1``; the graph's name where the line is the board's own
        work, between the regions.
    :ivar backend: that runs it; ``board`` for the board's own work.
    """

    region: str
    backend: str

    @property
    def label(self) -> str:
        return f"{self.region} [{self.backend}]"


def locate_regions(frames: Iterable[StackFrame]) -> dict[tuple[str, int], Place]:
    """(file, line) of each frame in a runner → its place."""
    graphs = {graph.name: graph for graph in ledger.graphs()}
    places: dict[tuple[str, int], Place] = {}
    for file, line in {(f.file, f.line) for f in frames if f.file.startswith("<fuseboard:")}:
        match = _FILE.match(file)
        if match is not None and _GRAPH.match(match["name"]):
            graph = graphs.get(match["name"], GraphReport(match["name"], "inference"))
            places[file, line] = _place(graph, linecache.getlines(file), line)
    return places


def _place(graph: GraphReport, lines: list[str], line: int) -> Place:
    """Of a line of a graph's runner. A graph that nobody remembers any more has no regions."""
    backends = {region.name: region.backend for region in graph.regions}
    number = _site(lines, line)
    if number is None:  # no sites, or no line numbers, as in stacks of perf
        number = 0 if len(backends) < 2 else -1
    region = f"{graph.name}.region{number}"
    if region in backends or (not backends and number >= 0):
        return Place(region, backends.get(region, "unknown"))
    return Place(graph.name, "board")


def _site(lines: list[str], line: int) -> int | None:
    """The site that was running at a line; -1 before the first one, None where it has none."""
    if not line or not any(_SITE.match(text) for text in lines):
        return None
    number = -1
    for text in lines[:line]:
        if (site := _SITE.match(text)) is not None:
            number = int(site["number"])
    return number


def place_of(stack: Iterable[StackFrame], places: Mapping[tuple[str, int], Place]) -> Place | None:
    """The innermost place on a stack (outermost call first); None outside of compiled code."""
    found = None
    for frame in stack:
        found = places.get((frame.file, frame.line), found)
    return found
