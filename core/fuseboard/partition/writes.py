"""Writes to the caller's tensors, which the board makes in these tensors' own memory.

AOTAutograd captures ``cache.index_copy_(2, position, key)`` as an op that computes another tensor,
which its epilogue then copies into the input: the cache moves through memory twice a call. Where
nothing needs the old values, the board runs such an op by itself, between regions, as the writing
op it was. Regions before it compute what is written, regions behind it read the input as it then
is, and none of them ever writes to what it is given.

A call may have to be answered a second time, in eager, after a region failed behind a write. So
only those writes are made in place that come to the same when they are made again: what is written,
and where, doesn't depend on the values that were there before.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fuseboard.contracts import BackendInfo
from fuseboard.ops.forms import are_alike, is_dense
from fuseboard.ops.views import view_chain
from fuseboard.torch_api.copies import copy_graph
from fuseboard.torch_api.internals import size_hint

aten = torch.ops.aten

#: Ops that compute a tensor that differs from the first argument in some places, and what writes
#: there. Made again, each comes to the same: none adds to what was there.
_WRITING: dict[Any, Any] = {
    aten.copy.default: aten.copy_.default,
    aten.fill.Scalar: aten.fill_.Scalar,
    aten.fill.Tensor: aten.fill_.Tensor,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.index_put.default: aten.index_put_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.zero.default: aten.zero_.default,
}
#: Ops that replace a part of their first argument by the second one, and the view that the part is.
_PARTS: dict[Any, Any] = {
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
}

#: Why a write is where it is.
WHY = "the board writes it to the caller's tensor"

#: A tensor of fewer bytes is copied: what the cut between regions takes is more.
MIN_BYTES = 1 << 16


@dataclass(frozen=True)
class Write:
    """A write to an input that the board makes.

    :ivar nodes: those that compute what the input holds after the call, in graph order. The last
        one's result is read in the place of the input; nothing else reads that.
    """

    nodes: tuple[Node, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)


def find_writes(graph: GraphModule, written: Mapping[int, int]) -> list[Write]:
    """The writes of an inference graph that can be made in place.

    :param written: position of a result → that of the input that it is copied into after the call,
        and nothing else is done with it.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    results: Any = graph.graph.output_node().args[0]
    found = []
    for number, position in written.items():
        result, memory = results[number], placeholders[position]
        others = [*results[:number], *results[number + 1 :]]
        if not isinstance(result, Node) or not _is_worth_it(memory, result):
            continue
        nodes = _Chain(result, memory).nodes
        if nodes and not any(_shares(other, {memory, *nodes}) for other in others):
            found.append(Write(tuple(node for node in graph.graph.nodes if node in nodes)))
    return found


def _is_worth_it(memory: Node, result: Node) -> bool:
    before, after = memory.meta.get("val"), result.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if not are_alike(before, after) or not is_dense(before):
        return False
    return size_hint(before.numel()) * before.element_size() >= MIN_BYTES


def _shares(value: Any, nodes: set[Node]) -> bool:
    return isinstance(value, Node) and not nodes.isdisjoint(view_chain(value))


class _Chain:
    """The ops between an input and what it holds after the call.

    :ivar nodes: empty where they aren't writes alone, or something else reads what they replace.
    """

    def __init__(self, result: Node, memory: Node) -> None:
        self._sources: set[Node] = set()
        self.nodes: set[Node] = set()
        if not self._follow(result, memory) or result is memory:
            self.nodes = set()
            return
        replaced = {memory, *self.nodes} - {result}
        read_elsewhere = any(not self.nodes.issuperset(node.users) for node in replaced)
        if read_elsewhere or not self._sources.isdisjoint({*replaced, result}):
            self.nodes = set()

    def _follow(self, value: Node, memory: Node) -> bool:
        """Note the writes that make ``value`` of ``memory``; whether there is nothing else."""
        while value is not memory:
            base = _base(value)
            if base is None:
                return False
            self.nodes.add(value)
            if _replaces_all(value):
                value = base
                continue
            rest = value.args[1:]
            if value.target in _PARTS and (part := _part_before(value)) is not None:
                self.nodes.add(part)
                if not self._follow(rest[0], part):  # type: ignore[arg-type]
                    return False
                rest = rest[1:]
            map_arg((rest, value.kwargs), self._sources.add)
            value = base
        return True


