"""How far candidates' results are from float64, where the setting ``tolerance`` allows an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.profile.choose.candidates import Candidate
from fuseboard.profile.judge.accuracy import Metric, NotMeasured, float64_run
from fuseboard.profile.judge.reference import Reference
from fuseboard.report.data import GraphReport


class Errors:
    """The errors of whole graphs in one call. The float64 run is made when it is first needed.

    :param graph: as captured.
    """

    def __init__(
        self, graph: GraphModule, inputs: Sequence[Any], session: Session, report: GraphReport
    ) -> None:
        self._graph = graph
        self._inputs = list(inputs)
        self._is_wanted = bool(report.tolerance)
        self._metric = Metric.of(session)
        self._notes = report.notes
        self._reference: Reference | str | None = None

    def measure(self, candidate: Candidate, results: Sequence[Any]) -> None:
        """Note a candidate's error in its row; one that has a larger error than it may is out."""
        if not self._is_wanted:
            return
        budget = candidate.context.budget
        try:
            error = candidate.row.error = self.of(results)
            problem = budget.excess_at_choice(error) if budget is not None else ""
        except NotMeasured as why:
            problem = f"its error isn't known: {why}" if budget is not None else ""
            if str(why) not in self._notes:
                self._notes.append(str(why))
        if problem:
            candidate.drop("inexact", problem)

    def of(self, results: Sequence[Any]) -> float:
        """The largest error of results.

        :raises NotMeasured: it isn't known.
        """
        if self._reference is None:
            try:
                self._reference = float64_run(self._graph, self._inputs)
            except NotMeasured as why:
                self._reference = str(why)
        if isinstance(self._reference, str):
            raise NotMeasured(self._reference)
        return self._metric.error(results, self._reference)
