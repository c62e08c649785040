"""2-D and 3-D convolutions: batch norm folded, weight packed, post-operation or residual inside."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_mkldnn import _ops, _transposed
from fuseboard_mkldnn._exact import all_finite, checked
from fuseboard_mkldnn._graph import (
    Editor,
    aten,
    calls,
    channels_last,
    for_each,
    has_good_dtypes,
    has_strides_of,
    is_channels_last,
    is_contiguous,
    is_empty,
    is_plain_clone,
    sole_user,
    tensor,
)
from fuseboard_mkldnn._layout import linked, to_strides_of
from fuseboard_mkldnn._options import Options
from fuseboard_mkldnn._pack import Budget, ConvolutionShape, choose_convolution
from fuseboard_mkldnn._pointwise import needs_finite, post_op, residual

BATCH_NORMS = (
    aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm.default,
)


@dataclass
class Convolution:
    """One convolution, which may be transposed, and what follows it.

    :ivar node: the ``convolution``.
    :ivar nodes: all that the rewrite replaces, in graph order.
    :ivar norm: the batch norm among them.
    :ivar add: the node among them that adds a residual, or subtracts one from the other.
    :ivar post: the post-operation among them; it comes last.
    """

    node: Node
    nodes: list[Node] = field(default_factory=list)
    norm: Node | None = None
    add: Node | None = None
    post: Node | None = None

    @property
    def is_transposed(self) -> bool:
        return bool(self.node.args[6])

    @property
    def name(self) -> str:
        """Such as ``conv+bn+add+relu``."""
        parts = ["conv_transpose" if self.is_transposed else "conv"]
        parts += ["bn"] if self.norm is not None else []
        parts += ["sub" if calls(self.add, aten.sub.Tensor) else "add"] if self.add else []
        parts += [post_op(self.post).name] if self.post is not None else []
        return "+".join(parts)


def is_convolution(node: Node) -> bool:
    """Whether a node is a convolution that oneDNN's operators here can run, its weight aside."""
    if not calls(node, aten.convolution.default) or len(node.args) < 9:
        return False
    x, weight, result = tensor(node.args[0]), tensor(node.args[1]), tensor(node)
    if x is None or weight is None or result is None:
        return False
    if x.dim() not in (4, 5) or weight.dim() != x.dim():
        return False
    if node.args[6] or any(one.device.type != "cpu" for one in (x, weight)):
        return False
    if any(map(is_empty, (x, weight, result))):
        return False
    if not has_good_dtypes(x, weight, tensor(node.args[2])):
        return False
    numbers = (*weight.shape, *node.args[3], *node.args[4], *node.args[5], node.args[8])
    if not all(isinstance(number, int) for number in numbers):
        return False
    # Only these two layouts can be given back.
    return is_contiguous(result) or is_channels_last(result)


def is_folded_norm(node: Node, static: set[Node] | None = None) -> bool:
    """Whether a node is an inference batch norm (with static statistics, if known)."""
    if not calls(node, *BATCH_NORMS):
        return False
    if calls(node, aten.native_batch_norm.default) and node.args[5]:
        return False  # training: the statistics are those of the batch
    further = [arg for arg in node.args[1:5] if arg is not None]
    known = static is None or static.issuperset(further)
    return known and isinstance(node.args[3], Node) and isinstance(node.args[4], Node)


def find_convolutions(graph: GraphModule, static: set[Node], taken: set[Node]) -> list[Convolution]:
    """Convolutions whose weight is static, with what can be fused to them.

    :param taken: nodes of other rewrites; those of these are added.
    """
    found: list[Convolution] = []
    order = {node: position for position, node in enumerate(graph.graph.nodes)}
    # From the end: of two convolutions whose results are added, the later one takes the addition,
    # because the other one's result is there by then.
    for node in reversed(list(graph.graph.nodes)):
        if not (is_convolution(node) or _transposed.is_transposed(node)):
            continue
        if node in taken or node.args[1] not in static or node.args[0] in static:
            continue
        one = Convolution(node=node, nodes=[node])
        _follow(one, static, taken)
        one.nodes.sort(key=order.__getitem__)
        taken.update(one.nodes)
        found.append(one)
    return found[::-1]


def _follow(one: Convolution, static: set[Node], taken: set[Node]) -> None:
    """Take in what follows, as long as each result has one user."""
    result = one.node
    while one.post is None and (user := sole_user(result)) is not None and user not in taken:
        if one.add is None and one.norm is None and _folds(one, user, result, static):
            one.norm = user
            one.nodes.append(user)
            user = sole_user(user)
        elif not _take(one, user, result):
            return
        one.nodes.append(user)
        result = user


