"""A region as two calls: ``compile`` a model around its weights, and ``run`` it on the rest.

``compile`` depends on weights alone, so the board hoists it: it is called once for each set of
weights, again when one of them changes, and what it made is dropped with the weights. What it
answers is a tensor that has the session as an attribute. Where the board hoists nothing, weights
are inputs like all others.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

import fuseboard
from fuseboard_openvino._model import Model, Session
from fuseboard_openvino._options import Options

aten = torch.ops.aten


class Program:
    """A region's model and how it is called.

    :param weights: positions of the inputs that ``compile`` is given.
    """

    def __init__(self, model: Model, weights: Sequence[int], options: Options) -> None:
        self._model = model
        self._weights = tuple(weights)
        self.notes = model.notes
        self._config = {
            "INFERENCE_PRECISION_HINT": options.precision,
            "EXECUTION_MODE_HINT": "ACCURACY" if options.precision == "f32" else "PERFORMANCE",
            "INFERENCE_NUM_THREADS": options.threads or torch.get_num_threads(),
            "ENABLE_CPU_PINNING": False,
        }

    def compile(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor of one element that has a new session, which lives as long as it does."""
        handle: Any = torch.zeros(1, device="cpu")
        values = dict(zip(self._weights, weights, strict=True))
        handle.session = self._model.session(values, self._config)
        return handle  # type: ignore[no-any-return]

    def run(self, handle: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The region's results; ``inputs`` are those that aren't weights."""
        return handle.session(inputs)  # type: ignore[attr-defined,no-any-return]

    def without_weights(self) -> Session:
        """A session whose inputs are all the region's."""
        return self._model.session({}, self._config)


def as_calls(
    graph: GraphModule, region: fuseboard.Region, options: Options
) -> list[fuseboard.Fusion]:
    """The rewrite of a whole region; none where it can't be converted, and ``lower`` says why."""
    if not region.static_inputs:
        return []
    try:
        own, used = _trimmed(graph)
        model = Model(own)
    except fuseboard.LoweringError:
        return []
    static = set(region.static_inputs)
    weights = [place for place, position in enumerate(used) if position in static]
    if not weights:
        return []
    program = Program(model, weights, options)
    names = tuple(n.name for n in graph.graph.nodes if n.op in ("call_function", "get_attr"))

    def apply() -> None:
        _rewrite(graph, program, [used[place] for place in weights], used)

    return [fuseboard.Fusion("model around its weights", names, apply)]


def _rewrite(
    graph: GraphModule, program: Program, weights: Sequence[int], used: Sequence[int]
) -> None:
    placeholders = graph.graph.find_nodes(op="placeholder")
    output = graph.graph.output_node()
    results: tuple[Node, ...] = output.args[0]  # type: ignore[assignment]
    others = [placeholders[i] for i in used if i not in weights]
    mode = results[0].meta["val"].fake_mode
    with graph.graph.inserting_before(output):
        handle = graph.graph.call_function(program.compile, ([placeholders[i] for i in weights],))
        with mode:
            handle.meta["val"] = torch.empty(1)
        called = graph.graph.call_function(program.run, (handle, others))
        called.meta["val"] = tuple(node.meta["val"] for node in results)
        items = []
        for place, node in enumerate(results):
            items.append(graph.graph.call_function(operator.getitem, (called, place)))
            items[-1].meta = dict(node.meta)
    output.args = (tuple(items),)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def lower(region: fuseboard.Region) -> fuseboard.LoweredRegion:
    """Flat code for what :func:`as_calls` left; a session of its own where it did nothing."""
    calls = [node for node in region.graph.graph.nodes if _is_program(node)]
    if len(calls) == 1:  # compile was hoisted
        lowered = fuseboard.lower_eagerly(region)
        target: Any = calls[0].target
        return dataclasses.replace(lowered, notes=target.__self__.notes)
    if calls:
        program: Any = calls[1].target
        return _every_input(program.__self__, region)
    own, used = _trimmed(region.graph)
    program = Program(Model(own), (), region.options)
    return _calling(program, used)


def _every_input(program: Program, region: fuseboard.Region) -> fuseboard.LoweredRegion:
    """Weights as inputs, since the board doesn't keep what would be made from them."""
    compile_, run = (node for node in region.graph.graph.nodes if _is_program(node))
    weights, others = iter(compile_.args[0]), iter(run.args[1])  # type: ignore[arg-type]
    count = len(compile_.args[0]) + len(run.args[1])  # type: ignore[arg-type]
    places = {n: i for i, n in enumerate(region.graph.graph.find_nodes(op="placeholder"))}
    own = set(program._weights)
    used = [places[next(weights if i in own else others)] for i in range(count)]
    return _calling(program, used)


def _calling(program: Program, used: Sequence[int]) -> fuseboard.LoweredRegion:
    session = program.without_weights()

    def call(args: list[Any]) -> tuple[Any, ...]:
        inputs = [args[i] for i in used]
        args.clear()
        return session(inputs)

    return fuseboard.LoweredRegion(call=call, notes=program.notes)


def _is_program(node: Node) -> bool:
    return isinstance(getattr(node.target, "__self__", None), Program)


def _trimmed(graph: GraphModule) -> tuple[GraphModule, list[int]]:
    """A copy without the inputs that nobody reads, and the positions of the others.

    The converter numbers inputs by their order, and leaves out such ones on its own.
    """
    copy = Graph()
    mapping: dict[Node, Node] = {}
    copy.output(copy.graph_copy(graph.graph, mapping))
    for node in copy.find_nodes(op="call_function", target=aten.split.Tensor):
        _split_with_sizes(node)
    placeholders = copy.find_nodes(op="placeholder")
    used = [i for i, node in enumerate(placeholders) if node.users]
    for node in placeholders:
        if not node.users:
            copy.erase_node(node)
    return GraphModule(graph, copy), used


def _split_with_sizes(node: Node) -> None:
    """The converter takes ``split`` by the sizes of the parts only."""
    axis = node.args[2] if len(node.args) > 2 else 0
    sizes = [part.shape[axis] for part in node.meta["val"]]  # type: ignore[index]
    node.target = aten.split_with_sizes.default
    node.args = (node.args[0], sizes, axis)
