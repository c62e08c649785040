"""Explanations as one page of HTML that needs no network: text, tables, and each graph drawn.

The text is written here, through the templates in ``assets/``, so that it can be read without
scripts, by a screen reader, and on paper. The drawing is made in the browser by ``assets/*.js``,
from one JSON object; there, nothing of it is ever parsed as HTML. A content security policy forbids
the page every request, and every script but its own.

A further part of the report is a row in :data:`SECTIONS` and a template.
"""

from __future__ import annotations

import json
import linecache
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from jinja2 import Environment
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from fuseboard.contracts import Trip
from fuseboard.explanations import scatter
from fuseboard.explanations.bars import chart
from fuseboard.explanations.folding import Box, fold
from fuseboard.module_names import readable
from fuseboard.report import choices, pages, words
from fuseboard.report.data import GraphReport, RegionReport
from fuseboard.report.elsewhere import elsewhere, foremost

if TYPE_CHECKING:
    from fuseboard.explanations.explanation import Explanation

#: Anchor, title and template of each section, in order. A template gets all that the others get.
SECTIONS = (
    ("summary", "Summary", "summary.html"),
    ("breaks", "Graph breaks", "breaks.html"),
    ("graphs", "Graphs", "graphs.html"),
    ("profile", "Where time goes", "profile.html"),
)

#: In the order in which they run: each may use what the ones before it define.
_SCRIPTS = ("dagre.min.js", "boxes.js", "details.js", "diagram.js", "page.js")
_STAGES = ("fuse", "partition", "lower", "profile")


class Profile(Protocol):
    """What the page shows of a profile; see :class:`fuseboard.SampledProfile`."""

    @property
    def duration_s(self) -> float: ...
    @property
    def total(self) -> int: ...
    def region_shares(self) -> Sequence[Any]: ...


def render_page(explanation: Explanation, title: str = "", profile: Profile | None = None) -> str:
    """The page as text; write it as UTF-8.

    :param title: of the page; without one, the explained functions are named.
    :param profile: its shares are shown.
    """
    from fuseboard.explanations.text import summary

    scripts = [_script(name) for name in _SCRIPTS]
    style = Markup(pages.asset(__package__, "page.css"))
    text = (
        _templates()
        .get_template("page.html")
        .render(
            title=title or _title(explanation),
            sections=SECTIONS,
            explanation=explanation,
            summary=str(summary(explanation)),
            graphs=explanation.graphs,
            backends=_backends(explanation.graphs),
            elsewhere=elsewhere,
            foremost=foremost,
            styles=_backend_styles(explanation.graphs),
            style=style,
            scripts=scripts,
            hashes={
                "style": pages.source_hash(style),
                "scripts": [pages.source_hash(script) for script in scripts],
            },
            data=htmlsafe_json_dumps(_data(explanation.graphs), separators=(",", ":")),
            nothing=words.NOTHING,
            profile=profile,
            shares=[] if profile is None else profile.region_shares(),
        )
    )
    # A file's name may hold bytes that are no text; Python has them as lone surrogates.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@cache
def _templates() -> Environment:
    environment = pages.templates(__package__)
    environment.globals["box"] = scatter
    environment.filters.update(
        many=words.many,
        ops=words.ops,
        fusions=words.fusions,
        places=words.places,
        shorten=words.shorten,
        function=_function,
        seconds=_seconds,
        stages=_stages,
        regions=_region_rows,
        chart=chart,
        scatter=scatter.scatter,
        why=choices.why,
        pending=choices.pending,
        scaled=choices.scaled,
        part=choices.part,
        by_error=choices.by_error,
        untried=choices.untried,
        loaded=_loaded,
        tally=lambda items: Counter(items).most_common(),
    )
    return environment


@cache
def _script(name: str) -> Markup:
    """A script as it goes into the page; one that isn't ours with its licence."""
    text = re.sub(r"^//# sourceMappingURL=.*\n?", "", pages.asset(__package__, name), flags=re.M)
    if name == "dagre.min.js":
        text = f"/*! @dagrejs/dagre\n{pages.asset(__package__, 'dagre.LICENSE.txt')}*/\n{text}"
    return Markup(text)


