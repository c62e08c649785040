"""A model as one functional graph, by ``torch.export``.

Read against torch 2.13: ``torch/export/exported_program.py`` (``run_decompositions``,
``graph_signature``), ``torch/_export/utils.py`` (``_collect_all_valid_cia_ops``).
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.errors import error_text
from fuseboard.torch_api.internals import fake_mode_of
from fuseboard.torch_api.symbols import expression


class NotExported(Exception):
    """A model has something that no graph can hold; the text says what."""


@dataclass(frozen=True)
class ExportedInput:
    """An input of the user's, or a number or text that was given in its place.

    :ivar node: the placeholder's name; None for a constant.
    """

    node: str | None
    constant: Any = None


@dataclass(frozen=True)
class ExportedOutput:
    """What a caller gets: the graph's result of this number, or a constant."""

    result: int | None
    constant: Any = None


@dataclass
class Exported:
    """A model's graph, of which nothing is written to.

    :ivar graph: its placeholders are symbols, then weights, then the inputs that are tensors.
    :ivar symbols: the names of the symbols; each is a placeholder.
    :ivar weights: name → parameter, buffer or constant, for each placeholder that is one.
    :ivar inputs: for each leaf of the arguments.
    :ivar outputs: for each leaf of the results.
    :ivar writes: (the graph's result, the name of the buffer or the number of the leaf) that a
        call writes it to.
    :ivar ranges: symbol → the least and the largest size that the user wants; None: any.
    :ivar program: torch's own.
    """

    graph: GraphModule
    symbols: tuple[str, ...]
    weights: dict[str, torch.Tensor]
    inputs: list[ExportedInput]
    outputs: list[ExportedOutput]
    writes: list[tuple[int, str | int]]
    ranges: dict[str, tuple[int, int | None]]
    program: Any

    @property
    def fakes(self) -> list[Any]:
        """The fake values of the graph's placeholders."""
        return [node.meta["val"] for node in self.graph.graph.find_nodes(op="placeholder")]


