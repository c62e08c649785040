"""Where in a region a backend's values leave the right ones.

Finds the first op whose output is wrong by cutting the region short, compiling what is left and
judging what is live at the cut.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fuseboard.contracts import Boxed, Verdict
from fuseboard.errors import containable
from fuseboard.profile.judge.copies import Copies
from fuseboard.profile.judge.reference import make_reference
from fuseboard.profile.judge.values import judge
from fuseboard.report.nodes import source_line
from fuseboard.torch_api.copies import graph_module

Lower = Callable[[GraphModule, Sequence[Any]], Boxed]

#: Graphs that are compiled at most, the whole region included, and seconds after which no further
#: one is begun.
MAX_TRIES, BUDGET_S = 16, 10.0


@dataclass(frozen=True)
class Divergence:
    """The first op of a region whose output is wrong.

    :ivar node: its name in the graph.
    :ivar target: the op.
    :ivar source: the user's ``file:line``, if known.
    :ivar verdict: what is wrong where the region ends with that op; its outputs are those of
        :func:`prefix`.
    :ivar within: how many ops it may be, that one and those before it: more than one where tries or
        time ran out, or the backend couldn't compile a part.
    """

    node: str
    target: str
    source: str
    verdict: Verdict
    within: int = 1


def first_divergence(
    graph: GraphModule,
    inputs: Sequence[Any],
    lower: Lower,
    tries: int = MAX_TRIES,
    budget_s: float = BUDGET_S,
) -> Divergence | None:
    """Find the first op whose output is wrong; None where the region's values are right.

    A part is another graph than the region: a compiler fuses it in another way, so what was wrong
    in the whole may be right in all of its parts. Then the last op is told.

    :param graph: a region as captured; it isn't changed. It must be ``replayable``.
    :param inputs: real ones; they are copied for each try.
    :param lower: compiles a part; it is given a graph of its own and real inputs. What it raises
        for the whole region is passed on; a part that it can't compile ends the search.
    """
    end = time.monotonic() + budget_s
    steps = _steps(graph)
    verdict = _verdict(graph, inputs, lower, len(steps))
    if verdict.ok or not steps:
        return None
    right, wrong = 0, len(steps)  # so many steps from the start are right, are wrong
    for _ in range(tries - 1):
        if wrong - right == 1 or time.monotonic() > end:
            break
        middle = (right + wrong) // 2
        try:
            found = _verdict(graph, inputs, lower, middle)
        except containable():  # the op is then one of several, which `within` says
            break
        if found.ok:
            right = middle
        else:
            wrong, verdict = middle, found
    node = steps[wrong - 1]
    return Divergence(node.name, str(node.target), source_line(node), verdict, wrong - right)


def _verdict(graph: GraphModule, inputs: Sequence[Any], lower: Lower, count: int) -> Verdict:
    reference = make_reference(prefix(graph, count), inputs)
    call = lower(prefix(graph, count), inputs)
    copies = Copies(inputs)
    with torch.no_grad():
        try:
            return judge(reference, call(list(copies.values)))
        finally:
            copies.written()


def _steps(graph: GraphModule) -> list[Node]:
    """The nodes that compute; items of a tuple come with what makes it."""
    return [
        node
        for node in graph.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]


def prefix(graph: GraphModule, count: int) -> GraphModule:
    """A graph of its own of the first ``count`` computing nodes.

    Its outputs are the tensors among them that are read after the cut, or returned.
    """
    inside = set(_steps(graph)[:count])
    kept: list[Node] = []
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is operator.getitem:
            if node.args[0] in inside:
                inside.add(node)
        elif node.op in ("placeholder", "get_attr"):
            inside.add(node)
        if node in inside:
            kept.append(node)
    live = [
        node
        for node in kept
        if node.op == "call_function"
        and isinstance(node.meta.get("val"), torch.Tensor)
        and any(user not in inside for user in node.users)
    ]
    new = Graph()
    mapping: dict[Node, Node] = {}
    for node in kept:
        mapping[node] = new.node_copy(node, mapping.__getitem__)
    new.output(tuple(mapping[node] for node in live))
    return graph_module(graph, new, type(graph).__name__)
