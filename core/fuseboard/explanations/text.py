"""Explanations as text: for terminals of 80 columns and more, and for pipes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from fuseboard.report import words
from fuseboard.report.data import Break
from fuseboard.report.graph_text import WIDTH, graph_parts, line, plain

if TYPE_CHECKING:
    from fuseboard.explanations.explanation import Explanation


#: Where a terminal has fewer columns, it folds the lines: tables of fewer say nothing.
NARROWEST = 72


def as_text(explanation: Explanation, width: int = WIDTH) -> str:
    """Without colours and trailing blanks, for ``str()``, files and pipes."""
    return plain(render(explanation), width)


def show(explanation: Explanation, console: Console) -> None:
    """Print it: with colours on a terminal, as plain text elsewhere."""
    console.width = max(console.width, NARROWEST)
    if console.is_terminal:
        console.print(render(explanation))
    else:
        console.file.write(as_text(explanation, console.width) + "\n")


def render(explanation: Explanation) -> RenderableType:
    """The whole report."""
    parts: list[RenderableType] = [summary(explanation)]
    parts += [Text(note, style="yellow") for note in explanation.notes]
    for found in explanation.breaks or ():
        parts += [Text(), *_break(found)]
    for graph in explanation.graphs:
        parts += [Text(), *graph_parts(graph)]
    if not explanation.graphs:
        parts += [Text(), Text(words.NOTHING)]
    return Group(*parts)


def summary(explanation: Explanation) -> Text:
    """One line: how many graphs, breaks and ops, and where the ops are."""
    graphs = [graph for graph in explanation.graphs if graph.kind != "joint"]
    homes = Counter(node.backend for graph in graphs for node in graph.nodes)
    trips = sum(len(graph.trips) for graph in explanation.graphs)
    seconds = sum(sum(graph.seconds.values()) for graph in explanation.graphs)
    text = Text(f"{words.many(len(graphs), 'graph')}", style="bold")
    if explanation.breaks is not None:
        breaks = sum(found.count for found in explanation.breaks)
        text.append(f" · {words.many(breaks, 'graph break')}", "yellow" if breaks else "")
    where = ", ".join(f"{count} {words.at(backend)}" for backend, count in homes.most_common())
    text.append(f" · {words.many(homes.total(), 'op')}")
    if where:
        text.append(f": {where}")
    if trips:
        text.append(f" · {words.many(trips, 'trip')}", "bold red")
    text.append(f" · {seconds:.1f} s in fuseboard's stages")
    return text


def _break(found: Break) -> list[RenderableType]:
    what = "left to Python" if found.uncompiled else "graph break"
    head = Text().append(what, "bold yellow")
    if found.count > 1:
        head.append(f" ×{found.count}", "bold yellow")
    if found.source:
        head.append(f" · {found.function} ({words.shorten(found.source)})")
    parts: list[RenderableType] = [head, line(found.reason)]
    parts += [line(found.explanation, "dim")] if found.explanation else []
    parts += [line(f"hint: {hint}", "dim") for hint in found.hints]
    parts += [line(f"reached through {words.shorten(step)}", "dim") for step in found.stack[:-1]]
    return parts
