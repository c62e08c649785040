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

    from fuseboard.contracts import BackendInfo, Claim, Decline, LoweredRegion, Region

_NAME = "export-capture"


class ExportError(FuseboardError):
    """A model isn't one graph, nobody writes such files, or what was written is wrong."""


def export(
    target: Target,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="What to write: out.onnx.")],
    rtol: Annotated[float, typer.Option(min=0, help="Allowed relative error.")] = 1e-3,
    atol: Annotated[float, typer.Option(min=0, help="Allowed absolute error.")] = 1e-4,
) -> None:
    """Write a model's inference graph, with its weights, and compare the file's results.

    FUNCTION returns a model and its arguments, (model, args) or (model, args, kwargs), as for
    fuseboard explain. The model has to be one graph, and the file is for the sizes of these
    arguments. The file is checked and run, and its results are held against eager's.

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
    """The inference graph of a call, by a backend that claims everything and runs it as eager.

    :raises ExportError: there are several graphs, or the board keeps a part of it.
    """
    import torch

    import fuseboard

    found: list[tuple[Region, list[Any], Sequence[Any]]] = []
    fuseboard.register(_recorder(found), _NAME)
    try:
        options: dict[str, Any] = {"backends": [_NAME, "eager"], "on_failure": "raise"}
        # By priority: to compare the recorder with eager would call it many times.
        options.update(hoist=False, min_region_us=0.0, policy="priority")
        options.update(verify="off")  # else it is given copies of the weights, which have no names
        torch.compiler.reset()
        call: Any = torch.compile(model, backend="fuseboard", dynamic=False, options=options)
        with torch.no_grad():
            call(*args, **kwargs)
    finally:
        fuseboard.unregister(_NAME)
        torch.compiler.reset()
    if len(found) != 1 or not found[0][0].whole:
        raise ExportError(
            f"the call ran as {len(found)} graphs, and a file holds one. fuseboard explain shows "
            "where the model breaks, and which views of outputs are computed apart."
        )
    region, inputs, outputs = found[0]
    names = _names(model, inputs, region.static_inputs)
    return Captured(region.graph, inputs, names, region.static_inputs, outputs)


def _recorder(found: list[tuple[Region, list[Any], Sequence[Any]]]) -> object:
    """A backend that runs as eager does, and notes the call."""
    import fuseboard

    class Recorder:
        @fuseboard.hookimpl
        def fuseboard_backend(self) -> BackendInfo:
            return fuseboard.BackendInfo(name=_NAME, compiles_quickly=True, by_request=True)

        @fuseboard.hookimpl
        def fuseboard_claim(self, graph: GraphModule) -> list[Claim | Decline]:
            return fuseboard.claim_nodes(graph, lambda node: None)

        @fuseboard.hookimpl
        def fuseboard_lower(self, region: Region) -> LoweredRegion:
            run = fuseboard.lower_eagerly(region).call

            def call(args: list[Any]) -> Sequence[Any]:
                inputs = list(args)
                outputs = run(args)
                found.append((region, inputs, outputs))
                return outputs

            return fuseboard.LoweredRegion(call=call)

    return Recorder()


def _names(model: Any, inputs: Sequence[Any], weights: Sequence[int]) -> list[str]:
    """Names of parameters and buffers; numbers for the other inputs."""
    import torch

    known: dict[int, str] = {}
    if isinstance(model, torch.nn.Module):
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            known.setdefault(value.data_ptr(), name)
    numbers = iter(range(len(inputs)))
    return [
        known.get(value.data_ptr(), f"weight_{position}")
        if position in weights
        else f"input_{next(numbers)}"
        for position, value in enumerate(inputs)
    ]


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
