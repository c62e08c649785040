"""What ZenDNN's operators are given: products and attention for which they are proven.

Each rule that refuses a layout, a mask or a tensor without elements is a finding in zentorch
2.13.0.2: an answer that is wrong, or an error where ATen has a result. The tests have the cases.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard_zentorch import _engine
from fuseboard_zentorch._options import Options
from fuseboard_zentorch._values import (
    above_one,
    argument,
    equal,
    is_contiguous,
    is_empty,
    macs,
    same_sizes,
    sizes_from_data,
    sole_user,
    tensor,
    tensors,
)

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default)
TRANSPOSES = (aten.t.default, aten.permute.default, aten.transpose.int)
LINEAR = (aten.addmm.default, aten.mm.default)
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
#: What is done in the product's kernel. relu, sigmoid and tanh lose a NaN there, and gelu makes
#: one of an infinity, so they stay calls of their own.
BINARY: dict[Any, str] = {aten.add.Tensor: "add", aten.mul.Tensor: "mul"}


def weights(graph: GraphModule, static: Collection[int] | None = None) -> set[Node]:
    """Inputs that may be weights, their transposes, and their casts (autocast makes these).

    :param static: positions of the inputs that are parameters or buffers; None where that isn't
        known yet, and each input may be one.
    """
    found: set[Node] = set()
    for place, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if static is None or place in static:
            found.add(node)
    for node in graph.graph.nodes:
        if node.target in (*TRANSPOSES, aten._to_copy.default) and node.args[0] in found:
            found.add(node)
    return found


def why_not_linear(node: Node, weights: Collection[Node], options: Options) -> str | None:
    """Why a product isn't one of a weight that ZenDNN runs; None where it is."""
    if node.target is aten.addmm.default:
        if argument(node, 3, "beta", 1) != 1 or argument(node, 4, "alpha", 1) != 1:
            return "alpha and beta"
    x, columns = node.args[-2:]
    product, rows, weight = tensor(node), tensor(x), tensor(columns)
    if columns not in weights:
        return "the second operand isn't known to be a weight"
    if product is None or rows is None or weight is None:
        return "it isn't one tensor"
    if not all(isinstance(size, int) for size in weight.shape):
        return "a weight of symbolic size"
    if node.target is aten.addmm.default and not _is_bias(node.args[0], product):
        return "what is added isn't a contiguous row as long as the result's"
    return _why_not(node, macs(*rows.shape, weight.shape[1]), options)


def why_not_bmm(node: Node, options: Options) -> str | None:
    """Why a batched product stays with ATen."""
    left, right = (tensor(used) for used in node.args[:2])
    if left is None or right is None:
        return "it isn't one tensor"
    reason = _why_not(node, macs(*left.shape, right.shape[-1]), options)
    if reason is not None:
        return reason
    if not all(above_one(size) for size in (*left.shape[1:], right.shape[-1])):
        return "ZenDNN trusts the stride of a size of 1, which may be anything"
    if not (_is_dense(left) and _is_dense(right)):
        return "ZenDNN misreads a batch whose matrices don't lie one after the other"
    return None


def _is_dense(batch: torch.Tensor) -> bool:
    return is_contiguous(batch) or is_contiguous(batch.mT)


def why_not_attention(node: Node, options: Options) -> str | None:
    """Why an attention stays with ATen."""
    query, key, value = (tensor(used) for used in node.args[:3])
    if query is None or key is None or value is None:
        return "it isn't one tensor"
    if any(user.args[1:] != (0,) for user in node.users):
        return "zentorch makes its first result only"
    if argument(node, 3, "dropout_p", 0.0) != 0:
        return "dropout"
    if not all(equal(one.stride(-1), 1) for one in (query, key, value)):
        return "zentorch needs the elements of a head side by side"
    if not equal(query.shape[-1], value.shape[-1]) or not equal(query.shape[1], key.shape[1]):
        return "zentorch needs heads of one size and number"
    mask = node.kwargs.get("attn_mask")
    if mask is not None and (reason := _why_not_mask(tensor(mask), query, key)) is not None:
        return reason
    if mask is not None and argument(node, 4, "is_causal", False):
        return "a mask beside is_causal"
    batch, heads, length, size = query.shape
    return _why_not(node, 2 * macs(batch, heads, length, key.shape[2], size), options)


def _why_not_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> str | None:
    if mask is None or mask.dtype != query.dtype:
        return "a mask of another dtype"
    whole = equal(mask.shape[-1], key.shape[2]) and above_one(mask.shape[-1])
    if not whole or not equal(mask.stride(-1), 1):
        return "zentorch needs a row of the mask as long as the keys and contiguous"
    return None


