"""Regions whose weights are to be frozen, and the handles that stand for a set of them.

A region with weights is given a call that depends on them alone, ``frozen_of(*weights)``, so the
board hoists it: it is called once for each set of weights, and again when one of them changes. What
it returns stands for the region's code with these weights in it. The region's ops stay in the
graph, where a child process can read and compile them; so that nothing else of it is hoisted, each
weight is read through an op that takes an ordinary input as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fuseboard import Fusion, LoweredRegion, LoweringError, Region
from fuseboard_inductor import _compile, _freeze

_library = torch.library.Library("fuseboard_inductor", "DEF")
#: The weight, in a region that is to be frozen. It stands in graphs only, and is never run.
_library.define("held(Tensor weight, Tensor handle, Tensor other) -> Tensor")
_held = torch.ops.fuseboard_inductor.held.default

#: Under this name in ``meta`` a handle's node has its region's plan.
_PLAN = "fuseboard_inductor_plan"


class Plan:
    """Makes the handles of a region, from when it was lowered."""

    def __init__(self) -> None:
        self._make: Callable[[Sequence[torch.Tensor]], Callable[..., Any]] | None = None

    def settle(self, make: Callable[[Sequence[torch.Tensor]], Callable[..., Any]]) -> None:
        """:param make: the code with these weights in it."""
        self._make = make

    def frozen_of(self, *weights: torch.Tensor) -> torch.Tensor:
        """A tensor that stands for the region's code with these weights, and keeps it alive."""
        if self._make is None:
            raise LoweringError("the region wasn't lowered")
        handle: Any = torch.zeros(1, device="cpu")
        handle.frozen = self._make(weights)
        return handle  # type: ignore[no-any-return]


def rewrites(graph: GraphModule, region: Region) -> list[Fusion] | None:
    """The rewrite of a region that has something to freeze."""
    if why_not(graph, region):
        return None
    names = tuple(node.name for node in graph.graph.nodes if node.op == "call_function")
    return [Fusion("weights as constants", names, lambda: _rewrite(graph, region))]


def why_not(graph: GraphModule, region: Region) -> str:
    """Why a region isn't frozen; "" if it can be."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    constant = {placeholders[i] for i in region.static_inputs}
    if not any(node.users for node in constant):
        return "it has no weights"
    if not _others(placeholders, region):
        return "it takes nothing but weights"
    for node in graph.graph.nodes:
        if node.op == "call_function" and constant.issuperset(node.all_input_nodes or placeholders):
            constant.add(node)
    if constant.intersection(graph.graph.output_node().all_input_nodes):
        return "a result depends on weights alone, and the caller could write to it"
    return ""


def _others(placeholders: Sequence[Node], region: Region) -> list[Node]:
    """Tensors that come with each call."""
    return [
        node
        for i, node in enumerate(placeholders)
        if i not in region.static_inputs and isinstance(node.meta["val"], torch.Tensor)
    ]


def _rewrite(graph: GraphModule, region: Region) -> None:
    placeholders = graph.graph.find_nodes(op="placeholder")
    weights = [placeholders[i] for i in region.static_inputs if placeholders[i].users]
    other = _others(placeholders, region)[0]
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    plan = Plan()
    with graph.graph.inserting_before(first):
        held = [graph.graph.call_function(_held, (other, other, other)) for _ in weights]
        for weight, node in zip(weights, held, strict=True):
            node.meta["val"] = weight.meta["val"]
            weight.replace_all_uses_with(node)
    with graph.graph.inserting_before(held[0]):
        handle = graph.graph.call_function(plan.frozen_of, tuple(weights))
    handle.meta["val"] = other.meta["val"].new_empty((1,), dtype=torch.float32)
    handle.meta[_PLAN] = plan
    for weight, node in zip(weights, held, strict=True):
        node.args = (weight, handle, other)


# --- lowering -------------------------------------------------------------------------------------


class _Region:
    """A rewritten region without its handle.

    :ivar graph: its graph as it was before the rewrite.
    :ivar inputs: fake, of that graph.
    :ivar weights: positions of those that are constants.
    :ivar handle: position of the handle in a call; None where it wasn't hoisted.
    :ivar plan: None in a child process.
    """

    def __init__(self, region: Region, inputs: Sequence[Any]) -> None:
        self.settings = _compile.settings_of(region)
        self.graph = graph = _copied(region.graph)
        held = graph.graph.find_nodes(op="call_function", target=_held)
        node: Any = held[0].args[1]
        self.handle: int | None = None
        self.inputs = list(inputs)
        if node.op == "placeholder":
            self.handle = graph.graph.find_nodes(op="placeholder").index(node)
            del self.inputs[self.handle]
        self.plan: Plan | None = node.meta.get(_PLAN)
        weights = {call.args[0] for call in held}
        for call in held:
            call.replace_all_uses_with(call.args[0])
            graph.graph.erase_node(call)
        graph.graph.erase_node(node)
        graph.recompile()
        placeholders = graph.graph.find_nodes(op="placeholder")
        self.weights = tuple(i for i, value in enumerate(placeholders) if value in weights)

    def lowered(self, code: _freeze.Code, artifact: bytes | None) -> LoweredRegion:
        """From here on handles can be made."""
        position = self.handle
        assert position is not None
        others = [i for i in range(len(self.inputs)) if i not in self.weights]
        moves = [i if i < position else i + 1 for i in others]
        inputs, settings = [self.inputs[i] for i in others], self.settings

        def make(weights: Sequence[torch.Tensor]) -> Callable[..., Any]:
            return _freeze.frozen_call(code, weights, inputs, settings)

        def call(args: list[Any]) -> Sequence[Any]:
            frozen = args[position].frozen
            given = [args[i] for i in moves]
            args.clear()
            return frozen(given)  # type: ignore[no-any-return]

        if self.plan is not None:
            self.plan.settle(make)
        return LoweredRegion(call=call, notes=code.notes, artifact=artifact)


def lower_region(region: Region, inputs: Sequence[Any]) -> LoweredRegion:
    """A region as something to call; as Inductor compiles it else where it isn't to be frozen."""
    if not _is_rewritten(region):
        why = why_not(region.graph, region) or "the rewrite is switched off"
        return _not_frozen(region, inputs, why)
    own = _Region(region, inputs)
    if own.handle is None:
        region = dataclasses.replace(region, graph=own.graph)
        return _not_frozen(region, inputs, "the setting hoist is off")
    code, artifact = _freeze.compile_frozen(
        own.graph, own.weights, own.inputs, own.settings, region.random
    )
    return own.lowered(code, artifact)


def load_region(artifact: bytes, region: Region, inputs: Sequence[Any]) -> LoweredRegion | None:
    """A region from the bytes that :func:`lower_region` gave."""
    if not _is_rewritten(region):
        return _compile.load_region(artifact, region, inputs)
    own = _Region(region, inputs)
    if own.handle is None:
        return None
    code = _freeze.load_code(artifact, own.inputs, own.settings)
    return None if code is None else own.lowered(code, artifact)


def _is_rewritten(region: Region) -> bool:
    return bool(region.graph.graph.find_nodes(op="call_function", target=_held))


def _not_frozen(region: Region, inputs: Sequence[Any], why: str) -> LoweredRegion:
    lowered = _compile.lower_region(region, inputs)
    return dataclasses.replace(lowered, notes=(f"nothing is frozen: {why}", *lowered.notes))


def _copied(graph: GraphModule) -> GraphModule:
    new = Graph()
    new.output(new.graph_copy(graph.graph, {}))
    return GraphModule(graph, new)
