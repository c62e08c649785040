"""From a region to a callable: weights as initializers of sessions, or as inputs.

ONNX Runtime folds and packs what it knows to be constant, and a session keeps its own copy of
that. So a region with weights is rewritten to two calls: one that makes a session from the
weights, and one that runs it. The first depends on weights alone, so the board hoists it: it is
called once for each set of weights, again when one of them changes, and the session is gone with
them. An artifact holds no weights.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

import fuseboard
from fuseboard_onnxruntime._model import Model
from fuseboard_onnxruntime._session import Runner, SessionSettings, make_session


class Plan:
    """A region whose weights are to be in sessions.

    :param original: its nodes before the rewrite, kept until it was lowered.
    :param owner: has the constants that these name.
    :ivar weights: positions of its inputs that are in a session.
    :ivar others: positions of those that come with each call.
    """

    def __init__(
        self,
        owner: GraphModule,
        original: Graph,
        weights: tuple[int, ...],
        others: tuple[int, ...],
    ) -> None:
        self._original: tuple[GraphModule, Graph] | None = owner, original
        self.count = len(original.find_nodes(op="placeholder"))
        self.weights = weights
        self.others = others
        self._model: Model | None = None
        self._settings = SessionSettings()

    @property
    def original(self) -> GraphModule:
        """The graph before the rewrite. A module of it is only made where it is converted: that
        compiles its Python code, for which a process that loads a session has no use."""
        assert self._original is not None, "it was lowered"
        return GraphModule(*self._original)

    def converted(self) -> Model:
        """The model whose initializers the weights are."""
        from fuseboard_onnxruntime._convert import convert, with_initializers

        return with_initializers(convert(self.original), self.weights)

    def __getstate__(self) -> dict[str, Any]:
        """What makes sessions in another process."""
        return {**vars(self), "_original": None}

    def settle(self, model: Model, settings: SessionSettings) -> Runner:
        """From here on sessions can be made. Returns what calls them."""
        passed = {output.passes for output in model.outputs if output is not None}
        if passed & set(self.weights):
            raise fuseboard.LoweringError("it returns a weight as it is")
        self._model, self._settings, self._original = model, settings, None
        return Runner(model, [value for value in model.inputs if value.position in self.others])

    def session(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor that stands for a session with these weights, and keeps it alive."""
        assert self._model is not None
        by_position = dict(zip(self.weights, weights, strict=True))
        given = [value for value in self._model.inputs if value.position in by_position]
        values = []
        for spec in given:
            weight = by_position[spec.position].detach()
            values.append(weight if spec.order is None else weight.permute(spec.order))
        names = [spec.name for spec in given]
        handle: Any = torch.zeros(1, device="cpu")
        handle.session = make_session(self._model, self._settings, values, names)
        return handle  # type: ignore[no-any-return]


# --- the rewrite ----------------------------------------------------------------------------------


