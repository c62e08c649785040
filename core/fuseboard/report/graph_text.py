"""A graph's report as text."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fuseboard.module_names import readable
from fuseboard.report import choices, words
from fuseboard.report.data import GraphReport, RegionReport
from fuseboard.report.elsewhere import Elsewhere, elsewhere, foremost

#: Texts that aren't for a terminal are written for this many columns.
WIDTH = 100

#: Colours of the states of candidates.
_STATES = {
    "chosen": "bold green",
    "failed": "red",
    "inexact": "yellow",
    "waiting": "yellow",
    "untried": "yellow",
}


def plain(what: RenderableType, width: int = WIDTH) -> str:
    """Without colours and trailing blanks."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, legacy_windows=False)
    console.print(what)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def graph_parts(graph: GraphReport) -> list[RenderableType]:
    """One below the other: what it is, what was chosen, regions, reasons, trips."""
    compile_id, _, function = graph.frame.partition(" ")
    head = Text()
    head.append(f"{graph.kind} graph", "bold cyan").append(f" {graph.name}", "bold")
    head.append(f" · {words.shorten(readable(function)) or 'unknown function'}")
    stages = ", ".join(f"{stage} {s:.2f}" for stage, s in graph.seconds.items() if s >= 0.005)
    below = "split into forward and backward · " if graph.kind == "joint" else ""
    below += f"compile {compile_id}" + (f" · seconds: {stages}" if stages else "")
    parts: list[RenderableType] = [head, line(below, "dim")]
    if graph.fusions:
        parts.append(line(f"rewritten as a whole: {words.fusions(graph.fusions)}"))
    parts += [line(f"note: {note}", "yellow") for note in graph.notes]
    parts += _choice(graph)
    if graph.regions:
        parts.append(Padding(_regions(graph.regions), (0, 0, 0, 1), expand=False))
    own = Counter(node.reason for node in graph.nodes if node.backend == "board")
    for reason, count in own.items():
        parts.append(line(f"{words.many(count, 'op')} run by the board itself: {reason}"))
    groups = elsewhere(graph)
    if groups:
        parts.append(line(f"not on {foremost(graph)}, which comes first:", "bold"))
        parts.append(Padding(_elsewhere(groups), (0, 0, 0, 3), expand=False))
    parts += [_trip(graph, number) for number in range(len(graph.trips))]
    return parts


def _choice(graph: GraphReport) -> list[RenderableType]:
    """The candidates, which one runs and why, and what wasn't tried."""
    if not graph.candidates:
        return [line(f"choice: {graph.instead}")] if graph.instead else []
    decided = f" ({graph.decided})" if graph.decided else ""
    why = choices.why(graph) or "nothing has been compared yet"
    parts: list[RenderableType] = [line(f"choice: {why}{decided}")]
    if pending := choices.pending(graph):
        parts.append(line(pending, "yellow"))
    rows = choices.rows(graph)
    parts.append(Padding(_candidates(rows), (0, 0, 0, 1), expand=False))
    if graph.tolerance:
        parts.append(line(f"errors are against float64; tolerance: {graph.tolerance}", "dim"))
    for found in graph.parts:
        parts.append(line(choices.part(found)))
        if found.error is not None or found.whole_error is None:
            parts.append(line(choices.exact_places(found), "dim", indent=4))
    if scaled := choices.scaled(graph):
        parts.append(line(scaled, "dim"))
    parts += [line(f"{row.name} {row.state}: {row.problem}", "red") for row in rows if row.problem]
    parts += [line(f"{row.name}: {note}", "dim") for row in rows for note in row.notes]
    if untried := choices.untried(graph):
        parts += [line("not tried:", "dim"), Padding(_untried(untried), (0, 0, 0, 3), expand=False)]
    return parts


def _candidates(rows: Sequence[choices.ChoiceRow]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("candidate", overflow="fold")
    table.add_column("", no_wrap=True)
    errors = any(row.error for row in rows)
    titles = ("a call", "quartiles", "× eager", "compile", "peak", *["error"] * errors)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        style = _STATES.get(row.state, "")
        cells = (row.latency, row.quartiles, row.factor, row.compile, row.peak)
        more = [row.error] if errors else []
        table.add_row(Text(row.name, style), Text(row.state, style), *cells, *more)
    return table


def _untried(reasons: Mapping[str, str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, reason in reasons.items():
        table.add_row(Text(name, "dim"), Text(reason, "dim"))
    return table


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
        line(text),
        line(trip.error, "red", indent=4),
        line(f"ran instead: {trip.instead}", indent=4),
    )


# --- small things ---------------------------------------------------------------------------------


def line(text: str | Text, style: str = "", indent: int = 2) -> RenderableType:
    """A text that keeps its indentation where it is folded."""
    text = Text(text, style=style) if isinstance(text, str) else text
    return Padding(text, (0, 0, 0, indent), expand=False)
