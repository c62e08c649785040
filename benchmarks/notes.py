"""What Dynamo and fuseboard tell of the graphs that were compiled. Used in a worker."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any


def compiler_counts() -> dict[str, int]:
    """What Dynamo counted in this process."""
    from torch._dynamo.utils import counters

    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
    }


def board_notes() -> dict[str, Any]:
    """Where fuseboard put the ops, and what tripped."""
    from fuseboard.report.data import ledger

    graphs = ledger.graphs()
    return {
        "ops": dict(Counter(node.backend for graph in graphs for node in graph.nodes)),
        "graphs": [_graph_notes(graph) for graph in graphs],
        "trips": [
            f"{trip.plugin} in {trip.stage}: {trip.error.splitlines()[0] if trip.error else '?'}"
            for graph in graphs
            for trip in graph.trips
        ],
    }


def _graph_notes(graph: Any) -> dict[str, Any]:
    """How one graph was cut, and what the report says of the plan."""
    reasons = Counter(node.reason for node in graph.nodes if node.backend != "board")
    return {
        "name": graph.name,
        "regions": len(graph.regions),
        "lowered": sum(not region.same_as for region in graph.regions),
        "whole": any(region.whole for region in graph.regions),
        "reason": reasons.most_common(1)[0][0] if reasons else "",
        "notes": list(graph.notes),
        "seconds": dict(graph.seconds),
        "settled": graph.settled,
        "decided": graph.decided,
        "candidates": [dataclasses.asdict(candidate) for candidate in graph.candidates],
    }


def forget_graphs() -> None:
    """The notes are to tell of the graphs alone that are compiled from now on."""
    from fuseboard.report.data import ledger

    ledger.clear()
