"""Linear layers: ``view → addmm → view → clone → post-operation, residual`` as few calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_mkldnn import _ops
from fuseboard_mkldnn._graph import (
    TRANSPOSES,
    VIEWS,
    Editor,
    argument,
    aten,
    calls,
    is_contiguous,
    is_empty,
    is_plain_clone,
    same_sizes,
    sole_user,
    tensor,
    view_source,
)
from fuseboard_mkldnn._options import Options
from fuseboard_mkldnn._pack import Budget, LinearShape, Step, choose
from fuseboard_mkldnn._pointwise import post_op, residual

#: Steps that are taken into one rewrite.
MOST_STEPS = 3


@dataclass
class Linear:
    """One linear layer and what follows it.

    Operands are read from ``product`` and ``steps`` when the rewrite is applied: earlier
    rewrites may have put other nodes in their places.

    :ivar product: the ``addmm`` or ``mm``.
    :ivar nodes: all that the rewrite replaces, in graph order, ``product`` first.
    :ivar steps: the nodes among them that are post-operations or add a residual.
    :ivar late_bias: the node among them that adds a bias.
    :ivar view: the last node among them that changes the leading dimensions.
    """

    product: Node
    nodes: list[Node]
    steps: list[Node] = field(default_factory=list)
    late_bias: Node | None = None
    view: Node | None = None

    @property
    def x(self) -> Node:
        """The input, (M, K)."""
        return self.product.args[-2]

    @property
    def columns(self) -> Node:
        """The weight, (K, N)."""
        return self.product.args[-1]

    @property
    def bias(self) -> Node | None:
        """The bias, (N,)."""
        if self.late_bias is not None:
            return _bias_added(self.late_bias, self.product)
        return self.product.args[0] if len(self.product.args) == 3 else None

    @property
    def name(self) -> str:
        """Such as ``linear+bias+gelu``."""
        parts = ["linear", *(["bias"] if self.bias is not None else [])]
        parts += [
            _sign(step) if (post := post_op(step)) is None else post.name for step in self.steps
        ]
        return "+".join(parts)


def is_linear(node: Node) -> bool:
    """Whether a node is a 2-D product that the kernels here can run, its weight aside."""
    if calls(node, aten.addmm.default):
        if argument(node, 3, "beta", 1) != 1 or argument(node, 4, "alpha", 1) != 1:
            return False
    elif not calls(node, aten.mm.default):
        return False
    product = tensor(node)
    values = [tensor(operand) for operand in node.args]
    if product is None or any(one is None or one.dtype != product.dtype for one in values):
        return False
    if any(one.device.type != "cpu" or is_empty(one) for one in values):
        return False
    if not _ops.has_kernels(product.dtype):
        return False
    k, n = values[-1].shape
    if not isinstance(k, int) or not isinstance(n, int) or not is_contiguous(product):
        return False
    return len(values) == 2 or _is_bias(values[0], product)


def _is_bias(found: torch.Tensor, product: torch.Tensor) -> bool:
    return (
        found.dtype == product.dtype
        and same_sizes(found.shape, product.shape[-1:])
        and _ops.known_equal(found.stride(0), 1)
    )


def find_linears(
    graph: GraphModule,
    static: set[Node],
    taken: set[Node],
    accepts: Callable[[Node], bool] = lambda node: True,
) -> list[Linear]:
    """Linear layers whose weight is static, with what can be fused to them.

    :param taken: nodes of other rewrites; those of these are added.
    :param accepts: says of a product whether it is one of those that are looked for.
    """
    found: list[Linear] = []
    for node in graph.graph.nodes:
        if not is_linear(node) or node.args[-1] not in static or node.args[-2] in static:
            continue
        if node in taken or not accepts(node):
            continue
        linear = Linear(product=node, nodes=[node])
        result = node
        while (user := sole_user(result)) is not None and user not in taken:
            if len(linear.steps) == MOST_STEPS or not _take(linear, user, result):
                break
            linear.nodes.append(user)
            result = user
        taken.update(linear.nodes)
        found.append(linear)
    return found


def _take(linear: Linear, user: Node, result: Node) -> bool:
    """Take in the one user of what there is so far, if it is of a kind that can be."""
    found = tensor(user)
    if found is None or not is_contiguous(found) or found.dtype != tensor(result).dtype:
        return False
    if is_plain_clone(user):
        return True
    if calls(user, *VIEWS):
        # The operand of a residual has the shape that the result has there; it must stay.
        added = any(post_op(step) is None for step in linear.steps)
        if added or view_source(user) is None:
            return False
        linear.view = user
        return True
    if post_op(user) is not None or _residual(user, result) is not None:
        linear.steps.append(user)
        return True
    if linear.bias is None and not linear.steps and _bias_added(user, result) is not None:
        linear.late_bias = user
        return True
    return False


def _residual(user: Node, result: Node) -> Node | None:
    """What is added to a result or subtracted from it."""
    if calls(user, aten.sub.Tensor) and user.args[0] is not result:
        return None
    return residual(user, result, aten.add.Tensor, aten.sub.Tensor)


def _sign(step: Node) -> Literal["add", "sub"]:
    """What a step that is no post-operation does with its operand."""
    return "sub" if calls(step, aten.sub.Tensor) else "add"


def _bias_added(user: Node, product: Node) -> Node | None:
    """The bias where one is added after the product (3-D inputs that aren't contiguous)."""
    if not calls(user, aten.add.Tensor) or argument(user, 2, "alpha", 1) != 1:
        return None
    for other in user.args[:2]:
        found = tensor(other)
        if found is not None and found.dim() == 1 and _is_bias(found, tensor(product)):
            return other
    return None


def fuse_linears(
    graph: GraphModule, static: set[Node], taken: set[Node], options: Options, budget: Budget
) -> list[fuseboard.Fusion]:
    """A fusion for each linear layer that something is gained for."""
    linears = find_linears(graph, static, taken)
    shapes = [_shape(linear) for linear in linears]
    kernels = ["plain"] * len(linears)
    # The largest first: what time there is for choosing goes where it matters.
    for i in sorted(range(len(linears)), key=lambda i: -shapes[i].work):
        kernels[i] = choose(shapes[i], _possible(linears[i], shapes[i]), options, budget)
    return [
        fuseboard.Fusion(
            name=f"{linear.name} ({kernel})",
            nodes=tuple(node.name for node in linear.nodes),
            apply=lambda linear=linear, kernel=kernel: _apply(linear, kernel),
        )
        for linear, kernel in zip(linears, kernels, strict=True)
        if kernel != "plain" or _leaves_out(linear)
    ]


def _leaves_out(linear: Linear) -> bool:
    """Whether the plain kernel in a rewritten graph takes fewer calls than the nodes."""
    return _transposed(linear.columns) is not None or any(map(is_plain_clone, linear.nodes))


def _shape(linear: Linear) -> LinearShape:
    columns = tensor(linear.columns)
    k, n = columns.shape
    steps: list[Step] = [post_op(step) or _sign(step) for step in linear.steps]
    return LinearShape(
        m=_ops.size_hint(tensor(linear.x).shape[0]) or 1,
        k=k,
        n=n,
        dtype=columns.dtype,
        bias=linear.bias is not None,
        transposed=is_contiguous(columns) and not is_contiguous(columns.t()),
        steps=tuple(steps),
    )


def _possible(linear: Linear, shape: LinearShape) -> tuple[str, ...]:
    """The kernels that can run a layer."""
    rows = tensor(linear.x).shape[0]
    if _ops.size_hint(rows) is None:
        return ("plain",)
    fixed = isinstance(rows, int)
    names = ["plain", "onednn"]
    if fixed and rows == 1 and shape.dtype == torch.float32:
        names.append("vector")
    first = shape.steps[0] if shape.steps else None
    if isinstance(first, str) or (first is not None and not first.drops_nan):
        names.append("onednn_fused")
    if fixed and _ops.has_mkl() and shape.dtype == torch.float32:
        names.append("mkl")
    return tuple(names)


# --- rewriting ----------------------------------------------------------------------------------


def _apply(linear: Linear, kernel: str) -> None:
    """Replace a layer by calls of one kernel."""
    edit = Editor(linear.nodes[-1])
    steps = list(linear.steps)
    if kernel == "plain":
        result = _emit_plain(edit, linear)
    elif kernel == "vector":
        result = _emit_vector(edit, linear)
    elif kernel == "mkl":
        result = _emit_mkl(edit, linear)
    else:
        result, steps = _emit_onednn(edit, linear, kernel == "onednn_fused")
    edit.replace(emit_steps(edit, linear, result, steps), linear.nodes)


def _emit_plain(edit: Editor, linear: Linear) -> Node:
    weight = _transposed(linear.columns)
    if weight is not None:
        # One call, which does in C++ what view, t, addmm and view did; the numbers are the same.
        x = rows_of(linear)
        args = (x, weight) if linear.bias is None else (x, weight, linear.bias)
        return edit.call(aten.linear.default, args, result_of(linear, x))
    product = tensor(linear.product)
    if linear.bias is None:
        return edit.call(aten.mm.default, (linear.x, linear.columns), product)
    return edit.call(aten.addmm.default, (linear.bias, linear.x, linear.columns), product)


def _emit_vector(edit: Editor, linear: Linear) -> Node:
    k, n = tensor(linear.columns).shape
    weight = _rows_by_columns(edit, linear)
    row = edit.call(aten.view.default, (linear.x, [k]), tensor(linear.x).view(k))
    product = tensor(linear.product).view(n)
    if linear.bias is None:
        return edit.call(aten.mv.default, (weight, row), product)
    return edit.call(aten.addmv.default, (linear.bias, weight, row), product)


def _emit_mkl(edit: Editor, linear: Linear) -> Node:
    x = rows_of(linear)
    weight = _rows_by_columns(edit, linear)
    if not is_contiguous(tensor(weight)):
        # MKL's packing reads memory as (N, K) whatever the strides say.
        dense = {"memory_format": torch.contiguous_format}
        weight = edit.call(aten.clone.default, (weight,), tensor(weight).contiguous(), dense)
    rows = tensor(linear.x).shape[0]
    reorder = torch.ops.mkl._mkl_reorder_linear_weight.default
    packed = edit.call(reorder, (weight, rows), tensor(weight))
    args = (x, packed, weight, linear.bias, rows)
    return edit.call(torch.ops.mkl._mkl_linear.default, args, result_of(linear, x))


def _emit_onednn(edit: Editor, linear: Linear, fused: bool) -> tuple[Node, list[Node]]:
    """The product, with its first step inside if ``fused``; and the steps that remain."""
    x, bias = rows_of(linear), linear.bias
    weight = _rows_by_columns(edit, linear)
    rows = _ops.size_hint(tensor(linear.x).shape[0])
    reorder = torch.ops.mkldnn._reorder_linear_weight.default
    packed = edit.call(reorder, (weight, rows), tensor(weight))
    val = result_of(linear, x)
    pointwise = torch.ops.mkldnn._linear_pointwise
    none: tuple[Any, ...] = (x, packed, bias, "none", [], "")
    if not fused:
        return edit.call(pointwise.default, none, val), linear.steps
    first = linear.steps[0]
    if (post := post_op(first)) is not None:
        args = (x, packed, bias, post.attr, list(post.scalars), post.algorithm)
        return edit.call(pointwise.default, args, val), linear.steps[1:]
    other = operand_of(linear, first)
    if not same_sizes(tensor(other).shape, val.shape):
        return edit.call(pointwise.default, none, val), linear.steps
    return edit.call(pointwise.binary, (x, other, packed, bias, _sign(first)), val), linear.steps[
        1:
    ]


def emit_steps(edit: Editor, linear: Linear, result: Node, steps: list[Node]) -> Node:
    """The steps one by one, and the final shape."""
    final = tensor(linear.nodes[-1])

    def shaped(node: Node) -> Node:
        if same_sizes(tensor(node).shape, final.shape):
            return node
        sizes = linear.view.args[1] if linear.view is not None else list(final.shape)
        return edit.call(aten.view.default, (node, sizes), final.new_empty(final.shape))

    for step in steps:
        if post_op(step) is None:
            result = shaped(result)
            args: tuple[Any, ...] = (result, operand_of(linear, step))
        else:
            args = (result, *step.args[1:])
        result = edit.call(step.target, args, tensor(result), dict(step.kwargs))
    return shaped(result)


def operand_of(linear: Linear, step: Node) -> Node:
    """What a residual step adds to the layer's own result."""
    left, right = step.args[:2]
    return right if left in linear.nodes else left


def rows_of(linear: Linear) -> Node:
    """The input before its view as (M, K), where the result has the same leading dimensions."""
    source = view_source(linear.x)
    leading = tensor(linear.nodes[-1]).shape[:-1]
    if source is not None and same_sizes(tensor(source).shape[:-1], leading):
        return source
    return linear.x


def result_of(linear: Linear, x: Node) -> torch.Tensor:
    """The fake product for ``x``."""
    found = tensor(x)
    return found.new_empty((*found.shape[:-1], tensor(linear.columns).shape[1]))


def _transposed(columns: Node) -> Node | None:
    """The (N, K) weight that ``columns`` is the transpose of, or None."""
    if not calls(columns, *TRANSPOSES):
        return None
    source = tensor(columns.args[0])
    if source.dim() != 2 or source.stride() != tensor(columns).stride()[::-1]:
        return None
    return columns.args[0]


def _rows_by_columns(edit: Editor, linear: Linear) -> Node:
    """The weight as (N, K)."""
    weight = _transposed(linear.columns)
    if weight is not None:
        return weight
    return edit.call(aten.t.default, (linear.columns,), tensor(linear.columns).t())
