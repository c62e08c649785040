"""Choose for calls end to end: what was compiled, or Dynamo's own graph.

Forward and backward are chosen separately, each against AOTAutograd's graph run op by op. Together
they may still be slower than the model without a compiler, whose ops weren't decomposed. So once
both have settled, the next call times forward and backward of compiled code and of Dynamo's graph.

The same is done for inference graphs that don't have Dynamo's graph as a candidate, such as those
that write to their inputs (a cache of keys and values): AOTAutograd's graph computes each of these
anew, and its caller copies them back.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fuseboard.board import Session
from fuseboard.capture.original import forward_of
from fuseboard.contracts import Event, Measurement
from fuseboard.errors import ContractError, containable
from fuseboard.lower import background
from fuseboard.partition.marks import MEMORY_BUDGET, mark_of
from fuseboard.profile.choose.stored_decision import StoredDecision
from fuseboard.profile.choose.winner import choose
from fuseboard.profile.costs.database import CandidateCost
from fuseboard.profile.judge.copies import KeptCopies
from fuseboard.profile.judge.replays import generators_put_back, without_anomaly_mode
from fuseboard.ranks.job import several_ranks
from fuseboard.report.choices import duration, size
from fuseboard.report.data import CandidateReport, GraphReport
from fuseboard.report.instead import graph_runs_in_eager
from fuseboard.report.structured_trace import emit
from fuseboard.run.failure import contain, describe, trip
from fuseboard.run.kept_inputs import strided_copy
from fuseboard.run.runner import Runner
from fuseboard.spare_memory import free_bytes
from fuseboard.torch_api import modes as torch_modes
from fuseboard.torch_api.allocator import peak_bytes
from fuseboard.torch_api.compiling import compile_lock
from fuseboard.torch_api.tensor_classes import is_plain

log = logging.getLogger("fuseboard")

Run = Callable[..., Any]

#: What the two are called where decisions are kept.
COMPILED, EAGER = "compiled", "eager"


def _first(reports: Mapping[str, GraphReport]) -> GraphReport:
    return reports["forward" if "forward" in reports else "inference"]


def _saves_memory(session: Session) -> bool:
    """Whether the user wants things computed again that eager would keep."""
    settings = session.settings
    return settings.memory_budget < 1 or settings.joint_policy == "recompute_all"


def _is_special(graph: GraphModule) -> bool:
    """Whether a part of a graph is to be computed again, or to be compiled rather than run."""
    return any(
        isinstance(node.target, torch._ops.HigherOrderOperator)  # a checkpoint, flex attention
        or mark_of(node, MEMORY_BUDGET) is not None
        for node in graph.graph.nodes
    )


#: What the report of a graph of each kind says where Dynamo's graph runs.
_RUNS = {
    "forward": "forward and backward run as Dynamo's own graph under autograd",
    "inference": "calls run as Dynamo's own graph",
}

#: What was timed.
_SUBJECTS = {"forward": "forward and backward together", "inference": "whole calls"}


class WholeCalls:
    """The choice of what runs whole calls: what was compiled, until a call can decide.

    :param graph: Dynamo's.
    :param mutated: positions of the inputs that it writes to.
    :param reports: of the ``inference`` graph, or of the ``forward`` and, once it is compiled, the
        ``backward`` graph, where they are chosen by measurement.
    :param stored: where the decision is kept.
    :param runners: of the graphs that are compiled; the backward's comes later.
    :ivar call: what runs the next call.
    """

    def __init__(
        self,
        compiled: Run,
        graph: GraphModule,
        mutated: frozenset[int],
        session: Session,
        reports: Mapping[str, GraphReport],
        stored: StoredDecision,
        runners: Sequence[Runner],
    ) -> None:
        self.call: Run = self._watch
        self._compiled = compiled
        self._graph = graph
        self._eager: Run = forward_of(graph)
        self._mutated = mutated
        self._session = session
        self._reports = reports
        self._report = _first(reports)
        self._training = self._report.kind == "forward"
        self._stored = stored
        self._runners = runners
        self._lock = threading.Lock()

    def run(self) -> Run | None:
        """What runs the calls from now on; None: Dynamo's own graph."""
        session = self._session
        if self._is_pinned():
            return self._compiled
        if session.eager_is_fallback_only or several_ranks() or _is_special(self._graph):
            return self._compiled
        if self._training and _saves_memory(session):
            return self._compiled
        decision = self._stored.find()
        if decision is None:
            return lambda *args: self.call(*args)
        if decision.winner != EAGER:
            return self._compiled
        kind = self._report.kind
        self._report.notes.append(f"{_RUNS[kind]}, as the cost database has it")
        note_dynamo_runs(kind, _times(decision.candidates), self._runners)
        return None

    def _is_pinned(self) -> bool:
        """Whether the user wants something where Dynamo's own graph hasn't it."""
        return any(runner.is_pinned for runner in self._runners)

    def _watch(self, *args: Any) -> Any:
        settled = all(report.settled for report in self._reports.values())
        # What is held against float64 in its first calls takes many times as long in these.
        settled = settled and not any(runner.is_proving for runner in self._runners)
        if self._training:
            settled = settled and "backward" in self._reports and torch.is_grad_enabled()
        if self._is_pinned():
            return self._leave("the user says what runs where")(*args)
        if self._training and torch_modes.saved_tensor_hooks_are_set():
            # A checkpoint's would meet other saved tensors when it computes again.
            self._leave("it is called where hooks of saved tensors are set, as by a checkpoint")
        elif settled and self._lock.acquire(blocking=False):
            try:
                if self.call == self._watch:
                    self.call = self._decide(args)
            finally:
                self._lock.release()
            return self.call(*args)
        return self._compiled(*args)

    def _leave(self, why: str) -> Run:
        """What was compiled runs on."""
        note = f"not compared with Dynamo's own graph as a whole: {why}"
        self._report.notes.append(note)
        self.call = self._compiled
        return self._compiled

    def _decide(self, args: Sequence[Any]) -> Run:
        """What runs from now on."""
        report = self._report
        if why_not := self._why_not(args):
            return self._leave(why_not)
        tripped = self._trips()
        written: list[int] = []
        try:
            with (
                compile_lock,
                background.worker.paused(),
                generators_put_back(),
                without_anomaly_mode(),
            ):
                watch = KeptCopies(args).watch()
                try:
                    measured, peaks = self._measure(args)
                finally:
                    written = watch.undo()
            why = "something tripped" if self._trips() > tripped else ""
        except containable() as error:  # torch's or a hook's; what was compiled runs on
            why = describe(error)
        if written:
            return self._give_up(written)
        if why:
            return self._leave(why)
        winner = (COMPILED, EAGER)[choose(measured, self._session.settings.margin)]
        rows = [
            CandidateReport(name, "", one.latency_us, one.low_us, one.high_us, peak_bytes=peak)
            for name, one, peak in zip((COMPILED, EAGER), measured, peaks, strict=True)
        ]
        self._stored.record(winner, rows, settled=True)
        report.notes.append(_note(report.kind, winner, rows))
        self._session.notify(Event("choose", report.name, 0.0, {"winner": winner, "whole": True}))
        if winner == COMPILED:
            emit(report)
            return self._compiled
        note_dynamo_runs(report.kind, _times(rows), self._runners)
        return self._eager

    def _give_up(self, written: Sequence[int]) -> Run:
        """Dynamo's own graph runs: something wrote to the user's tensors, which was undone.

        :raises RegionError: the policy is to raise.
        """
        report, session = self._report, self._session
        regions = [region for one in self._reports.values() for region in one.regions]
        backends = {region.backend for region in regions if region.backend != "eager"}
        if not backends:
            return self._leave(f"an op of it wrote to the inputs {list(written)} unsaid")
        for backend in sorted(backends):
            others = ", or another one did," if len(backends) > 1 else ""
            problem = f"it wrote{others} to the inputs {list(written)} of a call that was timed"
            error = ContractError(backend, "fuseboard_lower", problem)
            contain(session, report.name, backend, "profile", error, "")
            trip(session, report, backend, "profile", report.name, error, "Dynamo's own graph")
        failed = CandidateReport(COMPILED, "failed", problem=describe(error))
        self._stored.record(EAGER, [failed], settled=True)
        for runner in self._runners:
            give_up(runner, "Dynamo's own graph runs, since its inputs were written to", str(error))
        return self._eager

    def _trips(self) -> int:
        return sum(len(report.trips) for report in self._reports.values())

    def _why_not(self, args: Sequence[Any]) -> str:
        if any(isinstance(value, list | tuple | dict) for value in args):
            return "an input is a list"  # compiled autograd's; a call empties it
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if not all(map(is_plain, tensors)):
            return "an input is a tensor subclass"
        if self._training and any(value.is_inference() for value in tensors):
            return "an input was made in inference mode"
        if any(i >= len(args) for i in self._mutated):
            return "its inputs aren't in Dynamo's order"
        written = [args[i] for i in self._mutated if isinstance(args[i], torch.Tensor)]
        if self._training and any(value.requires_grad for value in written):
            return "an input that is written to has a gradient"
        addresses = Counter(value.untyped_storage().data_ptr() for value in tensors)
        if any(addresses[value.untyped_storage().data_ptr()] > 1 for value in written):
            return "it writes to inputs, and some share their memory"
        return _why_no_room(written)

    def _measure(self, args: Sequence[Any]) -> tuple[list[Measurement], list[int | None]]:
        """Times and peaks, in the order compiled, eager."""
        once = self._step if self._training else self._alone
        calls = [partial(once, run, args) for run in (self._compiled, self._eager)]
        _, measured = self._session.first(
            "fuseboard_measure", calls=calls, budget_s=self._session.settings.measure_s
        )
        first = next((a.device for a in args if isinstance(a, torch.Tensor) and a.is_cuda), None)
        device = first or torch.device("cpu")
        return measured, [peak_bytes(call, device) for call in calls]

    def _step(self, run: Run, args: Sequence[Any]) -> None:
        """Forward and backward; no gradient is left anywhere, and no hook of the user's called."""
        own = [self._own(number, value) for number, value in enumerate(args)]
        with torch.enable_grad():
            results = [r for r in tree_leaves(run(*own)) if isinstance(r, torch.Tensor)]
            results = [r for r in results if r.requires_grad]
            wanted = [v for v in own if isinstance(v, torch.Tensor) and v.requires_grad]
            ones = [torch.ones_like(r) for r in results]
            with torch_modes.without_autocast():
                torch.autograd.grad(results, wanted, ones, allow_unused=True)
        torch.clear_autocast_cache()  # it would keep a cast of each leaf until autocast ends

    def _alone(self, run: Run, args: Sequence[Any]) -> None:
        """A call without gradients, on the same weights: what is prepared from them stays."""
        run(*(strided_copy(v) if i in self._mutated else v for i, v in enumerate(args)))
        torch.clear_autocast_cache()

    def _own(self, number: int, value: Any) -> Any:
        """An input as a leaf of its own, on the same memory unless the graph writes there."""
        if not isinstance(value, torch.Tensor):
            return value
        if number in self._mutated:
            return strided_copy(value)
        return value.detach().requires_grad_(value.requires_grad)


