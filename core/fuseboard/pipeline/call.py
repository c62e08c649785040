"""Take one graph of Dynamo's through AOTAutograd, and what it captures through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.capture import unfit_graphs
from fuseboard.capture.comparison import CaptureCheck
from fuseboard.capture.original import forward_of
from fuseboard.contracts import Boxed
from fuseboard.errors import LoweringError, containable
from fuseboard.lower.decompose import raised_in
from fuseboard.partition.pins import Pins
from fuseboard.pipeline.graph_call import GraphCall, LeftAsItIs
from fuseboard.profile.choose.whole_calls import EAGER
from fuseboard.profile.judge.accuracy import Budget
from fuseboard.run.failure import describe
from fuseboard.run.runner import Runner
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.aot_functions import noting_functions

Run = Callable[..., Any]


@dataclass(frozen=True)
class Compiled:
    """What answers the calls of a graph.

    :ivar run: takes what Dynamo's graph takes.
    :ivar call: the compile that it comes from.
    :ivar is_dynamo_graph: it is Dynamo's own graph.
    :ivar captured: what AOTAutograd returned.
    """

    run: Run
    call: GraphCall
    is_dynamo_graph: bool = False
    captured: Run | None = None

    def capture_check(self) -> CaptureCheck:
        """What was compiled, to be held against Dynamo's graph or to be called as users do."""
        return self.call.capture_check_of(self.run)

    @property
    def runners(self) -> list[Runner]:
        return self.call.pipeline.runners

    @property
    def budget(self) -> Budget | None:
        """How far its results may be from float64; None where they are exact."""
        return self.call.pipeline.budget

    @property
    def is_pinned(self) -> bool:
        """Whether the user wants something in it where Dynamo's own graph hasn't it."""
        return any(runner.is_pinned for runner in self.runners)

    def is_decided(self) -> bool:
        """Whether no call is needed any more to decide what runs."""
        stored = self.call.pipeline.whole_call_decision
        settled = all(runner.chooser is None for runner in self.runners)
        return settled and (stored is None or self.is_pinned or stored.find() is not None)

    def dynamo_wins(self) -> bool:
        """Whether nothing that was compiled is any better than Dynamo's own graph."""
        stored = self.call.pipeline.whole_call_decision
        decision = stored.find() if stored is not None and not self.is_pinned else None
        if decision is not None:
            return decision.winner == EAGER
        sites = [site for runner in self.runners for site in runner.program.sites]
        return self.budget is None and all(site.lowered.author == "eager" for site in sites)


def compile_graph(
    session: Session,
    graph: GraphModule,
    inputs: Sequence[Any],
    example_inputs: Sequence[Any],
    frame: str,
    pins: Pins,
    bundled: Callable[[Callable[..., Boxed]], Any] | None = None,
    rewrite: bool = True,
) -> Compiled:
    """Compile a graph, or find that it is best run as Dynamo has it.

    :param inputs: for AOTAutograd, real or fake.
    :param example_inputs: the same inputs, real; they are not kept.
    :param frame: names the user's function in reports.
    :param pins: what the user wants where.
    :param bundled: wraps each of AOTAutograd's compilers, so that what they return can be sent to
        another process.
    :param rewrite: let plugins rewrite Dynamo's graph before it is captured.
    """
    call = GraphCall(session, graph, frame, pins)

    def as_dynamo_has_it() -> Compiled:
        return Compiled(forward_of(graph), call, is_dynamo_graph=True)

    def without_rewrites(problem: str) -> Compiled:
        call.pipeline.contain_rewritten_graph(problem)
        return compile_graph(
            session, graph, inputs, example_inputs, frame, pins, bundled, rewrite=False
        )

    if why := unfit_graphs.why_not_supported(graph, example_inputs):
        call.pipeline.leave_as_it_is(why)
        return as_dynamo_has_it()
    if why := unfit_graphs.why_unfit(graph, example_inputs):
        call.pipeline.leave_refused_graph(LoweringError(why))
        return as_dynamo_has_it()
    around = bundled or (lambda compiler: compiler)
    if bundled is not None:
        call.pipeline.records = []
    with torch_internals.capturing(), call.with_example_inputs(example_inputs):
        captured = call.pipeline.rewrite_dynamo_graph(graph) if rewrite else graph
        table = call.decompositions(example_inputs)
        call.pipeline.rewriter.decompositions = table
        aot = torch_internals.aot_autograd(
            fw_compiler=around(partial(call.compile, kind="forward")),
            bw_compiler=around(call.compile_backward),
            inference_compiler=around(partial(call.compile, kind="inference")),
            partition_fn=call.pipeline.partition_joint,
            decompositions=table,
        )
        try:
            with noting_functions() as functions:
                compiled = aot(captured, inputs)
        except containable() as error:  # AOTAutograd's ways to refuse a graph are many
            if call.pipeline.has_raised or torch_internals.is_dynamo_error(error):
                raise
            if isinstance(error, LeftAsItIs):
                call.pipeline.leave_as_it_is(str(error))
                return as_dynamo_has_it()
            if captured is not graph:
                return without_rewrites(describe(error))
            if raised_in(table, error):
                call.pipeline.contain_refused_graph(error)
            else:
                call.pipeline.leave_refused_graph(error)
            return as_dynamo_has_it()
    call.complete_gradients(functions)
    if problem := call.capture_problem(compiled, example_inputs):
        if captured is not graph:
            return without_rewrites(problem)
        call.pipeline.contain_other_graph(problem)
        return as_dynamo_has_it()
    chosen = call.choose_whole_calls(compiled)
    if chosen is None:
        return as_dynamo_has_it()
    run = call.watch_autocast(chosen)
    return Compiled(call.unless_unfit(run, example_inputs), call, captured=compiled)


def contain_untraced(session: Session, graph: GraphModule, frame: str, why: str) -> None:
    """Report that eager runs the user's code, since Dynamo's graph isn't that.

    :raises RegionError: the policy is to raise.
    """
    pipeline = GraphCall(session, graph, frame).pipeline
    pipeline.contain_refused_graph(LoweringError(why), "Dynamo", "the user's code, in eager")
