"""Which region a sampled stack was in, told by the generated functions on it.

Each function that fuseboard generates has a file name of its own, ``<fuseboard:NAME:NUMBER>``, and
its text stays in ``linecache``. In a runner (:mod:`fuseboard.run.program`) the line that was
running says it: it calls ``_region2_mkldnn([...])``, after a line ``site = 2``; a runner that only
passes its list on calls ``_region0(args)``.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fuseboard.contracts import StackFrame
from fuseboard.report.data import ledger

_FILE = re.compile(
    r"^<fuseboard:(?P<graph>(?:forward|backward|inference)\d+)(?P<trial>_trial(?:_\d+)?)?:\d+>$"
)
_SITE = re.compile(r"^\s*site(?:_\d+)? = (?P<number>-?\d+)$")
_CALL = re.compile(r"\b_region(?P<number>\d+)(?:_(?P<backend>[A-Za-z]\w*?))?(?:_\d+)?\(")


@dataclass(frozen=True)
class RegionFrame:
    """Where a line of a runner belongs.

    :ivar region: such as ``inference0.region1``; the graph's name where it is none of its regions.
    :ivar backend: that runs it. For a graph: ``board`` for the board's own work between its
        regions, ``trials`` for candidates that are compared, ``any`` where stacks have no lines.
    """

    region: str
    backend: str

    @property
    def label(self) -> str:
        return f"{self.region} [{self.backend}]"


def locate_regions(frames: Iterable[StackFrame]) -> dict[tuple[str, int], RegionFrame]:
    """(file, line) of each frame in a runner → its place."""
    known = {
        graph.name: {region.name: region.backend for region in graph.regions}
        for graph in ledger.graphs()
    }
    places: dict[tuple[str, int], RegionFrame] = {}
    for file, line in {(f.file, f.line) for f in frames if f.file.startswith("<fuseboard:")}:
        match = _FILE.match(file)
        if match is not None:
            graph = match["graph"]
            places[file, line] = (
                RegionFrame(graph, "trials")
                if match["trial"]
                else _place(graph, known.get(graph, {}), linecache.getlines(file), line)
            )
    return places


def _place(graph: str, backends: Mapping[str, str], lines: list[str], line: int) -> RegionFrame:
    """Of a line of a runner; 0 where it isn't known, as in stacks of perf.

    :param backends: of the graph's regions, by name, as it is now: it may have been another plan's.
    """
    if not 0 < line <= len(lines):
        if len(backends) != 1:
            return RegionFrame(graph, "any")
        ((region, backend),) = backends.items()
        return RegionFrame(region, backend)
    call = _CALL.search(lines[line - 1])
    if call is None:
        return RegionFrame(graph, "board")
    sites = [site["number"] for text in lines[:line] if (site := _SITE.match(text))]
    region = f"{graph}.region{sites[-1] if sites else call['number']}"
    return RegionFrame(region, call["backend"] or backends.get(region, "unknown"))


def place_of(
    stack: Iterable[StackFrame], places: Mapping[tuple[str, int], RegionFrame]
) -> RegionFrame | None:
    """The innermost place on a stack (outermost call first); None outside of compiled code."""
    found = None
    for frame in stack:
        found = places.get((frame.file, frame.line), found)
    return found


def short_file(file: str) -> str:
    """A path from the installed package on, or its last two parts."""
    for root in ("/site-packages/", "/dist-packages/"):
        if root in file:
            return file.rpartition(root)[2]
    return "/".join(Path(file).parts[-2:]) if "/" in file else file
