"""Code for a higher-order op whose own graphs were cut into regions.

The op itself runs as in eager, on functions in the place of its graphs: which branch is taken, and
how often a loop goes round, is up to torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from fuseboard.contracts import Boxed, Region
from fuseboard.ops.inner_graphs import InnerGraph, called_graphs
from fuseboard.partition.inner_plans import InnerPlan, returns_one_value, with_flat_results
from fuseboard.partition.regions import Cut, cut_regions
from fuseboard.run.eager import boxed_function
from fuseboard.run.portable import AroundGraphs, Preparing
from fuseboard.run.program import GraphContext, Program
from fuseboard.run.sites import Lowered, Site
from fuseboard.torch_api.copies import copy_graph

#: Lowers the cuts of one graph: (plan for it, its placeholder → the region's that it is, cuts).
LowerCuts = Callable[[InnerPlan, Mapping[Node, int], Sequence[Cut]], Sequence[Lowered]]


@dataclass(frozen=True)
class _InnerCode:
    """
    :ivar call: takes the graph's operands, then its prepared values.
    :ivar prepares: functions that make values, and the positions of the region's inputs they take.
    :ivar one_value: the graph returns a value by itself.
    """

    call: Boxed
    sites: tuple[Site, ...]
    prepares: tuple[tuple[Boxed, tuple[int, ...]], ...]
    values: int
    one_value: bool


def lower_around(
    region: Region, plans: Sequence[InnerPlan], lower_cuts: LowerCuts, context: GraphContext
) -> Lowered:
    """A region that is one higher-order op, with the plans for the graphs that it calls.

    :param context: of the program that calls the region.
    """
    graph = copy_graph(region.graph)
    placeholders = graph.graph.find_nodes(op="placeholder")
    inner = next(found for node in graph.graph.nodes if (found := called_graphs(node)))
    positions = {node: number for number, node in enumerate(placeholders)}
    static = {node for node, number in positions.items() if number in region.static_inputs}
    codes = [
        _code(one, plan, {n: positions[n] for n in static}, lower_cuts, context)
        for one, plan in zip(inner, plans, strict=True)
    ]
    body = _on_functions(graph, inner, region.name)
    count = len(placeholders)
    functions = tuple((code.call, code.values, code.one_value) for code in codes)
    call = AroundGraphs(body, functions, count)
    prepares = [one for code in codes for one in code.prepares]
    uses = tuple(sorted({number for _, numbers in prepares for number in numbers}))
    prepare = None
    if prepares:
        numbered = [(one, tuple(map(uses.index, numbers))) for one, numbers in prepares]
        prepare = Preparing(tuple(numbered))
    return Lowered(
        region,
        call,
        call,
        tuple(range(count)),
        prepare,
        uses,
        sum(code.values for code in codes),
        inner=tuple(site for code in codes for site in code.sites),
    )


def _code(
    inner: InnerGraph,
    plan: InnerPlan,
    static: Mapping[Node, int],
    lower_cuts: LowerCuts,
    context: GraphContext,
) -> _InnerCode:
    graph = with_flat_results(inner.graph)
    nodes = {node.name: node for node in graph.graph.nodes}
    kept = [nodes[name] for name in plan.board_nodes]
    cuts = cut_regions(graph, plan.placements, kept, plan.regions)
    placeholders = graph.graph.find_nodes(op="placeholder")
    weights = {
        node: static[operand]
        for node, operand in zip(placeholders, inner.operands, strict=True)
        if isinstance(operand, Node) and operand in static
    }
    prepares: list[tuple[Boxed, tuple[int, ...]]] = []
    sites: list[Site] = []
    values = 0
    for cut, lowered in zip(cuts, lower_cuts(plan, weights, cuts), strict=True):
        inputs = [cut.inputs[i] for i in lowered.keeps]
        if lowered.prepare is not None:
            used = tuple(weights[cut.inputs[i]] for i in lowered.uses)
            prepares.append((lowered.prepare, used))
            inputs += _further_placeholders(graph, lowered.values)
            values += lowered.values
        plain = dataclasses.replace(
            lowered, prepare=None, uses=(), values=0, keeps=tuple(range(len(inputs)))
        )
        sites.append(Site(dataclasses.replace(cut, inputs=inputs), plain))
    results: Any = graph.graph.output_node().args[0]
    own = dataclasses.replace(context, graph=graph, board_nodes=kept, results=results)
    call = Program(own, sites).trial(None)
    return _InnerCode(call, tuple(sites), tuple(prepares), values, returns_one_value(inner.graph))


def _further_placeholders(graph: GraphModule, count: int) -> list[Node]:
    """Placeholders behind those that a graph has."""
    after = next(node for node in graph.graph.nodes if node.op != "placeholder")
    with graph.graph.inserting_before(after):
        return [graph.graph.placeholder("prepared") for _ in range(count)]


def _on_functions(graph: GraphModule, inner: Sequence[InnerGraph], name: str) -> Boxed:
    """The op's graph, which is changed, as a function that takes what it calls as inputs, too."""
    for one, taken in zip(inner, _further_placeholders(graph, len(inner)), strict=True):
        one.holder.replace_all_uses_with(taken)
        graph.graph.erase_node(one.holder)
    return boxed_function(graph, name)
