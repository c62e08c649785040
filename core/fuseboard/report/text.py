"""Explanations as text: for terminals of 80 columns and more, and for pipes."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fuseboard.report import words
from fuseboard.report.data import Break, GraphReport, RegionReport
from fuseboard.report.dynamo import readable

if TYPE_CHECKING:
    from fuseboard.report.explain import Elsewhere, Explanation

#: ``str(explanation)`` is written for this many columns.
WIDTH = 100


def as_text(explanation: Explanation, width: int = WIDTH) -> str:
    """Without colours and trailing blanks, for ``str()``, files and pipes."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, legacy_windows=False)
    console.print(render(explanation))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def show(explanation: Explanation, console: Console) -> None:
    """Print it: with colours on a terminal, as plain text elsewhere."""
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
        parts += [Text(), *_graph(graph)]
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


# --- a graph --------------------------------------------------------------------------------------


def _graph(graph: GraphReport) -> list[RenderableType]:
    from fuseboard.report.explain import elsewhere

    compile_id, _, function = graph.frame.partition(" ")
    head = Text()
    head.append(f"{graph.kind} graph", "bold cyan").append(f" {graph.name}", "bold")
    head.append(f" · {words.shorten(readable(function)) or 'unknown function'}")
    stages = ", ".join(f"{stage} {s:.2f}" for stage, s in graph.seconds.items() if s >= 0.005)
    below = "split into forward and backward · " if graph.kind == "joint" else ""
    below += f"compile {compile_id}" + (f" · seconds: {stages}" if stages else "")
    parts: list[RenderableType] = [head, _line(below, "dim")]
    if graph.fusions:
        parts.append(_line(f"rewritten as a whole: {words.fusions(graph.fusions)}"))
    parts += [_line(f"note: {note}", "yellow") for note in graph.notes]
    if graph.regions:
        parts.append(Padding(_regions(graph.regions), (0, 0, 0, 1), expand=False))
    own = Counter(node.reason for node in graph.nodes if node.backend == "board")
    for reason, count in own.items():
        parts.append(_line(f"{words.many(count, 'op')} run by the board itself: {reason}"))
    groups = elsewhere(graph)
    if groups:
        parts.append(_line(f"not on {graph.backends[0]}, which comes first:", "bold"))
        parts.append(Padding(_elsewhere(groups), (0, 0, 0, 3), expand=False))
    parts += [_trip(graph, number) for number in range(len(graph.trips))]
    return parts


def _regions(regions: Sequence[RegionReport]) -> Table:
    """A row for each region that was lowered; those that share its code are counted."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("region", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    table.add_column("ops", justify="right", no_wrap=True)
    table.add_column("what is in it", overflow="fold")
    table.add_column("lower s", justify="right", no_wrap=True)
    alike = Counter(region.same_as for region in regions)
    for region in regions:
        if region.same_as:
            continue
        name = region.name.rpartition(".")[2]
        more = alike[region.name]
        table.add_row(
            f"{name} ×{more + 1}" if more else name,
            Text(region.backend, style="green"),
            str(sum(region.ops.values())),
            _contents(region, more),
            f"{region.lower_s:.2f}",
        )
    return table


def _contents(region: RegionReport, more: int) -> Text:
    lines = [Text(words.ops(region.ops))]
    if region.whole:
        lines.insert(0, Text("the whole graph"))
    if more:
        lines.append(Text(f"lowered once for {more + 1} places", style="dim"))
    if region.loaded:
        lines.append(Text("loaded from the cache"))
    if any(fusion.applied for fusion in region.fusions):
        lines.append(Text(f"fused: {words.fusions(region.fusions)}"))
    if region.hoisted:
        lines.append(
            Text(f"{words.many(region.hoisted, 'value')} of weights computed outside the calls")
        )
    if region.specialised:
        shapes = words.many(len(region.specialised), "combination")
        lines.append(Text(f"compiled for {shapes} of sizes: {'; '.join(region.specialised)}"))
    if region.sources:
        places = words.places(region.sources)
        lines += [Text(f"from {place}", style="dim") for place in places[: words.SHOWN]]
        if len(places) > words.SHOWN:
            lines.append(Text(f"from {len(places) - words.SHOWN} more files", style="dim"))
    lines += [Text(f"note: {note}", style="yellow") for note in dict.fromkeys(region.notes)]
    return Text("\n").join(lines)


def _elsewhere(groups: Sequence[Elsewhere]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for group in groups:
        cell = Text(f"{group.reason or 'no reason given'}")
        cell.append(f" → {group.backend}", "green")
        cell.append(f"\n{words.ops(group.ops)}", "dim")
        table.add_row(str(sum(group.ops.values())), cell)
    return table


def _trip(graph: GraphReport, number: int) -> RenderableType:
    trip = graph.trips[number]
    text = Text().append(f"tripped: {trip.plugin} in stage {trip.stage}", "bold red")
    place = f", {words.shorten(trip.source)}" if trip.source else ""
    text.append(f" on {trip.region}{place}")
    return Group(
        _line(text),
        _line(trip.error, "red", indent=4),
        _line(f"ran instead: {trip.instead}", indent=4),
    )


def _break(found: Break) -> list[RenderableType]:
    what = "left to Python" if found.uncompiled else "graph break"
    head = Text().append(what, "bold yellow")
    if found.count > 1:
        head.append(f" ×{found.count}", "bold yellow")
    if found.source:
        head.append(f" · {found.function} ({words.shorten(found.source)})")
    parts: list[RenderableType] = [head, _line(found.reason)]
    parts += [_line(found.explanation, "dim")] if found.explanation else []
    parts += [_line(f"hint: {hint}", "dim") for hint in found.hints]
    parts += [_line(f"reached through {words.shorten(step)}", "dim") for step in found.stack[:-1]]
    return parts


# --- small things ---------------------------------------------------------------------------------


def _line(text: str | Text, style: str = "", indent: int = 2) -> RenderableType:
    """A text that keeps its indentation where it is folded."""
    text = Text(text, style=style) if isinstance(text, str) else text
    return Padding(text, (0, 0, 0, indent), expand=False)
