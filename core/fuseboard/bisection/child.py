"""One run of a bisection: a script under settings that are above all others.

``python -m fuseboard.bisection.child JOB OUT SCRIPT ARGS...``: the script ends this process as it
would by itself; what the reports say of it is written to OUT then.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from fuseboard.bisection import plan
from fuseboard.bisection.reproduction import function_of
from fuseboard.bisection.run import STEPS, TRACES, Fusion, Placed, Step, Trace

#: Ops of a reproduction.
_MOST_NODES = 40


def main(job: str, out: str, script: str, *args: str) -> None:
    step = STEPS.validate_json(Path(job).read_bytes())
    _apply(step)
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        Path(out).write_bytes(TRACES.dump_json(_trace()))


def _apply(step: Step) -> None:
    from fuseboard.config.layers import enforce

    enforce(**step.settings)
    plan.allowed = None if step.nodes is None else range(*step.nodes)
    if step.compiler:
        _stand_in(step.compiler)


def _stand_in(compiler: str) -> None:
    """Let torch's own debugging backend answer to our name."""
    from torch._dynamo import lookup_backend, register_backend

    own: Any = lookup_backend(compiler)

    def fuseboard(graph: Any, inputs: Any, **options: Any) -> Any:
        return own(graph, inputs)

    register_backend(fuseboard, name="fuseboard")


def _trace() -> Trace:
    from fuseboard.board import board
    from fuseboard.report.data import ledger

    graphs = ledger.graphs()
    return Trace(
        plugins={
            state.name: tuple(state.stages) for state in board.states() if state.state == "ready"
        },
        backends=tuple(dict.fromkeys(name for graph in graphs for name in graph.backends)),
        placed=[
            Placed(node.name, node.op, node.backend, graph.name, node.region, node.source)
            for graph in graphs
            for node in graph.nodes
        ],
        fusions=[
            Fusion(one.number, one.plugin, one.name, one.nodes, graph.name, region)
            for graph in graphs
            for region, fusions in [
                ("", graph.fusions),
                *((region.name, region.fusions) for region in graph.regions),
            ]
            for one in fusions
            if one.applied
        ],
        trips=[f"{trip.plugin} in {trip.stage}: {trip.error}" for g in graphs for trip in g.trips],
        offered=list(plan.offered),
        function=_function(),
    )


def _function() -> dict[str, Any] | None:
    """What the backend got, where that is little enough to be read."""
    if len(plan.given) != 1 or len(plan.given[0][1]) > _MOST_NODES:
        return None
    return function_of(*plan.given[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