def export(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
) -> Exported:
    """Export a model for inference, at the level of ops that AOTAutograd captures.

    :raises NotExported: the graph isn't all of the model.
    """
    with torch.no_grad(), quiet():
        made = torch.export.export(
            model, args, dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
        )
        program = made.run_decompositions(_composites())
    graph: GraphModule = program.graph_module
    signature: Any = program.graph_signature
    weights: dict[str, torch.Tensor] = {}
    inputs = []
    for spec in signature.input_specs:
        kind, name = spec.kind.name, getattr(spec.arg, "name", "")
        if kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
            held = program.state_dict.get(spec.target, program.constants.get(spec.target))
            if not isinstance(held, torch.Tensor):
                raise NotExported(f"{spec.target}, which is no tensor")
            weights[spec.target] = held.detach()
        elif kind != "USER_INPUT":
            raise NotExported(f"an input of the kind {kind.lower()}: {spec.target or name}")
        elif type(spec.arg).__name__ == "ConstantArgument":
            inputs.append(ExportedInput(None, spec.arg.value))
        elif type(spec.arg).__name__ == "TensorArgument":
            inputs.append(ExportedInput(name))
        else:
            raise NotExported(f"{name}, a number that changes from call to call")
    leaves = [one.node for one in inputs]
    outputs, writes = [], []
    for number, spec in enumerate(signature.output_specs):
        kind, what = spec.kind.name, type(spec.arg).__name__
        if kind == "BUFFER_MUTATION":
            writes.append((number, spec.target))
        elif kind == "USER_INPUT_MUTATION":
            writes.append((number, leaves.index(spec.target)))
        elif kind != "USER_OUTPUT":
            raise NotExported(f"an output of the kind {kind.lower()}: {spec.target}")
        elif what == "ConstantArgument":
            outputs.append(ExportedOutput(None, spec.arg.value))
        elif what in ("TensorArgument", "SymIntArgument"):
            outputs.append(ExportedOutput(number))
        else:
            raise NotExported(f"an output of the kind {what}")
    _drop_constants(graph, {one.node for one in inputs} | {None}, len(weights))
    symbols = _symbols_as_inputs(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    ranges = {
        str(symbol): (_whole(found.lower) or 0, _whole(found.upper))
        for symbol, found in program.range_constraints.items()
    }
    return Exported(graph, symbols, weights, inputs, outputs, writes, ranges, made)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch warns of its own pytrees."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _composites() -> dict[Any, Callable[..., Any]]:
    """Decompositions of the ops that AOTAutograd never sees, since the dispatcher takes them apart.

    ``run_decompositions`` keeps those that its table doesn't have.
    """
    from torch._export.utils import _collect_all_valid_cia_ops, _get_decomp_for_cia

    return {op: _get_decomp_for_cia(op) for op in _collect_all_valid_cia_ops()}


def _whole(number: Any) -> int | None:
    """A bound of a range as an int; None where it is infinite."""
    try:
        return int(number)
    except (OverflowError, TypeError, ValueError, AttributeError):
        return None


def _drop_constants(graph: GraphModule, tensors: set[str | None], first: int) -> None:
    """Take out the placeholders of arguments that are no tensors, which nothing reads."""
    for node in graph.graph.find_nodes(op="placeholder")[first:]:
        if node.name not in tensors:
            graph.graph.erase_node(node)


def _symbols_as_inputs(graph: GraphModule) -> tuple[str, ...]:
    """Give the graph its symbols as inputs, in front, as AOTAutograd's graphs have them.

    :raises NotExported: a symbol is no size of an input.
    """
    places: dict[Any, Any] = {}
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node in placeholders:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                for symbol in expression(size).free_symbols:
                    places.setdefault(symbol, None)
                if expression(size).is_Symbol:
                    places[expression(size)] = size
    names: dict[Any, Node] = {}
    for symbol, size in places.items():
        if size is None:
            raise NotExported(f"the size {symbol}, which no input has alone")
        with graph.graph.inserting_before(graph.graph._root._next):
            made = graph.graph.placeholder(str(symbol))
        made.meta["val"] = size
        names[symbol] = made
    ordered = [node.name for node in graph.graph.find_nodes(op="placeholder")][: len(names)]
    for node in graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.sym_size.int, sort=False
    ):
        value = node.meta["val"]
        if isinstance(value, torch.SymInt) and expression(value) in names:
            node.replace_all_uses_with(names[expression(value)])
            graph.graph.erase_node(node)
    return tuple(ordered)


@contextlib.contextmanager
def compiling_exported(exported: Exported) -> Iterator[None]:
    """What holds while AOTAutograd has a graph compiled, for the block: its inputs' roles."""
    from torch._guards import TracingContext, tracing

    fakes = exported.fakes
    context: Any = TracingContext(fake_mode_of(fakes))
    first = len(exported.symbols)
    unwritten = SimpleNamespace(mutates_data=False, mutates_metadata=False)
    context.fw_metadata = SimpleNamespace(
        input_info=[unwritten] * len(fakes),
        static_input_indices=[
            first + number
            for number, name in enumerate(exported.weights)
            if name not in dict(exported.writes).values()
        ],
        mutated_inp_runtime_indices=[],
        tokens={},
    )
    with tracing(context):
        yield


def to_bytes(program: Any) -> bytes:
    """torch's own file of an exported program, without weights.

    :raises NotExported: it can't be written, as where results are of a class that torch can't.
    """
    held = {**program.state_dict}
    try:
        for name, value in held.items():
            empty = value.new_empty(0)
            is_parameter = isinstance(value, torch.nn.Parameter)
            program.state_dict[name] = (
                torch.nn.Parameter(empty, value.requires_grad) if is_parameter else empty
            )
        stream = io.BytesIO()
        with quiet():
            torch.export.save(program, stream)
        return stream.getvalue()
    except Exception as error:  # whatever the objects in it raise
        raise NotExported(error_text(error)) from error
    finally:
        program.state_dict.update(held)


def from_bytes(data: bytes, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """The module of an exported program, with weights."""
    with quiet():
        program = torch.export.load(io.BytesIO(data))
        for name in [*program.state_dict]:
            value, old = weights[name], program.state_dict[name]
            program.state_dict[name] = (
                torch.nn.Parameter(value, old.requires_grad)
                if isinstance(old, torch.nn.Parameter)
                else value
            )
        return program.module()
