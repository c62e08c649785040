"""The ``torch.compile`` entry: Dynamo's graph in, AOTAutograd wired to the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard import mixed_norms, torch_internals, unfit_calls
from fuseboard.board import Session, board
from fuseboard.captured import CannotCompare, Capture
from fuseboard.config import resolve
from fuseboard.contracts import Boxed, GraphKind
from fuseboard.errors import CONTAINED, LoweringError, PluginError
from fuseboard.lower.entry import BackwardEntry, Entry
from fuseboard.lower.failure import describe
from fuseboard.lower.specialise import compiling
from fuseboard.original import forward_of, mend_powers
from fuseboard.partition.pins import Pins
from fuseboard.pipeline import Pipeline
from fuseboard.profile.ranks import several_ranks
from fuseboard.step import whole_step
from fuseboard.torch_copies import copy_graph
from fuseboard.torch_state import StateGuard
from fuseboard.torch_views import eager_view_strides, why_not_installed

why_not_installed()  # Dynamo traces before it calls the backend


def fuseboard(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that ``torch.compile(backend="fuseboard")`` finds by its entry point.

    :param graph: Dynamo's graph; parameters and buffers are among its inputs.
    :param example_inputs: real tensors; they are not kept.
    :param mode: a preset of settings.
    :param options: settings, above every other source; ``{"mode": ...}`` is accepted.
    :raises SettingsError: a setting is wrong; nothing has been compiled.
    """
    with StateGuard(), eager_view_strides():
        compiled = _compile(graph, example_inputs, mode, options)
    return _under_its_modes(compiled) if torch_internals.function_modes_are_on() else compiled


