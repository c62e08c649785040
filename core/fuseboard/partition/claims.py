"""From what a backend supports, node by node, to claims and declines with reasons."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard import torch_symbols
from fuseboard.contracts import BackendInfo, Claim, Decline


def claim_nodes(
    graph: GraphModule,
    why_not: Callable[[Node], str | None],
    native: Callable[[Node], bool] = lambda node: True,
) -> list[Claim | Decline]:
    """Claim every node that nothing speaks against, as one stretch.

    An op that holds graphs of its own (``cond``, ``while_loop``, ``scan``) is asked about, and so
    is each node in them: what speaks against one of these speaks against the op.

    :param why_not: the reason to decline a ``call_function`` node, or None to claim it.
    :param native: whether the backend runs a claimed node better than eager would.
    """
    claimed: list[Node] = []
    answers: list[Claim | Decline] = []
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        reason = _first_reason(node, why_not)
        if reason is None:
            claimed.append(node)
        else:
            answers.append(Decline(node=node.name, reason=reason))
    if claimed:
        own = frozenset(node.name for node in claimed if native(node))
        answers.insert(0, Claim(nodes=frozenset(node.name for node in claimed), native=own))
    return answers


def _first_reason(node: Node, why_not: Callable[[Node], str | None]) -> str | None:
    """What speaks against a node, or against a node of the graphs that it holds."""
    reason = why_not(node)
    if reason is not None or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return reason
    for inner in _inner_nodes(node):
        reason = why_not(inner)
        if reason is not None:
            return f"in a graph of {node.target.name()}: {reason}"
    return None


def _inner_nodes(node: Node) -> Iterator[Node]:
    """The ops in the graphs that a higher-order op is given, at any depth."""
    owner = node.graph.owning_module
    for used in node.all_input_nodes:
        if used.op != "get_attr" or owner is None:
            continue
        held = operator.attrgetter(str(used.target))(owner)
        for inner in held.graph.nodes if isinstance(held, GraphModule) else ():
            if inner.op == "call_function":
                yield inner
                yield from _inner_nodes(inner)


# --- what the board declines on a backend's behalf ----------------------------------------------


def why_unsupported(info: BackendInfo, node: Node, specialise: bool = False) -> str | None:
    """What the board declines on a backend's behalf.

    Its device types, dtypes, dynamic shapes, and what would be wrong on any backend but eager.

    :param specialise: a backend without dynamic shapes gets code for each combination of sizes.
    """
    reason = _why_special(info, node)
    if reason is not None:
        return reason
    reason = _first_reason(node, lambda inner: _why_values(info, inner))
    if reason is None and not info.dynamic_shapes:
        reason = _first_reason(node, lambda inner: _why_symbolic(info, inner, specialise))
        if reason is None and specialise:
            reason = _why_nested(info, node)
    return reason


def _why_special(info: BackendInfo, node: Node) -> str | None:
    """Ops that stay in eager because of what they do, not of what they compute on."""
    if info.name == "eager":
        return None
    if node.target is torch.ops.higher_order.with_effects:
        # A compiled region that fails is run again in eager, and the effect would happen twice.
        # Inductor also returns None for the token, which is an output of the region.
        return "it has effects beyond its results, and runs once, in order, in eager"
    return None


def _why_values(info: BackendInfo, node: Node) -> str | None:
    values = [used.meta.get("val") for used in node.all_input_nodes]
    own = node.meta.get("val")
    values.extend(own if isinstance(own, list | tuple) else [own])
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type not in info.device_types:
                allowed = ", ".join(sorted(info.device_types))
                return f"device {value.device.type}; {info.name} runs on {allowed}"
            if (
                info.dtypes is not None
                and (value.is_floating_point() or value.is_complex())
                and value.dtype not in info.dtypes
            ):
                return f"dtype {value.dtype} isn't supported by {info.name}"
    return None


def _why_symbolic(info: BackendInfo, node: Node, specialise: bool) -> str | None:
    """Why a backend without dynamic shapes can't have a node."""
    for value in (node.meta.get("val"), *(used.meta.get("val") for used in node.all_input_nodes)):
        numbers = torch_symbols.symbolic_numbers(value)
        if not any(torch_symbols.expression(number).free_symbols for number in numbers):
            continue
        if not specialise:
            return f"symbolic sizes; {info.name} has no dynamic shapes"
        unknown = torch_symbols.why_unknown(value)
        if unknown:
            return f"{unknown}; {info.name} has no dynamic shapes and can't be specialised for them"
    return None


def _why_nested(info: BackendInfo, node: Node) -> str | None:
    """Why a node that holds graphs can't be specialised."""
    if isinstance(node.target, torch._ops.HigherOrderOperator) and any(
        torch_symbols.symbolic_numbers(inner.meta.get("val")) for inner in _inner_nodes(node)
    ):
        return f"a graph within it has symbolic sizes; {info.name} has no dynamic shapes"
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
    position = {name: number for number, name in enumerate(nodes)}
    dropped: dict[str, str] = {}
    for answer in answers:
        if isinstance(answer, Decline):
            if answer.node in nodes and answer.node not in refused:
                result.append(answer)
            continue
        allowed = frozenset(n for n in answer.nodes if n in nodes and n not in refused)
        reason = _why_not_whole(answer, refused, nodes, position) if answer.together else None
        if reason is not None:
            dropped.update(dict.fromkeys(allowed, reason))
        elif allowed:
            result.append(replace(answer, nodes=allowed, native=answer.native & allowed))
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
