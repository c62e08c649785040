"""Why ops aren't where they were meant to be first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fuseboard.report.data import GraphReport, NodeReport


@dataclass(frozen=True)
class Elsewhere:
    """Ops of a graph that aren't on the first backend, for one reason.

    :ivar ops: op → how many.
    :ivar sources: the user's lines that they come from, ``file:line``.
    """

    backend: str
    reason: str
    ops: dict[str, int]
    sources: tuple[str, ...]


def foremost(graph: GraphReport) -> str:
    """The backend that comes first: in what was chosen, where several were compared; or ""."""
    if not any(candidate.state == "chosen" for candidate in graph.candidates):
        return graph.backends[0] if graph.backends else ""
    running = {region.backend for region in graph.regions}
    return next((name for name in graph.backends if name in running), "")


def elsewhere(graph: GraphReport) -> list[Elsewhere]:
    """Why ops aren't on the foremost backend, largest group first. The board's aren't counted."""
    first = foremost(graph)
    groups: dict[tuple[str, str], list[NodeReport]] = {}
    for node in graph.nodes:
        if first and node.backend not in (first, "board"):
            reason = node.declined.get(first) or node.reason
            groups.setdefault((node.backend, reason), []).append(node)
    return [
        Elsewhere(
            backend=backend,
            reason=reason,
            ops=dict(Counter(node.op for node in nodes).most_common()),
            sources=tuple(dict.fromkeys(node.source for node in nodes if node.source)),
        )
        for (backend, reason), nodes in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
