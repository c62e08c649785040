"""A region as launches of kernels, with the views and ops between them that run on the host."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

import fuseboard
from fuseboard_triton import _torch_internals
from fuseboard_triton._axes import Axes, Conflict
from fuseboard_triton._build import VIEWS, buffer
from fuseboard_triton._claim import is_view
from fuseboard_triton._codegen import KernelSource, kernel_source
from fuseboard_triton._composites import build
from fuseboard_triton._ir import Unsupported, Value, contiguous_strides
from fuseboard_triton._launch import Launcher
from fuseboard_triton._match import put_kernels
from fuseboard_triton._options import Options
from fuseboard_triton._schedule import Group, Unschedulable, base_of, schedule
from fuseboard_triton._torch_internals import Size, size_of


def lower_region(region: fuseboard.Region) -> fuseboard.LoweredRegion:
    """Generate kernels for a region."""
    options = region.options or Options()
    written = put_kernels(region.graph) if options.written_kernels else []
    plan = plan_region(region.graph)
    graph = _write(region.graph, plan, options)
    kernels = len(plan.groups)
    notes = [f"{kernels} Triton kernel{'' if kernels == 1 else 's'}"]
    counted = Counter(written)
    notes += [f"written kernel {name} ×{times}" for name, times in sorted(counted.items())]
    hosted = [node for node in plan.host if isinstance(node.target, torch._ops.OpOverload)]
    alone = sorted({str(node.target) for node in hosted if not is_view(node)})
    if alone:
        notes.append(f"run by eager between kernels: {', '.join(alone)}")
    call = fuseboard.lower_eagerly(dataclasses.replace(region, graph=graph)).call
    return fuseboard.LoweredRegion(call=call, notes=tuple(notes))


@dataclasses.dataclass
class Plan:
    """What becomes of a region.

    :ivar values: node → value, tuple of values, or None where no kernel can use it.
    :ivar host: nodes that run on the host and whose results are buffers.
    :ivar epochs: value → how many of them it waits for, one after the other.
    """

    values: dict[Node, Any]
    host: dict[Node, int]
    epochs: dict[Value, int]
    stored: dict[Value, None]
    groups: list[Group]
    hints: dict[Any, int]

    def hint(self, size: Size) -> int:
        """A size as a number, in the example."""
        return size if isinstance(size, int) else int(size.xreplace(self.hints))


def plan_region(graph: GraphModule) -> Plan:
    """Build values and put them into kernels; what doesn't fit is left to the host."""
    forced: set[Node] = set()
    while True:
        builder = _Builder(graph, forced)
        try:
            return builder.run()
        except Unschedulable as problem:
            owner = builder.owner_of(problem.value)
            views = {n for n in owner.all_input_nodes if n.target in VIEWS} - forced
            forced |= views or {owner}