def _why_not(node: Node, work: int, options: Options) -> str | None:
    """What is refused of all ops."""
    values = [value for used in (node, *node.all_input_nodes) for value in tensors(used)]
    dtype = values[0].dtype
    if dtype not in (torch.float32, torch.bfloat16):
        return f"{dtype}"
    if dtype == torch.bfloat16 and not _engine.supports_bfloat16():
        return "ZenDNN has no bfloat16 kernels for this CPU"
    if any(is_empty(value) for value in values):
        return "a tensor without elements"
    if work < options.min_macs:
        return f"{work} multiply-adds: ATen's call is faster (plugins.zentorch.min_macs)"
    return None


def _is_bias(node: object, product: torch.Tensor) -> bool:
    bias = tensor(node)
    return (
        bias is not None
        and bias.dtype == product.dtype
        and same_sizes(bias.shape, product.shape[-1:])
        and is_contiguous(bias)
    )


def is_native(node: Node, weights: Collection[Node], options: Options) -> str | None:
    """Why ZenDNN doesn't run a node itself; None where it does."""
    values = [value for used in (node, *node.all_input_nodes) for value in tensors(used)]
    if sizes_from_data(values):
        return "a size that is known only from data"
    if node.target in LINEAR:
        return why_not_linear(node, weights, options)
    if node.target is aten.bmm.default:
        return why_not_bmm(node, options)
    if node.target is ATTENTION:
        return why_not_attention(node, options)
    return "not a product"


# --- a linear layer and what follows it -----------------------------------------------------------


@dataclass
class Linear:
    """A product by a weight, and what its kernel does besides.

    Operands are read when the rewrite is applied: earlier ones may have put other nodes there.

    :ivar product: the ``addmm`` or ``mm``.
    :ivar nodes: all that is replaced, in graph order.
    :ivar views: the views around the product, as (M, K) and back, are left out.
    :ivar silu: the activation, or None.
    :ivar binary: the sum or product with a tensor of the result's shape, or None.
    """

    product: Node
    nodes: list[Node]
    views: bool = False
    silu: Node | None = None
    binary: Node | None = None

    @property
    def x(self) -> Node:
        """The input, (M, K) or with more leading sizes."""
        rows: Node = self.product.args[-2]  # type: ignore[assignment]
        return rows.args[0] if self.views else rows  # type: ignore[return-value]

    @property
    def bias(self) -> Node | None:
        return self.product.args[0] if self.product.target is aten.addmm.default else None  # type: ignore[return-value]

    @property
    def other(self) -> Node | None:
        """The other operand of ``binary``."""
        if self.binary is None:
            return None
        left, right = self.binary.args[:2]
        return right if left in self.nodes else left  # type: ignore[return-value]

    @property
    def name(self) -> str:
        parts = ["linear"]
        if self.bias is not None:
            parts.append("bias")
        if self.silu is not None:
            parts.append("silu")
        if self.binary is not None:
            parts.append(BINARY[self.binary.target])
        return "+".join(parts)


def linear_at(product: Node, taken: Collection[Node]) -> Linear:
    """A product with what can be done in its kernel.

    :param taken: nodes of other rewrites.
    """
    layer = Linear(product, [product])
    user = _next(layer, taken)
    if user is not None and user.target in VIEWS and _views_back(layer.x, user):
        layer.views = True
        layer.nodes.append(user)
        user = _next(layer, taken)
    if user is not None and user.target is aten.silu.default:
        layer.silu = user
        layer.nodes.append(user)
        user = _next(layer, taken)
    if user is not None and _is_binary(user, layer.nodes[-1]):
        layer.binary = user
        layer.nodes.append(user)
    return layer


def _next(layer: Linear, taken: Collection[Node]) -> Node | None:
    user = sole_user(layer.nodes[-1])
    if user is None or user.op != "call_function" or user in taken:
        return None
    return user


def _views_back(x: Node, view: Node) -> bool:
    """Whether the result is viewed with the leading sizes that the input had before its view."""
    before, rows, shaped = tensor(x.args[0]) if x.target in VIEWS else None, tensor(x), tensor(view)
    if before is None or rows is None or shaped is None or not before.dim():
        return False
    return equal(before.shape[-1], rows.shape[-1]) and same_sizes(
        before.shape[:-1], shaped.shape[:-1]
    )


def _is_binary(node: Node, result: Node) -> bool:
    """Whether a node adds or multiplies a tensor that lies in memory as ``result`` does."""
    if node.target not in BINARY or node.kwargs or len(node.args) != 2:
        return False
    left, right = node.args
    if left is right:
        return False
    other, own, answer = tensor(right if left is result else left), tensor(result), tensor(node)
    if other is None or own is None or answer is None:
        return False
    return (
        other.dtype == own.dtype == answer.dtype
        and same_sizes(other.shape, own.shape)
        and is_contiguous(other)
        and is_contiguous(answer)
    )
