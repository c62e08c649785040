"""The ``torch.compile`` entry: Dynamo's graph in, what answers its calls out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.board import Session, board
from fuseboard.capture.known_indices import write_known_indices
from fuseboard.capture.original import fix_negative_bases
from fuseboard.capture.unfit_graphs import take_out_inference_mode, why_not_supported
from fuseboard.capture.untraced_modes import why_untraced
from fuseboard.config import resolve
from fuseboard.errors import LoweringError
from fuseboard.partition.pins import Pins
from fuseboard.pipeline.call import compile_graph, contain_untraced
from fuseboard.torch_api import modes as torch_modes
from fuseboard.torch_api.call_sizes import sizes_of
from fuseboard.torch_api.dynamo_graphs import with_held_as_inputs
from fuseboard.torch_api.frames import frame_title, leave_to_eager, needs_one_graph
from fuseboard.torch_api.state import StateGuard
from fuseboard.torch_api.symbols import in_the_example
from fuseboard.torch_api.tensor_classes import is_fake
from fuseboard.torch_api.views import eager_strides, why_not_installed
from fuseboard.workshop.admission import why_held, why_in_calls, why_not_apart, with_a_cache
from fuseboard.workshop.desk import watch_dynamo
from fuseboard.workshop.dynamo_graph import DynamoGraph
from fuseboard.workshop.first_call import begin_with_a_call
from fuseboard.workshop.kept_call import CannotKeep
from fuseboard.workshop.life import Life

# Dynamo traces before it calls the backend.
why_not_installed()
watch_dynamo()

Run = Callable[..., Any]
#: Makes what answers the calls of a graph, from its first inputs.
Compiler = Callable[[Session, GraphModule, Sequence[Any]], Run]


def fuseboard(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Run:
    """The backend that ``torch.compile(backend="fuseboard")`` finds by its entry point.

    Under the policy ``measured`` it returns at once: Dynamo's own graph answers calls until
    something better is ready. Where the settings ask to wait, or the graph can't be tried in
    another process, it is compiled before this returns.

    :param graph: Dynamo's graph; parameters and buffers are among its inputs.
    :param example_inputs: real tensors; they are not kept.
    :param mode: a preset of settings.
    :param options: settings, above every other source; ``{"mode": ...}`` is accepted.
    :raises SettingsError: a setting is wrong; nothing has been compiled.
    """
    return _answered(_begin, graph, example_inputs, mode, options)


def compile_now(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Run:
    """Like :func:`fuseboard`, for callers that wait: candidates are compared within calls."""
    return _answered(_compile, graph, example_inputs, mode, options)


def _answered(
    compiler: Compiler,
    graph: GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> Run:
    """What answers the calls of a graph, in the modes that it assumes."""
    with StateGuard(), eager_strides():
        session = board.session(resolve(options, mode))
        if problem := why_not_installed():
            session.notes.append(problem)
        _refuse_untraced(session, graph)
        fix_negative_bases(graph)
        write_known_indices(graph)
        run = _in_its_inference_mode(compiler, session, graph, inputs)
    return _under_its_modes(run)


def _refuse_untraced(session: Session, graph: GraphModule) -> None:
    """Let eager run the user's code where Dynamo's graph isn't what that computes.

    :raises LoweringError: the user wants one graph.
    """
    why = why_untraced(graph)
    if why and needs_one_graph():
        raise LoweringError(f"{why}, and fullgraph=True leaves no other way")
    if why:
        contain_untraced(session, graph, frame_title(), why)
        leave_to_eager(why)


def _begin(session: Session, graph: GraphModule, inputs: Sequence[Any]) -> Run:
    """What answers calls from now on: compiled beside them, or before this returns."""
    if why_not_supported(graph, inputs):
        return _compile(session, graph, inputs)
    why = why_in_calls(session, inputs)
    if not why:
        given, held = with_held_as_inputs(graph)
        why = why_held(given) or why_not_apart(given)
    if not why:
        try:
            sizes = sizes_of(given, [*inputs, *held])
            real = [*map(in_the_example, inputs), *held]
            dynamo_graph = DynamoGraph.of_call(with_a_cache(session), given, real, sizes)
            waits = any(map(is_fake, real))
            run = begin_with_a_call(dynamo_graph) if waits else Life(dynamo_graph, real).begin()
            return run if not held else lambda *args: run(*args, *held)
        except (CannotKeep, LoweringError) as error:
            why = str(error)
    if session.settings.settle == "background":
        session.notes.append(f"tried within calls, not beside them: {why}")
    return _compile(session, graph, inputs)


def _compile(session: Session, graph: GraphModule, inputs: Sequence[Any]) -> Run:
    pins = Pins(session, graph)
    return compile_graph(session, graph, inputs, inputs, frame_title(), pins).run


def _in_its_inference_mode(
    compiler: Compiler, session: Session, graph: GraphModule, inputs: Sequence[Any]
) -> Run:
    """Compile and call in inference mode what the user's code computes in one, all of it."""
    if torch.is_inference_mode_enabled() or not take_out_inference_mode(graph):
        return compiler(session, graph, inputs)
    with torch.inference_mode():
        inner = compiler(session, graph, inputs)

    def run(*args: Any) -> Any:
        with torch.inference_mode():
            return inner(*args)

    return run


def _under_its_modes(compiled: Run) -> Run:
    """Call what was compiled with modes of ``__torch_function__`` off, where there are some.

    Dynamo has traced through them, so what they do is in the graph; it would be done twice.
    """
    if not torch_modes.function_modes():
        return compiled

    def run(*args: Any) -> Any:
        with torch_modes.without_function_modes():
            return compiled(*args)

    return run