class _Builder:
    """The values of a region's nodes."""

    def __init__(self, graph: GraphModule, forced: set[Node]) -> None:
        self.graph = graph
        self.forced = forced
        self.values: dict[Node, Any] = {}
        self.host: dict[Node, int] = {}
        self.epochs: dict[Value, int] = {}
        self.stored: dict[Value, None] = {}
        self.owners: dict[Value, Node] = {}

    def run(self) -> Plan:
        for node in self.graph.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.values[node] = self._given(node)
            elif node.op == "call_function":
                self._compute(node)
        output = self.graph.graph.output_node()
        for node in output.all_input_nodes:
            self._demand(node)
        hints = _torch_internals.hints_of(_sizes_in(self.graph))
        plan = Plan(self.values, self.host, self.epochs, self.stored, [], hints)
        order = _in_order(self.stored)
        plan.groups = schedule(order, self.stored, self.epochs, plan.hint)
        return plan

    def owner_of(self, value: Value) -> Node:
        return self.owners[value]

    def _given(self, node: Node) -> Any:
        meta = node.meta.get("val")
        if isinstance(meta, torch.SymInt):
            return Value("symbol", torch.int64, (), param=meta.node.expr)
        if not isinstance(meta, torch.Tensor):
            return None
        try:
            return buffer(meta)
        except Unsupported:
            return None

    def _compute(self, node: Node) -> None:
        meta = node.meta.get("val")
        if isinstance(meta, torch.SymInt):
            self.values[node] = Value("symbol", torch.int64, (), param=meta.node.expr)
            self.host[node] = 0
            return
        if node in self.forced:
            self._leave_to_host(node, meta)
            return
        try:
            built = build(node, self._operand)
            for value in built if isinstance(built, tuple) else (built,):
                if value is not None and value.kind == "view":
                    _check_views(value)
        except (Unsupported, Conflict):
            self._leave_to_host(node, meta)
        else:
            self.values[node] = built
            self._own(built, node)

    def _operand(self, node: Node) -> Any:
        value = self.values[node]
        if value is None:
            raise Unsupported("it reads what no kernel can")
        return value

    def _own(self, built: Any, node: Node) -> None:
        """Note whose the new values are, and for how many host ops they wait."""
        results = built if isinstance(built, tuple) else (built,)
        for value in _in_order(v for v in results if v is not None):
            if value not in self.owners and value.kind not in ("buffer", "symbol"):
                self.owners[value] = node
                waits = [self.epochs.get(used, 0) for used in value.args]
                self.epochs[value] = max(waits, default=0)

    def _leave_to_host(self, node: Node, meta: Any) -> None:
        epoch = 0
        for used in node.all_input_nodes:
            self._demand(used)
            epoch = max(epoch, self._epoch_of(used))
        # Views of what was there from the start wait for nobody.
        waits = 0 if epoch == 0 and is_view(node) and not self._computed(node) else epoch + 1
        self.host[node] = waits
        try:
            if isinstance(meta, torch.Tensor):
                self.values[node] = value = buffer(meta)
                self.epochs[value] = waits
            else:
                self.values[node] = None
        except Unsupported:
            self.values[node] = None

    def _computed(self, node: Node) -> bool:
        """Whether a view's source is a kernel's result."""
        return any(
            isinstance(value, Value) and base_of(value).kind != "buffer"
            for value in (self.values[used] for used in node.all_input_nodes)
        )

    def _epoch_of(self, node: Node) -> int:
        if node in self.host:
            return self.host[node]
        value = self.values[node]
        return self.epochs.get(value, 0) if isinstance(value, Value) else 0

    def _demand(self, node: Node) -> None:
        """A node's value is needed in memory."""
        if node in self.host or node.op != "call_function":
            return
        if node.target in VIEWS:
            (source, *_) = node.all_input_nodes
            self._demand(source)
            return
        value = self.values[node]
        if isinstance(value, Value):
            self.stored[value] = None


def _check_views(value: Value) -> None:
    """Whether axes can express a chain of views.

    :raises Conflict: they can't.
    """

    def labels(current: Value) -> Any:
        if current.kind != "view":
            return axes.fresh_labels(current.shape)
        return axes.viewed(current, labels(current.args[0]))

    axes = Axes()
    labels(value)


def _in_order(values: Iterable[Value]) -> list[Value]:
    """Values and what they read, each after what it reads."""
    done: dict[Value, None] = {}
    pending = [(value, False) for value in reversed(list(values))]
    while pending:
        value, ready = pending.pop()
        if value in done:
            continue
        if ready:
            done[value] = None
        else:
            pending.append((value, True))
            pending.extend((used, False) for used in reversed(value.args))
    return list(done)


def _sizes_in(graph: GraphModule) -> Iterable[Any]:
    for node in graph.graph.nodes:
        metas = node.meta.get("val")
        for meta in metas if isinstance(metas, list | tuple) else [metas]:
            if isinstance(meta, torch.Tensor):
                yield from (*meta.shape, *meta.stride())
            else:
                yield meta


# --- the graph that runs --------------------------------------------------------------------------


