"""Compile a graph of Dynamo's away from Dynamo's call of its backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.contracts import Boxed
from fuseboard.errors import containable
from fuseboard.lower.guards import keeping_sizes
from fuseboard.partition.pins import Pins
from fuseboard.pipeline.call import Compiled, compile_graph
from fuseboard.run.failure import describe
from fuseboard.torch_api.call_sizes import CallSizes
from fuseboard.torch_api.compiling import alone_in_tracing
from fuseboard.torch_api.dynamo_graphs import Tracing, tracing_apart
from fuseboard.torch_api.state import StateGuard
from fuseboard.torch_api.views import eager_strides
from fuseboard.workshop.admission import why_not_kept
from fuseboard.workshop.dynamo_graph import DynamoGraph
from fuseboard.workshop.sizes import SizeCondition, SizeRoute

Run = Callable[..., Any]


@dataclass(frozen=True)
class CompiledApart:
    """What was compiled, and what Dynamo would have had to guard on.

    :ivar compiled: answers calls for which :meth:`condition` holds.
    """

    compiled: Compiled
    _tracing: Tracing
    _sizes: SizeCondition | None

    @property
    def problem(self) -> str:
        """Why it can't answer calls; "" if it can."""
        if not self._tracing.guards():
            return ""
        return (
            "AOTAutograd relies on which of its inputs are the same, on which Dynamo doesn't "
            "guard then"
        )

    def condition(self) -> SizeCondition | None:
        """What has to hold of a call's sizes, as far as is known now; None where these are plain.

        :raises NoCondition: it can't be told from a call.
        """
        return None if self._sizes is None else self._sizes.with_terms(self._tracing.learned)

    def learn_no_more(self) -> None:
        """What has still to be compiled has to do with what is known of the sizes."""
        self._tracing.freeze()


def compile_apart(
    session: Session,
    graph: GraphModule,
    inputs: Sequence[Any],
    sizes: CallSizes | None,
    frame: str,
    pins: Pins,
    bundled: Callable[[Callable[..., Boxed]], Any] | None = None,
) -> CompiledApart:
    """Compile a graph for calls of all sizes that Dynamo's guards let through, as far as it can be.

    :param inputs: real ones.
    :param sizes: what Dynamo knows of their sizes.
    :param frame: names the user's function in reports.
    :param pins: what the user wants where.
    :param bundled: as of :func:`fuseboard.pipeline.call.compile_graph`.
    """
    with eager_strides(), keeping_sizes(), tracing_apart(inputs, sizes) as tracing:
        graph = tracing.with_known_numbers(graph)
        condition = SizeCondition.on(tracing.inputs)  # before any of their sizes may be fixed
        try:
            tracing.note_example_values(graph, inputs)
            rewrite = True
        except containable():  # a limit of fake tensors; AOTAutograd may know another way
            rewrite = False
        compiled = compile_graph(
            session, graph, tracing.inputs, inputs, frame, pins, bundled, rewrite=rewrite
        )
        return CompiledApart(compiled, tracing, condition)


class NotCompiled(Exception):
    """Nothing that could answer calls came of it; the text says why."""


def compile_here(graph: DynamoGraph, inputs: Sequence[Any], why: str) -> tuple[Compiled, Run]:
    """Compile a graph within a call of the user's; with what then answers calls of all sizes.

    Each program checks its first calls of other sizes itself. Dynamo's graph answers what they
    aren't good for.

    :param why: it isn't done beside calls.
    :raises NotCompiled: it can't be done.
    """
    if why_not := next(filter(None, map(why_not_kept, inputs)), ""):
        raise NotCompiled(f"{why}; {why_not}")
    session = graph.session
    session.notes.append(f"tried within calls, not beside them: {why}")
    try:
        with StateGuard(), alone_in_tracing():
            apart = compile_apart(
                session, graph.graph, inputs, graph.sizes, graph.frame, graph.pins
            )
        condition = apart.condition()
    except containable() as error:
        raise NotCompiled(describe(error)) from error
    if apart.problem:
        raise NotCompiled(apart.problem)
    apart.learn_no_more()
    run = apart.compiled.run
    if condition is not None:
        run = SizeRoute(condition, run, graph.run, None).run
    return apart.compiled, run
