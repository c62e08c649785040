"""What is told of a graph while nothing has been compiled of it, and of how that ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fuseboard.board import Session
from fuseboard.contracts import Event, GraphKind
from fuseboard.living import Living
from fuseboard.lower import background
from fuseboard.report.data import GraphReport, ledger
from fuseboard.report.names import call_numbers, next_name
from fuseboard.report.settled import tell_settled
from fuseboard.report.structured_trace import emit
from fuseboard.totals import Missed, totals
from fuseboard.workshop.states import GraphState, StateMachine

log = logging.getLogger("fuseboard")

_STATES = frozenset(state.value for state in GraphState)

#: Of the graphs that somebody may call.
living: Living[LifeReport] = Living()


class LifeReport:
    """A report that says what answers the calls, until there are reports of what was compiled.

    It lives as long as somebody may call the graph.

    :ivar data: as it stands in the ledger.
    :ivar number: of the backend's call.
    :ivar shown: it, or those that have taken its place.
    """

    def __init__(
        self, session: Session, frame: str, kind: GraphKind, machine: StateMachine
    ) -> None:
        self._session = session
        self._machine = machine
        self.number = next(call_numbers)
        self.data = GraphReport(
            f"graph{next(background.numbers)}",
            kind,
            frame,
            self.number,
            notes=[*session.notes, GraphState.WATCHING.value],
            backends=tuple(info.name for info in session.backends),
            settled=False,
        )
        self.shown: tuple[GraphReport, ...] = (self.data,)
        self._began = time.perf_counter()
        living.add(self)

    @property
    def state(self) -> GraphState:
        return self._machine.state

    @property
    def name(self) -> str:
        return self.data.name

    def take(self, happening: Mapping[str, Any]) -> None:
        """Tell of what has happened in the workshop."""
        if "lookup" in happening:
            missed = happening["missed"]
            totals.looked_up(happening["lookup"], missed and Missed(**missed))
            return
        event = {**happening["event"], "graph": self.name, "process": "workshop"}
        self._session.notify(Event(**event))

    def show(self) -> None:
        """Put it into the ledger."""
        ledger.add(self.data)

    def note(self, text: str) -> None:
        self.data.notes.append(text)

    def tell_state(self, state: GraphState) -> None:
        """What answers the calls now."""
        self.data.notes[:] = [note for note in self.data.notes if note not in _STATES]
        self.note(state.value)

    def give_way(self, *reports: GraphReport) -> None:
        """Reports of what was compiled take its place."""
        ledger.replace(self.data, *reports)
        self.shown = reports

    def refused(self, problem: str) -> None:
        """Dynamo's own graph answers all calls."""
        self.tell_state(GraphState.REFUSED)
        for report in self.shown:
            report.settled = True
            report.instead = f"Dynamo's own graph runs: {problem}"
            log.info("fuseboard: %s: %s", report.frame, report.instead)
            emit(report)

    def dynamo_won(self, reports: Sequence[GraphReport]) -> None:
        """Nothing that was compiled is faster.

        :param reports: another process's, of what lost.
        """
        self.tell_state(GraphState.SETTLED)
        why = "Dynamo's own graph runs: nothing that was compiled of it is faster"
        for report in reports:
            report.name = next_name(report.kind)
            report.call, report.frame, report.settled = self.number, self.data.frame, True
            report.instead = report.instead or why
        if reports:
            self.give_way(*reports)
        else:
            self.data.settled = True
            self.data.instead = f"{why}, as the cost database has it"
        for report in reports or (self.data,):
            emit(report)

    def settled(self, winner: str) -> None:
        """Tell observers who won."""
        seconds = time.perf_counter() - self._began
        details = {"winner": winner, "whole": True}
        self._session.notify(Event("choose", self.name, seconds, details))
        self.over()

    def over(self) -> None:
        """Tell callbacks that nothing is left to try."""
        tell_settled(*self.shown)
