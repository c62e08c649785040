"""AOTAutograd's capture away from Dynamo's call of the backend: what Dynamo leaves for it.

Read against torch 2.13: ``torch/_functorch/_aot_autograd/frontend_utils.py``
(``_try_get_metadata_from_dynamo``, ``process_inputs``), ``torch/_functorch/aot_autograd.py``
(``preserve_rng_state``), ``torch/_guards.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fuseboard.errors import LoweringError, error_text
from fuseboard.torch_api.call_sizes import CallSizes, SymbolicInputs
from fuseboard.torch_api.copies import copy_graph
from fuseboard.torch_api.graphs import constants_from_bytes, constants_to_bytes
from fuseboard.torch_api.nodes import graphs_in
from fuseboard.torch_api.symbols import GuardWatch, in_the_example

#: Where Dynamo notes what kind of static input a placeholder is: on the tensor it stands for.
_STATIC = "_dynamo_static_input_type"

#: What nodes take along to another process. ``nn_module_stack`` has its classes replaced by their
#: names: they may be the user's, which another process needn't find.
_SENT_METADATA = frozenset({"stack_trace", "nn_module_stack", "custom", "recompute", "ac_graph_id"})


def static_positions(graph: GraphModule) -> frozenset[int]:
    """Positions of the inputs of Dynamo's graph that are parameters or buffers."""
    return frozenset(
        i
        for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))
        if node.meta.get("tensor_dict", {}).get(_STATIC)
    )


# --- to another process ---------------------------------------------------------------------------


def graph_to_bytes(graph: GraphModule) -> bytes:
    """Dynamo's graph for another process, with the constants that it holds.

    :raises LoweringError: something in it can't be sent, or this torch can't.
    """
    try:
        from fuseboard.torch_api.graph_pickler import dumps

        sent = dumps(_lean(graph), _SENT_METADATA)
        return pickle.dumps((sent, constants_to_bytes(graph)))
    except Exception as error:  # whatever the code of an object in the graph raises
        raise LoweringError(
            f"Dynamo's graph can't be sent to another process: {error_text(error)}"
        ) from error


def graph_from_bytes(data: bytes, static: frozenset[int]) -> GraphModule:
    """The graph as :func:`graph_to_bytes` got it, with what AOTAutograd looks for in Dynamo's."""
    from torch._dynamo.source import LocalSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from fuseboard.torch_api.graph_pickler import loads, receive_slices

    with contextlib.suppress(ImportError):  # Dynamo puts ops of it into graphs, such as an fma
        importlib.import_module("torch._inductor.inductor_prims")
    sent, constants = pickle.loads(data)
    graph: Any = loads(sent, FakeTensorMode(shape_env=ShapeEnv()))
    for held in graphs_in(graph):
        receive_slices(held)
    constants_from_bytes(graph, constants)
    graph.meta["dynamo_compile_id"] = None
    graph._param_name_to_source = {}
    for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        node._dynamo_source = LocalSource(node.name)
        node.meta["tensor_dict"] = {_STATIC: "unguarded"} if i in static else {}
    return graph  # type: ignore[no-any-return]


def _lean(graph: GraphModule) -> GraphModule:
    """A copy that holds only what its nodes name: Dynamo leaves the user's modules on its own."""
    import copy

    from torch.fx._lazy_graph_module import _LazyGraphModule

    from fuseboard.torch_api.graph_pickler import send_slices

    attributes: dict[str, Any] = {}
    for node in graph.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            held = operator.attrgetter(str(node.target))(graph)
            attributes[str(node.target)] = _lean(held) if isinstance(held, GraphModule) else held
    made = _LazyGraphModule(attributes, copy.deepcopy(graph.graph))  # nobody runs it
    for node in made.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if isinstance(stack, Mapping):
            node.meta["nn_module_stack"] = {
                str(key): (entry[0], _name_of(entry[1])) for key, entry in stack.items()
            }
    send_slices(made)
    return made