def _base(value: Node) -> Node | None:
    """What a writing op changes a part of; None for another op."""
    if value.target not in _WRITING and value.target not in _PARTS:
        return None
    if _replaces_all(value):
        return value.args[1]  # type: ignore[return-value]
    if value.target is aten.index_put.default:
        accumulates = value.args[3] if len(value.args) > 3 else value.kwargs.get("accumulate")
        if accumulates:
            return None
    base = value.args[0] if value.args else None
    return base if isinstance(base, Node) else None


def _replaces_all(value: Node) -> bool:
    """Whether an op replaces a slice that is the whole tensor, of which it needs nothing then."""
    if value.target is not aten.slice_scatter.default or not isinstance(value.args[1], Node):
        return False
    return are_alike(value.args[1].meta.get("val"), value.meta.get("val"))


def _part_before(value: Node) -> Node | None:
    """The view of the part that an op replaces, where the part is made of it by writes."""
    part = value.args[1]
    while isinstance(part, Node) and (base := _base(part)) is not None:
        part = base
    if part is value.args[1] or not isinstance(part, Node):
        return None
    same = part.target is _PARTS[value.target] and part.args == (value.args[0], *value.args[2:])
    return part if same and not part.kwargs and not value.kwargs else None


def in_place(graph: GraphModule) -> GraphModule:
    """A region of one write as ops that write to its input, which it returns.

    :param graph: the region's; its only result is the write's.
    """
    made = copy_graph(graph)
    output = made.graph.output_node()
    (result,) = output.all_input_nodes
    memory = _memory(result)
    with made.graph.inserting_before(output):
        _make(made, result, memory, memory)
    output.args = ((memory,),)
    made.graph.eliminate_dead_code()  # what writes is kept
    made.recompile()
    return made


def _memory(value: Node) -> Node:
    while (base := _base(value)) is not None:
        value = base
    return value


def _make(made: GraphModule, value: Node, old: Node, memory: Node) -> None:
    """Write so that ``memory``, which holds ``old``, holds ``value``."""
    if value is old:
        return
    base = _base(value)
    assert base is not None
    _make(made, base, old, memory)
    if _replaces_all(value):
        return
    call = functools.partial(made.graph.create_node, "call_function")
    if value.target in _WRITING:
        call(_WRITING[value.target], (memory, *value.args[1:]), dict(value.kwargs))
        return
    view = call(_PARTS[value.target], (memory, *value.args[2:]), dict(value.kwargs))
    part = _part_before(value)
    if part is None:
        call(aten.copy_.default, (view, value.args[1]))
    else:
        _make(made, value.args[1], part, view)  # type: ignore[arg-type]


def left_to_eager(
    excluded: Mapping[str, Mapping[str, str]],
    own: Mapping[str, str],
    backends: Sequence[BackendInfo],
) -> dict[str, Mapping[str, str]]:
    """What backends may not run, and why, with what none of them may.

    :param own: node → reason.
    :param backends: eager is the last.
    """
    left = {info.name: {**own, **excluded.get(info.name, {})} for info in backends[:-1]}
    return {**excluded, **left}


def regions_with_writes(
    regions: Sequence[tuple[str, ...]], writes: Sequence[Write]
) -> tuple[tuple[str, ...], ...]:
    """Planned regions, and one for each write.

    A write that a planned region has a part of is left to it, and makes a copy.
    """
    planned = {name for region in regions for name in region}
    return (*regions, *(write.names for write in writes if planned.isdisjoint(write.names)))
