"""Which nodes of a graph are needed, and until when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node


def needed_nodes(kept: Sequence[Node], results: Sequence[Any]) -> list[Node]:
    """The nodes among ``kept`` that lead to results, in order."""
    own = set(kept)
    needed: set[Node] = set()
    pending = [node for node in results if node in own]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(used for used in node.all_input_nodes if used in own)
    return [node for node in kept if node in needed]


def drops(
    steps: Sequence[tuple[Sequence[Node], Sequence[Node]]],
    results: Sequence[Any],
    keep_inputs: bool,
) -> list[list[Node]]:
    """What to let go after each step.

    :param steps: what each step reads and what it makes.
    :param keep_inputs: for calls that may be tried a second time.
    """
    last: dict[Node, int] = {}
    for number, (reads, makes) in enumerate(steps):
        for node in [*reads, *makes]:
            last[node] = number
    keep = {node for node in results if isinstance(node, Node)}
    dropped: list[list[Node]] = [[] for _ in steps]
    for node, number in last.items():
        inputs = node.op == "placeholder" and keep_inputs
        if node not in keep and not inputs and node.op != "get_attr":
            dropped[number].append(node)
    return dropped


def unused_after(graph: Graph) -> dict[Node, list[Node]]:
    """After each node, the ones that no later node reads; what the graph returns stays."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    steps = [(node.all_input_nodes, [node]) for node in nodes]
    results = graph.output_node().all_input_nodes
    return dict(zip(nodes, drops(steps, results, keep_inputs=False), strict=True))
