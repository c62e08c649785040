"""A graph from its first call to its decision, beside the user's calls.

Dynamo's own graph answers the first call, and those that follow while the workshop tries
candidates and while what was chosen is loaded. Then what was chosen and Dynamo's graph answer calls
in turn, until it is known which of them does it faster here. The states are those of
:mod:`fuseboard.workshop.states`. Past 400 lines, since all that may change one graph's state is in
one class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.beside import beside
from fuseboard.board import Session
from fuseboard.capture.comparison import CannotCompare
from fuseboard.capture.original import forward_of
from fuseboard.errors import CONTAINED
from fuseboard.forks import fork_safe_lock
from fuseboard.lower import background
from fuseboard.pipeline.call import Compiled
from fuseboard.profile.choose.whole_calls import COMPILED, EAGER, give_up, note_dynamo_runs
from fuseboard.report.data import GraphReport
from fuseboard.report.structured_trace import emit
from fuseboard.run.failure import describe, trip
from fuseboard.run.route import Route
from fuseboard.torch_api import dynamo_graphs as torch_capture
from fuseboard.torch_api import modes as torch_modes
from fuseboard.torch_api.call_sizes import CallSizes
from fuseboard.torch_api.frames import frame_title
from fuseboard.torch_api.state import StateGuard
from fuseboard.workshop.admission import why_not_kept
from fuseboard.workshop.asking import make_request
from fuseboard.workshop.by_sizes import BySizes
from fuseboard.workshop.checkpoints import Recomputations
from fuseboard.workshop.compiling import compile_apart
from fuseboard.workshop.desk import Next, desk
from fuseboard.workshop.kept_answers import KeptAnswers
from fuseboard.workshop.kept_call import CannotKeep, KeptCall
from fuseboard.workshop.loading import ComputesOtherwise, NotLoaded, load
from fuseboard.workshop.reporting import LifeReport
from fuseboard.workshop.request import Answer, Request
from fuseboard.workshop.sizes import SizeCondition, SizeRoute
from fuseboard.workshop.slices import slices
from fuseboard.workshop.states import GraphState, StateMachine
from fuseboard.workshop.trial import Trial

log = logging.getLogger("fuseboard")

Run = Callable[..., Any]

#: Calls on kept inputs by which :func:`fuseboard.wait` ends a trial, at most.
_TRIAL_CALLS = 80


class Life:
    """One graph of Dynamo's.

    :param graph: it isn't changed.
    :param inputs: real ones, of which :func:`why_in_calls` says nothing; they are not kept.
    :param sizes: what Dynamo knows of their sizes; None where these are plain.
    :raises CannotKeep: later calls can't be made on them.
    :ivar run: what Dynamo calls.
    """

    def __init__(
        self,
        session: Session,
        graph: GraphModule,
        inputs: Sequence[Any],
        sizes: CallSizes | None = None,
    ) -> None:
        self.limit_s = session.settings.hook_limit_s
        self._session = session
        self._graph = graph
        self._own = forward_of(graph)
        self._static = torch_capture.static_positions(graph)
        self._sizes = sizes
        weights = {i for i, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)}
        self._weights = self._static | weights
        self._kept = self._keep(inputs)
        self._frame = frame_title()
        self._context = copy_context()
        self._machine = StateMachine()
        self._compiling = fork_safe_lock()
        self._has_begun = False
        self._trial: Trial | None = None
        self._compiled: Compiled | None = None
        self._chosen: Run = self._own
        #: What sends calls to it by their sizes, where these are symbolic.
        self._by_sizes: BySizes | None = None
        self._answers: KeptAnswers | None = None
        #: What is to be loaded.
        self._program: bytes | None = None
        #: How many calls may take the place of the first one, and whether the next one is to.
        self._calls_left, self._wants_call = 3, False
        #: Why only a call can go on with it; "" where work beside calls can.
        self._why_here = ""
        #: Whether an earlier process's answer will do, and whether this one is.
        self._may_look, self._is_recalled = True, False
        training = self._kept.grads and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in inputs
        )
        self._report = LifeReport(session, self._frame, "forward" if training else "inference")
        self._training = training
        self._recomputations = Recomputations()
        #: Whether a gradient was computed that is to be differentiated.
        self._is_twice = False
        self._route = Route(self._begin_with)
        self.run = self._route.run

    def _keep(self, inputs: Sequence[Any]) -> KeptCall:
        """
        :raises CannotKeep: it would take too much memory.
        """
        return KeptCall(inputs, self._weights, "as_strided" in self._graph.code)

    def begin(self) -> Run:
        """What answers the calls from now on."""
        self._report.show()
        background.add(self)
        if self._sizes is not None:
            self._take_calls_over()
        return self.run

    def _take_calls_over(self) -> None:
        """Let nobody wait for graphs of one size: Dynamo calls the newest that fits any.

        Their trials would need calls that don't come.
        """
        for graph in background.unsettled():
            if isinstance(graph, Life) and graph._sizes is None and graph._is_of_call(self):
                background.leave(graph)

    def _is_of_call(self, other: Life) -> bool:
        """Whether it is of the same function, on the same weights."""
        frames = [one._frame.partition("/")[0] for one in (self, other)]
        return frames[0] == frames[1] and self._kept.has_the_weights_of(other._kept)

    def _begin_with(self, *args: Any) -> Any:
        """Answer the first call. Work beside it begins after that: Dynamo is still at its guards
        when it has called its backend."""
        if self._training:
            self._recomputations.note()
        try:
            return self._seen(self._own(*args))
        finally:
            with self._compiling:
                begins, self._has_begun = not self._has_begun, True
                if begins:  # else another thread's call was quicker
                    self._route.put(self._watch)
                    desk().submit(self)

    def _watch(self, *args: Any) -> Any:
        if self._training:
            self._recomputations.note()
        began = slices.enter()
        try:
            return self._seen(self._own(*args))
        finally:
            slices.leave(began)

    def _seen(self, results: Any) -> Any:
        """Look whether gradients of gradients are asked for, which not all that is compiled has."""
        if self._training and not self._is_twice:
            torch_modes.before_any_backward(results, self._look_how_often)
        return results

    def _look_how_often(self) -> None:
        self._is_twice |= torch.is_grad_enabled()

    # --- for callers that wait -------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._report.name

    @property
    def state(self) -> GraphState:
        return self._machine.state

    @property
    def settled(self) -> bool:
        return self._machine.is_over

    @property
    def waiting(self) -> int:
        """Whether something is done for it beside calls."""
        needs_call = not self._has_begun or bool(self._why_here) or self._wants_call
        return int(self.state in (GraphState.WATCHING, GraphState.LOADING) and not needs_call)

    def settle(self) -> bool:
        """Let the trial end now, on the inputs that were kept; False where they weren't."""
        inputs = self._kept.inputs()
        if self.settled or inputs is None or self._wants_call:
            return self.settled
        try:
            with self._kept.entered(), StateGuard():
                if self._why_here:
                    self._compile_on(inputs)
                if self._compiled is None:
                    return self.settled
                make_call = self._compiled.capture_check().calls_of(inputs, self._route.run)
                for _ in range(_TRIAL_CALLS):
                    make_call()
                    if self.settled:
                        break
        except (CannotCompare, CannotKeep):
            return False
        except CONTAINED as error:  # the call that comes meets it as well
            log.info("fuseboard: a trial on kept inputs failed: %s", describe(error))
            return False
        return self.settled

    def forked(self) -> None:
        """In a forked child: neither the threads nor the workshop are there. Its calls begin anew.

        Only when it makes one: most forked children never do.
        """
        if self._by_sizes is not None:
            self._by_sizes.forked()
        if not self.waiting:
            return

        def again(*args: Any) -> Any:
            self._route.put(self._watch)
            background.add(self)
            if self.state is GraphState.LOADING:
                desk().load(self)
            else:
                desk().submit(self)
            return self._watch(*args)

        self._route.put(again)

    # --- in the threads of the desk -------------------------------------------------------------

    @property
    def bytes_to_send(self) -> int:
        """Bytes of inputs and weights."""
        return self._kept.nbytes

    def recall(self) -> Next:
        """See whether an earlier process has asked the workshop."""
        return self._context.copy().run(self._recall)

    def _recall(self) -> Next:
        with beside():
            inputs = self._kept.inputs()
            if inputs is None:
                self.fail("a weight is gone")
                return Next.NOTHING
            self._answers = KeptAnswers.of(
                self._session,
                self._graph,
                self._report.data,
                self._kept,
                inputs,
                self._static,
                self._sizes,
            )
            known = self._answers.find() if self._may_look else None
            self._is_recalled = known is not None
            return self._answered(known) if known is not None else Next.ASK

    def request(self, directory: Path) -> Request | Answer:
        """What to ask the workshop, or its answer where it can't be asked."""
        with beside():
            return self._context.copy().run(
                make_request,
                self._session,
                self._graph,
                self._kept,
                self._sizes,
                self._frame,
                directory,
            )

    def answered(self, answer: Answer) -> Next:
        """Take what the workshop found."""
        if self._answers is not None and (problem := self._answers.keep(answer)):
            self._report.note(f"not kept for later processes: {problem}")
        return self._answered(answer)

    def _answered(self, answer: Answer) -> Next:
        if answer.dynamo_wins:
            self._dynamo_runs(answer.reports)
        elif answer.again:
            self._try_another_call(answer.problem)
        elif answer.only_here:
            self._compile_in_a_call(answer.problem)
        elif answer.program is None:
            self.fail(answer.problem or "it wasn't tried")
        elif self._machine.change(GraphState.LOADING):
            self._program = answer.program
            self._report.tell_state(self.state)
            return Next.LOAD
        return Next.NOTHING

    def _dynamo_runs(self, reports: Sequence[GraphReport]) -> None:
        """Dynamo's graph won in the workshop, or in an earlier process."""
        self._settle_on(self._own)
        self._report.dynamo_won(reports)
        self._report.settled(EAGER)

    def _settle_on(self, program: Run) -> None:
        """Let calls go to what was decided on, but for those that are to be made again."""
        answers = self._recomputations.after(self._own, program, self._route.put)
        self._machine.change(GraphState.SETTLED, lambda: self._route.put(answers))
        self._kept.forget()

    def _try_another_call(self, problem: str) -> None:
        """The call that was kept raises: keep the next one that doesn't, and ask about that."""
        self._calls_left -= 1
        if self._calls_left < 0:
            self.fail(problem)
            return

        def keep(*args: Any) -> Any:
            results = self._watch(*args)
            with self._compiling:
                if self._wants_call:
                    self._wants_call = False
                    self._route.put(self._watch)
                    try:
                        self._kept = self._keep(args)
                    except CannotKeep as error:
                        self.fail(str(error))
                    else:
                        desk().submit(self)
            return results

        self._wants_call = True
        kept: Run = torch.compiler.disable(keep)
        self._route.put(kept)

    def _compile_in_a_call(self, why: str) -> None:
        """Let the next call compile it, since only this process can; calls wait for that."""

        def compile_first(*args: Any) -> Any:
            with self._compiling:
                self._compile_on(args)
            return self._route.run(*args)

        first: Run = torch.compiler.disable(compile_first)
        self._why_here = why
        if self.state is GraphState.LOADING:
            self._route.put(first)
        else:
            self._machine.change(GraphState.LOADING, lambda: self._route.put(first))
        self._report.tell_state(self.state)

    def _compile_on(self, inputs: Sequence[Any]) -> None:
        if self.settled:
            return  # another thread's call has done it
        why = self._why_here
        if why_not := next(filter(None, map(why_not_kept, inputs)), ""):
            self.fail(f"{why}; {why_not}")
            return
        self._session.notes.append(f"tried within calls, not beside them: {why}")
        try:
            with StateGuard():
                apart = compile_apart(self._session, self._graph, inputs, self._sizes, self._frame)
            condition = apart.condition()
        except CONTAINED as error:
            self.fail(describe(error))
            return
        if apart.problem:
            self.fail(apart.problem)
            return
        apart.learn_no_more()
        self._report.give_way()
        self._compiled = apart.compiled
        run = apart.compiled.run
        if condition is not None:  # each program checks its first calls of other sizes itself
            run = SizeRoute(condition, run, self._own, None).run
        self._settle_on(run)

    def fail(self, problem: str) -> None:
        """Nothing comes of it: Dynamo's own graph answers all calls."""
        if self._machine.change(GraphState.REFUSED, lambda: self._route.put(self._own)):
            self._kept.forget()
            self._report.refused(problem)

    def load(self) -> Next:
        """Make what was chosen anew in this process."""
        return self._context.copy().run(self._load)

    def _load(self) -> Next:
        program, number = self._program, self._report.number
        assert program is not None
        with beside():
            try:
                compiled, condition = load(
                    program, self._session, self._graph, self._kept, self._frame, number
                )
            except CannotKeep as error:
                self.fail(str(error))
            except NotLoaded as error:
                return self._not_loaded(error)
            else:
                self._install(compiled, condition)
            return Next.NOTHING

    def _not_loaded(self, error: NotLoaded) -> Next:
        """What an earlier process kept is asked about anew, once."""
        if self._is_recalled:
            self._may_look, self._program = False, None
            self._machine.change(GraphState.WATCHING)
            self._report.note(f"tried anew: {error}")
            return Next.ASK
        if not isinstance(error, ComputesOtherwise):
            self._compile_in_a_call(f"what was chosen can't be loaded: {error}")
            return Next.NOTHING
        self._trip(self._report.data, error, error.backends)
        self.fail(str(error))
        if self._answers is not None:  # a later process would load the same
            self._answers.keep(Answer(dynamo_wins=True, reports=(self._report.data,)))
        return Next.NOTHING

    def _trip(self, report: GraphReport, error: Exception, backends: Sequence[str]) -> None:
        """Note that what was chosen computes otherwise here than Dynamo's graph."""
        who = ", ".join(backends) or "AOTAutograd"
        trip(report, who, "lower", self.name, error, "Dynamo's own graph")

    def _install(self, compiled: Compiled, condition: SizeCondition | None) -> None:
        gradients = compiled.call.gradients
        if self._is_twice and gradients is not None and gradients.why_not:
            self.fail(f"it is differentiated twice, and {gradients.why_not}")
            return
        self._report.give_way(*(runner.report for runner in compiled.runners))
        self._compiled, self._chosen = compiled, compiled.run
        for runner in compiled.runners:
            runner.on_trip = self._keep_that_eager_runs
        if condition is not None:
            self._by_sizes = self._sending_by_sizes(compiled, condition)
            self._chosen = self._by_sizes.run
        if compiled.is_dynamo_graph:
            self._settle_on(self._own)
            self._report.settled(EAGER)
        elif self._training:
            # A call of the user's tells nothing of its backward; the workshop timed both together.
            self._settle_on(self._chosen)
            self._report.settled(COMPILED)
        else:
            self._begin_trial(compiled, condition)

    def _sending_by_sizes(self, compiled: Compiled, condition: SizeCondition) -> BySizes:
        notes = compiled.runners[0].report.notes
        by_sizes = BySizes(
            compiled,
            condition,
            self._watch,
            self._keep,
            lambda: desk().compare(self),
            notes.append,
            self._passed_by,
        )
        if (inputs := self._kept.inputs()) is not None:
            by_sizes.is_right_for(inputs)
        return by_sizes

    def _begin_trial(self, compiled: Compiled, condition: SizeCondition | None) -> None:
        margin, runs = self._session.settings.margin, (self._own, compiled.run)
        if condition is None or self._by_sizes is None:
            trial = self._trial = Trial(runs, margin, self._decide)
            self._machine.change(GraphState.TRIALLING, lambda: self._route.put(trial.call))
            return
        self._trial = Trial(runs, margin, self._decide, condition.sizes_of())
        self._by_sizes.put(self._trial.call)
        chosen = self._chosen
        self._machine.change(GraphState.TRIALLING, lambda: self._route.put(chosen))

    def compare(self) -> Next:
        """Hold what was chosen against Dynamo's graph on a call of other sizes."""
        return self._context.copy().run(self._compare)

    def _compare(self) -> Next:
        by_sizes, compiled = self._by_sizes, self._compiled
        assert by_sizes is not None
        assert compiled is not None
        with beside():
            problem = by_sizes.compare()
            if problem:
                error = ComputesOtherwise(problem, compiled)
                self._route.put(self._own)
                self._machine.change(GraphState.SETTLED)
                self._trip(compiled.runners[0].report, error, error.backends)
                for runner in compiled.runners:
                    give_up(runner, "Dynamo's own graph runs", problem)
                self._keep_that_eager_runs(problem)
        return Next.NOTHING

    def _passed_by(self) -> None:
        if self.state is GraphState.TRIALLING and self._trial is not None:
            self._trial.pass_by()

    # --- in a call ------------------------------------------------------------------------------

    def _decide(self, winner: int) -> None:
        """The trial is over."""
        compiled, trial = self._compiled, self._trial
        assert compiled is not None
        assert trial is not None
        if not self._machine.change(GraphState.SETTLED, lambda: self._decided(winner)):
            return
        self._kept.forget()
        eager_us, compiled_us = trial.latencies_us
        report = compiled.runners[0].report
        report.notes.append(
            f"in {trial.calls} calls of the user's: {compiled_us:.4g} us as compiled, "
            f"{eager_us:.4g} us as Dynamo's own graph"
        )
        if winner == 0:
            note_dynamo_runs(
                "inference", {COMPILED: compiled_us, EAGER: eager_us}, compiled.runners
            )
            self._keep_that_eager_runs()
        emit(report)
        self._report.settled((EAGER, COMPILED)[winner])

    def _decided(self, winner: int) -> None:
        assert self._compiled is not None
        if self._by_sizes is not None:
            self._by_sizes.put(self._compiled.run)
        self._route.put((self._own, self._chosen)[winner])

    def _keep_that_eager_runs(self, problem: str = "") -> None:
        """For later processes.

        :param problem: of what was chosen, in a later call; "" where it was slower.
        """
        if self._answers is not None and self._compiled is not None:
            reports = tuple(runner.report for runner in self._compiled.runners)
            if problem:
                instead = f"Dynamo's own graph runs: what was chosen failed in a call: {problem}"
                reports = tuple(replace(one, instead=instead, regions=[]) for one in reports)
            self._answers.keep(Answer(dynamo_wins=True, reports=reports))
