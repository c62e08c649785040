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
from pathlib import Path
from typing import Any

import torch

from fuseboard.beside import beside
from fuseboard.capture.side_runs import CannotCompare
from fuseboard.contracts import GraphKind
from fuseboard.errors import containable
from fuseboard.forks import fork_safe_lock
from fuseboard.lower import background
from fuseboard.pipeline.call import Compiled
from fuseboard.profile.choose.whole_calls import COMPILED, EAGER
from fuseboard.ranks.job import job_of
from fuseboard.report.data import GraphReport
from fuseboard.run.failure import describe
from fuseboard.run.route import Route
from fuseboard.torch_api.compiling import compile_lock
from fuseboard.torch_api.state import StateGuard
from fuseboard.workshop.asking import make_request
from fuseboard.workshop.by_sizes import BySizes
from fuseboard.workshop.chosen import Chosen
from fuseboard.workshop.compiling import NotCompiled, compile_here
from fuseboard.workshop.desk import Next, desk
from fuseboard.workshop.dynamo_graph import DynamoGraph
from fuseboard.workshop.happenings import Take
from fuseboard.workshop.kept_answers import KeptAnswers
from fuseboard.workshop.kept_call import CannotKeep
from fuseboard.workshop.loading import ComputesOtherwise, NotLoaded, load
from fuseboard.workshop.proving import Proving
from fuseboard.workshop.reporting import LifeReport
from fuseboard.workshop.request import Answer, Request, TrialOutcome
from fuseboard.workshop.sizes import SizeCondition
from fuseboard.workshop.states import GraphState, StateMachine
from fuseboard.workshop.together import Together
from fuseboard.workshop.watching import Watching

log = logging.getLogger("fuseboard")

Run = Callable[..., Any]

#: Calls on kept inputs by which :func:`fuseboard.wait` ends a trial, at most.
_TRIAL_CALLS = 80


