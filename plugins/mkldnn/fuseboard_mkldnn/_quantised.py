"""Linear layers and convolutions of quantised numbers, as PT2E writes them, in int8.

``dequantize(x) → product with dequantize(weight) → post-operation or residual`` becomes one call of
oneDNN's int8 kernels. What is said there in float32 is computed on the integers themselves: the sum
of products in 32 bits, exactly, times the product of the scales. The quantisation that may follow
is taken in when the region is lowered (:mod:`fuseboard_mkldnn._int8_values`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_mkldnn import _int8_kernels as kernels
from fuseboard_mkldnn import _ops
from fuseboard_mkldnn._conv import is_convolution
from fuseboard_mkldnn._graph import (
    TRANSPOSES,
    VIEWS,
    Editor,
    argument,
    aten,
    calls,
    channels_last,
    for_each,
    has_strides_of,
    is_plain_clone,
    same_sizes,
    sole_user,
    tensor,
)
from fuseboard_mkldnn._layout import to_strides_of
from fuseboard_mkldnn._linear import (
    Linear,
    emit_steps,
    find_linears,
    is_linear,
    operand_of,
    result_of,
    rows_of,
)
from fuseboard_mkldnn._pointwise import post_op, residual
from fuseboard_mkldnn._quantised_ops import dequantises, overloads_of, quantises, source_of

#: Products of 255 * 128 that a sum in 32 bits holds.
MOST_PRODUCTS = 2**31 // (255 * 128)

#: Post-operations that the operators take, by oneDNN's names.
INSIDE_LINEAR = frozenset({"relu", "gelu", "swish", "hardswish", "hardtanh", "tanh", "leaky_relu"})
INSIDE_CONVOLUTION = frozenset({"relu", "swish", "hardswish", "hardtanh"})


def is_quantised_product(node: Node) -> bool:
    """Whether a node is a product of quantised numbers that oneDNN can run, its weight aside."""
    if not _ops.has_int8() or not (is_linear(node) or _is_plain_convolution(node)):
        return False
    x, weight = _operands(node)
    source = source_of(x)
    if source is None or not _is_weight(weight, is_linear(node)):
        return False
    if not is_linear(node) and not isinstance(argument(source, 1, "scale"), float):
        return False  # its packed weight holds for one scale
    sizes = tensor(weight).shape
    return math.prod(sizes[:1] if is_linear(node) else sizes[1:]) <= MOST_PRODUCTS


def weight_of(node: Node) -> Node:
    """The integers of a product's weight."""
    return _dequantised_weight(_operands(node)[1]).args[0]


def floats_of(held: Node) -> Node:
    """The floats that a weight's integers were rounded from, where the graph rounds it."""
    rounds = calls(held, *overloads_of("quantize_per_channel", "default"))
    return held.args[0] if rounds else held  # type: ignore[return-value]


def _operands(node: Node) -> tuple[Any, Any]:
    return (node.args[-2], node.args[-1]) if is_linear(node) else (node.args[0], node.args[1])


def _is_plain_convolution(node: Node) -> bool:
    return is_convolution(node) and tensor(node.args[0]).dim() == 4


def _dequantised_weight(weight: Any) -> Any:
    return weight.args[0] if calls(weight, *TRANSPOSES) else weight


def _is_weight(weight: Any, columns: bool) -> bool:
    """Whether a weight is int8 with a scale for each channel of the result, or one for all.

    :param columns: it is (K, N), and so the transpose of what is held.
    """
    made = _dequantised_weight(weight)
    if columns == (made is weight) or tensor(made) is None or tensor(made).dtype != torch.float32:
        return False
    per_channel = calls(made, *overloads_of("dequantize_per_channel", "default"))
    if not per_channel and not calls(made, *overloads_of("dequantize_per_tensor", "default")):
        return False
    held = tensor(made.args[0])
    if held is None or held.dtype != torch.int8:
        return False
    zero_points = made.args[2]
    if per_channel:
        axis: Any = made.args[3]
        return axis in (0, -held.dim()) and (zero_points is None or isinstance(zero_points, Node))
    return zero_points == 0 and isinstance(made.args[1], float)