def _take(one: Convolution, user: Node, result: Node) -> bool:
    """Take in one node that keeps the shape, if it is of a kind that can be."""
    found = tensor(user)
    if found is None or not has_strides_of(found, tensor(result)):
        return False
    if is_plain_clone(user):
        return True
    post = post_op(user)
    if post is not None:
        # After a sum oneDNN's operator takes relu alone.
        one.post = user if one.add is None or post.name == "relu" else None
        return one.post is not None
    # oneDNN's operator for transposed ones takes no second operand.
    if one.is_transposed or one.add is not None:
        return False
    if residual(user, result, aten.add.Tensor, aten.sub.Tensor) is not None:
        one.add = user
    return one.add is not None


def _folds(one: Convolution, user: Node, result: Node, static: set[Node]) -> bool:
    """Whether ``user`` is a batch norm of ``result`` that can be folded into the weight."""
    if not is_folded_norm(user, static) or user.args[0] is not result:
        return False
    bias = one.node.args[2]
    item = sole_user(user)
    return (bias is None or bias in static) and item is not None and item.args[1:] == (0,)


# --- choosing -----------------------------------------------------------------------------------


def fuse_convolutions(
    graph: GraphModule, static: set[Node], taken: set[Node], options: Options, budget: Budget
) -> list[fuseboard.Fusion]:
    """A fusion for each convolution that something is gained for."""
    found = find_convolutions(graph, static, taken)
    feeding = linked({one.node for one in found if not one.is_transposed})
    packed = {one.node: _packs(one, one.node in feeding, options, budget) for one in found}
    checks = any(
        packed[one.node]
        and one.post is not None
        and needs_finite(post_op(one.post), one.is_transposed)
        for one in found
    )
    return [
        fuseboard.Fusion(
            name=one.name,
            nodes=tuple(node.name for node in one.nodes),
            apply=lambda one=one: _apply(one, checks),
        )
        for one in found
        if packed[one.node]
    ]


def _packs(one: Convolution, feeds: bool, options: Options, budget: Budget) -> bool:
    """Whether the packed kernel is to run a convolution.

    It reads and writes channels-last. Between convolutions that is for free; one that stands
    alone pays for converting, and may then be slower than the plain kernel: it is measured.
    Batch norms aren't folded into the plain kernel: on 200 random (2, 16, 9, 11) inputs its largest
    error was then 1.7 times that of convolution and norm apart (median; the packed kernel's 0.96).
    """
    if options.channels_last != "auto":
        return options.channels_last == "always"
    if one.is_transposed:
        return _transposed.choose(one.node, one.norm is not None, budget) == "packed"
    if feeds or is_channels_last(tensor(one.node)):
        return True
    return choose_convolution(_shape(one), budget) == "packed"


def _shape(one: Convolution) -> ConvolutionShape:
    x, weight = tensor(one.node.args[0]), tensor(one.node.args[1])
    stride, padding, dilation = (tuple(for_each(arg, weight)) for arg in one.node.args[3:6])
    return ConvolutionShape(
        x=tuple(_ops.size_hint(size) or 1 for size in x.shape),
        weight=tuple(weight.shape),
        padding=padding,
        stride=stride,
        dilation=dilation,
        groups=one.node.args[8],
        dtype=x.dtype,
        norm=one.norm is not None,
    )


# --- rewriting ----------------------------------------------------------------------------------


