"""``fuseboard export``: a whole inference graph as a file that runs without torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuseboard.cli.explain import OutputError, Target, call_at
from fuseboard.errors import FuseboardError

if TYPE_CHECKING:
    from torch.fx import GraphModule


class ExportError(FuseboardError):
    """A model can't be exported, nobody writes such files, or what was written is wrong."""


def export(
    target: Target,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="What to write: out.onnx.")],
    rtol: Annotated[float, typer.Option(min=0, help="Allowed relative error.")] = 1e-3,
    atol: Annotated[float, typer.Option(min=0, help="Allowed absolute error.")] = 1e-4,
) -> None:
    """Write a model's inference graph, with its weights, and compare the file's results.

    FUNCTION returns a model and its arguments, (model, args) or (model, args, kwargs), as for
    fuseboard explain. torch.export has to be able to export the model, and the file is for the
    sizes of these arguments. The file is checked and run, and its results are held against eager's.

    Which endings can be written depends on the plugins: onnxruntime writes .onnx.
    """
    path = path.absolute()  # the code may change the directory
    if not path.parent.is_dir():
        raise OutputError(f"{str(path)!r} can't be written: there is no directory {path.parent}")
    with redirect_stdout(sys.stderr):
        model, args, kwargs = call_at(target)
        captured = capture(model, args, kwargs)
        results = _write(captured, path)
    worst = _compare(results, captured.outputs, rtol, atol, path)
    count = sum(node.op == "call_function" for node in captured.graph.graph.nodes)
    print(
        f"{path}: {count} ops, {len(captured.weights)} weights, {len(results)} outputs; "
        f"at most {worst:.1e} from eager"
    )


@dataclass
class Captured:
    """One call of a model as a graph.

    :ivar inputs: real, in the order of the graph's placeholders.
    :ivar weights: positions of parameters and buffers.
    :ivar outputs: what eager's ops computed.
    """

    graph: GraphModule
    inputs: Sequence[Any]
    names: Sequence[str]
    weights: tuple[int, ...]
    outputs: Sequence[Any]


def capture(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Captured:
    """The inference graph of a call, as ``fuseboard package`` takes it.

    :raises ExportError: no graph is all of the call.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    from fuseboard.ahead.making import module_of
    from fuseboard.errors import containable
    from fuseboard.profile.judge.reference import run_eager
    from fuseboard.run.failure import describe
    from fuseboard.torch_api import exports

    module = model if isinstance(model, torch.nn.Module) else module_of(model)
    try:
        exported = exports.export(module, tuple(args), kwargs, None)
    except exports.NotExported as error:
        raise ExportError(f"the model can't be written: it has {error}") from error
    except containable() as error:  # of the user's code, or torch's
        raise ExportError(f"torch.export can't export the model: {describe(error)}") from error
    if exported.writes:
        raise ExportError("a call of the model writes to its inputs or buffers, as no file does")
    pairs = zip(tree_leaves((tuple(args), kwargs)), exported.inputs, strict=True)
    given = [leaf for leaf, one in pairs if one.node is not None]
    inputs = [*exported.weights.values(), *given]
    return Captured(
        exported.graph,
        inputs,
        [*exported.weights, *(f"input_{number}" for number in range(len(given)))],
        tuple(range(len(exported.weights))),
        run_eager(exported.graph, inputs),
    )


def _write(captured: Captured, path: Path) -> Sequence[Any]:
    """What the file computes, from the first plugin that writes such files.

    :raises ExportError: there is none.
    """
    from fuseboard.board import board
    from fuseboard.config import resolve

    ready = [state.name for state in board.states() if state.state == "ready"]
    session = board.session(resolve())
    for plugin in ready:
        answer = session.call(
            "fuseboard_export",
            plugin,
            graph=captured.graph,
            inputs=captured.inputs,
            names=captured.names,
            weights=captured.weights,
            path=path,
        )
        if answer is not None:
            return answer  # type: ignore[no-any-return]
    raise ExportError(
        f"no plugin that is ready writes {path.suffix or 'files without an ending'}. For .onnx: "
        "pip install 'fuseboard[onnxruntime]'"
    )


def _compare(
    results: Sequence[Any], expected: Sequence[Any], rtol: float, atol: float, path: Path
) -> float:
    """The largest difference.

    :raises ExportError: it is more than allowed; the file stays to be looked at.
    """
    import torch

    worst = 0.0
    for number, (got, want) in enumerate(zip(results, expected, strict=True)):
        if want is None:
            continue
        try:
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            text = " ".join(str(error).split())
            raise ExportError(f"{path}: output {number} differs from eager's. {text}") from error
        if want.numel() and want.is_floating_point():
            worst = max(worst, float((got - want).nan_to_num().abs().max()))
    return worst
