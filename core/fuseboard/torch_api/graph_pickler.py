"""Graphs as bytes.

torch's own pickler of graphs, with four things done otherwise:

* It registers ``slice`` with pytree for as long as it works. Dynamo guards on what is registered,
  so a thread that pickles would have other threads' functions compiled again. Slices that hold
  nodes are sent as named tuples here, which pytree knows anyway.
* It describes each fake tensor with all that a converter of metadata may ask for, half a
  millisecond apiece to read again. Those that have a dtype, sizes and strides alone are described
  by these. Views on storages of symbolic sizes would have these fixed by the converter.
* It walks through the arguments of each node in Python, twice. Here torch's compiled walk does it.
* It writes the graph's Python code to send it, which Python's compiler then has in both processes,
  some 40 ms each time for a graph of 500 nodes in which no other thread runs. Here a graph comes
  without code, and has it once somebody asks for it.

Symbolic floats and booleans, which it refuses, are sent as symbolic integers are.

Read against torch 2.13: ``torch/fx/_graph_pickler.py`` (``GraphPickler``, ``_GraphUnpickler``,
``_GraphModulePickleData``, ``patch_pytree_map_over_slice``), ``torch/fx/_lazy_graph_module.py``,
``torch/_subclasses/fake_tensor.py`` (``FakeTensor.__new__``).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._graph_pickler import (
    GraphPickler,
    Options,
    _GraphPickleData,
    _GraphUnpickler,
    _NodePickleData,
    _SymNodePickleData,
    _UnpickleState,
)
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_aggregate


def dumps(value: Any, metadata: Collection[str]) -> bytes:
    """A structure with graphs and fake tensors in it.

    :param metadata: what nodes take along; ``val`` is the fake value.
    """
    options = Options(ops_filter=None, node_metadata_key_filter=lambda key: key in metadata)
    stream = io.BytesIO()
    _Pickler(stream, options).dump(value)
    return stream.getvalue()


def loads(data: bytes, mode: FakeTensorMode) -> Any:
    """What :func:`dumps` was given; its fake tensors are of ``mode``."""
    return _GraphUnpickler(io.BytesIO(data), _UnpickleState(mode)).load()


# --- modules --------------------------------------------------------------------------------------

#: What the code of a graph module consists of.
_CODE = ("_graph", "_code", "_lineno_map", "_prologue_start")


class _Module:
    """A graph module without its code."""

    def __init__(self, module: GraphModule, options: Options) -> None:
        self._values = {k: v for k, v in vars(module).items() if k not in _CODE}
        self._graph = _GraphPickleData(module.graph, options)

    def made(self, state: Any) -> GraphModule:
        module: Any = _LazyGraphModule.__new__(_LazyGraphModule)
        module.__dict__ = self._values
        module._graph = _unpickled(self._graph, module, state)
        module.recompile()  # it notes that there is none yet
        return module  # type: ignore[no-any-return]


def _unpickled(data: _GraphPickleData, module: GraphModule, state: Any) -> Graph:
    """A graph as ``_GraphPickleData.unpickle`` makes it, in a third of its time.

    Nodes get their arguments afterwards: for those that it is given, ``create_node`` walks through
    them once more, in Python, to warn of symbolic numbers.
    """
    graph = Graph(module, data.tracer_cls, data.tracer_extras)
    nodes: dict[Any, Node] = {}

    def node_of(value: Any) -> Any:
        return nodes[value] if type(value) is _NodePickleData else value

    for one in data.nodes:
        target: Any = one.target.unpickle(state)
        node = nodes[one] = graph.create_node(one.op, target, (), {}, one.name, one.type)
        node.args = map_aggregate(one.args, node_of)
        node.kwargs = map_aggregate(one.kwargs, node_of)
        node.meta = one.meta
    graph._codegen = data._codegen
    return graph


# --- slices ---------------------------------------------------------------------------------------


class _Slice(NamedTuple):
    """Stands for a slice."""

    start: Any
    stop: Any
    step: Any


def send_slices(graph: GraphModule) -> None:
    """Let named tuples stand for the slices among the arguments of a graph that is to be sent."""
    _map_arguments(graph, lambda a: _Slice(a.start, a.stop, a.step) if type(a) is slice else a)


def receive_slices(graph: GraphModule) -> None:
    """Undo :func:`send_slices`."""
    _map_arguments(graph, lambda a: slice(*a) if type(a) is _Slice else a)


def _map_arguments(graph: GraphModule, change: Callable[[Any], Any]) -> None:
    for node in graph.graph.nodes:
        if any(type(value) in (slice, _Slice) for value in _leaves(node.args)):
            node.args = _mapped(node.args, change)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple) and type(value) is not _Slice:
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(value, list | tuple) or type(value) is _Slice:
        return change(value)
    values = [_mapped(one, change) for one in value]
    return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)


# --- fake tensors ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """A fake tensor of a storage; tensors that share one there share one here.

    :ivar storage: its number.
    :ivar nbytes: of the storage.
    """

    storage: int
    nbytes: int | torch.SymInt
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | torch.SymInt, ...]
    strides: tuple[int | torch.SymInt, ...]
    offset: int | torch.SymInt
    requires_grad: bool
    is_parameter: bool


class _Pickler(GraphPickler):
    """Writes plain fake tensors as forms, and graph modules without code."""

    def __init__(self, file: Any, options: Options | None = None) -> None:
        super().__init__(file, options)
        #: By identity. The storages are kept, so that none takes the place of another.
        self._numbers: dict[int, tuple[int, Any]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, GraphModule):
            return _Module.made, (_Module(obj, self.options), self._unpickle_state)
        if type(obj) is FakeTensor and _is_plain(obj):
            return _made, (self._form(obj), self._unpickle_state)
        if isinstance(obj, torch.SymFloat | torch.SymBool):
            return _number, (_SymNodePickleData(obj.node), self._unpickle_state)
        return super().reducer_override(obj)

    def _form(self, value: FakeTensor) -> _Form:
        storage = value.untyped_storage()
        number, _ = self._numbers.setdefault(storage._cdata, (len(self._numbers), storage))
        return _Form(
            number,
            storage.nbytes(),
            value.dtype,
            value.device,
            tuple(value.shape),
            value.stride(),
            value.storage_offset(),
            value.requires_grad,
            isinstance(value, torch.nn.Parameter),
        )


def _is_plain(value: FakeTensor) -> bool:
    if value.layout != torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
        return False
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    known = all(type(size) in (int, torch.SymInt) for size in sizes)
    return known and value.is_leaf and value.constant is None


def _made(form: _Form, state: Any) -> FakeTensor:
    """
    :param state: torch's, of one reading; storages are kept there.
    """
    storages: dict[int, Any] = state.__dict__.setdefault("fuseboard_storages", {})
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        value = _value(form, storages)
        if form.requires_grad:
            value.requires_grad_()
        made = FakeTensor(state.fake_mode, value, form.device)
    if form.is_parameter:
        setattr(made, "_is_param", True)  # noqa: B010  # what isinstance(made, Parameter) asks
    return made


def _value(form: _Form, storages: dict[int, Any]) -> torch.Tensor:
    """
    :param storages: those that were made, by number.
    """
    kind: Any = {"dtype": form.dtype, "device": "meta"}
    if form.storage not in storages:
        if all(type(size) is int for size in (form.nbytes, *form.shape, *form.strides)):
            # Most tensors are all that their storage holds: a third less work.
            value = torch.empty_strided(form.shape, form.strides, **kind)
            if form.offset == 0 and value.untyped_storage().nbytes() == form.nbytes:
                storages[form.storage] = value.untyped_storage()
                return value
        # An untyped storage would fix a symbolic size.
        held = torch.empty(form.nbytes, dtype=torch.uint8, device="meta")
        storages[form.storage] = held.untyped_storage()
    value = torch.empty(0, **kind)
    return value.set_(storages[form.storage], form.offset, form.shape, form.strides)


def _number(data: Any, state: Any) -> Any:
    """
    :param data: torch's description of a node, whose ShapeEnv has been read with it.
    """
    kind: Any = {float: torch.SymFloat, bool: torch.SymBool}[data.pytype]
    return kind(data._to_sym_node())