class Life:
    """One graph of Dynamo's.

    :param inputs: real ones, of which :func:`why_in_calls` says nothing; they are not kept.
    :raises CannotKeep: later calls can't be made on them.
    :ivar run: what Dynamo calls.
    """

    def __init__(self, graph: DynamoGraph, inputs: Sequence[Any]) -> None:
        session = graph.session
        self.limit_s = session.settings.hook_limit_s
        self._margin = session.settings.margin
        self._graph = graph
        self._own = self._graph.run
        self._kept = self._graph.keep(inputs)
        self._context = copy_context()
        self._machine = StateMachine()
        self._compiling = fork_safe_lock()
        self._has_begun = False
        self._chosen: Chosen | None = None
        self._answers: KeptAnswers | None = None
        #: What is to be loaded.
        self._program: bytes | None = None
        #: How many calls may take the place of the first one, and whether the next one is to.
        self._calls_left, self._wants_call = 3, False
        #: Why only a call can go on with it; "" where work beside calls can.
        self._why_here = ""
        #: Whether an earlier process's answer will do, whether this one is, and its trial.
        self._may_look, self._is_recalled = True, False
        #: Another rank of the job leads.
        self._follows = False
        self._trial: TrialOutcome | None = None
        #: While further calls are compared, since what was chosen may have an error.
        self._proving: Proving | None = None
        #: Of the trial here: Dynamo's graph (0) or what was chosen.
        self._winner = 0
        training = self._kept.grads and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in inputs
        )
        kind: GraphKind = "forward" if training else "inference"
        self._report = LifeReport(session, self._graph.frame, kind, self._machine)
        self._training = training
        self._watching = Watching(self._own, training)
        self._route = Route(self._begin_with, self._report)
        self.run = self._route.run
        #: Where several ranks have this graph: how they agree, and what is told the others.
        job = job_of(session.settings.rank_limit_s)  # where they agree: others come here never
        self._together = None if job is None else Together(job, self, self._route.put)
        self._found = Answer()
        #: Answers calls while nothing is decided.
        self._watched: Run = self._watch
        if self._together is not None:
            self._watched = self._together.counting(self._watch)

    def begin(self) -> Run:
        """What answers the calls from now on."""
        self._report.show()
        background.add(self)
        if self._graph.sizes is not None:
            self._take_calls_over()
        return self.run

    def _take_calls_over(self) -> None:
        """Let nobody wait for graphs of one size: Dynamo calls the newest that fits any.

        Their trials would need calls that don't come.
        """
        for graph in background.unsettled():
            if isinstance(graph, Life) and graph._graph.sizes is None and graph._is_of_call(self):
                background.leave(graph)

    def _is_of_call(self, other: Life) -> bool:
        """Whether it is of the same function, on the same weights."""
        frames = [one._graph.frame.partition("/")[0] for one in (self, other)]
        return frames[0] == frames[1] and self._kept.has_the_weights_of(other._kept)

    def _begin_with(self, *args: Any) -> Any:
        """Answer the first call. Work beside it begins after that: Dynamo is still at its guards
        when it has called its backend."""
        try:
            results = self._watching.first_call(*args)
        finally:
            with self._compiling:
                begins, self._has_begun = not self._has_begun, True
                if begins:  # else another thread's call was quicker
                    self._route.put(self._watched)
                    desk().submit(self)
        if begins:
            desk().pay_for_trace()
        return results

    def _watch(self, *args: Any) -> Any:
        """Answer a call by Dynamo's graph. What is called holds the life, as the desk doesn't."""
        return self._watching.call(*args)

    # --- for callers that wait -------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._report.name

    @property
    def state(self) -> GraphState:
        return self._machine.state

    @property
    def take(self) -> Take:
        return self._report.take

    @property
    def settled(self) -> bool:
        return self._machine.is_told

    @property
    def waiting(self) -> int:
        """Whether something is done for it beside calls."""
        if self._machine.is_over:
            return int(not self.settled)  # another thread puts it into the report
        needs_call = not self._has_begun or bool(self._why_here) or self._wants_call
        needs_call |= self._proving is not None
        needs_call |= self._together is not None and self._together.error is not None
        return int(self.state is not GraphState.TRIALLING and not needs_call)

    def settle(self) -> bool:
        """Let the trial end now, on the inputs that were kept; False where they weren't."""
        inputs = self._kept.inputs()
        if self._together is not None:  # a trial is the job's affair, and its calls all ranks'
            self._together.check()
            return self.settled
        if self.settled or inputs is None or self._wants_call:
            return self.settled
        try:
            with self._kept.entered(), StateGuard():
                if self._why_here:
                    self._compile_on(inputs)
                if self._chosen is None:
                    return self.settled
                proving = self._end_proof()
                make_call = self._chosen.compiled.capture_check().calls_of(inputs, self._route.run)
                for _ in range(_TRIAL_CALLS):
                    make_call()
                    if self.settled:
                        break
                if proving is not None:  # what comes is to show what these inputs can't
                    self._chosen.prove(proving.left)
        except (CannotCompare, CannotKeep):
            return False
        except containable() as error:  # the call that comes meets it as well
            log.info("fuseboard: a trial on kept inputs failed: %s", describe(error))
            return False
        return self.settled

    def forked(self) -> None:
        """In a forked child: neither the threads nor the workshop are there. Its calls begin anew.

        Only when it makes one: most forked children never do.
        """
        if self._chosen is not None and self._chosen.by_sizes is not None:
            self._chosen.by_sizes.forked()
        if self._proving is not None:
            self._proving.forked()
        if self._machine.is_over:
            return
        if self._together is not None:  # the parent is a rank, its child isn't
            self._route.put(self._own)
            return
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
            if self._answers is None:
                self._answers = KeptAnswers.of(self._graph, self._report.data, self._kept, inputs)
                if self._together is not None:
                    parts = self._answers.parts or {"graph": self._graph.graph.code}
                    self._together.begin(parts, self._graph.frame)
                    return Next.NOTHING
            if self._follows:
                return self._answered(self._found)
            known = self._answers.find() if self._may_look else None
            self._is_recalled = known is not None
            return self._answered(known) if known is not None else Next.ASK

    def lead(self) -> None:
        """Find out for all ranks what is the fastest."""
        desk().submit(self)

    def follow(self, answer: Answer) -> None:
        """Take what another rank has found."""
        self._found, self._follows = answer, True
        desk().submit(self)

    def request(self, directory: Path) -> Request | Answer:
        """What to ask the workshop, or its answer where it can't be asked."""
        with beside():
            return self._context.copy().run(make_request, self._graph, self._kept, directory)

    def answered(self, answer: Answer) -> Next:
        """Take what the workshop found."""
        if self._answers is not None and (problem := self._answers.keep(answer)):
            self._report.note(f"not kept for later processes: {problem}")
        return self._answered(answer)

    def _answered(self, answer: Answer) -> Next:
        self._found = answer
        if self._together is not None and not answer.again and answer.program is None:
            self._together.answered(answer)
        if answer.dynamo_wins:
            self._dynamo_runs(answer.reports)
        elif answer.again:
            self._try_another_call(answer.problem)
        elif answer.only_here:
            self._compile_in_a_call(answer.problem)
        elif answer.program is None:
            self.fail(answer.problem or "it wasn't tried")
        elif self._machine.change(GraphState.LOADING):
            self._program, self._trial = answer.program, answer.trial
            self._report.tell_state(self.state)
            return Next.LOAD
        return Next.NOTHING

    def _dynamo_runs(self, reports: Sequence[GraphReport]) -> None:
        """Dynamo's graph won in the workshop, or in an earlier process."""
        self._settle_on(self._own, lambda: self._report.dynamo_won(reports))
        self._report.settled(EAGER)

    def _settle_on(self, program: Run, tell: Callable[[], None] = lambda: None) -> None:
        """Let calls go to what was decided on, but for those that are to be made again."""
        answers = self._watching.before(program, self._route.put)
        self._machine.change(GraphState.SETTLED, lambda: self._route.put(answers), tell)
        self._kept.forget()

    def _try_another_call(self, problem: str) -> None:
        """The call that was kept raises: keep the next one that doesn't, and ask about that."""
        self._calls_left -= 1
        if self._calls_left < 0:
            self.fail(problem)
            return

        def keep(*args: Any) -> Any:
            results = self._watched(*args)
            with self._compiling:
                if self._wants_call:
                    self._wants_call = False
                    self._route.put(self._watched)
                    try:
                        self._kept = self._graph.keep(args)
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
        with compile_lock, self._compiling:
            if not self.settled:  # else another thread has done it
                self._compile(inputs)

    def _compile(self, inputs: Sequence[Any]) -> None:
        try:
            compiled, run = compile_here(self._graph, inputs, self._why_here)
        except NotCompiled as error:
            self.fail(str(error))
            return
        self._report.give_way(*(runner.report for runner in compiled.runners))
        self._chosen = Chosen(compiled, run)
        self._settle_on(run)

    def fail(self, problem: str) -> None:
        """Nothing comes of it: Dynamo's own graph answers all calls."""

        def tell() -> None:
            self._kept.forget()
            self._report.refused(problem)

        if self._machine.change(GraphState.REFUSED, lambda: self._route.put(self._own), tell):
            self._report.over()
        if self._together is not None:
            self._together.failed(problem)

    def load(self) -> Next:
        """Make what was chosen anew in this process."""
        return self._context.copy().run(self._load)

    def _load(self) -> Next:
        program, number = self._program, self._report.number
        assert program is not None
        with beside():
            try:
                compiled, condition = load(program, self._graph, self._kept, number)
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
            self._may_look, self._is_recalled, self._program = False, False, None
            self._machine.change(GraphState.WATCHING)
            self._report.note(f"tried anew: {error}")
            return Next.ASK
        if not isinstance(error, ComputesOtherwise):
            problem = f"what was chosen can't be loaded: {error}"
            if self._follows:
                self.fail(problem)
            else:
                self._answered(Answer(problem=problem, only_here=True))
            return Next.NOTHING
        error.note_in(self._report.data, self.name)
        self.fail(str(error))
        if self._answers is not None:  # a later process would load the same
            self._answers.keep(Answer(dynamo_wins=True, reports=(self._report.data,)))
        return Next.NOTHING

    def _install(self, compiled: Compiled, condition: SizeCondition | None) -> None:
        gradients = compiled.call.gradients
        if self._watching.is_twice and gradients is not None and gradients.why_not:
            self.fail(f"it is differentiated twice, and {gradients.why_not}")
            return
        self._report.give_way(*(runner.report for runner in compiled.runners))
        chosen = self._chosen = self._as_chosen(compiled, condition)
        for runner in compiled.runners:
            runner.on_trip = self._keep_that_eager_runs
        if compiled.is_dynamo_graph and self._together is None:
            self._settle_on(self._own)
            self._report.settled(EAGER)
        elif compiled.budget is not None:
            keep, submit = self._graph.keep, self._ask_to_compare
            self._proving = Proving(compiled, condition, self._watched, keep, submit)
            self._route.put(self._proving.run)
        else:
            self._begin_with_chosen(chosen)

    def _end_proof(self) -> Proving | None:
        """Let what was chosen answer calls, if it was being compared."""
        proving, self._proving = self._proving, None
        if proving is not None and self._chosen is not None:
            self._begin_with_chosen(self._chosen)
        return proving

    def _begin_with_chosen(self, chosen: Chosen) -> None:
        """Let what was chosen answer calls, at first in turn with Dynamo's graph."""
        if self._together is not None:
            self._route.put(self._watched)
            self._together.answered(self._found)
            self._together.loaded()
        elif self._training or chosen.compiled.is_pinned:
            # A call of the user's tells nothing of its backward; the workshop timed both together.
            # And what the user wants on a backend isn't there in Dynamo's graph.
            self._settle_on(chosen.run)
            self._report.settled(COMPILED)
        elif (trial := self._trial) is not None:
            self._settle_on(chosen.run, lambda: chosen.tell_earlier_trial(trial))
            self._report.settled(COMPILED)
        else:
            answers = chosen.in_turn_with(self._own, self._margin, self._decide)
            self._machine.change(GraphState.TRIALLING, lambda: self._route.put(answers))

    def swap(self) -> Run:
        """All ranks have what was chosen: let it answer calls, in a while."""
        chosen = self._chosen
        assert chosen is not None
        is_own = chosen.compiled.is_dynamo_graph
        program = self._own if is_own else chosen.run

        def answers(*args: Any) -> Any:
            # Until this call Dynamo's graph answered: some calls may be to be made again by it.
            self._route.put(self._watching.before(program, self._route.put))
            return self._route.run(*args)

        if not self._machine.change(GraphState.SETTLED):
            return self._own  # it was found wrong meanwhile
        self._kept.forget()
        self._report.settled(EAGER if is_own else COMPILED)
        return answers

    def _as_chosen(self, compiled: Compiled, condition: SizeCondition | None) -> Chosen:
        if condition is None:
            return Chosen(compiled, compiled.run)
        own = self._watch
        by_sizes = BySizes(compiled, condition, own, self._graph.keep, self._ask_to_compare)
        if (inputs := self._kept.inputs()) is not None:
            by_sizes.is_right_for(inputs)
        return Chosen(compiled, by_sizes.run, by_sizes)

    def _ask_to_compare(self) -> None:
        desk().compare(self)

    def compare(self) -> Next:
        """Hold what was chosen against Dynamo's graph on a further call, or of other sizes."""
        return self._context.copy().run(self._compare)

    def _compare(self) -> Next:
        chosen, proving = self._chosen, self._proving
        assert chosen is not None
        with beside():
            if proving is not None:
                if problem := proving.compare():
                    self._give_up(chosen, problem)
                elif not proving.left:
                    self._end_proof()
            elif chosen.by_sizes is not None and (problem := chosen.by_sizes.compare()):
                self._give_up(chosen, problem)
        return Next.NOTHING

    def _give_up(self, chosen: Chosen, problem: str) -> None:
        """Let no call go to what was chosen, whether it was decided on or is on trial."""

        def tell() -> None:
            chosen.tell_wrong(problem, self.name)
            self._keep_that_eager_runs(problem)

        if not self._machine.change(GraphState.SETTLED, lambda: self._let_own_answer(chosen), tell):
            self._let_own_answer(chosen)
            tell()
        self._kept.forget()
        self._proving = None
        if self._together is not None:  # other ranks may be waiting for this one
            self._together.failed(problem)

    def _let_own_answer(self, chosen: Chosen) -> None:
        chosen.leave_to(self._own)
        self._route.put(self._own)

    def keep_trial(self) -> Next:
        """Keep for later processes how the trial ended."""
        if self._winner == 0:
            self._keep_that_eager_runs()
        elif self._answers is not None and self._chosen is not None:
            self._answers.keep_trial(self._chosen.trial)
        return Next.NOTHING

    # --- in a call ------------------------------------------------------------------------------

    def _decide(self, winner: int) -> None:
        """The trial is over."""
        chosen = self._chosen
        assert chosen is not None

        def tell() -> None:
            chosen.tell_winner(winner)

        if self._machine.change(GraphState.SETTLED, lambda: self._decided(winner), tell):
            self._kept.forget()
            self._report.settled((EAGER, COMPILED)[winner])
            self._winner = winner
            desk().keep_trial(self)  # a disk may be slow

    def _decided(self, winner: int) -> None:
        assert self._chosen is not None
        self._chosen.end_trial()
        self._route.put((self._own, self._chosen.run)[winner])

    def _keep_that_eager_runs(self, problem: str = "") -> None:
        """For later processes.

        :param problem: of what was chosen, in a later call; "" where it was slower.
        """
        if self._answers is not None and self._chosen is not None:
            self._answers.keep(self._chosen.lost(problem))