# --- words ----------------------------------------------------------------------------------------


def _title(explanation: Explanation) -> str:
    # The parts of a function that graph breaks cut are one function.
    names = [_function(graph).partition(" (")[0] for graph in explanation.graphs]
    names = [name.partition(", resumed")[0] for name in names]
    names = names or [found.function for found in explanation.breaks or ()]
    return words.first(list(dict.fromkeys(filter(None, names)))) or "nothing compiled"


def _function(graph: GraphReport) -> str:
    """The user's function that a graph is of, with its place."""
    return words.shorten(readable(graph.frame.partition(" ")[2]))


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.005 else "under 0.01 s"


def _region_rows(graph: GraphReport) -> list[tuple[RegionReport, str, int]]:
    """Each region that was lowered, its short name, and how many regions run its code."""
    alike = Counter(region.same_as for region in graph.regions)
    return [
        (region, _short(region.name), alike[region.name] + 1)
        for region in graph.regions
        if not region.same_as
    ]


def _loaded(graph: GraphReport) -> str:
    """How many regions' code came from the cache; "" where none was to be compiled."""
    compiled = [r for r in graph.regions if not r.same_as and r.backend != "eager"]
    hits = sum(region.loaded for region in compiled)
    if not compiled:
        return ""
    return f"The code of {hits} of {words.many(len(compiled), 'region')} came from the cache."


def _short(region: str) -> str:
    return region.rpartition(".")[2]


def _stages(seconds: Mapping[str, float]) -> list[tuple[str, float, str]]:
    """Stage, seconds, and the CSS class of its part of the bar: the same one in each graph."""
    order = dict.fromkeys((*_STAGES, *seconds))
    styles = {stage: f"stage{i % pages.STYLES}" for i, stage in enumerate(order)}
    return [(stage, s, styles[stage]) for stage, s in seconds.items()]


def _backends(graphs: Sequence[GraphReport]) -> list[tuple[str, int, str]]:
    """Backends that run ops, with how many, and the CSS class."""
    counts = Counter(node.backend for graph in graphs for node in graph.nodes)
    styles = _backend_styles(graphs)
    return [(name, counts[name], style) for name, style in styles.items() if counts[name]]


def _backend_styles(graphs: Sequence[GraphReport]) -> dict[str, str]:
    """The CSS class of each backend: by its place in the order of priority."""
    ordered = [name for graph in graphs for name in graph.backends]
    ordered += [node.backend for graph in graphs for node in graph.nodes]
    return pages.backend_styles(ordered)


# --- data -----------------------------------------------------------------------------------------


