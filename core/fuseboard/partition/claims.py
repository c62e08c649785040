"""From what a backend supports, node by node, to claims and declines with reasons."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.contracts import Claim, Decline
from fuseboard.ops.inner_graphs import inner_nodes

#: In the ``meta`` of a node that the backend doesn't get whatever it answers: the reason.
_REFUSED = "fuseboard_refused"


#: In the ``meta`` of a refused node of which regions that read it hold a copy: what the backend
#: says against such a copy; "" until it is asked, and if it says nothing.
_AGAINST_COPY = "fuseboard_against_copy"


def claimed_names(answers: Iterable[Claim | Decline]) -> frozenset[str]:
    """The names of the nodes that a backend claims."""
    return frozenset().union(*(claim.nodes for claim in answers if isinstance(claim, Claim)))


def claims_within(
    answers: Iterable[Claim | Decline], names: Collection[str]
) -> list[Claim | Decline]:
    """A backend's answers as if it claimed some of the nodes alone."""
    cut: list[Claim | Decline] = []
    for answer in answers:
        if isinstance(answer, Decline):
            cut.append(answer)
        elif nodes := answer.nodes.intersection(names):
            cut.append(replace(answer, nodes=nodes, native=answer.native & nodes))
    return cut


def mark_refused(
    graph: GraphModule, refused: Mapping[str, str], copied: Collection[str] = ()
) -> None:
    """Note in a backend's copy of a graph what it doesn't get: ``claim_nodes`` won't claim it.

    :param refused: node → reason.
    :param copied: those of which regions that read them hold copies.
    """
    for node in graph.graph.nodes:
        if node.name in refused:
            node.meta[_REFUSED] = refused[node.name]
        if node.name in copied:
            node.meta[_AGAINST_COPY] = ""


def readers_of_unfit(graph: GraphModule, kept: Collection[str]) -> dict[str, str]:
    """Nodes that a backend can't have, since their region would hold a copy that it can't have.

    :param graph: the backend's copy of the graph, which it was asked about.
    :param kept: names of the board's own nodes.
    :returns: node → reason.
    """
    found: dict[str, str] = {}
    for node in graph.graph.nodes:
        why = node.meta.get(_AGAINST_COPY)
        pending = [node] if why else []
        while pending:
            for user in pending.pop().users:
                if user.name in kept:
                    pending.append(user)
                elif user.op == "call_function":
                    found.setdefault(user.name, f"it reads {node.name}, and {why}")
    return found


def claim_nodes(
    graph: GraphModule,
    why_not: Callable[[Node], str | None],
    native: Callable[[Node], bool] = lambda node: True,
) -> list[Claim | Decline]:
    """Claim every node that nothing speaks against, as one stretch.

    An op that holds graphs of its own (``cond``, ``while_loop``, ``scan``) is asked about, and so
    is each node in them: what speaks against one of these speaks against the op. Nodes that the
    backend doesn't get (the board runs them itself, the backend hasn't declared that it can have
    them, or the user excludes them) aren't claimed, nor asked about; only the board's views are,
    since regions that read them have copies of them.

    :param why_not: the reason to decline a ``call_function`` node, or None to claim it.
    :param native: whether the backend runs a claimed node better than eager would.
    """
    claimed: list[Node] = []
    answers: list[Claim | Decline] = []
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if _AGAINST_COPY in node.meta:
            node.meta[_AGAINST_COPY] = first_reason(node, why_not) or ""
        reason = node.meta.get(_REFUSED) or first_reason(node, why_not)
        if reason is None:
            claimed.append(node)
        else:
            answers.append(Decline(node=node.name, reason=reason))
    if claimed:
        own = frozenset(node.name for node in claimed if native(node))
        answers.insert(0, Claim(nodes=frozenset(node.name for node in claimed), native=own))
    return answers


def first_reason(node: Node, why_not: Callable[[Node], str | None]) -> str | None:
    """What speaks against a node, or against a node of the graphs that it holds."""
    reason = why_not(node)
    if reason is not None or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return reason
    for inner in inner_nodes(node):
        reason = why_not(inner)
        if reason is not None:
            return f"in a graph of {node.target.name()}: {reason}"
    return None


# --- what is left of a backend's answers --------------------------------------------------------


def arbitrate(
    answers: Sequence[Claim | Decline], refused: Mapping[str, str], nodes: Mapping[str, Node]
) -> list[Claim | Decline]:
    """Claims without nodes that the board refuses or that aren't there, and all the declines.

    A claim that is taken all or none is gone with any node of it.

    :param refused: node → reason.
    """
    result: list[Claim | Decline] = []
    open_to_it = nodes.keys() - refused.keys()
    together = any(isinstance(answer, Claim) and answer.together for answer in answers)
    position = {name: number for number, name in enumerate(nodes)} if together else {}
    dropped: dict[str, str] = {}
    for answer in answers:
        if isinstance(answer, Decline):
            if answer.node in open_to_it:
                result.append(answer)
            continue
        allowed = answer.nodes & open_to_it
        reason = _why_not_whole(answer, refused, nodes, position) if answer.together else None
        if reason is not None:
            dropped.update(dict.fromkeys(allowed, reason))
        elif allowed:
            result.append(replace(answer, nodes=allowed, native=answer.native & allowed))
    if dropped:
        said = {answer.node for answer in result if isinstance(answer, Decline)}
        said.update(n for claim in result if isinstance(claim, Claim) for n in claim.nodes)
        result.extend(Decline(name, reason) for name, reason in dropped.items() if name not in said)
    result.extend(Decline(name, reason) for name, reason in refused.items())
    return result


def _why_not_whole(
    claim: Claim,
    refused: Mapping[str, str],
    nodes: Mapping[str, Node],
    position: Mapping[str, int],
) -> str | None:
    """Why nodes that are claimed together can't be taken together."""
    for name in sorted(claim.nodes):
        if name not in nodes:
            return f"claimed together with {name!r}, which the board runs itself"
        if name in refused:
            return f"claimed together with {name!r}: {refused[name]}"
    between = _way_back(claim, nodes, position)
    if between is not None:
        return f"claimed together, though {between!r} reads one of them and another one reads it"
    return None


def _way_back(claim: Claim, nodes: Mapping[str, Node], position: Mapping[str, int]) -> str | None:
    """A node outside of a claim that depends on it and that it depends on."""
    last = max(position[name] for name in claim.nodes)
    pending = [nodes[name] for name in claim.nodes]
    seen: set[Any] = set()
    first: dict[Node, str] = {}
    while pending:
        node = pending.pop()
        outside = node.name not in claim.nodes
        for user in node.users:
            if user.name in claim.nodes:
                if outside:
                    return first[node]
            elif user not in seen and position.get(user.name, last) < last:
                seen.add(user)
                first[user] = first[node] if outside else user.name
                pending.append(user)
    return None