def fold_batch_norm(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float,
    transposed_groups: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight (O, I/groups, ...) and bias (O,) of a convolution that does the norm as well.

    Computed in float64, so that each value is rounded once.

    :param transposed_groups: the groups of a transposed one, whose weight is (I, O/groups, ...).
    """
    scale = torch.rsqrt(variance.double() + eps)
    if norm_weight is not None:
        scale = scale * norm_weight.double()
    shift = -mean.double() if bias is None else bias.double() - mean.double()
    shift = shift * scale
    if norm_bias is not None:
        shift = shift + norm_bias.double()
    ones = [1] * (weight.dim() - 2)
    if transposed_groups:
        apart = weight.double().unflatten(0, (transposed_groups, -1))
        folded = (apart * scale.view(transposed_groups, 1, -1, *ones)).flatten(0, 1)
    else:
        folded = weight.double() * scale.view(-1, 1, *ones)
    return folded.to(weight.dtype), shift.to(weight.dtype)


def _apply(one: Convolution, checks: bool) -> None:
    """Replace a convolution and what follows it."""
    edit = Editor(one.nodes[-1])
    weight, bias = _folded(edit, one)
    weight, bias = _negated(edit, one, weight, bias)
    edit.replace(_emit(edit, one, weight, bias, checks), one.nodes)


def _folded(edit: Editor, one: Convolution) -> tuple[Node, Node | None]:
    """Weight and bias, with the batch norm folded in."""
    weight, bias = one.node.args[1:3]
    if one.norm is None:
        return weight, bias
    norm = one.norm.args
    eps = norm[6] if calls(one.norm, BATCH_NORMS[0]) else norm[7]
    dense = tensor(weight)
    vals = (dense, dense.new_empty((tensor(one.node).shape[1],)))
    groups = one.node.args[8] if one.is_transposed else 0
    both = edit.call(fold_batch_norm, (weight, bias, *norm[1:5], eps, groups), vals)
    return (
        edit.call(operator.getitem, (both, 0), vals[0]),
        edit.call(operator.getitem, (both, 1), vals[1]),
    )


def _emit(edit: Editor, one: Convolution, weight: Node, bias: Node | None, checks: bool) -> Node:
    """The packed kernel with what follows it, and the conversion to the strides that were."""
    x, dense = one.node.args[0], tensor(weight)
    packed, shape = _packed(edit, one, weight)
    post = post_op(one.post) if one.post is not None else None
    apart = one.add is not None or (post is not None and needs_finite(post, one.is_transposed))
    inside = None if apart else post
    val = channels_last(tensor(one.node))
    pointwise = torch.ops.mkldnn._convolution_pointwise
    args: tuple[Any, ...]
    if one.add is not None:
        name = "sub" if _subtracts(one) else "add"
        args = (x, _operand(one), packed, bias, *shape, name, 1.0, None, [], None)
        result = edit.call(pointwise.binary, args, val)
    else:
        attr, scalars = (inside.attr, list(inside.scalars)) if inside else ("none", [])
        args = (x, packed, bias, *shape, attr, scalars, inside.algorithm if inside else "")
        operator_ = _ops.transposed_convolution() if one.is_transposed else pointwise.default
        result = edit.call(operator_, args, val)
    if checks:
        operands = (weight,) if bias is None else (weight, bias)
        flag = edit.call(all_finite, operands, dense.new_empty((), dtype=torch.bool))
        result = edit.call(checked, (result, flag), val)
    if post is not None and inside is None:
        args = (result, *one.post.args[1:])
        result = edit.call(one.post.target, args, val, dict(one.post.kwargs))
    return to_strides_of(edit, result, tensor(one.nodes[-1]))


def _packed(edit: Editor, one: Convolution, weight: Node) -> tuple[Node, tuple[Any, ...]]:
    """The packed weight, and the convolution's arguments as oneDNN's operators take them."""
    x, dense = tensor(one.node.args[0]), tensor(weight)
    if one.is_transposed:
        shape = _transposed.arguments(one.node)
        reorder = torch.ops.mkldnn._reorder_convolution_transpose_weight.default
    else:
        stride, padding, dilation = (for_each(arg, dense) for arg in one.node.args[3:6])
        shape = (padding, stride, dilation, one.node.args[8])
        reorder = torch.ops.mkldnn._reorder_convolution_weight.default
    sizes = [_ops.size_hint(size) for size in x.shape]
    return edit.call(reorder, (weight, *shape, sizes), dense), shape


def _negated(
    edit: Editor, one: Convolution, weight: Node, bias: Node | None
) -> tuple[Node, Node | None]:
    """Weight and bias of -convolution, which is added, where it is subtracted from a residual.

    A sign changes no bit of a result's digits.
    """
    if not calls(one.add, aten.sub.Tensor) or _subtracts(one):
        return weight, bias
    negate = aten.neg.default
    negative = edit.call(negate, (weight,), tensor(weight))
    return negative, bias if bias is None else edit.call(negate, (bias,), tensor(bias))


def _subtracts(one: Convolution) -> bool:
    """Whether a residual is subtracted from the convolution's result."""
    return calls(one.add, aten.sub.Tensor) and one.add.args[0] in one.nodes


def _operand(one: Convolution) -> Node:
    """What the residual adds to the convolution's own result."""
    left, right = one.add.args[:2]
    return right if left in one.nodes else left
