"""Where in a region a backend's values part from the right ones.

Finds the first op whose output is wrong by cutting the region short, compiling what is left and
judging what is live at the cut.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fuseboard import torch_internals
from fuseboard.contracts import Boxed, Verdict
from fuseboard.profile.reference import make_reference
from fuseboard.profile.values import judge

Lower = Callable[[GraphModule, Sequence[Any]], Boxed]

#: Prefixes that are compiled at most, and seconds after which no further one is begun.
MAX_TRIES, BUDGET_S = 16, 30.0


@dataclass(frozen=True)
class Parting:
    """The first op of a region whose output is wrong.

    :ivar node: its name in the graph.
    :ivar target: the op.
    :ivar source: the user's ``file:line``, if known.
    :ivar verdict: what is wrong there.
    :ivar last: whether the search ended at one op. Where tries or time ran out, or a prefix
        couldn't be compiled, the op is the last of a stretch in which the values part.
    """

    node: str
    target: str
    source: str
    verdict: Verdict
    last: bool = True


def first_parting(
    graph: GraphModule,
    inputs: Sequence[Any],
    lower: Lower,
    tries: int = MAX_TRIES,
    budget_s: float = BUDGET_S,
) -> Parting | None:
    """Find the first op whose output parts; None where the whole region is right.

    A prefix is another graph than the region: a compiler fuses it in another way, and what was
    wrong in the whole may be right in all of its prefixes.

    :param graph: a region as captured; it isn't changed.
    :param inputs: real ones.
    :param lower: compiles a prefix; it is given a graph of its own and real inputs.
    """
    end = time.monotonic() + budget_s
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    low, high = 0, len(nodes)  # the first `low` nodes are right, the first `high` are wrong
    verdict = _try(graph, inputs, lower, len(nodes))
    if verdict is None or verdict.ok:
        return None
    single = True
    for _ in range(tries - 1):
        if high - low <= 1 or time.monotonic() > end:
            break
        middle = (low + high) // 2
        found = _try(graph, inputs, lower, middle)
        if found is None or found.ok:
            low = middle
        else:
            high, verdict = middle, found
    single = high - low <= 1
    node = nodes[high - 1]
    return Parting(node.name, str(node.target), source_line(node), verdict, single)


def _try(graph: GraphModule, inputs: Sequence[Any], lower: Lower, count: int) -> Verdict | None:
    part = prefix(graph, count)
    reference = make_reference(part, inputs)
    call = lower(prefix(graph, count), inputs)
    with torch.no_grad():
        return judge(reference, call(list(inputs)))


def prefix(graph: GraphModule, count: int) -> GraphModule:
    """A graph of its own of the first ``count`` computing nodes.

    Its outputs are the values that are needed after the cut, and the outputs that are ready.
    """
    kept: list[Node] = []
    computing = 0
    for node in graph.graph.nodes:
        if node.op == "output":
            break
        if node.op == "call_function":
            if computing == count:
                continue
            computing += 1
        kept.append(node)
    inside = set(kept)
    live = [
        node
        for node in kept
        if node.op == "call_function"
        and (not node.users or any(user not in inside for user in node.users))
        and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    new = Graph()
    mapping: dict[Node, Node] = {}
    for node in kept:
        mapping[node] = new.node_copy(node, mapping.__getitem__)
    new.output(tuple(mapping[node] for node in live))
    return torch_internals.graph_module(graph, new, type(graph).__name__)


def source_line(node: Node) -> str:
    """The user's ``file:line`` in a node's stack trace, else ""."""
    trace = node.meta.get("stack_trace") or ""
    places: list[tuple[str, str]] = re.findall(r'File "([^"]+)", line (\d+)', trace)
    home = torch.__path__[0]
    own = [place for place in places if not place[0].startswith(home)] or places
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""
