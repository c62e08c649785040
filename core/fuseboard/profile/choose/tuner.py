"""Choice by measurement for one graph: which of its candidates runs.

A call is used for it, since only a call has real inputs. The first one compares what compiles
quickly: each candidate is verified region by region, the right ones are timed in turn, and the call
is answered by the winner. What takes long is compiled beside the following calls; the call after
that compares it with the winner so far. Then the graph has *settled*. Past 400 lines: whatever may
change which candidate runs is in one class.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from fuseboard.board import Session
from fuseboard.contracts import Boxed, Event, Stage
from fuseboard.errors import LoweringError, NotEnoughMemory, RegionError, containable
from fuseboard.lower import background
from fuseboard.lower.caching import Token
from fuseboard.lower.guards import SizeFixed
from fuseboard.lower.isolated import LoweringResult
from fuseboard.profile.choose.candidates import Candidate, note_gain_of_preparing
from fuseboard.profile.choose.errors import Errors
from fuseboard.profile.choose.layouts import Layouts
from fuseboard.profile.choose.stored_decision import StoredDecision
from fuseboard.profile.choose.timing import Timing
from fuseboard.profile.choose.winner import choose
from fuseboard.profile.costs.database import Decision
from fuseboard.profile.costs.rows import NOT_TRIED
from fuseboard.profile.judge.copies import KeptCopies
from fuseboard.profile.judge.replays import generators_put_back
from fuseboard.ranks.decisions import Decide, decide_alone
from fuseboard.report.settled import tell_settled
from fuseboard.report.structured_trace import emit
from fuseboard.run.checked import RegionChecks
from fuseboard.run.failure import contain, decide, describe, trip
from fuseboard.run.kept_inputs import KeptInputs
from fuseboard.run.runner import Runner
from fuseboard.run.weights import any_version
from fuseboard.torch_api.compiling import compile_lock
from fuseboard.torch_api.profiler import is_recording
from fuseboard.torch_api.state import StateGuard, under_state
from fuseboard.torch_api.symbols import compiling_in_a_call

log = logging.getLogger("fuseboard")


class Tuner:
    """Compares the candidates of one graph, and installs the winners.

    :param candidates: in order of preference; at least one.
    :param static: positions of inputs that are parameters or buffers.
    :param mode: the fake mode that the graph was captured under.
    :param stored: where decisions are kept.
    :param installed: called with each winner.
    :param decide: answers what a function does, or what it did on another rank.
    """

    def __init__(
        self,
        runner: Runner,
        candidates: Sequence[Candidate],
        static: Collection[int],
        mode: Any,
        stored: StoredDecision,
        installed: Callable[[Candidate], None],
        decide: Decide | None = None,
    ) -> None:
        self._runner = runner
        self._candidates = list(candidates)
        self._static = static
        self._mode = mode
        self._stored = stored
        self._installed = installed
        self._decide = decide or decide_alone
        self._session: Session = runner.session
        self._report = runner.report
        self._chosen: Candidate | None = None
        self._lock = threading.RLock()
        self._due: list[Candidate] = []
        #: There was no memory for their weights beside those of others, which may lose.
        self._crowded: list[Candidate] = []
        self._timing = Timing(runner.session, runner.report)
        self._kept = KeptInputs()
        self._call: Boxed = torch.compiler.disable(self._tune)  # Dynamo must not trace it

    @property
    def name(self) -> str:
        return self._report.name

    @property
    def waiting(self) -> int:
        """How many regions are still to be compiled."""
        return sum(len(candidate.waiting) for candidate in self._candidates)

    @property
    def settled(self) -> bool:
        return not (self._due or self.waiting or any(c.postponed for c in self._candidates))

    # --- in the backend's call ------------------------------------------------------------------

    def start(self, defers: bool) -> None:
        """Lower the candidates, and let the first call compare those that are ready.

        What an earlier process decided holds; what it didn't come to try is tried now.

        :param defers: what takes long is compiled in the background.
        """
        for candidate in self._left(self._decide(self._stored.find)):
            self._lower(candidate, defers=defers and self._takes_long(candidate))
            if candidate.program is not None:
                self._due.append(candidate)
            candidate.lowering.real = {}  # of this call
        if self._due:
            self._runner.interrupt(self._call)
        elif all(candidate.dropped for candidate in self._candidates):
            self._runner.give_up("all candidates failed in earlier processes: eager runs")
        elif self._chosen is not None:  # by an earlier process, so no call will compare first
            self._rest_is_due()
        self._report_settled()
        if not self.settled:
            background.add(self)

    def _report_settled(self) -> None:
        """Note in the report whether all is tried. Until it is, the runner keeps this alive."""
        had_settled, self._report.settled = self._report.settled, self.settled
        self._runner.chooser = None if self.settled else self
        if self.settled and not had_settled:
            tell_settled(self._report)

    def _left(self, decision: Decision | None) -> Sequence[Candidate]:
        """The candidates that are to be tried; the winner of an earlier process runs."""
        if decision is None:
            return [c for c in self._candidates if not c.dropped]
        known = {cost.name: cost for cost in decision.candidates}
        cost = known.get(decision.winner)
        decided = decision.winner, () if cost is None else cost.exact
        winner = next((c for c in self._candidates if (c.name, c.row.exact) == decided), None)
        if winner is None or not self._lower(winner, defers=False):
            for candidate in self._candidates:
                cost = known.get(candidate.name)
                if cost is not None and decision.settled and cost.problem not in ("", NOT_TRIED):
                    candidate.recall(cost, lost=True, settled=True)
            return [c for c in self._candidates if c is not winner and not c.dropped]
        self._report.decided = "taken from the cost database"
        for candidate in self._candidates:
            if (cost := known.get(candidate.name)) is not None:
                candidate.recall(cost, lost=candidate is not winner, settled=decision.settled)
        winner.proven = True
        self._install(winner)
        return [c for c in self._candidates if c is not winner and not c.dropped]

    def _takes_long(self, candidate: Candidate) -> bool:
        quick = {info.name for info in self._session.backends if info.compiles_quickly}
        return any(cut.backend not in quick for cut in candidate.cuts)

    def _lower(self, candidate: Candidate, defers: bool) -> bool:
        """Whether a candidate is lowered now; what it waits for is sent to be compiled."""
        try:
            deferred = candidate.lower(defers)
        except RegionError:  # a wrapper's; the policy is to raise
            raise
        except SizeFixed as error:
            candidate.drop("untried", str(error))
            return False
        except containable() as error:  # a plugin may raise anything; the policy decides
            self._failed(candidate, "lower", error)
            return False
        if candidate.waiting or candidate.postponed:
            candidate.row.state = "waiting"
        for later in deferred:  # those without a request are postponed
            background.compile_for(self, candidate, later, self._session.settings)
        return candidate.program is not None

    # --- when something has been compiled --------------------------------------------------------

    def compiled(
        self, candidate: Candidate, token: Token, result: LoweringResult, seconds: float
    ) -> None:
        """Note a result, in the worker's thread; the next call compares what is complete."""
        with self._lock:  # a comparison that is under way ends first
            candidate.ready[token] = result
            candidate.row.compile_s = (candidate.row.compile_s or 0.0) + seconds
            candidate.waiting.discard(token)
            if not candidate.waiting and not candidate.dropped:
                self._due.append(candidate)
                self._runner.interrupt(self._call)

    def forked(self) -> None:
        """Wait for nothing in a forked child: what the parent has compiled doesn't come here."""
        self._lock = threading.RLock()  # a thread that this process hasn't may have held it
        for candidate in self._candidates:
            if candidate.waiting:
                candidate.undecided = True
                candidate.drop("untried", "it was being compiled for the process that was forked")
        self._report_settled()

    # --- in a call ------------------------------------------------------------------------------

    def _tune(self, args: list[Any]) -> Sequence[Any]:
        """A call in which candidates are compared; then it is made."""
        inputs = list(args)
        args.clear()
        with self._lock:
            if self._due:
                self._runner.interrupt(None)  # later calls run normally, even if this one raises
                self._compare(inputs)
                if self._due and self._session.settings.settle == "first_call":
                    self._runner.interrupt(None)
                    self._compare(inputs)  # what is tried last
                if self._chosen is None:
                    return self._runner.captured.eager(inputs)  # the user's own error, most likely
                if not self.settled:
                    self._kept.keep(inputs, self._static)
            if self.settled:
                self._kept.clear()
        return self._runner.uninterrupted(inputs)

    def settle(self) -> bool:
        """Compare what is due on the inputs that were kept; False where there are none."""
        inputs = self._kept.inputs()
        if inputs is None:
            return False
        with self._lock, under_state(self._kept.state):
            if self._due:
                self._runner.interrupt(None)
                self._compare(inputs)
            if self.settled:
                self._kept.clear()
        return True

    def _rest_is_due(self) -> None:
        """Let the next call lower and compare what only this process can compile."""
        if not self._due:
            self._due = [candidate for candidate in self._candidates if candidate.postponed]
        if self._due:
            self._runner.interrupt(self._call)

    def _compare(self, inputs: list[Any]) -> None:
        """Verify what is due, time it beside the winner so far, and install the winner."""
        try:
            self._compare_due(inputs)
        finally:
            self._report_settled()  # also where Ctrl-C ended the comparison

    def _compare_due(self, inputs: list[Any]) -> None:
        due, self._due = self._due, []
        self._crowded = []
        order = [c for c in self._candidates if c in due or c is self._chosen]
        kept = KeptCopies(inputs)
        checks = RegionChecks(
            self._session.settings.verify != "off", references={}, input_copies=kept
        )
        layouts = Layouts(self._runner, inputs)
        errors = Errors(self._runner.captured.graph, inputs, self._session, self._report)
        profiling = self._report.timed("profile")
        with (
            compile_lock,
            StateGuard(),
            compiling_in_a_call(self._mode),
            generators_put_back(),
            background.worker.paused(),
            profiling,
        ):
            for candidate in order:
                if candidate.program is None and not self._lower(candidate, defers=False):
                    continue
                if not candidate.proven and not self._verify(
                    candidate, inputs, checks, layouts, errors
                ):
                    # Where it neither ran short of memory nor is out, eager raises as well.
                    if candidate not in self._crowded and not candidate.dropped:
                        self._due = due
                        self._runner.interrupt(self._call)
                        return
                    continue
                if self._chosen is None:
                    self._install(candidate)  # if the user interrupts, there is something to run
            right = [candidate for candidate in order if candidate.proven and not candidate.dropped]
            checks.references = None
            winner = self._winner(right, inputs, kept)
        self._due = self._crowded
        if winner is None:
            self._chosen = None  # it may have been installed, to be found wrong when it was timed
            self._rest_is_due()
            self._run_eager()
            return
        for candidate in right:
            if candidate is not winner and not candidate.dropped:
                candidate.drop("slower")
        self._report.decided = f"{'measured' if len(right) > 1 else 'verified'} in a call"
        self._chosen = winner
        self._rest_is_due()
        self._install(winner)
        if is_recording():  # torch's profiler weighs on candidates of many ops
            self._report.notes.append("chosen under a profiler: later processes choose again")
        else:
            undecided = {c.name for c in self._candidates if c.undecided}
            self._stored.record(winner.name, self._report.candidates, self.settled, undecided)
        emit(self._report)

    def _winner(
        self, right: list[Candidate], inputs: list[Any], kept: KeptCopies
    ) -> Candidate | None:
        """The fastest of what is right, as this rank or another one decides."""

        def name() -> str:
            only = next(iter(right), None)
            fastest = self._fastest(right, inputs, kept) if len(right) > 1 else only
            return fastest.name if fastest is not None else ""

        chosen = self._decide(name)
        found = next((candidate for candidate in right if candidate.name == chosen), None)
        if found is None and chosen and right:
            self._report.notes.append(
                f"another rank chose {chosen}, which isn't right on this rank"
            )
        return found or (right[0] if right and chosen else None)

    def _verify(
        self,
        candidate: Candidate,
        inputs: list[Any],
        checks: RegionChecks,
        layouts: Layouts,
        errors: Errors,
    ) -> bool:
        """Whether a candidate keeps its contract and computes the right values."""
        assert candidate.program is not None
        sets = candidate.program.sets
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        if sets is not None and any(tensor.is_inference() for tensor in tensors):
            sets.version_of = any_version
        if self._session.settings.verify == "off":
            checks = RegionChecks(values=False, input_copies=checks.input_copies)
        try:
            results = candidate.program.trial(checks)(list(inputs))
            if checks.values and len(candidate.cuts) > 1:
                layouts.check(candidate, results)
            errors.measure(candidate, results)
            if candidate.dropped:
                return False
        except NotEnoughMemory as error:
            if any(c.holds_weights for c in self._candidates if c is not self._chosen):
                self._crowded.append(candidate)
            else:
                candidate.drop("untried", str(error))
            return False
        except containable() as error:  # compiled code may raise anything
            try:
                self._runner.captured.eager(list(inputs))
            except containable():  # eager raises as well: the user's own error, raised by the call
                return False
            if candidate.dynamo_site is not None:
                return self._without_dynamo_graph(candidate, inputs, checks, layouts, errors, error)
            self._failed(candidate, "profile", error)
            return False
        candidate.proven = True
        return True

    def _without_dynamo_graph(
        self,
        candidate: Candidate,
        inputs: list[Any],
        checks: RegionChecks,
        layouts: Layouts,
        errors: Errors,
        error: BaseException,
    ) -> bool:
        """Let the captured graph op by op be the candidate that Dynamo's own graph can't be.

        :returns: whether that one is right.
        :raises RegionError: the policy is to raise.
        """
        if decide(self._session, self.name, "eager", "profile", error) == "raise":
            self._failed(candidate, "profile", error)
        instead = "the graph as captured, op by op"
        trip(self._session, self._report, "eager", "profile", self.name, error, instead)
        candidate.dynamo_site = candidate.program = None
        self._runner.uncompiled = self._runner.captured.eager
        return self._lower(candidate, defers=False) and self._verify(
            candidate, inputs, checks, layouts, errors
        )

    def _fastest(
        self, right: list[Candidate], inputs: list[Any], kept: KeptCopies
    ) -> Candidate | None:
        """Time candidates in turn; what raises now, or writes to its inputs, is out."""
        times, errors = self._timing(right, inputs, kept)
        for candidate, error in errors.items():
            self._failed(candidate, "profile", error)
        if not times:
            return None
        left = list(times)
        return left[choose(list(times.values()), self._session.settings.margin)]

    # --- the outcome ----------------------------------------------------------------------------

    def _install(self, candidate: Candidate) -> None:
        assert candidate.program is not None
        self._chosen = candidate
        for other in self._candidates:
            if other.row.state == "chosen":
                other.row.state = "slower"
        candidate.row.state = "chosen"
        rows = [each.row for each in self._candidates]
        note_gain_of_preparing(candidate.program.sets, rows, self._session.settings.margin)
        every = self._session.settings.verify_every
        again = every is not None
        inputs: Any = "watched" if again else "unseen"
        checks = RegionChecks(False, strides=not candidate.proven, inputs=inputs, again=again)
        self._runner.on_trip = partial(self._stored.record_trip, candidate.name)
        self._runner.install(candidate.program, checks)
        self._report_settled()
        self._report.instead = ""
        self._installed(candidate)
        self._runner.report_tripped()
        self._session.notify(
            Event("choose", self.name, 0.0, {"winner": candidate.name, "settled": self.settled})
        )

    def _run_eager(self) -> None:
        """No candidate is right: the captured graph runs op by op."""
        self._report.notes.append("no candidate is right on this call: eager runs the graph")
        self._chosen = None
        self._runner.give_up("no candidate was right: eager runs")
        emit(self._report)

    def _failed(self, candidate: Candidate, stage: Stage, error: BaseException) -> None:
        """A candidate is out.

        :raises RegionError: the policy is to raise.
        """
        others = [c.name for c in self._candidates if c is not candidate and not c.dropped]
        if candidate.dynamo_site is not None:
            self._runner.uncompiled = self._runner.captured.eager
        instead = "eager" if others in ([], ["eager"]) else "the other candidates"
        plugin = getattr(error, "plugin", "") or candidate.cuts[0].backend
        candidate.undecided = isinstance(error, LoweringError) and not error.for_good
        candidate.drop("failed", describe(error))
        what = f"candidate {candidate.name!r} of graph {self.name!r} failed in stage {stage!r}"
        contain(self._session, self.name, plugin, stage, error, what)
        source = next((s for r in candidate.regions for s in r.sources), "")
        trip(self._session, self._report, plugin, stage, self.name, error, instead, source)