def _why_no_room(written: Sequence[torch.Tensor]) -> str:
    """Why no copies of these should be made beside the call's own; "" if they may."""
    devices = {value.device for value in written}
    for device in devices:
        free = free_bytes(device)
        wanted = sum(value.nbytes for value in written if value.device == device)
        if free is not None and 2 * wanted > free:
            return "copies of what it writes to would take more than half of the free memory"
    return ""


def _times(rows: Sequence[CandidateReport | CandidateCost]) -> dict[str, float]:
    """What the two took, in microseconds."""
    return {row.name: row.latency_us for row in rows if row.latency_us is not None}


def _note(kind: str, winner: str, rows: Sequence[CandidateReport]) -> str:
    us = _times(rows)
    peaks = [row.peak_bytes for row in rows]
    more = ""
    if None not in peaks:
        more = ", with peaks of " + " and ".join(size(peak or 0) for peak in peaks)
    text = f"{_SUBJECTS[kind]} take {duration(us[COMPILED])} as compiled and {duration(us[EAGER])} "
    text += f"as Dynamo's own graph{more}: "
    if winner == EAGER:
        return text + _RUNS[kind]
    close = us[EAGER] < us[COMPILED]
    return text + "what was compiled runs" + (", which is close enough" if close else "")


def note_dynamo_runs(kind: str, us: Mapping[str, float], runners: Sequence[Runner]) -> None:
    """Note in the report of each graph that none of what was compiled of it runs."""
    instead = "Dynamo's own graph runs"
    if us.keys() >= {COMPILED, EAGER}:
        times = f"{duration(us[EAGER])} by it, and {duration(us[COMPILED])} as compiled"
        instead += f": {_SUBJECTS[kind]} take {times}"
    for runner in runners:
        give_up(runner, instead)


def give_up(runner: Runner, instead: str, problem: str = "") -> None:
    """Let Dynamo's own graph run for good; :func:`fuseboard.wait` doesn't wait for the runner.

    :param instead: why, in a sentence.
    :param problem: of all that was compiled; "" where it is right but slower.
    """
    report = runner.report
    if runner.chooser is not None:
        background.leave(runner.chooser)
    runner.chooser, report.settled, report.instead = None, True, instead
    graph_runs_in_eager(report, "Dynamo's own graph runs")
    for candidate in report.candidates:
        if candidate.name == "eager":
            candidate.state, candidate.problem = "chosen", ""
        elif problem:
            candidate.state, candidate.problem = "failed", problem
        elif candidate.state == "chosen":
            candidate.state = "slower"
    emit(report)
