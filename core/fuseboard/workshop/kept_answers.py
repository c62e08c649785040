"""What the workshop answered, for later processes: which of the two won, and the program or, where
Dynamo's own graph won, the reports of what lost. And how the trial in the user's calls ended."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence

import torch

from fuseboard.forks import fork_safe_lock
from fuseboard.lower.artifact_files import Key
from fuseboard.lower.artifacts import Store, store_at
from fuseboard.profile.choose.stored_decision import StoredDecision
from fuseboard.profile.choose.whole_calls import COMPILED, EAGER
from fuseboard.profile.costs.database import Decision
from fuseboard.report.data import CandidateReport, GraphReport
from fuseboard.totals import Missed, totals
from fuseboard.workshop.dynamo_graph import DynamoGraph
from fuseboard.workshop.kept_call import KeptCall
from fuseboard.workshop.request import Answer, TrialOutcome


class KeptAnswers:
    """The answer about one graph: the winner in the cost database, the program in the cache."""

    def __init__(self, stored: StoredDecision, store: Store) -> None:
        self._stored = stored
        self._store = store
        self._lock = fork_safe_lock()
        self._has_eager_won = False

    @classmethod
    def of(
        cls,
        graph: DynamoGraph,
        report: GraphReport,
        call: KeptCall,
        inputs: Sequence[torch.Tensor | int],
    ) -> KeptAnswers:
        """The place of a graph's answer, by all that the choice depends on.

        :param inputs: of ``call``.
        """
        stored = StoredDecision.of_dynamo_graph(
            graph.session,
            graph.graph,
            report,
            inputs,
            graph.static,
            graph.sizes,
            _around(graph, call),
        )
        settings = graph.session.settings
        return cls(stored, store_at(settings))

    @property
    def parts(self) -> Mapping[str, str]:
        """What the answer depends on; none where that has no name in other processes."""
        return self._stored.parts or {}

    def find(self) -> Answer | None:
        """What an earlier process was answered; None where none was, or the program is gone."""
        parts, decision = self._stored.parts, self._stored.find()
        if parts is None:
            return None
        if decision is None:
            totals.looked_up("misses", Missed.of(parts, self._stored.nearest()))
            return None
        found = self._store.find(Key(parts), lambda artifact: True)
        if decision.winner == EAGER:
            reports = pickle.loads(found.data) if found is not None else ()
            return Answer(dynamo_wins=True, reports=reports if isinstance(reports, tuple) else ())
        if found is None:
            return None
        return Answer(program=found.data, trial=_trial(decision))

    def keep_trial(self, trial: TrialOutcome) -> None:
        """Keep that the program won the trial, so that a later process needs none.

        Unless it has failed in a later call: then it is kept no more.
        """
        own_us, compiled_us = trial.times_us or (None, None)
        rows = [
            CandidateReport(COMPILED, "chosen", latency_us=compiled_us),
            CandidateReport(EAGER, "slower", latency_us=own_us),
        ]
        with self._lock:
            if not self._has_eager_won:
                self._stored.record(COMPILED, rows, settled=True)

    def keep(self, answer: Answer) -> str:
        """Keep an answer. Returns why it can't be kept, or ""."""
        if self._stored.parts is None or answer.problem:
            return ""
        data = pickle.dumps(answer.reports) if answer.dynamo_wins else answer.program
        if data is None:
            return ""
        with self._lock:
            self._has_eager_won = answer.dynamo_wins
            if problem := self._store.put(Key(self._stored.parts), data, {"guards": []}):
                return problem
            winner = EAGER if answer.dynamo_wins else COMPILED
            self._stored.record(winner, [CandidateReport(winner, "chosen")], settled=True)
        return ""


def _around(graph: DynamoGraph, call: KeptCall) -> str:
    """What an answer depends on besides the graph and its inputs."""
    parts = [call.described(), graph.pins.described(graph.graph)]
    if graph.op_definitions:
        parts.append(hashlib.sha256(graph.op_definitions).hexdigest())
    return " ".join(parts)


def _trial(decision: Decision) -> TrialOutcome | None:
    """How the trial ended that a program has won; None where none has: only it is listed then."""
    times = {row.name: row.latency_us for row in decision.candidates}
    if EAGER not in times:
        return None
    own_us, compiled_us = times[EAGER], times.get(COMPILED)
    return TrialOutcome(None if own_us is None or compiled_us is None else (own_us, compiled_us))
