"""NaN where eager has NaN, although oneDNN's relu and clip drop it.

oneDNN's relu is ``max(x, 0)``, which answers 0 for NaN; fused into a convolution it would hide
what eager shows. Applied after the convolution it would cost a pass over memory. So a region is
lowered twice: *fast* with it fused, *exact* without, and each call runs fast only if its inputs
and the weights are finite. It is fused only where a NaN can't come from anything but those inputs
and weights: one that arises further in by overflow of finite numbers is the exception that
remains (eager then answers NaN or infinity).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fuseboard_mkldnn import _ops
from fuseboard_mkldnn._graph import aten, calls, sole_user, tensor
from fuseboard_mkldnn._pointwise import needs_finite, post_op

CONVOLUTION = torch.ops.mkldnn._convolution_pointwise.default
CONVOLUTION_ADD = torch.ops.mkldnn._convolution_pointwise.binary

#: Ops that make no NaN or infinity from finite numbers, overflow aside.
TAME = frozenset(
    {
        operator.getitem,
        aten._adaptive_avg_pool2d.default,
        aten._unsafe_view.default,
        aten.abs.default,
        aten.add.Tensor,
        aten.avg_pool2d.default,
        aten.cat.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.expand.default,
        aten.gelu.default,
        aten.hardsigmoid.default,
        aten.hardswish.default,
        aten.hardtanh.default,
        aten.leaky_relu.default,
        aten.max_pool2d_with_indices.default,
        aten.mean.dim,
        aten.mul.Tensor,
        aten.neg.default,
        aten.permute.default,
        aten.relu.default,
        aten.select.int,
        aten.sigmoid.default,
        aten.silu.default,
        aten.slice.Tensor,
        aten.sub.Tensor,
        aten.tanh.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)


def all_finite(*weights: torch.Tensor) -> torch.Tensor:
    """Whether every number is finite, as a boolean of no dimensions."""
    return torch.stack([torch.isfinite(weight).all() for weight in weights]).all()


def checked(result: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """``result`` itself. Carries ``finite``, said of its weights, to the lowering."""
    return result


@dataclass(frozen=True)
class Guard:
    """What must be finite for the fast graph: inputs and flags, by position."""

    inputs: tuple[int, ...]
    flags: tuple[int, ...]

    def holds(self, args: list[Any]) -> bool:
        """Whether one call's arguments are finite."""
        for position in self.flags:
            if not args[position]:
                return False
        for position in self.inputs:
            # A sum is infinite or NaN if one of its terms is.
            if not math.isfinite(args[position].sum().item()):
                return False
        return True


def fast_copy(graph: GraphModule) -> tuple[GraphModule, Guard] | None:
    """A copy with relu and clip inside the convolutions, and what it takes to run it.

    Also takes the ``checked`` nodes out of ``graph``. None where there is nothing to fuse.
    """
    flags = _take_out_checks(graph)
    needs = _needs(graph, flags)
    fusible = [
        (node, node.args[0])
        for node in graph.graph.nodes
        if node.op == "call_function" and _fuses(node) and node.args[0] in needs
    ]
    if not fusible:
        return None
    required = set().union(*(needs[convolution] for _, convolution in fusible))
    placeholders = list(graph.graph.find_nodes(op="placeholder"))
    wanted = [(i, node) for i, node in enumerate(placeholders) if node in required]
    guard = Guard(
        inputs=tuple(i for i, node in wanted if node not in flags.values()),
        flags=tuple(i for i, node in wanted if node in flags.values()),
    )
    copied = Graph()
    new: dict[Node, Node] = {}
    copied.output(copied.graph_copy(graph.graph, new))
    for old, node in new.items():
        node.meta = dict(old.meta)
    for node, convolution in fusible:
        _fuse(new[node], new[convolution])
    return GraphModule(graph, copied), guard


def _take_out_checks(graph: GraphModule) -> dict[Node, Node]:
    """Remove ``checked`` nodes; convolution → its flag, where that is an input."""
    flags: dict[Node, Node] = {}
    for node in list(graph.graph.find_nodes(op="call_function", target=checked)):
        result, flag = node.args
        node.replace_all_uses_with(result)
        graph.graph.erase_node(node)
        if flag.op == "placeholder":
            flags[result] = flag
        elif not flag.users:
            graph.graph.erase_node(flag)
    return flags


def _needs(graph: GraphModule, flags: dict[Node, Node]) -> dict[Node, frozenset[Node]]:
    """For nodes that are finite if some placeholders are: those placeholders."""
    needs: dict[Node, frozenset[Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            found = tensor(node)
            floats = found is not None and found.is_floating_point()
            needs[node] = frozenset({node}) if floats else frozenset()
        elif node.op != "call_function":
            continue
        elif node in flags:
            data = node.args[:2] if calls(node, CONVOLUTION_ADD) else node.args[:1]
            if all(one in needs for one in data):
                needs[node] = frozenset({flags[node]}).union(*(needs[one] for one in data))
        elif node.target in TAME and all(one in needs for one in node.all_input_nodes):
            if all(map(_is_tame_number, (*node.args, *node.kwargs.values()))):
                needs[node] = frozenset().union(*(needs[one] for one in node.all_input_nodes))
    return needs


def _is_tame_number(argument: Any) -> bool:
    return not isinstance(argument, float) or math.isfinite(argument)


def _fuses(node: Node) -> bool:
    """Whether a node is a post-operation that its convolution can take in."""
    post, convolution = post_op(node), node.args[0] if node.args else None
    transposed = calls(convolution, _ops.transposed_convolution())
    if post is None or not needs_finite(post, transposed) or sole_user(convolution) is not node:
        return False
    if calls(convolution, CONVOLUTION_ADD):
        return convolution.args[10] is None and post.name == "relu"
    return (transposed or calls(convolution, CONVOLUTION)) and convolution.args[-3] == "none"


def _fuse(node: Node, convolution: Node) -> None:
    post = post_op(node)
    if calls(convolution, CONVOLUTION_ADD):
        convolution.args = (*convolution.args[:10], post.attr, [], None)
    else:
        convolution.args = (*convolution.args[:-3], post.attr, list(post.scalars), "")
    node.replace_all_uses_with(convolution)
    node.graph.erase_node(node)
