"""``fuseboard passes``: who rewrites graphs, in which order, and what each did to a model."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fuseboard.cli.explain import AsJson, run

if TYPE_CHECKING:
    from fuseboard.board import Session
    from fuseboard.report.data import FusionReport, GraphReport

#: Hook → what the rewrites that it offers are of.
_LEVELS = {
    "fuseboard_fuse_dynamo": "Dynamo's graph",
    "fuseboard_fuse": "joint and inference graphs, its regions",
    "fuseboard_narrow": "graphs in narrower numbers, within tolerance",
}


def passes(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCRIPT_OR_MODULE:FUNCTION]",
            help="What to compile, as for fuseboard explain; none: just list who rewrites.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option(help="Try every candidate before, those that compile slowly too.")
    ] = False,
    must_match: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Exit with 1 unless a rewrite of this name was applied; may be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the plugins that rewrite graphs, in the order in which they are asked.

    Given a FUNCTION as for fuseboard explain, show what each of them did to what it compiles: the
    rewrites with the numbers that the setting fuse_skip takes, and the trips of the stage.
    """
    if must_match and target is None:
        raise typer.BadParameter("it needs a FUNCTION to look into", param_hint="--must-match")
    from fuseboard.board import board
    from fuseboard.config import resolve

    session = board.session(resolve())
    found: dict[str, Any] = {"passes": list(_passes(session))}
    if target is not None:
        with redirect_stdout(sys.stderr):
            explanation = run(target, wait)
        found["graphs"] = list(map(_graph, explanation.graphs))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        console = Console(highlight=False)
        console.print(_table(found["passes"]))
        for graph in found.get("graphs", ()):
            _show(console, graph)
    _check(must_match or (), found.get("graphs", ()))


def _check(names: Iterable[str], graphs: Iterable[dict[str, Any]]) -> None:
    """Exit with 1 where a name isn't among the rewrites that were applied."""
    places = [
        place for graph in graphs for place in (graph["rewrites"], *graph["regions"].values())
    ]
    applied = {fusion["name"] for place in places for fusion in place if fusion["applied"]}
    missing = [name for name in names if name not in applied]
    if missing:
        there = ", ".join(sorted(applied)) or "none"
        print(f"not found: {', '.join(missing)}; what was rewritten: {there}", file=sys.stderr)
        raise typer.Exit(1)


def _passes(session: Session) -> Iterator[dict[str, str]]:
    """Who rewrites what; who decides the stage by the settings is asked first."""
    chosen = session.override("fuse")
    for hook, level in _LEVELS.items():
        first = [chosen] if chosen and hook == "fuseboard_fuse" else []
        others = [name for name in session.with_hook(hook) if name not in first]
        for name in (*first, *others):
            origin = f"by stages.fuse, set in {session.settings.origin('stages.fuse')}"
            yield {"name": name, "level": level, "why": origin if name in first else ""}


def _graph(graph: GraphReport) -> dict[str, Any]:
    regions = {region.name: list(map(_fusion, region.fusions)) for region in graph.regions}
    trips = [trip for trip in graph.trips if trip.stage == "fuse"]
    return {
        "graph": graph.name,
        "frame": graph.frame,
        "rewrites": list(map(_fusion, graph.fusions)),
        "regions": {name: fusions for name, fusions in regions.items() if fusions},
        "trips": [{"plugin": one.plugin, "error": one.error} for one in trips],
    }


def _fusion(fusion: FusionReport) -> dict[str, Any]:
    return {
        "number": fusion.number,
        "plugin": fusion.plugin,
        "name": fusion.name,
        "nodes": list(fusion.nodes),
        "applied": fusion.applied,
    }


def _table(rows: list[dict[str, str]]) -> Table:
    table = Table()
    for column in ("pass", "rewrites", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row["name"], row["level"], row["why"])
    return table


def _show(console: Console, graph: dict[str, Any]) -> None:
    """A graph's rewrites, those of one pass and name on one line."""
    console.print(Text(f"\n{graph['graph']} · {graph['frame']}", "bold"), soft_wrap=True)
    places = {"": graph["rewrites"], **graph["regions"]}
    lines = [line for place, fusions in places.items() for line in _lines(place, fusions)]
    lines += [f"{trip['plugin']} tripped: {trip['error']}" for trip in graph["trips"]]
    for line in lines or ["nothing was rewritten"]:
        console.print(Text(f"  {line}"), soft_wrap=True)


def _lines(place: str, fusions: list[dict[str, Any]]) -> Iterator[str]:
    where = f" in {place}" if place else ""
    for (plugin, name), count in Counter((f["plugin"], f["name"]) for f in fusions).items():
        own = [f for f in fusions if (f["plugin"], f["name"]) == (plugin, name)]
        numbers = ", ".join(str(f["number"]) for f in own)
        off = sum(not f["applied"] for f in own)
        switched = f", {off} switched off" if off else ""
        times = "once" if count == 1 else f"{count} times"
        yield f"{plugin}: {name}, {times}{where} (number {numbers}{switched})"
