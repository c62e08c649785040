"""A sampled profile as one page of HTML that needs no network: shares, flame graph, functions.

Tables are written here, so that they can be read without scripts and by a screen reader; the flame
graph is drawn in the browser by ``assets/flame.js`` from one JSON object, of which nothing is ever
parsed as HTML. A content security policy forbids the page every request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from fuseboard.contracts import StackFrame
from fuseboard.profile.observe.sampling_regions import short_file
from fuseboard.report import pages

if TYPE_CHECKING:
    from fuseboard.profile.observe.sampling_result import SampledProfile

#: How many functions the table lists.
_LISTED = 40
#: Places of several backends, or of none that is known.
_MIXED = dict.fromkeys(("trials", "any", "unknown"), "mixed")


@dataclass
class _Node:
    """A call on the merged stacks. Children are in the order in which they were first seen."""

    label: str
    style: str
    samples: int = 0
    children: dict[str, _Node] = field(default_factory=dict)


@dataclass(frozen=True)
class FunctionRow:
    """A row of the table of functions: samples in the function itself, and with what it called."""

    label: str
    own: int
    whole: int


def render_flame_graph(profile: SampledProfile) -> str:
    """The page as text; write it as UTF-8."""
    style = Markup(
        pages.asset("fuseboard.explanations", "page.css") + pages.asset(__package__, "flame.css")
    )
    script = Markup(pages.asset(__package__, "flame.js"))
    styles = _backend_styles(profile)
    return (
        pages.templates(__package__)
        .get_template("flame.html")
        .render(
            profile=profile,
            shares=profile.region_shares(),
            functions=_functions(profile),
            styles=styles,
            style=style,
            script=script,
            hashes={"style": pages.source_hash(style), "script": pages.source_hash(script)},
            data=htmlsafe_json_dumps(_data(profile, styles), separators=(",", ":")),
        )
    )


# --- what is drawn --------------------------------------------------------------------------------


def _function(profile: SampledProfile, frame: StackFrame) -> str:
    """A frame's region or function: whatever line it was at."""
    place = profile.regions.get((frame.file, frame.line))
    if place is not None:
        return place.label
    return f"{frame.name} ({short_file(frame.file)})" if frame.file else frame.name


def _backend_styles(profile: SampledProfile) -> dict[str, str]:
    """Backend → its CSS class, as in the page of an explanation."""
    backends = {place.backend for place in profile.regions.values()} - _MIXED.keys()
    return pages.backend_styles(sorted(backends)) | _MIXED


def _style(profile: SampledProfile, frame: StackFrame, styles: dict[str, str]) -> str:
    place = profile.regions.get((frame.file, frame.line))
    if place is not None:
        return styles[place.backend]
    return "python" if ".py" in frame.file or frame.file.startswith("<") else "native"


def _merged(profile: SampledProfile, styles: dict[str, str]) -> _Node:
    """Every stack in one tree: threads, then calls by function."""
    root = _Node("all", "thread")
    for sample in profile.samples:
        node = root
        node.samples += sample.count
        steps: Iterable[tuple[str, str]] = [
            (sample.thread or profile.sampler, "thread"),
            *((_function(profile, f), _style(profile, f, styles)) for f in sample.stack),
        ]
        for label, style in steps:
            node = node.children.setdefault(label, _Node(label, style))
            node.samples += sample.count
    return root


def _walk(root: _Node) -> Iterator[tuple[int, _Node]]:
    """Depth and node, parents first. A list instead of recursion: stacks are a thousand deep."""
    waiting = [(0, root)]
    while waiting:
        depth, node = waiting.pop()
        yield depth, node
        waiting.extend((depth + 1, child) for child in reversed(node.children.values()))


def _data(profile: SampledProfile, styles: dict[str, str]) -> dict[str, Any]:
    """What ``flame.js`` draws: labels once, and [depth, label, samples] for each node in order."""
    labels: dict[tuple[str, str], int] = {}
    nodes = [
        [depth, labels.setdefault((node.label, node.style), len(labels)), node.samples]
        for depth, node in _walk(_merged(profile, styles))
    ]
    return {"labels": list(labels), "nodes": nodes}


def _functions(profile: SampledProfile) -> list[FunctionRow]:
    """The functions with most samples of their own. One that calls itself is counted once."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for sample in profile.samples:
        names = [_function(profile, frame) for frame in sample.stack]
        for name in set(names):
            whole[name] += sample.count
        if names:
            own[names[-1]] += sample.count
    return [FunctionRow(name, count, whole[name]) for name, count in own.most_common(_LISTED)]
