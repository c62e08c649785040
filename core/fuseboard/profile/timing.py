"""Candidates of one graph timed against each other on a call's inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fuseboard.board import Session
from fuseboard.board.deadline import deadline
from fuseboard.contracts import Boxed, Measurement
from fuseboard.errors import CONTAINED, ContractError, HookTimeout, PluginError
from fuseboard.lower.failure import decide, trip
from fuseboard.profile.candidates import Candidate
from fuseboard.profile.choose import note_times
from fuseboard.profile.measure import measure_calls
from fuseboard.report.data import GraphReport
from fuseboard.torch_allocator import peak_bytes
from fuseboard.torch_state import CALL_PARTS, StateGuard

#: Seconds after which timing is stopped, on top of a multiple of ``measure_s``.
ROUNDS_LIMIT_S, ROUNDS_LIMIT_FACTOR = 60.0, 100.0
_CPU = torch.device("cpu")


class Timing:
    """Times candidates in turn, and writes what it finds into their rows of the report."""

    def __init__(self, session: Session, report: GraphReport) -> None:
        self._session = session
        self._report = report
        self._comparisons = 0

    def __call__(
        self, candidates: Sequence[Candidate], inputs: list[Any]
    ) -> tuple[dict[Candidate, Measurement], dict[Candidate, BaseException]]:
        """What each one takes, and the exceptions of those that raised.

        :raises PluginError: the hook that measures failed, and the policy is to raise.
        """
        errors: dict[Candidate, BaseException] = {}
        running: list[Candidate] = []

        def call(candidate: Candidate, function: Boxed) -> None:
            running[:] = [candidate]
            try:
                function(list(inputs))
            except CONTAINED as error:  # compiled code may raise anything
                errors.setdefault(candidate, error)

        calls = {
            candidate: partial(call, candidate, candidate.program.trial(None))
            for candidate in candidates
            if candidate.program is not None
        }
        try:
            with StateGuard(CALL_PARTS) as state, deadline(self._limit_s, self._late):
                measured = self._measure(list(calls.values()))
        except HookTimeout as error:
            rest = [one for one in candidates if one not in running]
            times, errors = self(rest, inputs) if rest else ({}, {})
            return times, {**errors, **dict.fromkeys(running, error)}
        if state.told("answers"):
            errors.update(_changing(calls))
        times = dict(zip(calls, measured, strict=True))
        times = {candidate: one for candidate, one in times.items() if candidate not in errors}
        self._comparisons += 1
        note_times([(c.told, one) for c, one in times.items()], self._comparisons)
        self._note_peaks({candidate: calls[candidate] for candidate in times}, inputs)
        return times, errors

    @property
    def _limit_s(self) -> float:
        """Seconds for all rounds, which end by themselves as soon as calls do."""
        settings = self._session.settings
        return min(settings.hook_limit_s, ROUNDS_LIMIT_S + ROUNDS_LIMIT_FACTOR * settings.measure_s)

    def _late(self) -> Exception:
        problem = f"its calls took over {self._limit_s:.3g} s while they were timed"
        return HookTimeout("", "fuseboard_lower", problem)

    def _measure(self, calls: Sequence[Callable[[], Any]]) -> list[Measurement]:
        budget_s = self._session.settings.measure_s
        try:
            _, measured = self._session.first("fuseboard_measure", calls=calls, budget_s=budget_s)
        except PluginError as error:
            graph = self._report.name
            if decide(self._session, graph, error.plugin, "profile", error) == "raise":
                raise
            trip(self._report, error.plugin, "profile", graph, error, "the default measuring")
            measured = measure_calls(calls, budget_s)
        return measured  # type: ignore[no-any-return]

    def _note_peaks(
        self, calls: Mapping[Candidate, Callable[[], Any]], inputs: Sequence[Any]
    ) -> None:
        """What each candidate allocates at the most, by one more call of each.

        Only as long as these calls take no longer than the time for measuring.
        """
        device = next((v.device for v in inputs if isinstance(v, torch.Tensor) and v.is_cuda), _CPU)
        left_s = self._session.settings.measure_s
        for candidate, call in calls.items():
            if candidate.told.peak_bytes is None:
                left_s -= 1e-6 * (candidate.told.latency_us or 0.0)
                if left_s > 0:
                    candidate.told.peak_bytes = peak_bytes(call, device)


def _changing(calls: Mapping[Candidate, Callable[[], Any]]) -> dict[Candidate, BaseException]:
    """The candidates of which one more call changes the process; what it changed is put back."""
    found: dict[Candidate, BaseException] = {}
    for candidate, call in calls.items():
        with StateGuard(CALL_PARTS) as state:
            call()
        if left := state.told("answers"):
            problem = f"its call changed {left}, which was put back"
            backend = next((c.backend for c in candidate.cuts if c.backend != "eager"), "eager")
            found[candidate] = ContractError(backend, "fuseboard_lower", problem)
    return found