class _Strings:
    """Texts by number: reasons and places repeat a thousand times."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[str]:
        return list(self._numbers)


def _data(graphs: Sequence[GraphReport]) -> dict[str, Any]:
    """What the drawing is made from. ``assets/boxes.js`` reads it; nothing else does."""
    strings = _Strings()
    sources: dict[int, str] = {}
    drawn = [_graph(graph, strings, sources) for graph in graphs if graph.nodes]
    return {
        "styles": _backend_styles(graphs),
        "graphs": drawn,
        "code": sources,
        "strings": strings.all(),
    }


def _graph(graph: GraphReport, strings: _Strings, sources: dict[int, str]) -> dict[str, Any]:
    ends = {node.name: -1 - i for i, node in enumerate(graph.inputs)}
    position = {**ends, **{node.name: i for i, node in enumerate(graph.nodes)}}
    numbers = {region.name: i for i, region in enumerate(graph.regions)}
    declines: dict[str, int] = {}
    nodes = []
    for node in graph.nodes:
        place = strings(words.shorten(node.source))
        sources.setdefault(place, _code(node.source))
        refused = json.dumps([[strings(b), strings(r)] for b, r in node.declined.items()])
        nodes.append(
            [
                node.name,
                *map(strings, (node.op, words.short_op(node.op), node.value, node.backend)),
                numbers.get(node.region, -1),
                strings(node.reason),
                place,
                strings(node.module),
                declines.setdefault(refused, len(declines)),
                [position[name] for name in node.inputs if name in position],
            ]
        )
    return {
        "name": graph.name,
        "inputs": [[node.name, node.value, node.static] for node in graph.inputs],
        "outputs": [position[name] for name in graph.outputs if name in position],
        "nodes": nodes,
        "declines": [json.loads(refused) for refused in declines],
        "regions": _regions(graph, position),
        "boxes": [_box(graph, box) for box in fold(graph)],
    }


def _regions(graph: GraphReport, position: Mapping[str, int]) -> list[dict[str, Any]]:
    regions = {region.name: region for region in graph.regions}
    members: dict[str, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        members.setdefault(node.region, []).append(i)
    return [
        {
            **_region(region, [trip for trip in graph.trips if trip.region == region.name]),
            "fusions": _fused(region, regions.get(region.same_as, region), members, position),
        }
        for region in graph.regions
    ]


def _region(region: RegionReport, trips: Sequence[Trip]) -> dict[str, Any]:
    rows: list[tuple[str, str]] = [("backend", region.backend), ("ops", words.ops(region.ops))]
    if region.same_as:
        rows.append(("code", f"the same as {_short(region.same_as)}'s, which was lowered for both"))
    else:
        rows.append(("lowered in", _seconds(region.lower_s)))
    if region.fusions:
        rows.append(("fused", words.fusions(region.fusions)))
    if region.hoisted:
        values = words.many(region.hoisted, "value")
        rows.append(("hoisted", f"{values} of weights computed outside the calls"))
    rows += [("note", note) for note in dict.fromkeys(region.notes)]
    rows += [
        ("tripped", f"{trip.plugin} in stage {trip.stage}: {trip.error}; {trip.instead} ran")
        for trip in trips
    ]
    rows += [("from", place) for place in words.places(region.sources)[: words.SHOWN]]
    return {
        "name": _short(region.name),
        "backend": region.backend,
        "seconds": "" if region.same_as else _seconds(region.lower_s),
        "whole": region.whole,
        "sameAs": _short(region.same_as),
        "marks": ["note"] * bool(region.notes) + ["tripped"] * bool(trips),
        "rows": rows,
    }


def _fused(
    region: RegionReport,
    owner: RegionReport,
    members: Mapping[str, Sequence[int]],
    position: Mapping[str, int],
) -> list[tuple[str, list[int]]]:
    """Rewrites that were applied, with the positions of their nodes.

    Left out are those whose nodes aren't all in the region: a backend may decompose its own copy
    before it rewrites. A region that shares its ``owner``'s code has that one's rewrites, on its
    own nodes in the same places.
    """
    if not owner.fusions:
        return []
    theirs, own = members.get(owner.name, ()), members.get(region.name, ())
    twin = dict(zip(theirs, own, strict=True)) if len(theirs) == len(own) else {}
    found = []
    for fusion in owner.fusions:
        nodes = [twin.get(position.get(name, -1), -1) for name in fusion.nodes]
        if fusion.applied and min(nodes, default=-1) >= 0:
            found.append((fusion.name, nodes))
    return found


def _box(graph: GraphReport, box: Box) -> Any:
    """A box as JSON; an op is just its number."""
    if box.kind == "op":
        return box.node
    data: dict[str, Any] = {"kind": box.kind, "boxes": [_box(graph, c) for c in box.children]}
    if box.kind == "region":
        data["region"] = box.region
    elif box.kind == "repeat":
        data["copies"] = box.copies
    return data


def _code(source: str) -> str:
    """The user's line, as it is on disk now; "" where there is none."""
    file, _, line = source.rpartition(":")
    return linecache.getline(file, int(line)).strip()[:200] if file and line.isdigit() else ""
