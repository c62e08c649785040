"""What reports tell once something else runs than what was planned or chosen.

A report is written when a graph is compiled and when its candidates are compared. What a later call
puts in the place of a region, or of the whole graph, is written over that here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from fuseboard.report.data import GraphReport


def regions_run_in_eager(report: GraphReport, names: Collection[str], why: str) -> None:
    """These regions of a graph run op by op from now on, as they were cut.

    :param why: of each of their ops.
    """
    for region in report.regions:
        if region.name in names:
            region.backend, region.loaded, region.hoisted = "eager", False, 0
            region.fusions = []
            region.notes[:] = [why]
    report.nodes[:] = [
        dataclasses.replace(node, backend="eager", reason=why) if node.region in names else node
        for node in report.nodes
    ]


def graph_runs_in_eager(report: GraphReport, why: str) -> None:
    """The graph runs without any of its regions from now on."""
    report.regions.clear()
    report.nodes[:] = [
        dataclasses.replace(node, backend="eager", region="", reason=why) for node in report.nodes
    ]


def choose_eager(report: GraphReport, instead: str, problem: str) -> None:
    """The candidate ``eager`` takes the place of the chosen one, which failed.

    :param instead: in a sentence, what runs and why.
    :param problem: of the chosen one.
    """
    report.instead = instead
    for row in report.candidates:
        if row.state == "chosen" and row.name != "eager":
            row.state, row.problem = "failed", problem or row.problem
    for row in report.candidates:
        if row.name == "eager" and row.state == "slower":
            row.state = "chosen"
