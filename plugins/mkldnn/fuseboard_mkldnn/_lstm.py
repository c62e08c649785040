"""LSTM layers with packed weights, where that measures faster.

In inference torch decomposes an LSTM without projections into ``mkldnn_rnn_layer``, one for each
layer and direction, which packs its two weights in each call. Dynamo captures LSTMs only with
``torch._dynamo.config.allow_rnn``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_mkldnn import _ops
from fuseboard_mkldnn._conv import has_good_dtypes
from fuseboard_mkldnn._graph import Editor, calls, is_contiguous, is_empty, tensor
from fuseboard_mkldnn._options import Options
from fuseboard_mkldnn._pack import Budget, remembered

#: The value of ``mode`` for an LSTM (``torch/nn/modules/rnn.py``).
LSTM = 2


def is_lstm(node: Node) -> bool:
    """Whether a node is an LSTM layer that packed weights work for."""
    if not calls(node, _ops.lstm_layer()) or len(node.args) != 16 or node.kwargs:
        return False
    x, first, second = (tensor(arg) for arg in node.args[:3])
    if x is None or first is None or second is None or x.dim() != 3:
        return False
    if any(one.device.type != "cpu" or is_empty(one) for one in (x, first, second)):
        return False
    *_, mode, _, layers, _, bidirectional, batch_first, train = node.args
    one_layer = mode == LSTM and layers == 1 and not bidirectional
    if not one_layer or batch_first or train or node.args[8]:
        return False
    if x.dtype == torch.float16:  # its LSTM layers in float16 haven't been looked at
        return False
    return has_good_dtypes(*map(tensor, node.args[:7])) and is_contiguous(x)


def fuse_lstms(
    graph: GraphModule, static: set[Node], taken: set[Node], options: Options, budget: Budget
) -> list[fuseboard.Fusion]:
    """A rewrite for each one that is faster packed."""
    found = []
    for node in graph.graph.nodes:
        if node in taken or not is_lstm(node) or not static.issuperset(node.args[1:3]):
            continue
        if options.packing == "none" or not _packs(node, options, budget):
            continue
        taken.add(node)
        found.append(fuseboard.Fusion("lstm", (node.name,), lambda node=node: _apply(node)))
    return found


def _packs(node: Node, options: Options, budget: Budget) -> bool:
    if options.packing == "onednn":
        return True
    x = tensor(node.args[0])
    sizes = tuple(_ops.size_hint(size) or 1 for size in x.shape)
    reverse, _, _, hidden, _, biases = node.args[7:13]
    key = ("lstm", sizes, hidden, x.dtype, reverse, biases)
    return remembered(key, lambda: _candidates(*key[1:]), budget) == "packed"


def _candidates(
    sizes: tuple[int, ...], hidden: int, dtype: torch.dtype, reverse: bool, biases: bool
) -> dict[str, Callable[[], Any]]:
    """The layer with dense weights and with packed ones, on random tensors."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(dtype)

    with fuseboard.real_tensors():
        x, state = random(*sizes), random(1, sizes[1], hidden)
        weights = random(4 * hidden, sizes[2]), random(4 * hidden, hidden)
        bias = random(4 * hidden)
        reorder = torch.ops.mkldnn._reorder_mkldnn_rnn_layer_weight.default
        packed = reorder(*weights, hidden, reverse, biases, False)
    layer = _ops.lstm_layer()
    further = (reverse, [], LSTM, hidden, 1, biases, False, False, False)
    # Without biases torch passes zeros of the weights' shapes, and they aren't read.
    added = (bias, bias) if biases else weights

    def with_weights(first: torch.Tensor, second: torch.Tensor) -> Callable[[], Any]:
        return lambda: layer(x, first, second, *added, state, state, *further)

    return {"plain": with_weights(*weights), "packed": with_weights(*packed)}


def _apply(node: Node) -> None:
    edit = Editor(node)
    first, second = node.args[1:3]
    reverse, _, _, hidden, _, biases = node.args[7:13]
    vals = [tensor(first), tensor(second)]
    reorder = torch.ops.mkldnn._reorder_mkldnn_rnn_layer_weight.default
    both = edit.call(reorder, (first, second, hidden, reverse, biases, False), vals)
    packed = [edit.call(operator.getitem, (both, i), vals[i]) for i in range(2)]
    new = edit.call(node.target, (node.args[0], *packed, *node.args[3:]), node.meta["val"])
    edit.replace(new, [node])