@dataclass
class _Convolution:
    """A quantised convolution and what follows it.

    :ivar nodes: all that the rewrite replaces, in graph order.
    :ivar steps: the nodes among them that are post-operations or add a residual.
    """

    node: Node
    nodes: list[Node]
    steps: list[Node] = field(default_factory=list)


def fuse_quantised(
    graph: GraphModule, static: set[Node], taken: set[Node]
) -> list[fuseboard.Fusion]:
    """A fusion for each product of quantised numbers whose weight is static.

    :param taken: nodes of other rewrites; those of these are added.
    """
    products = {
        node
        for node in graph.graph.nodes
        if is_quantised_product(node) and static.issuperset(_operands(node)[1].all_input_nodes)
    }
    if not products:
        return []
    found: list[fuseboard.Fusion] = []
    for linear in find_linears(graph, static, taken, products.__contains__):
        name = "int8 " + linear.name
        nodes = tuple(node.name for node in linear.nodes)
        found.append(fuseboard.Fusion(name, nodes, partial(_apply_linear, linear)))
    # From the end: of two whose results are added, the later one takes the addition.
    for node in reversed([node for node in graph.graph.nodes if node in products]):
        if node in taken or is_linear(node):
            continue
        one = _Convolution(node, [node])
        _follow(one, taken)
        taken.update(one.nodes)
        parts = ["add" if (post := post_op(step)) is None else post.name for step in one.steps]
        name = "+".join(("int8 conv", *parts))
        nodes = tuple(node.name for node in one.nodes)
        found.append(fuseboard.Fusion(name, nodes, partial(_apply_convolution, one)))
    return found


def _follow(one: _Convolution, taken: set[Node]) -> None:
    """Take in a post-operation, or a residual and then relu."""
    result = one.node
    while (user := sole_user(result)) is not None and user not in taken:
        if not has_strides_of(
            tensor(user) if tensor(user) is not None else tensor(result), tensor(result)
        ):
            return
        if not is_plain_clone(user):
            post = post_op(user)
            if post is None:
                if one.steps or residual(user, result) is None:
                    return
            elif post.attr not in INSIDE_CONVOLUTION:
                return
            elif one.steps and not (post_op(one.steps[-1]) is None and post.name == "relu"):
                return
            elif one.steps and source_of(operand_in(one.nodes, one.steps[-1])) is None:
                return  # it may hold NaN, which oneDNN's relu would hide
            one.steps.append(user)
        one.nodes.append(user)
        result = user


def operand_in(nodes: list[Node], step: Node) -> Node:
    """What a residual step adds to the result of its product."""
    left, right = step.args[:2]
    return right if left in nodes else left


# --- rewriting ------------------------------------------------------------------------------------


def _apply_linear(linear: Linear) -> None:
    edit = Editor(linear.nodes[-1])
    x = rows_of(linear)
    source = source_of(x)
    rows = _ops.size_hint(tensor(linear.x).shape[0])
    made = _dequantised_weight(linear.columns)
    held = made.args[0]
    packed = edit.call(
        kernels.packed_linear, (held, rows, tensor(linear.columns).shape[0]), tensor(held)
    )
    val = result_of(linear, x)
    steps, added, post = list(linear.steps), None, _NOTHING
    if steps and post_op(steps[0]) is None and not calls(steps[0], aten.sub.Tensor):
        other = operand_of(linear, steps[0])
        if same_sizes(tensor(other).shape, val.shape):
            added, steps = other, steps[1:]
    inside = post_op(steps[0]) if steps else None
    if inside is not None and inside.attr in INSIDE_LINEAR:
        # After a sum there is relu alone, which would hide NaN of the other summand.
        finite = added is None or source_of(added) is not None
        if added is None or (inside.name == "relu" and finite):
            post, steps = (inside.attr, list(inside.scalars), inside.algorithm), steps[1:]
    args = (
        *(integers_of(edit, x), *source.args[1:3], packed),
        *_scales(edit, made, held),
        *(_bias(edit, linear.bias), added, post, _needs_halves(source.args[0])),
    )
    result = edit.call(kernels.linear, args, val)
    edit.replace(emit_steps(edit, linear, result, steps), linear.nodes)


