"""Post-operations: the pointwise ops that oneDNN can apply while it writes a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fuseboard_mkldnn import _ops
from fuseboard_mkldnn._graph import argument, aten, calls, same_sizes, tensor


@dataclass(frozen=True)
class PostOp:
    """One pointwise op, in oneDNN's words and in ATen's.

    :ivar attr: oneDNN's name for it, with ``scalars`` and ``algorithm``.
    :ivar in_place: the ATen function that does the same to a tensor in place, with the further
        arguments ``args`` and ``approximate`` (if not ""). Its results are eager's, bit by bit.
    :ivar drops_nan: oneDNN returns a number where eager returns NaN (its relu and clip are
        ``max`` and ``min`` instructions, which answer with their other operand).
    """

    name: str
    attr: str
    in_place: Callable[..., torch.Tensor]
    scalars: tuple[float, ...] = ()
    algorithm: str = ""
    args: tuple[float, ...] = ()
    approximate: str = ""
    drops_nan: bool = False

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of ``in_place``."""
        return {"approximate": self.approximate} if self.approximate else {}


_PLAIN = {
    aten.relu.default: PostOp("relu", "relu", torch.relu_, drops_nan=True),
    aten.silu.default: PostOp("silu", "swish", _ops.nn.silu_),
    aten.hardswish.default: PostOp("hardswish", "hardswish", _ops.nn.hardswish_),
    aten.hardsigmoid.default: PostOp(
        "hardsigmoid", "hardsigmoid", _ops.nn.hardsigmoid_, drops_nan=True
    ),
    aten.sigmoid.default: PostOp("sigmoid", "sigmoid", torch.sigmoid_),
    aten.tanh.default: PostOp("tanh", "tanh", torch.tanh_),
}

_GELU = {
    kind: PostOp(name, "gelu", _ops.nn.gelu_, algorithm=kind, approximate=kind)
    for kind, name in (("none", "gelu"), ("tanh", "gelu_tanh"))
}

POST_OPS = frozenset(
    {
        *_PLAIN,
        aten.clamp.default,
        aten.gelu.default,
        aten.hardtanh.default,
        aten.leaky_relu.default,
    }
)
IN_PLACE = frozenset(
    {
        torch.clamp_,
        _ops.nn.gelu_,
        _ops.nn.leaky_relu_,
        *(post.in_place for post in _PLAIN.values()),
    }
)


def post_op(node: Node) -> PostOp | None:
    """What oneDNN would call ``node``, or None if it has nothing for it."""
    if node.op != "call_function":
        return None
    if node.target in _PLAIN:
        return _PLAIN[node.target]
    if calls(node, aten.gelu.default):
        return _GELU.get(argument(node, 1, "approximate", "none"))
    if calls(node, aten.leaky_relu.default):
        slope = argument(node, 1, "negative_slope", 0.01)
        return _leaky_relu(slope) if isinstance(slope, int | float) else None
    if calls(node, aten.hardtanh.default):
        return _hardtanh(argument(node, 1, "min_val", -1.0), argument(node, 2, "max_val", 1.0))
    if calls(node, aten.clamp.default):
        return _hardtanh(argument(node, 1, "min"), argument(node, 2, "max"))
    return None


def needs_finite(post: PostOp, transposed: bool) -> bool:
    """Whether one inside of a convolution is eager's on finite numbers only.

    :param transposed: the convolution is: its kernel's sigmoid drops NaN as well, and its relu
        makes NaN of an infinity.
    """
    return post.drops_nan or (transposed and post.name == "sigmoid")


def _leaky_relu(slope: float) -> PostOp:
    # With slope 0 oneDNN takes its relu, which drops NaN.
    scalars = (float(slope),)
    return PostOp(
        "leaky_relu", "leaky_relu", _ops.nn.leaky_relu_, scalars, args=scalars, drops_nan=not slope
    )


def _hardtanh(low: Any, high: Any) -> PostOp | None:
    if not isinstance(low, int | float) or not isinstance(high, int | float) or low > high:
        return None
    scalars = (float(low), float(high))
    return PostOp("hardtanh", "hardtanh", torch.clamp_, scalars, args=scalars, drops_nan=True)


def residual(node: Node, result: Node, *targets: Any) -> Node | None:
    """The other operand if ``node`` adds a tensor of ``result``'s shape and dtype to it.

    :param targets: in place of ``aten.add.Tensor``, ops of two tensors.
    """
    if not calls(node, *(targets or (aten.add.Tensor,))) or argument(node, 2, "alpha", 1) != 1:
        return None
    left, right = node.args[0], node.args[1]
    other = right if left is result else left
    mine, theirs, total = tensor(result), tensor(other), tensor(node)
    if other is result or mine is None or theirs is None or total is None:
        return None
    alike = mine.dtype == theirs.dtype == total.dtype and same_sizes(mine.shape, theirs.shape)
    return other if alike else None