def strides_of(value: Value) -> tuple[Size, ...]:
    """How a value lies in memory."""
    if value.meta is None:
        return contiguous_strides(value.shape)
    return tuple(size_of(stride) for stride in value.meta.stride())


def sources_of(plan: Plan) -> list[KernelSource]:
    """The source of each group."""
    return [kernel_source(group, strides_of, plan.hint) for group in plan.groups]


def _write(graph: GraphModule, plan: Plan, options: Options) -> GraphModule:
    """The region's graph with launches in the places of ops."""
    return _Writer(graph, plan, options).run()


class _Writer:
    def __init__(self, graph: GraphModule, plan: Plan, options: Options) -> None:
        self.old = graph
        self.plan = plan
        self.options = options
        self.new = Graph()
        self.nodes: dict[Node, Node] = {}  # of the old graph → of the new
        self.made: dict[Value, Node] = {}
        self.symbols: dict[Any, Node] = {}
        self.device = _device_of(graph)

    def run(self) -> GraphModule:
        for node in self.old.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copy(node)
        groups = list(zip(self.plan.groups, sources_of(self.plan), strict=True))
        last = max([0, *self.plan.host.values(), *(group.epoch for group, _ in groups)])
        for epoch in range(last + 1):
            for node, when in self.plan.host.items():
                if when == epoch:
                    self._copy(node)
            for group, source in groups:
                if group.epoch == epoch:
                    self._launch(source)
        output = self.old.graph.output_node()
        self.new.output(torch.fx.map_arg(output.args[0], self._in_memory))
        return GraphModule(self.old, self.new)

    def _copy(self, node: Node) -> Node:
        copied = self.new.node_copy(node, self._in_memory)
        copied.meta = dict(node.meta)
        self.nodes[node] = copied
        value = self.plan.values[node]
        if isinstance(value, Value):
            if value.kind == "symbol":
                self.symbols.setdefault(value.param, copied)
            else:
                self.made[value] = copied
        return copied

    def _in_memory(self, node: Node) -> Node:
        """A node's value in the new graph; views of kernels' results are made here."""
        if node in self.nodes:
            return self.nodes[node]
        value = self.plan.values[node]
        if node.target not in VIEWS:
            return self.made[value]
        self._in_memory(node.all_input_nodes[0])
        return self._copy_view(node)

    def _copy_view(self, node: Node) -> Node:
        copied = self.new.node_copy(node, self._in_memory)
        copied.meta = dict(node.meta)
        self.nodes[node] = copied
        return copied

    def _launch(self, source: KernelSource) -> None:
        symbols = self._symbols_of(source)
        launcher = Launcher(
            source,
            symbols,
            lambda value: (value.shape, strides_of(value)),
            self.device,
            self.options.autotune,
        )
        args = [*(self.made[v] for v in source.inputs), *(self.symbols[s] for s in symbols)]
        both = self.new.call_function(launcher, tuple(args))
        for number, value in enumerate(source.outputs):
            self.made[value] = self.new.call_function(operator.getitem, (both, number))

    def _symbols_of(self, source: KernelSource) -> list[Any]:
        sizes = [*source.numbers, source.outer, *source.extents]
        sizes += [] if source.reduced is None else [source.reduced]
        for value in source.outputs:
            sizes += [*value.shape, *strides_of(value)]
        found = {s for size in sizes if not isinstance(size, int) for s in size.free_symbols}
        missing = sorted(str(symbol) for symbol in found if symbol not in self.symbols)
        if missing:
            raise fuseboard.LoweringError(f"sizes that no input gives: {', '.join(missing)}")
        return sorted(found, key=str)


def _device_of(graph: GraphModule) -> torch.device:
    for node in graph.graph.nodes:
        metas = node.meta.get("val")
        for meta in metas if isinstance(metas, list | tuple) else [metas]:
            if isinstance(meta, torch.Tensor):
                return meta.device
    raise fuseboard.LoweringError("a region without a tensor")
