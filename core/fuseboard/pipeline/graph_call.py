"""A graph of Dynamo's while it is compiled: AOTAutograd's compilers, and what goes around it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.capture import mixed_norms, unfit_calls
from fuseboard.capture.comparison import CaptureCheck
from fuseboard.capture.gradients import Gradients
from fuseboard.capture.original import fix_negative_bases, forward_of
from fuseboard.capture.side_runs import CannotCompare
from fuseboard.contracts import Boxed, GraphKind
from fuseboard.errors import LoweringError, PluginError, containable
from fuseboard.lower.decompose import keeping_layout
from fuseboard.partition.pins import Pins
from fuseboard.pipeline.stages import Pipeline
from fuseboard.profile.choose.whole_calls import EAGER, WholeCalls
from fuseboard.ranks.job import several_ranks
from fuseboard.report.data import CandidateReport
from fuseboard.run.captured_graph import CapturedBackward, CapturedGraph
from fuseboard.run.failure import describe
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api import modes as torch_modes
from fuseboard.torch_api.compiling import compile_lock
from fuseboard.torch_api.copies import copy_graph
from fuseboard.torch_api.state import StateGuard
from fuseboard.torch_api.views import eager_strides

Run = Callable[..., Any]

#: The name of AOTAutograd's graphs in stored comparisons with Dynamo's graph.
CAPTURED = "captured"


class LeftAsItIs(Exception):
    """What AOTAutograd makes of a graph is known to be something else, so that it isn't wanted."""