def _name_of(kind: Any) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


# --- to be rewritten ------------------------------------------------------------------------------

#: What AOTAutograd looks for on a graph of Dynamo's and on its placeholders.
_OF_GRAPHS, _OF_PLACEHOLDERS = ("_param_name_to_source",), ("_dynamo_source",)


def copy_dynamo_graph(graph: GraphModule) -> GraphModule:
    """A copy that AOTAutograd captures as it would the graph."""
    copy = copy_graph(graph)
    copy.meta.update(graph.meta)
    for name in _OF_GRAPHS:
        if hasattr(graph, name):
            object.__setattr__(copy, name, getattr(graph, name))
    pairs = [one.graph.find_nodes(op="placeholder") for one in (graph, copy)]
    for node, own in zip(*pairs, strict=True):
        for name in _OF_PLACEHOLDERS:
            if hasattr(node, name):
                setattr(own, name, getattr(node, name))
    return copy


def with_held_as_inputs(graph: GraphModule) -> tuple[GraphModule, list[torch.Tensor]]:
    """A graph of Dynamo's that is given what the graph holds; with what to call it with, besides.

    Dynamo has the weights and the state of an optimizer, in the place of inputs, as attributes of
    a compiled step. What the graph writes to is these tensors, and no copy of them would do.

    :returns: the graph itself, and nothing, where it holds no parameter.
    """
    from torch._dynamo.source import LocalSource

    held = {
        str(node.target): value
        for node in graph.graph.find_nodes(op="get_attr")
        if isinstance(value := operator.attrgetter(str(node.target))(graph), torch.Tensor)
    }
    if not any(isinstance(value, torch.nn.Parameter) for value in held.values()):
        return graph, []
    made = copy_dynamo_graph(graph)
    last = next((n for n in reversed(made.graph.nodes) if n.op == "placeholder"), None)
    for target in held:
        reads = [n for n in made.graph.find_nodes(op="get_attr") if n.target == target]
        where = (
            made.graph.inserting_after(last) if last is not None else made.graph.inserting_before()
        )
        with where:
            last = made.graph.placeholder(reads[0].name)
        last.meta.update({k: v for k, v in reads[0].meta.items() if k == "example_value"})
        last._dynamo_source = LocalSource(last.name)
        for read in reads:
            read.replace_all_uses_with(last)
            made.graph.erase_node(read)
        delattr(made, target)
    made.recompile()
    return made, list(held.values())


def note_values(graph: GraphModule, inputs: Sequence[Any]) -> None:
    """Give each node its fake value as ``val``.

    :param inputs: real ones, which the values are made from where Dynamo's aren't there any more.
        They are then of plain sizes, unless Dynamo's are there of all inputs and have symbols.
    """
    nodes = list(graph.graph.nodes)
    called = [node for node in nodes if node.op.startswith("call") and node.users]
    if any("example_value" not in node.meta for node in called):
        # Of real tensors and symbols together, each op would learn what number a symbol is.
        fakes = [node.meta.get("example_value") for node in nodes if node.op == "placeholder"]
        symbolic = None not in fakes and any(isinstance(one, torch.SymInt) for one in fakes)
        values = _Values(graph, fakes if symbolic else inputs).values
    else:
        values = {node: node.meta.get("example_value") for node in nodes}
    for node in nodes:
        node.meta["val"] = values.get(node)


