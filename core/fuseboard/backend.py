"""The ``torch.compile`` entry: Dynamo's graph in, AOTAutograd wired to the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard import mixed_norms, torch_internals
from fuseboard.board import Session, board
from fuseboard.config import resolve
from fuseboard.contracts import Boxed
from fuseboard.errors import LoweringError, PluginError
from fuseboard.original import mend_powers
from fuseboard.partition.pins import Pins
from fuseboard.pipeline import Pipeline
from fuseboard.report.data import ledger
from fuseboard.step import whole_step


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
    session = board.session(resolve(options, mode))
    mend_powers(graph)
    capture = _Capture(session, graph)
    with torch_internals.without_donated_buffers(), capture.knowing(example_inputs):
        aot = torch_internals.aot_autograd(
            fw_compiler=partial(capture.compile, kind="forward"),
            bw_compiler=partial(capture.compile, kind="backward"),
            inference_compiler=partial(capture.compile, kind="inference"),
            partition_fn=capture.partition_joint,
            decompositions=capture.decompositions(example_inputs),
        )
        try:
            compiled = aot(graph, example_inputs)
        except Exception as error:  # AOTAutograd's ways to refuse a graph are many
            if capture.was_compiling or torch_internals.is_dynamos(error):
                raise
            capture.pipeline.contain_refused_graph(error)
            return graph.forward
    return capture.guard_overlap(capture.whole_step(compiled), example_inputs)


class _Capture:
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
        self.was_compiling = False
        self._mutated: frozenset[int] = frozenset()

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

    def compile(self, graph: GraphModule, inputs: Sequence[Any], kind: Any) -> Boxed:
        if kind != "backward":
            self._mutated = torch_internals.input_roles().mutated
        if kind == "forward":
            torch_internals.note_no_donated_buffers()
        self.was_compiling = True
        boxed = self.pipeline.compile(graph, inputs, kind)
        self.was_compiling = False
        return boxed

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

    def whole_step(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """In training, let the faster of what was compiled and Dynamo's own graph run the calls."""
        book = self.pipeline.step_book
        if book is None:
            return compiled
        reports = self.pipeline.chosen
        return whole_step(compiled, self.graph, self._mutated, self.session, reports, book)

    def guard_overlap(
        self, compiled: Callable[..., Any], example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Let Dynamo's own graph run the calls whose inputs overlap as the compiled ones didn't.

        AOTAutograd compiles for the overlap that it sees, and Dynamo doesn't guard on it
        (pytorch#139789). Only graphs that write to their inputs can tell the difference.
        """
        if not self._mutated:
            return compiled
        graph, note = self.graph, self._note_overlap
        expected = _overlap(example_inputs)

        def run(*args: Any) -> Any:
            if _overlap(args) != expected:
                note()
                return graph(*args)
            return compiled(*args)

        return run

    def _note_overlap(self) -> None:
        text = "a call's inputs overlapped as the compiled ones didn't: Dynamo's own graph ran"
        for report in ledger.graphs():
            if report.frame.endswith(self.pipeline.frame) and text not in report.notes:
                report.notes.append(text)


def _overlap(args: Sequence[Any]) -> frozenset[tuple[tuple[int, int], ...]]:
    """Which inputs overlap, and how: (position, offset) of each, a tuple for each storage.

    Code for inputs that overlap has their offsets in their storage built in.
    """
    tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    addresses = [torch_internals.storage_address(tensor) for _, tensor in tensors]
    if len(set(addresses)) == len(addresses):
        return frozenset()
    groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for address, pair in zip(addresses, tensors, strict=True):
        groups.setdefault(address, []).append(pair)
    found = []
    for group in groups.values():
        if len(group) > 1:
            places = sorted(torch_internals.overlapping([tensor for _, tensor in group]))
            found.append(tuple((group[i][0], int(group[i][1].storage_offset())) for i in places))
    return frozenset(filter(None, found))
