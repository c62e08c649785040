"""Where the written kernels fit: patterns of ATen nodes, and what stands in their place.

Gated activations and RMS norms that are written out are functions (``fuseboard.Pattern``). The
others are matched by hand, since what may differ (a residual, which results are saved for the
backward) matters to the kernels.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator

from torch.fx import GraphModule, Node

from fuseboard_triton.patterns import gated, norms, rotary, softmax
from fuseboard_triton.patterns.nodes import Match

#: What finds matches that end in a node. The larger comes first: a softmax may be a part of a loss.
_FIRST = (*softmax.WHOLE, *rotary.FINDERS, *norms.FINDERS)
_LAST = softmax.FINDERS


def matches(graph: GraphModule) -> list[Match]:
    """Places that don't overlap, in graph order; the larger pattern comes first."""
    taken: set[Node] = set()
    found = []
    written_out = itertools.chain(norms.find(graph), gated.find(graph))
    for match in itertools.chain(_ending(graph, _FIRST), written_out, _ending(graph, _LAST)):
        if not taken & set(match.nodes):
            taken |= set(match.nodes)
            found.append(match)
    return found


def _ending(
    graph: GraphModule, finders: tuple[Callable[[Node], Match | None], ...]
) -> Iterator[Match]:
    for finder in finders:
        for node in graph.graph.nodes:
            match = finder(node) if node.op == "call_function" else None
            if match is not None:
                yield match


def put_kernels(graph: GraphModule) -> list[str]:
    """Put calls of written kernels into a graph; the names of those that fitted."""
    found = matches(graph)
    for match in found:
        _replace(graph, match)
    graph.graph.eliminate_dead_code()
    return [match.name for match in found]


def _replace(graph: GraphModule, match: Match) -> None:
    position = {node: number for number, node in enumerate(graph.graph.nodes)}
    inputs = [arg for arg in match.args if isinstance(arg, Node)]
    last = max(inputs, key=position.__getitem__)
    if last.op == "placeholder":
        last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    with graph.graph.inserting_after(last):
        call = graph.graph.call_function(match.kernel, match.args)
    call.meta["val"] = tuple(
        match.outputs[place].meta["val"] if place in match.outputs else None
        for place in range(max(match.outputs) + 1)
    )
    after = call
    for place, node in match.outputs.items():
        with graph.graph.inserting_after(after):
            after = graph.graph.call_function(operator.getitem, (call, place))
        after.meta = dict(node.meta)
        node.replace_all_uses_with(after)
