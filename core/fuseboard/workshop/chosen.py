"""What was chosen for a graph, once this process has it: its trial, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fuseboard.pipeline.call import Compiled
from fuseboard.profile.choose.whole_calls import COMPILED, EAGER, give_up, note_dynamo_runs
from fuseboard.report.data import GraphReport
from fuseboard.report.structured_trace import emit
from fuseboard.workshop.by_sizes import BySizes
from fuseboard.workshop.loading import ComputesOtherwise
from fuseboard.workshop.request import Answer, TrialOutcome
from fuseboard.workshop.trial import Trial

Run = Callable[..., Any]


class Chosen:
    """A program that may take the place of Dynamo's own graph.

    :param run: what answers a call of the graph's; not all of them are good for ``compiled.run``.
    :param by_sizes: what sends calls by their sizes; None where these are plain, or each program
        checks its first calls of other sizes itself.
    """

    def __init__(self, compiled: Compiled, run: Run, by_sizes: BySizes | None = None) -> None:
        self.compiled = compiled
        self.run = run
        self.by_sizes = by_sizes
        self._trial: Trial | None = None

    @property
    def reports(self) -> tuple[GraphReport, ...]:
        return tuple(runner.report for runner in self.compiled.runners)

    # --- the trial ------------------------------------------------------------------------------

    def in_turn_with(self, own: Run, margin: float, decided: Callable[[int], None]) -> Run:
        """What answers calls by Dynamo's graph and by this program in turn.

        :param decided: of :class:`Trial`: 0 if Dynamo's graph has won, 1 if this program.
        """
        runs = own, self.compiled.run
        if self.by_sizes is None:
            self._trial = Trial(runs, margin, decided)
            return self._trial.call
        self._trial = Trial(runs, margin, decided, self.by_sizes.sizes_of)
        self.by_sizes.begin(self._trial)
        return self.run

    def prove(self, calls: int) -> None:
        """Hold results of so many further calls against float64, if they may have an error."""
        for runner in self.compiled.runners:
            runner.prove(calls)

    def end_trial(self) -> None:
        """From now on no call is answered in turn. It takes no lock."""
        if self.by_sizes is not None:
            self.by_sizes.put(self.compiled.run)

    @property
    def trial(self) -> TrialOutcome:
        """How the trial ended that this has won."""
        assert self._trial is not None
        return TrialOutcome(None if self._trial.is_undecided else self._trial.latencies_us)

    def tell_winner(self, winner: int) -> None:
        """Note in the reports how the trial ended."""
        assert self._trial is not None
        report, calls = self.reports[0], self._trial.calls
        report.notes.append(_told(f"in {calls} calls", self.trial))
        if winner == 0:
            own_us, compiled_us = self._trial.latencies_us
            us = {COMPILED: compiled_us, EAGER: own_us}
            note_dynamo_runs("inference", us, self.compiled.runners)
        emit(report)

    def tell_earlier_trial(self, trial: TrialOutcome) -> None:
        """Note that it won in an earlier process, so that there is no trial here."""
        self.reports[0].notes.append(_told("in an earlier process's calls", trial))
        emit(self.reports[0])

    # --- where it fails -------------------------------------------------------------------------

    def leave_to(self, own: Run) -> None:
        """Let calls that are still sent by their sizes go to Dynamo's graph. It takes no lock."""
        if self.by_sizes is not None:
            self.by_sizes.put(own)

    def tell_wrong(self, problem: str, name: str) -> None:
        """Note in the reports that it computes something else than Dynamo's graph.

        :param name: of the graph.
        """
        wrong = ComputesOtherwise(problem, self.compiled)
        wrong.note_in(self.reports[0], name, exceeded=self.compiled.budget is not None)
        for runner in self.compiled.runners:
            give_up(runner, "Dynamo's own graph runs", problem)

    def lost(self, problem: str) -> Answer:
        """What later processes are told: Dynamo's own graph runs.

        :param problem: of the program, in a later call; "" where it was slower.
        """
        reports = self.reports
        if problem:
            instead = f"Dynamo's own graph runs: what was chosen failed in a call: {problem}"
            reports = tuple(replace(one, instead=instead, regions=[]) for one in reports)
        return Answer(dynamo_wins=True, reports=reports)


def _told(whose: str, trial: TrialOutcome) -> str:
    if trial.times_us is None:
        return (
            f"undecided {whose} of the user's, of which too few had the same sizes: what was "
            "faster in the workshop stays"
        )
    own_us, compiled_us = trial.times_us
    return (
        f"{whose} of the user's: {compiled_us:.4g} us as compiled, "
        f"{own_us:.4g} us as Dynamo's own graph"
    )
