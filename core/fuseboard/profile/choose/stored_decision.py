"""Decisions on graphs in the cost database: by what they are found, and what is kept of them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.contracts import GraphKind
from fuseboard.lower.cache_keys import (
    NotCacheable,
    call_parts,
    graph_parts,
    plugin_options_text,
)
from fuseboard.lower.machine import code_hash
from fuseboard.profile.costs.database import (
    CandidateCost,
    CostDatabase,
    Decision,
    database,
    decision_key,
)
from fuseboard.profile.costs.rows import NOT_TRIED
from fuseboard.ranks.job import several_ranks
from fuseboard.report.data import CandidateReport, GraphReport
from fuseboard.torch_api.call_sizes import CallSizes
from fuseboard.torch_api.internals import real_tensors
from fuseboard.totals import differing

Level = Literal["graph", "step", "capture", "call"]

#: Elements of each weight, at least, that tell it from others.
_SAMPLED = 256

#: Settings that change which candidates there are, or what is right.
_SETTINGS = (
    "backends",
    "exclude",
    "fuse_limit",
    "fuse_order",
    "fuse_skip",
    "hoist",
    "isolate",
    "margin",
    "min_region_us",
    "pin",
    "prepare_memory",
    "random",
    "repeats",
    "tolerance",
    "tolerance_metric",
    "tolerance_training",
    "verify",
)


@dataclass(frozen=True)
class StoredDecision:
    """Where the decision about one graph is found and kept.

    :ivar parts: what the decision depends on; None where something has no name elsewhere.
    """

    database: CostDatabase
    parts: dict[str, str] | None
    report: GraphReport
    level: Level = "graph"

    @classmethod
    def of(
        cls,
        session: Session,
        graph: GraphModule,
        kind: GraphKind,
        static: Collection[int],
        report: GraphReport,
        weights: Iterable[torch.Tensor] = (),
    ) -> StoredDecision:
        """That of a graph as captured.

        :param static: positions of its inputs that are weights.
        :param weights: real ones, as far as they are known.
        """
        costs = database(session.settings)
        try:
            of_graph = graph_parts(graph, kind, sorted(static))
            parts = {**of_graph, **_session_parts(session), **_weight_parts(session, weights)}
        except NotCacheable as error:
            if (note := f"its decision isn't kept: {error}") not in report.notes:
                report.notes.append(note)
            return cls(costs, None, report)
        return cls(costs, parts, report)

    @classmethod
    def of_dynamo_graph(
        cls,
        session: Session,
        graph: GraphModule,
        report: GraphReport,
        inputs: Sequence[torch.Tensor | int],
        static: Collection[int],
        sizes: CallSizes | None,
        around: str,
    ) -> StoredDecision:
        """That of a graph of Dynamo's: whether its candidates were tried in another process.

        :param inputs: real ones.
        :param sizes: what Dynamo knows of the inputs' sizes; None where these are plain.
        :param around: what results depend on besides.
        """
        costs = database(session.settings)
        try:
            of_call = call_parts(graph, inputs, sorted(static), sizes)
            weights = [one for one in inputs if isinstance(one, torch.nn.Parameter)]
            parts = {**of_call, "around the call": around, **_session_parts(session)}
            parts |= _weight_parts(session, weights)
        except NotCacheable:
            return cls(costs, None, report, "call")
        return cls(costs, parts, report, "call")

    def find(self) -> Decision | None:
        """What was decided before; a note says what differs where something nearly was."""
        if self.parts is None:
            return None
        found = self.database.find(decision_key(self.level, self.parts))
        self._note_trouble()
        if found is not None or self.level != "graph":
            return found
        if (near := self.nearest()) is not None:
            note = (
                "not in the cost database, where a decision on the same graph differs in: "
                + ", ".join(differing(self.parts, near))
            )
            if note not in self.report.notes:
                self.report.notes.append(note)
        return None

    def nearest(self) -> Mapping[str, str] | None:
        """What the nearest decision on the same graph depends on, if there is one."""
        return None if self.parts is None else self.database.nearest(self.level, self.parts)

    def exact_places(self) -> dict[str, tuple[str, ...]] | None:
        """What stays exact in each candidate, as decided before; None where nothing was."""
        decision = None if self.parts is None else self.find()
        if decision is None:
            return None
        return {cost.name: cost.exact for cost in decision.candidates if cost.exact}

    def record(
        self,
        winner: str,
        candidates: Sequence[CandidateReport],
        settled: bool,
        undecided: Collection[str] = (),
    ) -> None:
        """Keep a decision.

        :param undecided: names of candidates that a later process tries as if this one hadn't.
        """
        if self.parts is None:
            return
        costs = [_cost(row, row.name in undecided) for row in candidates]
        self.database.record(
            Decision(
                key=decision_key(self.level, self.parts),
                parts=self.parts,
                level=self.level,
                winner=winner,
                candidates=tuple(costs),
                title=f"{self.report.kind} {self.report.frame}",
                settled=settled and not undecided,
                created=time.time(),
            )
        )
        self._note_trouble()

    def record_trip(self, name: str, problem: str) -> None:
        """Keep that a winner failed in a later call: the best of the others is the winner then.

        Of those that are exact. Where there is none it is eager, or nothing at all.
        """
        if self.parts is None:
            return
        found = self.database.find(decision_key(self.level, self.parts))
        if found is None or found.winner != name:
            return  # it wasn't kept, or another process has met the same
        costs = tuple(
            replace(cost, problem=problem) if cost.name == name else cost
            for cost in found.candidates
        )
        right = [
            cost
            for cost in costs
            if cost.latency_us is not None and not cost.problem and cost.tolerance is None
        ]
        eager = next((cost.name for cost in costs if cost.name == "eager"), "")
        best = min(right, key=lambda cost: cost.latency_us or 0.0).name if right else eager
        self.database.record(
            replace(found, candidates=costs, winner=best, created=time.time()), replace=True
        )
        self._note_trouble()

    def _note_trouble(self) -> None:
        problem = self.database.problem
        if problem and problem not in self.report.notes:
            self.report.notes.append(problem)


def _weight_parts(session: Session, weights: Iterable[torch.Tensor]) -> dict[str, str]:
    """Some elements of weights, where an error is allowed: how large it is depends on them.

    A model of the same graph with other weights is decided on by itself. Ranks of a job may have
    different ones, and are to agree: none are looked at there.
    """
    tolerance = session.settings.tolerance
    if several_ranks() or not (
        any(tolerance.values()) if isinstance(tolerance, dict) else tolerance
    ):
        return {}
    digest = hashlib.sha256()
    with torch.no_grad(), real_tensors():
        for weight in weights:
            if weight.layout == torch.strided:
                step = max(1, weight.numel() // _SAMPLED)
                some = weight.detach().reshape(-1)[::step].contiguous().cpu()
                digest.update(some.view(torch.uint8).numpy().tobytes())
    return {"weights": digest.hexdigest()}


def _session_parts(session: Session) -> dict[str, str]:
    """The settings, and the plugins with all that their code depends on."""
    backends = [_described(session, info.name, info.fingerprint) for info in session.backends]
    return {
        "backends": "; ".join(backends),
        "rewriters": "; ".join(_rewriters(session)),
        "settings": _settings(session),
    }


def _rewriters(session: Session) -> list[str]:
    """The plugins that rewrite or wrap and aren't backends, with all that their code depends on."""
    hooks = ("fuseboard_fuse_dynamo", "fuseboard_fuse", "fuseboard_narrow", "fuseboard_wrap")
    backends = {info.name for info in session.backends}
    names = dict.fromkeys(name for hook in hooks for name in session.with_hook(hook))
    return [
        _described(session, name, session.fingerprint(name))
        for name in names
        if name not in backends
    ]


def _described(session: Session, plugin: str, fingerprint: str) -> str:
    code = " ".join(map(code_hash, session.homes(plugin)))
    return f"{plugin} {fingerprint} {code} {plugin_options_text(session.options(plugin))}"


def _settings(session: Session) -> str:
    values: dict[str, Any] = {name: getattr(session.settings, name) for name in _SETTINGS}
    homes = session.override_homes()
    values["stages"] = {stage: session.override(stage) for stage in homes}
    values["code of stages"] = {
        stage: [*map(code_hash, own)] for stage, own in homes.items() if own
    }
    return json.dumps(values, sort_keys=True, default=repr)


def _cost(row: CandidateReport, undecided: bool) -> CandidateCost:
    problem = row.problem
    if undecided or (not problem and row.state in ("waiting", "untried")):
        problem = NOT_TRIED
    return CandidateCost(
        name=row.name,
        latency_us=row.latency_us,
        low_us=row.low_us,
        high_us=row.high_us,
        compile_s=row.compile_s,
        peak_bytes=row.peak_bytes,
        error=row.error,
        tolerance=row.tolerance,
        exact=row.exact,
        problem=problem,
    )