def fuse(graph: GraphModule, region: fuseboard.Region) -> list[fuseboard.Fusion] | None:
    """The rewrite to a session that holds the weights: inference regions that have any.

    In training each step changes them, so there they are inputs.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    weights = tuple(i for i in region.static_inputs if placeholders[i].users)
    sizes = [size for i in weights for size in placeholders[i].meta["val"].shape]
    others = tuple(i for i in range(len(placeholders)) if i not in region.static_inputs)
    results = graph.graph.output_node().args[0]
    returned = any(placeholders[i] in results for i in weights)
    called = any(placeholders[i].users for i in others)
    known = all(type(size) is int for size in sizes)
    if region.kind != "inference" or not (weights and known and called) or returned:
        return None
    names = tuple(node.name for node in graph.graph.nodes if node.op == "call_function")

    def apply() -> None:
        _rewrite(graph, Plan(graph, graph.graph, weights, others), region.signature)

    return [fuseboard.Fusion("weights as initializers", names, apply)]


def _rewrite(graph: GraphModule, plan: Plan, signature: str) -> None:
    """``run_session(signature, session_of(*weights), *others)`` in place of everything.

    In a graph of its own: the plan has the old one, which is only read again where it is converted.

    The signature stands for what was there, in keys of caches: both functions hold values of
    their own.
    """

    session_of, run_session = _SessionOf(plan, signature), _RunSession(plan, signature)
    output = graph.graph.output_node()
    results = output.args[0]
    values = [node.meta["val"] if isinstance(node, Node) else None for node in results]
    new = Graph()
    placeholders = [new.node_copy(node) for node in graph.graph.find_nodes(op="placeholder")]
    handle = new.call_function(session_of, tuple(placeholders[i] for i in plan.weights))
    example = placeholders[plan.weights[0]].meta["val"]
    handle.meta["val"] = example.new_empty((1,), dtype=torch.float32)
    others = tuple(placeholders[i] for i in plan.others)
    run = new.call_function(run_session, (signature, handle, *others))
    run.meta["val"] = tuple(values)
    items: list[Node | None] = []
    for number, value in enumerate(values):
        if value is None:
            items.append(None)
            continue
        item = new.call_function(operator.getitem, (run, number))
        item.meta["val"] = value
        items.append(item)
    new.output(tuple(items)).meta = dict(output.meta)
    graph.graph = new


@dataclass(eq=False)
class _SessionOf:
    """What a graph calls to make a session of weights."""

    plan: Plan
    cache_key: str
    __name__: ClassVar[str] = "session_of"  # which torch.fx asks for

    def __call__(self, *weights: torch.Tensor) -> torch.Tensor:
        return self.plan.session(weights)


@dataclass(eq=False)
class _RunSession:
    """What a graph calls to run a session."""

    plan: Plan
    cache_key: str
    __name__: ClassVar[str] = "run_session"

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("a rewritten region is lowered, never run as a graph")


def _run_node(graph: GraphModule) -> Node | None:
    """The call of a session in a rewritten graph."""
    for node in graph.graph.nodes:
        if isinstance(node.target, _RunSession):
            return node
    return None


# --- lowering -------------------------------------------------------------------------------------


def lower_region(region: fuseboard.Region, model: Model | None = None) -> fuseboard.LoweredRegion:
    """A region as something to call.

    :param model: what it was converted to before, from a cache.
    """
    settings = SessionSettings.of(region.options)
    run = _run_node(region.graph)
    if run is None:
        return _with_weights_as_inputs(region.graph, settings, model)
    plan: Plan = run.target.plan  # type: ignore[union-attr]
    if run.args[1].op != "placeholder":  # type: ignore[union-attr]
        # Nobody hoisted the making of sessions (the setting hoist is off).
        return _with_weights_as_inputs(plan.original, settings, model)
    if model is None:
        model = plan.converted()
    runner = plan.settle(model, settings)
    placeholders = region.graph.graph.find_nodes(op="placeholder")
    place = {node: i for i, node in enumerate(placeholders)}
    handle = place[run.args[1]]  # type: ignore[index]
    moves = [(o, place[node]) for o, node in zip(plan.others, run.args[2:], strict=True)]
    call = _SessionCall(runner, handle, tuple(moves), plan.count)
    return fuseboard.LoweredRegion(call=call, notes=model.notes, artifact=model.to_bytes())


@dataclass(frozen=True)
class _SessionCall:
    """Calls the session that comes with the inputs.

    :ivar handle: its position.
    :ivar moves: (position that the model knows an input by, its position in a call).
    :ivar count: of the positions that the model knows.
    """

    runner: Runner
    handle: int
    moves: tuple[tuple[int, int], ...]
    count: int

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        given = [None] * self.count
        for to, source in self.moves:
            given[to] = args[source]
        session = args[self.handle].session
        args.clear()
        return self.runner(session, given)


def _with_weights_as_inputs(
    graph: GraphModule, settings: SessionSettings, model: Model | None
) -> fuseboard.LoweredRegion:
    if model is None:
        from fuseboard_onnxruntime._convert import convert

        model = convert(graph)
    call = _OwnSession(model, settings)
    return fuseboard.LoweredRegion(call=call, notes=model.notes, artifact=model.to_bytes())


class _OwnSession:
    """Calls a session whose weights are inputs."""

    def __init__(self, model: Model, settings: SessionSettings) -> None:
        self._made_from = model, settings
        self._runner = Runner(model, model.inputs)
        self._session = make_session(model, settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return _OwnSession, self._made_from

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        given = list(args)
        args.clear()
        return self._runner(self._session, given)
