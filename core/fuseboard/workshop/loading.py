"""What was chosen for a graph, made again in the user's process, and called there once.

In a thread beside the user's calls, on the inputs of one that was kept.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fuseboard.capture.side_runs import CannotCompare
from fuseboard.errors import LoweringError, containable
from fuseboard.lower.caching import Deferred
from fuseboard.pipeline.call import Compiled
from fuseboard.report.data import GraphReport
from fuseboard.run.failure import describe, record_trip
from fuseboard.torch_api.state import StateGuard
from fuseboard.torch_api.views import eager_strides
from fuseboard.workshop.carried import CarriedProgram, NotCarried, unpack
from fuseboard.workshop.dynamo_graph import DynamoGraph
from fuseboard.workshop.kept_call import CannotKeep, KeptCall
from fuseboard.workshop.sizes import SizeCondition

log = logging.getLogger("fuseboard")


class NotLoaded(Exception):
    """It can't be made again here; the text says why."""


class ComputesOtherwise(NotLoaded):
    """It could, and gives other results than Dynamo's graph.

    :ivar backends: whose code it is.
    """

    def __init__(self, problem: str, compiled: Compiled) -> None:
        super().__init__(problem)
        sites = [site for runner in compiled.runners for site in runner.program.sites]
        self._session = compiled.call.pipeline.session
        self.backends = sorted({site.lowered.region.backend for site in sites} - {"eager"})

    def note_in(self, report: GraphReport, name: str, exceeded: bool = False) -> None:
        """Record it as a failure that was contained.

        :param name: of the graph.
        :param exceeded: it was right within a budget on the call that was judged.
        """
        who = ", ".join(self.backends) or "AOTAutograd"
        instead = "Dynamo's own graph"
        tripped = record_trip(report, who, "lower", name, self, instead, exceeded=exceeded)
        self._session.notify(tripped)


def load(
    data: bytes, graph: DynamoGraph, call: KeptCall, number: int
) -> tuple[Compiled, SizeCondition | None]:
    """Make again what :func:`fuseboard.workshop.carried.pack` packed, and call it.

    Returned with the condition on the sizes of the calls that it answers.

    :param graph: of this process.
    :param call: on its inputs it is called, and Dynamo's graph, to compare their results.
    :param number: of the backend's call.
    :raises NotLoaded: it can't be made, or computes something else.
    :raises CannotKeep: the call can't be made any more.
    """
    inputs = call.inputs()
    if inputs is None:
        raise CannotKeep("a weight is gone")
    try:
        with call.entered(), StateGuard(), eager_strides():
            compiled, carried = unpack(
                data, graph.session, graph.graph, inputs, graph.frame, number
            )
            problem = _first_call(compiled, carried, inputs)
    except CannotKeep:
        raise
    except (NotCarried, LoweringError, Deferred) as error:
        raise NotLoaded(str(error)) from error
    except containable() as error:  # a plugin's, or a bug of the board's
        log.warning("fuseboard: %s can't be loaded: %s", graph.frame, describe(error))
        raise NotLoaded(describe(error)) from error
    if problem:
        raise ComputesOtherwise(problem, compiled)
    return compiled, carried.condition


def _first_call(compiled: Compiled, carried: CarriedProgram, inputs: Sequence[Any]) -> str:
    """What differs from Dynamo's graph; "" if nothing does.

    Where calls can't be made without a trace, the user's first one is the first.
    """
    if compiled.is_dynamo_graph or not compiled.is_decided():
        return ""
    try:
        return compiled.capture_check().difference_as_it_runs(inputs, carried.spreads)
    except CannotCompare as why:
        note = f"not called before a call of the user's: {why}"
        compiled.runners[0].report.notes.append(note)
        return ""