def _apply_convolution(one: _Convolution) -> None:
    edit = Editor(one.nodes[-1])
    x, weight, bias = one.node.args[:3]
    source, made = source_of(x), _dequantised_weight(weight)
    held, dense = made.args[0], tensor(made.args[0])
    stride, padding, dilation = (for_each(arg, dense) for arg in one.node.args[3:6])
    numbers = (stride, padding, dilation, one.node.args[8])
    scales, zeros = _scales(edit, made, held)
    integers, (scale, zero_point) = integers_of(edit, x), source.args[1:3]
    if tensor(integers).dtype == torch.int8:
        zero_point_inside = zero_point + 128
    else:
        zero_point_inside = zero_point
    sizes = [_ops.size_hint(size) for size in tensor(x).shape]
    args = (held, scales, scale, zero_point_inside, *numbers, sizes)
    packed = edit.call(kernels.packed_convolution, args, dense)
    added, post = None, _NOTHING
    for step in one.steps:
        if (inside := post_op(step)) is None:
            added = operand_in(one.nodes, step)
        else:
            post = (inside.attr, list(inside.scalars), inside.algorithm)
    added, quantisation = _held(edit, added)
    args = (
        *(integers, scale, zero_point, packed, scales, zeros, _bias(edit, bias)),
        *(added, quantisation, numbers, post, _needs_halves(source.args[0])),
    )
    result = edit.call(kernels.convolution, args, channels_last(tensor(one.node)))
    edit.replace(to_strides_of(edit, result, tensor(one.nodes[-1])), one.nodes)


_NOTHING: tuple[Any, ...] = ("none", [], "")


def _held(edit: Editor, added: Node | None) -> tuple[Node | None, Any]:
    """A residual as integers with scale and zero point where it is uint8, else as it is."""
    source = source_of(added)
    if added is None or source is None or not isinstance(source.args[1], float):
        return added, None
    if tensor(source.args[0]).dtype != torch.uint8:
        return added, None
    return integers_of(edit, added), tuple(source.args[1:3])


def integers_of(edit: Editor, node: Node) -> Node:
    """The integers behind what :func:`source_of` finds, through the same views."""
    views = []
    while not dequantises(node):
        views.append(node)
        node = node.args[0]
    found: Node = node.args[0]
    for view in reversed(views):
        args = (found, *view.args[1:])
        found = edit.call(view.target, args, tensor(view).to(tensor(found).dtype))
    return found


def _scales(edit: Editor, made: Node, held: Node) -> tuple[Node, Node]:
    """Scales and zero points of a weight, as the operators want them."""
    scales, zero_points = made.args[1:3]
    given = tensor(scales)
    shape = (1,) if given is None else given.shape
    val = tensor(held).new_empty(shape, dtype=torch.float32)
    first = edit.call(kernels.weight_scales, (held, scales), val)
    zeros = zero_points if isinstance(zero_points, Node) else None
    args = (first, zeros)
    return first, edit.call(
        kernels.weight_zero_points, args, val.new_empty(shape, dtype=torch.int32)
    )


def _bias(edit: Editor, bias: Node | None) -> Node | None:
    if bias is None:
        return None
    return edit.call(kernels.finite_bias, (bias,), tensor(bias))


def _needs_halves(integers: Node) -> bool:
    return fuseboard.cuts_off_int8_sums() and largest(integers) > kernels.LARGEST_HALF


def largest(node: Node) -> int:
    """The largest integer that a node's value may hold, as uint8."""
    while calls(node, *VIEWS, *TRANSPOSES):
        node = node.args[0]
    if tensor(node).dtype != torch.uint8 or not quantises(node):
        return 255
    return int(argument(node, 4, "quant_max"))