def fake_results(graph: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """What a graph returns for inputs, as fake values of plain sizes.

    :param inputs: real ones.
    """
    end = graph.graph.output_node()
    return tree_leaves(_Values(graph, inputs).values[end])


def drop_values(graph: GraphModule) -> None:
    """Leave a graph as Dynamo does."""
    for node in graph.graph.nodes:
        node.meta.pop("val", None)


class _Values(torch.fx.Interpreter):
    """Each node's fake value.

    :param inputs: fake ones, or real ones, of which fake ones with plain sizes are made. Beside
        real ones, a symbol is the number that it is in the call.
    """

    def __init__(self, graph: GraphModule, inputs: Sequence[Any]) -> None:
        from torch._dispatch.python import enable_python_dispatcher
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        super().__init__(graph)
        self.values: dict[torch.fx.Node, Any] = {}
        modes = [value.fake_mode for value in inputs if isinstance(value, FakeTensor)]
        mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)
        fakes = [
            mode.from_tensor(one, static_shapes=True)
            if isinstance(one, torch.Tensor) and not isinstance(one, FakeTensor)
            else one
            if modes
            else in_the_example(one)
            for one in inputs
        ]
        with mode, enable_python_dispatcher():  # as Dynamo does, for ops on symbolic sizes
            self.run(*fakes, enable_io_processing=False)

    def run_node(self, n: torch.fx.Node) -> Any:
        self.values[n] = result = super().run_node(n)
        return result


# --- there ----------------------------------------------------------------------------------------


@dataclass
class Tracing:
    """A tracing context of its own for AOTAutograd.

    :ivar inputs: fake ones; aliases and strides are those of the real ones.
    :ivar learned: what is learned of symbolic sizes from now on.
    """

    inputs: list[Any]
    learned: GuardWatch
    _context: Any
    _symbolic: SymbolicInputs | None

    def guards(self) -> list[Any]:
        """What AOTAutograd relies on that Dynamo would have had to guard on."""
        return list(self._context.guards_context.aotautograd_guards)

    def freeze(self) -> None:
        """Let guards that come too late be refused."""
        if self._symbolic is not None:
            self._symbolic.mode.shape_env.freeze()

    def with_known_numbers(self, graph: GraphModule) -> GraphModule:
        """Dynamo's graph with the numbers in it that Dynamo guards on, though they are inputs.

        Under ``dynamic=True`` a float of the user's comes in a tensor. Where an op needs its value,
        such as the epsilon of a norm, Dynamo guards on it; fake tensors don't know it here.
        """
        numbers = self._symbolic.numbers if self._symbolic is not None else []
        if all(number is None for number in numbers):
            return graph
        graph = copy_dynamo_graph(graph)
        nodes = graph.graph.find_nodes(op="placeholder")
        for node, number in zip(nodes, numbers, strict=True):
            for user in list(node.users) if number is not None else []:
                if user.op == "call_method" and user.target == "item":
                    user.replace_all_uses_with(number)
                    graph.graph.erase_node(user)
        graph.recompile()
        return graph

    def note_example_values(self, graph: GraphModule, inputs: Sequence[Any]) -> None:
        """Give each node of Dynamo's graph its fake value again, as far as sizes are symbolic.

        :param inputs: real ones.
        """
        if self._symbolic is not None:
            fakes = self._symbolic.made(inputs, apart=True)  # the graph may change their shapes
            values = _Values(graph, fakes).values
            for node in graph.graph.nodes:
                node.meta["example_value"] = values.get(node)


@contextlib.contextmanager
def tracing_apart(inputs: Sequence[Any], sizes: CallSizes | None = None) -> Iterator[Tracing]:
    """Let AOTAutograd capture a graph, for the block, as if Dynamo were calling its backend.

    :param inputs: real tensors, and numbers.
    :param sizes: what Dynamo knows of their sizes; without it these are plain.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    symbolic = None if sizes is None else SymbolicInputs(sizes.data)
    mode = FakeTensorMode(shape_env=ShapeEnv()) if symbolic is None else symbolic.mode
    context = TracingContext(mode)
    learned = GuardWatch(mode)
    with tracing(context):
        fakes = (
            [
                mode.from_tensor(value, static_shapes=True)
                if isinstance(value, torch.Tensor)
                else value
                for value in inputs
            ]
            if symbolic is None
            else symbolic.made(inputs)
        )
        yield Tracing(fakes, learned, context, symbolic)