class GraphCall:
    """A graph of Dynamo's while it is compiled.

    :ivar mutated: positions of the inputs that a call writes to.
    :ivar input_count: how many inputs AOTAutograd's graph has.
    :ivar autocast: whether calls are made under autocast.
    :ivar gradients: of a training graph.
    """

    def __init__(
        self,
        session: Session,
        graph: GraphModule,
        frame: str,
        pins: Pins | None = None,
        number: int | None = None,
    ) -> None:
        self.session = session
        self.graph = graph
        self.pipeline = Pipeline(session, frame, pins, number)
        #: Ways into the graphs that AOTAutograd captured.
        self.captured_graphs: list[CapturedGraph] = []
        self.autocast = torch_modes.autocast_is_on()
        self.mutated: frozenset[int] = frozenset()
        self.input_count = 0
        self.gradients: Gradients | None = None

    @contextmanager
    def with_example_inputs(self, example_inputs: Sequence[Any]) -> Iterator[None]:
        """Let the pipeline see Dynamo's graph and the real inputs for the block.

        Neither is kept, except the graph where it is what runs. Under autocast it can't be: the
        casts are in AOTAutograd's graph alone, which is called with autocast off.
        """
        self.pipeline.example_inputs.values = example_inputs
        self.pipeline.dynamo_graph = None if torch_modes.autocast_is_on() else self.graph
        try:
            yield
        finally:
            self.pipeline.example_inputs.values, self.pipeline.dynamo_graph = (), None

    def compile(self, graph: GraphModule, inputs: Sequence[Any], kind: GraphKind) -> Boxed:
        """AOTAutograd's compiler of forward and inference graphs."""
        self.mutated = torch_internals.input_roles().mutated
        self.input_count = len(inputs)
        if kind == "forward":
            if torch_internals.writes_cut_gradients_off():
                raise LeftAsItIs("it writes to an input that has a gradient, as results do")
            torch_internals.note_no_donated_buffers()
        for inner in graph.children():  # of control flow, which calls them as torch writes them
            fix_negative_bases(inner)
        own = copy_graph(graph)
        captured = CapturedGraph(lambda: own, f"captured_{kind}")
        self.captured_graphs.append(captured)
        self.pipeline.compile(captured, kind)
        return captured.boxed()

    def compile_backward(self, graph: GraphModule, inputs: Sequence[Any]) -> Boxed:
        """AOTAutograd's compiler of backward graphs: they are compiled when they first run.

        One with sizes among its inputs is compiled at once: a later guard on them would be lost.
        """
        own = copy_graph(graph)
        captured = CapturedBackward(lambda: own, "captured_backward", self.note_backward)
        self.captured_graphs.append(captured)
        if any(isinstance(value, torch.SymInt) for value in inputs):
            self.pipeline.compile(captured, "backward")
        else:
            captured.put(self._compiling_first(captured))
        return captured.boxed()

    def note_backward(self, text: str) -> None:
        """Note something in the backward's report; in the forward's, as long as there is none."""
        reports = [runner.report for runner in self.pipeline.runners]
        report = next((one for one in reports if one.kind == "backward"), next(iter(reports), None))
        if report is not None and text not in report.notes:
            report.notes.append(text)

    def _compiling_first(self, captured: CapturedGraph) -> Boxed:
        entered = torch_internals.compiling_later()

        def call(args: list[Any]) -> Sequence[Any]:
            with compile_lock:
                if captured.function is call:  # else another thread was quicker
                    with StateGuard(), eager_strides(), entered():
                        self.pipeline.compile(captured, "backward")
            return captured.function(args)

        return call

    def decompositions(self, example_inputs: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
        """The decompositions to capture with: none in inference, where the captured graph is what
        values are compared with.

        In training those of all backends that train, in any order: the split into forward and
        backward can choose among the resulting ops only, and rewrites of joint graphs are written
        for the level of their backend. Of two decompositions of one op the one of the backend whose
        name comes first is used.
        """
        training = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
        )
        if not training:
            return {}
        wanted: dict[Any, Callable[..., Any]] = {}
        for info in sorted(self.session.backends, key=lambda info: info.name):
            if not info.training:
                continue
            try:
                table = self.session.call(
                    "fuseboard_decompositions",
                    info.name,
                    kind="joint",
                    options=self.session.options(info.name),
                )
            except (PluginError, LoweringError) as error:
                self.pipeline.contain_at_capture(info.name, error)
                continue
            wanted = {**(table or {}), **wanted}
        return keeping_layout({**mixed_norms.decompositions(), **wanted})

    def capture_check_of(self, compiled: Run) -> CaptureCheck:
        as_many = self.input_count == len(self.graph.graph.find_nodes(op="placeholder"))
        written = self.mutated if as_many or not self.mutated else None
        fast = self.session.settings.random == "fast"
        budget = self.pipeline.budget
        return CaptureCheck(self.graph, compiled, self.captured_graphs, written, fast, budget)

    def capture_problem(self, compiled: Callable[..., Any], example_inputs: Sequence[Any]) -> str:
        """What AOTAutograd's graphs compute that Dynamo's doesn't; "" where nothing is found."""
        pipeline, settings = self.pipeline, self.session.settings
        if settings.verify == "off" or not pipeline.runners or several_ranks():
            return ""
        captured = self.capture_check_of(compiled)
        report = pipeline.runners[0].report
        problem = reason = ""
        try:
            with compile_lock, report.timed("capture"):
                problem = self._known_difference(captured, example_inputs)
        except CannotCompare as why:
            reason = str(why)
        except containable() as error:  # torch's, on results of a kind that it can't compute with
            reason = describe(error)
        if reason:
            report.notes.append(f"not held against Dynamo's own graph: {reason}")
        return problem

    def _known_difference(self, captured: CaptureCheck, inputs: Sequence[Any]) -> str:
        """Where AOTAutograd's graphs differ from Dynamo's, by the cost database or a comparison."""
        stored = self.pipeline.capture_decision
        if stored is None or stored.parts is None:
            return captured.difference(inputs)
        text = hashlib.sha256(self.graph.code.encode()).hexdigest()
        stored = replace(stored, parts={**stored.parts, "dynamos": text})
        if (decision := stored.find()) is not None:
            return next((one.problem for one in decision.candidates), "")
        problem = captured.difference(inputs)
        row = CandidateReport(CAPTURED, "failed" if problem else "chosen", problem=problem)
        stored.record(EAGER if problem else CAPTURED, [row], settled=True)
        return problem

    def choose_whole_calls(self, compiled: Callable[..., Any]) -> Callable[..., Any] | None:
        """Let the faster of the compiled code and Dynamo's own graph run the calls.

        In training, and where Dynamo's graph isn't among the candidates. None where an earlier
        process found that Dynamo's graph is faster.
        """
        stored = self.pipeline.whole_call_decision
        if stored is None:
            return compiled
        reports = self.pipeline.chosen
        return WholeCalls(
            compiled, self.graph, self.mutated, self.session, reports, stored, self.pipeline.runners
        ).run()

    def unless_unfit(
        self, compiled: Callable[..., Any], example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Let Dynamo's own graph run the calls that what was compiled isn't made for."""
        training = any(runner.context.kind != "inference" for runner in self.pipeline.runners)
        conditions: list[unfit_calls.Unfit] = []
        if training:
            conditions.append(unfit_calls.with_tangents)
        if training and self.mutated:
            conditions.append(unfit_calls.writes_in_a_checkpoint)
        if self.mutated:
            conditions.append(unfit_calls.other_overlaps(example_inputs))
        if self.gradients is not None and self.gradients.why_not:
            conditions.append(self.gradients.unfit)
        own = forward_of(self.graph)
        return unfit_calls.unless_unfit(compiled, own, conditions, self._note)

    def complete_gradients(self, functions: Sequence[Any]) -> None:
        """Let a training graph's backward do as autograd's does.

        :param functions: the autograd functions that AOTAutograd made.
        """
        backwards = [one for one in self.captured_graphs if isinstance(one, CapturedBackward)]
        if not backwards:
            return
        if len(functions) != 1 or len(self.captured_graphs) != 2:
            self._note(
                "this torch's AOTAutograd has another autograd function than the board knows: "
                "gradients of gradients are as it makes them"
            )
            return
        (forward,) = (one for one in self.captured_graphs if one is not backwards[0])
        fast = self.session.settings.random == "fast"
        self.gradients = Gradients(self.graph, forward, backwards[0], fast, self.note_backward)
        self.gradients.take_over(functions[0])

    def watch_autocast(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Tell backwards whether they are called under autocast, which AOTAutograd hides."""
        backwards = [one for one in self.captured_graphs if isinstance(one, CapturedBackward)]
        if not backwards or not self.autocast:
            return compiled

        def run(*args: Any) -> Any:
            results = compiled(*args)
            torch_modes.before_backward(results, backwards[0].look_around)
            return results

        return run

    def _note(self, text: str) -> None:
        for report in (runner.report for runner in self.pipeline.runners):
            if text not in report.notes:
                report.notes.append(text)