def _under_its_modes(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Call what was compiled with modes of ``__torch_function__`` off.

    Dynamo has traced through them, so what they do is in the graph; it would be done twice.
    """

    def run(*args: Any) -> Any:
        with torch_internals.without_function_modes():
            return compiled(*args)

    return run


def _compile(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    session = board.session(resolve(options, mode))
    if problem := why_not_installed():
        session.notes.append(problem)
    mend_powers(graph)
    call = _BackendCall(session, graph)
    with torch_internals.capturing(), call.knowing(example_inputs):
        aot = torch_internals.aot_autograd(
            fw_compiler=partial(call.compile, kind="forward"),
            bw_compiler=call.compile_backward,
            inference_compiler=partial(call.compile, kind="inference"),
            partition_fn=call.partition_joint,
            decompositions=call.decompositions(example_inputs),
        )
        try:
            compiled = aot(graph, example_inputs)
        except CONTAINED as error:  # AOTAutograd's ways to refuse a graph are many
            if call.was_compiling or torch_internals.is_dynamos(error):
                raise
            call.pipeline.contain_refused_graph(error)
            return forward_of(graph)
    if call.is_another(compiled, example_inputs):
        return forward_of(graph)
    compiled = call.watch_autocast(call.whole_step(compiled))
    return call.unless_unfit(compiled, example_inputs)


class _BackendCall:
    """One call of the backend.

    :ivar was_compiling: whether the board's own stages ran when AOTAutograd ended, not its code.
    """

    def __init__(self, session: Session, graph: GraphModule) -> None:
        self.session = session
        self.graph = graph
        # A look at the callers' locals keeps what they hold alive for as long as those frames run:
        # only where a pattern has to be compared with the modules in them.
        wishes = session.settings.pin or session.settings.exclude
        pins = Pins(session, graph, torch_internals.frame_scope() if wishes else None)
        self.pipeline = Pipeline(session, torch_internals.frame_name(), pins)
        #: Ways into the graphs that AOTAutograd captured.
        self.entries: list[Entry] = []
        self.was_compiling = False
        self._autocast = torch_internals.autocast_is_on()
        self._mutated: frozenset[int] = frozenset()
        self._inputs = 0

    @contextmanager
    def knowing(self, example_inputs: Sequence[Any]) -> Iterator[None]:
        """Let the pipeline see Dynamo's graph and the real inputs for the block.

        Neither is kept, but for the graph where it is what runs. Under autocast it can't run: what
        is cast, AOTAutograd's graph alone knows, and is called with autocast off.
        """
        self.pipeline.example_inputs = example_inputs
        self.pipeline.dynamos = None if torch_internals.autocast_is_on() else self.graph
        try:
            yield
        finally:
            self.pipeline.example_inputs, self.pipeline.dynamos = (), None

    def compile(self, graph: GraphModule, inputs: Sequence[Any], kind: GraphKind) -> Boxed:
        """For a forward or inference graph."""
        self._mutated = torch_internals.input_roles().mutated
        self._inputs = len(inputs)
        if kind == "forward":
            torch_internals.note_no_donated_buffers()
        entry = self._entry(graph, kind)
        self._compile(entry, kind)
        return entry.boxed()

    def compile_backward(self, graph: GraphModule, inputs: Sequence[Any]) -> Boxed:
        """A backward graph is compiled when it first runs: it may never do.

        One with sizes among its inputs is compiled at once: a later guard on them would be lost.
        """
        entry = BackwardEntry(copy_graph(graph), "captured_backward", self._note_backward)
        self.entries.append(entry)
        if any(isinstance(value, torch.SymInt) for value in inputs):
            self._compile(entry, "backward")
        else:
            entry.put(self._compiling_first(entry))
        return entry.boxed()

    def _note_backward(self, text: str) -> None:
        """Into the report of the backward graph; the forward's, as long as there is none."""
        reports = [runner.report for runner in self.pipeline.runners]
        report = next((one for one in reports if one.kind == "backward"), next(iter(reports), None))
        if report is not None and text not in report.notes:
            report.notes.append(text)

    def _entry(self, graph: GraphModule, kind: GraphKind) -> Entry:
        for inner in graph.children():  # of control flow, which calls them as torch writes them
            mend_powers(inner)
        self.entries.append(Entry(copy_graph(graph), f"captured_{kind}"))
        return self.entries[-1]

    def _compile(self, entry: Entry, kind: GraphKind) -> None:
        self.was_compiling = True
        self.pipeline.compile(entry, kind)
        self.was_compiling = False

    def _compiling_first(self, entry: Entry) -> Boxed:
        entered = torch_internals.compiling_later()

        def call(args: list[Any]) -> Sequence[Any]:
            with compiling:
                if entry.function is call:  # else another thread was quicker
                    with StateGuard(), eager_view_strides(), entered():
                        self._compile(entry, "backward")
            return entry.function(args)

        return call

    def partition_joint(self, *args: Any, **keywords: Any) -> tuple[GraphModule, GraphModule]:
        self.was_compiling = True
        parts = self.pipeline.partition_joint(*args, **keywords)
        self.was_compiling = False
        return parts

    def decompositions(self, example_inputs: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
        """The level to capture at: no decompositions in inference, so that none is in what values
        are held against.

        In training the level of the first backend in order that trains: the split into forward and
        backward can choose among these ops only, and that backend's rewrites of joint graphs are
        made for them.
        """
        training = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
        )
        if not training:
            return {}
        own = mixed_norms.decompositions()
        for info in self.session.backends:
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
            return {**own, **(table or {})}
        return own

    def is_another(self, compiled: Callable[..., Any], example_inputs: Sequence[Any]) -> bool:
        """Whether AOTAutograd's graphs compute something else than Dynamo's; that is contained.

        :raises RegionError: the policy is to raise.
        """
        pipeline, settings = self.pipeline, self.session.settings
        if settings.verify == "off" or not pipeline.runners or several_ranks():
            return False
        as_many = self._inputs == len(self.graph.graph.find_nodes(op="placeholder"))
        written = self._mutated if as_many or not self._mutated else None
        fast = settings.random == "fast"
        captured = Capture(self.graph, compiled, self.entries, written, fast)
        report = pipeline.runners[0].report
        problem = reason = ""
        try:
            with compiling, report.timed("capture"):
                problem = captured.known_difference(pipeline.capture_book, example_inputs)
        except CannotCompare as why:
            reason = str(why)
        except CONTAINED as error:  # torch's, on results of a kind that it can't compute with
            reason = describe(error)
        if reason:
            report.notes.append(f"not held against Dynamo's own graph: {reason}")
        if problem:
            pipeline.contain_other_graph(problem)
        return bool(problem)

    def whole_step(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Let the faster of what was compiled and Dynamo's own graph run the calls.

        In training, and where none of the compiled graph's candidates is Dynamo's.
        """
        book = self.pipeline.step_book
        if book is None:
            return compiled
        reports = self.pipeline.chosen
        return whole_step(
            compiled, self.graph, self._mutated, self.session, reports, book, self.pipeline.runners
        )

    def unless_unfit(
        self, compiled: Callable[..., Any], example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Let Dynamo's own graph run the calls that what was compiled isn't made for."""
        training = any(runner.board.kind != "inference" for runner in self.pipeline.runners)
        conditions: list[unfit_calls.Unfit] = []
        if training:
            conditions.append(unfit_calls.with_tangents)
        if training and self._mutated:
            conditions.append(unfit_calls.writes_in_a_checkpoint)
        if self._mutated:
            conditions.append(unfit_calls.other_overlaps(example_inputs))
        own = forward_of(self.graph)
        return unfit_calls.unless_unfit(compiled, own, conditions, self._note)

    def watch_autocast(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Let backwards know whether they are called under autocast, where AOTAutograd hides it."""
        backwards = [one for one in self.entries if isinstance(one, BackwardEntry)]
        if not backwards or not self._autocast:
            return compiled

        def run(*args: Any) -> Any:
            results = compiled(*args)
            torch_internals.before_backward(results, backwards[0].look_around)
            return results

        return run

    def _note(self, text: str) -> None:
        for report in (runner.report for runner in self.pipeline.runners):
            if text not in report.notes:
                report.notes.append(text)
