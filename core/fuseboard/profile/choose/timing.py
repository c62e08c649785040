"""Candidates of one graph timed against each other on a call's inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fuseboard.board import Session
from fuseboard.board.deadline import deadline
from fuseboard.contracts import Boxed, Measurement
from fuseboard.errors import ContractError, HookTimeout, NotEnoughMemory, PluginError, containable
from fuseboard.profile.choose.candidates import Candidate
from fuseboard.profile.choose.measure import measure_calls
from fuseboard.profile.choose.winner import note_times
from fuseboard.profile.judge.copies import Checksums, KeptCopies, WriteWatch, memory_of
from fuseboard.report.data import GraphReport
from fuseboard.run.checked import RegionChecks
from fuseboard.run.failure import decide, trip
from fuseboard.torch_api.allocator import peak_bytes
from fuseboard.torch_api.state import CALL_PARTS, StateGuard

#: Seconds after which timing is stopped, on top of a multiple of ``measure_s``.
ROUNDS_LIMIT_S, ROUNDS_LIMIT_FACTOR = 60.0, 100.0
_CPU = torch.device("cpu")

#: So often a candidate is called again where one of several wrote to its inputs.
_TRIES = 3


class Timing:
    """Times candidates in turn, and writes what it finds into their rows of the report."""

    def __init__(self, session: Session, report: GraphReport) -> None:
        self._session = session
        self._report = report
        self._comparisons = 0

    def __call__(
        self, candidates: Sequence[Candidate], inputs: list[Any], kept: KeptCopies
    ) -> tuple[dict[Candidate, Measurement], dict[Candidate, BaseException]]:
        """The time of each, and the errors of those that raised or broke their contract.

        :param kept: copies of the inputs. The inputs themselves are used: each candidate has run
            without writing to copies, and what is prepared from weights belongs to them.
        :raises PluginError: the hook that measures failed, and the policy is to raise.
        """
        errors: dict[Candidate, BaseException] = {}
        running: list[Candidate] = []

        def call(candidate: Candidate, function: Boxed) -> None:
            running[:] = [candidate]
            try:
                function(list(inputs))
            except containable() as error:  # compiled code may raise anything
                errors.setdefault(candidate, error)

        calls = {
            candidate: partial(call, candidate, candidate.program.trial(None))
            for candidate in candidates
            if candidate.program is not None
        }
        watch, seals = self._watch(kept), {candidate: _seals(candidate) for candidate in calls}
        written: list[int] = []
        times: dict[Candidate, Measurement] = {}
        late = False
        state = StateGuard(CALL_PARTS)
        try:
            with state, deadline(self._limit_s, self._late):
                measured = self._measure(list(calls.values()))
            times = dict(zip(calls, measured, strict=True))
            times = {candidate: one for candidate, one in times.items() if candidate not in errors}
            self._note_peaks(times, calls, inputs)
        except HookTimeout as error:
            late = True
            errors.update(dict.fromkeys(running, error))
        finally:
            if watch is not None:
                written = watch.undo()
        if state.changed("answers"):
            errors.update(_changing(calls))
        for candidate, own in seals.items():
            if any(seal.is_broken() for seal in own):
                errors.setdefault(candidate, _wrote(candidate, "what was prepared for it"))
        if written:
            errors = {**self._writers(list(calls), inputs, kept, written), **errors}
        if late:  # nothing is known of the others yet
            rest = [candidate for candidate in calls if candidate not in errors]
            times, more = self(rest, inputs, kept) if rest else ({}, {})
            return times, {**more, **errors}
        times = {candidate: one for candidate, one in times.items() if candidate not in errors}
        self._comparisons += 1
        timed = [(candidate.row, one) for candidate, one in times.items()]
        note_times(timed, self._comparisons, self._report.candidates)
        return times, errors

    @property
    def _limit_s(self) -> float:
        """The limit for all rounds together, in seconds."""
        settings = self._session.settings
        return min(settings.hook_limit_s, ROUNDS_LIMIT_S + ROUNDS_LIMIT_FACTOR * settings.measure_s)

    def _late(self) -> Exception:
        problem = f"its calls took over {self._limit_s:.3g} s while they were timed"
        return HookTimeout("", "fuseboard_lower", problem)

    def _watch(self, kept: KeptCopies) -> WriteWatch | None:
        try:
            return kept.watch()
        except NotEnoughMemory as error:
            self._report.notes.append(f"whether timed calls write isn't known: {error}")
            return None

    def _writers(
        self,
        candidates: Sequence[Candidate],
        inputs: list[Any],
        kept: KeptCopies,
        written: list[int],
    ) -> dict[Candidate, BaseException]:
        """Which candidates write to their inputs; all that may where none does it again."""
        found: dict[Candidate, BaseException] = {}
        suspects = [candidate for candidate in candidates if candidate.authors]
        for candidate in suspects:
            assert candidate.program is not None
            checks = RegionChecks(values=False, strides=False, again=True, input_copies=kept)
            trial = candidate.program.trial(checks)
            try:
                for _ in range(_TRIES):
                    trial(list(inputs))
            except containable() as error:  # that it writes, or what it raises instead
                found[candidate] = error
        which = f"inputs {written} of the graph" + (
            ", or another candidate did" if len(suspects) > 1 else ""
        )
        return found or {one: _wrote(one, which) for one in suspects}

    def _measure(self, calls: Sequence[Callable[[], Any]]) -> list[Measurement]:
        budget_s = self._session.settings.measure_s
        try:
            _, measured = self._session.first("fuseboard_measure", calls=calls, budget_s=budget_s)
        except PluginError as error:
            graph = self._report.name
            if decide(self._session, graph, error.plugin, "profile", error) == "raise":
                raise
            trip(
                self._session,
                self._report,
                error.plugin,
                "profile",
                graph,
                error,
                "the default measuring",
            )
            measured = measure_calls(calls, budget_s)
        return measured  # type: ignore[no-any-return]

    def _note_peaks(
        self,
        times: Mapping[Candidate, Measurement],
        calls: Mapping[Candidate, Callable[[], Any]],
        inputs: Sequence[Any],
    ) -> None:
        """What each candidate allocates at the most, by one more call of each.

        Only as long as these calls take no longer than the time for measuring.
        """
        device = next((v.device for v in inputs if isinstance(v, torch.Tensor) and v.is_cuda), _CPU)
        left_s = self._session.settings.measure_s
        for candidate, one in times.items():
            if candidate.row.peak_bytes is None:
                left_s -= 1e-6 * one.latency_us
                if left_s > 0:
                    candidate.row.peak_bytes = peak_bytes(calls[candidate], device)


def _changing(calls: Mapping[Candidate, Callable[[], Any]]) -> dict[Candidate, BaseException]:
    """The candidates that change the process in one more call; the change is undone."""
    found: dict[Candidate, BaseException] = {}
    for candidate, call in calls.items():
        with StateGuard(CALL_PARTS) as state:
            call()
        if left := state.changed("answers"):
            found[candidate] = ContractError(
                _backend_of(candidate),
                "fuseboard_lower",
                f"its call changed {left}, which was put back",
            )
    return found


def _seals(candidate: Candidate) -> list[Checksums]:
    """Checksums of what was prepared from weights for a candidate's regions."""
    sets = candidate.program.sets if candidate.program is not None else None
    memories = map(memory_of, sets.last.values if sets is not None else ())
    return [Checksums(memory) for memory in memories if memory is not None]


def _wrote(candidate: Candidate, what: str) -> ContractError:
    problem = f"it wrote to {what} while it was timed"
    return ContractError(_backend_of(candidate), "fuseboard_lower", problem)


def _backend_of(candidate: Candidate) -> str:
    return next(iter(candidate.authors), "eager")
