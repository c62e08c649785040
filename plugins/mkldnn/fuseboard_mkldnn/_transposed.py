"""Transposed convolutions, 2-D and 3-D, with a packed weight where that measures faster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import Node

import fuseboard
from fuseboard_mkldnn import _ops
from fuseboard_mkldnn._graph import (
    aten,
    calls,
    for_each,
    has_good_dtypes,
    is_channels_last,
    is_contiguous,
    is_empty,
    tensor,
)
from fuseboard_mkldnn._pack import Budget, remembered


def is_transposed(node: Node) -> bool:
    """Whether a node is a transposed convolution that oneDNN can run, its weight aside.

    Its operator has no depthwise ones, and its packed weight holds for one size of the input.
    """
    if not calls(node, aten.convolution.default) or len(node.args) < 9 or not node.args[6]:
        return False
    x, weight, result = tensor(node.args[0]), tensor(node.args[1]), tensor(node)
    if _ops.transposed_convolution() is None or x is None or weight is None or result is None:
        return False
    if x.dim() not in (4, 5) or weight.dim() != x.dim():
        return False
    if any(one.device.type != "cpu" or is_empty(one) for one in (x, weight, result)):
        return False
    groups = node.args[8]
    numbers = (*x.shape, *weight.shape, *node.args[3], *node.args[4], *node.args[5], *node.args[7])
    if not all(isinstance(number, int) for number in (*numbers, groups)):
        return False
    if groups > 1 and groups == weight.shape[0]:
        return False
    if not has_good_dtypes(x, weight, tensor(node.args[2])):
        return False
    # Only these two layouts can be given back.
    return is_contiguous(result) or is_channels_last(result)


def arguments(node: Node) -> tuple[Any, ...]:
    """Padding, output padding, stride, dilation, groups, as oneDNN's operators take them."""
    weight = tensor(node.args[1])
    stride, padding, dilation = (for_each(arg, weight) for arg in node.args[3:6])
    return padding, for_each(node.args[7], weight), stride, dilation, node.args[8]


def choose(node: Node, norm: bool, budget: Budget) -> str:
    """``packed`` or ``plain``.

    :param norm: a batch norm follows, which the packed weight takes in.
    """
    x, weight = tensor(node.args[0]), tensor(node.args[1])
    layouts = is_channels_last(x), is_channels_last(tensor(node))
    numbers = arguments(node)
    sizes = tuple(x.shape), tuple(weight.shape)
    hashable = (tuple(arg) if isinstance(arg, list) else arg for arg in numbers)
    key = ("transposed", *sizes, x.dtype, layouts, norm, *hashable)
    calls = partial(_candidates, *sizes, x.dtype, layouts, norm, numbers)
    return remembered(key, calls, budget)


def _candidates(
    x_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    dtype: torch.dtype,
    layouts: tuple[bool, bool],
    norm: bool,
    arguments: tuple[Any, ...],
) -> dict[str, Callable[[], Any]]:
    """Eager's call and the packed one, on random tensors that lie as the graph's do."""
    generator = torch.Generator().manual_seed(0)
    padding, output_padding, stride, dilation, groups = arguments
    operator = _ops.transposed_convolution()
    reads_last, gives_last = layouts
    with fuseboard.real_tensors():
        x = torch.randn(x_shape, generator=generator, device="cpu").to(dtype)
        if reads_last:
            x = x.to(memory_format=_LAST[x.dim()])
        weight = torch.randn(weight_shape, generator=generator, device="cpu").to(dtype)
        reorder = torch.ops.mkldnn._reorder_convolution_transpose_weight.default
        packed = reorder(weight, *arguments, list(x_shape))
        ones = torch.ones(weight.shape[1] * groups, dtype=dtype, device="cpu")
        statistics = (ones,) * 4
    eagers: Callable[..., torch.Tensor] = (
        torch.conv_transpose2d if x.dim() == 4 else torch.conv_transpose3d
    )

    def plain() -> torch.Tensor:
        result = eagers(x, weight, None, stride, padding, output_padding, groups, dilation)
        return torch.batch_norm(result, *statistics, False, 0.1, 1e-5, False) if norm else result

    def onednn() -> torch.Tensor:
        result: torch.Tensor = operator(x, packed, None, *arguments, "none", [], "")
        return result if gives_last else result.contiguous()

    return {"plain": plain, "packed": onednn}


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
