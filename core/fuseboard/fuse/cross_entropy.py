"""Cross entropy of a linear layer becomes one op: a pass over Dynamo's graphs.

The op (:mod:`fuseboard.ops.linear_cross_entropy`) never holds all logits, so it stands where
nothing but the loss reads them. A loss is followed upwards to its layer, through casts to wider
floats and through views and slices of rows, as in the shifted loss of transformers' language
models. What only moves rows is done to the layer's input instead.

A model that returns its logits beside the loss stays as it is, as most of transformers' do when
they are compiled by themselves. A compiled function that returns such a model's loss alone is
rewritten.
"""

from __future__ import annotations

import inspect
import math
import operator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.contracts import Fusion
from fuseboard.fuse.interruptions import interrupted
from fuseboard.fuse.reading import argument, calls, dtype_of, value_of
from fuseboard.fuse.writing import Writer
from fuseboard.hookspecs import hookimpl
from fuseboard.ops import linear_cross_entropy as ops
from fuseboard.ops.estimate import sizes

F = torch.nn.functional

#: Logits from this size on. The op holds two chunks of them, so it saves little below.
LEAST_BYTES = 2 * ops.CHUNK_BYTES

_LOG_SOFTMAX = {F.log_softmax, torch.log_softmax, "log_softmax"}
_MATMUL = {torch.matmul, torch.mm, operator.matmul, "matmul", "mm", "__matmul__"}
_SUM = {torch.add, operator.add, "add", "__add__"}
_CASTS = {"float", "double", "to", "type"}
_VIEWS = {"view", "reshape", "flatten", "contiguous", torch.reshape, torch.flatten}
_SWAPS = {"t", "transpose", "swapaxes", "permute", torch.t, torch.transpose, torch.permute, getattr}


@dataclass
class _Loss:
    """Cross entropy of a linear layer.

    :ivar hidden: ``(..., H)``.
    :ivar weight: ``(V, H)``; ``(H, V)`` where ``by_columns``.
    :ivar moves: what is done to rows on the way to the loss.
    :ivar nodes: what is computed otherwise, from the layer to the loss.
    """

    arguments: dict[str, Any]
    nodes: list[Node]
    moves: list[Node] = field(default_factory=list)
    hidden: Node | None = None
    weight: Node | None = None
    by_columns: bool = False
    bias: Node | None = None

    @property
    def loss(self) -> Node:
        return self.nodes[-1]

    @property
    def layer(self) -> Node:
        return self.nodes[0]


@hookimpl
def fuseboard_fuse_dynamo(graph: GraphModule) -> list[Fusion] | None:
    """Offer to write each large loss of a linear layer as one op."""
    found = [one for one in map(_matched, graph.graph.nodes) if one is not None]
    return [
        Fusion(
            "linear_cross_entropy",
            tuple(node.name for node in one.nodes),
            partial(_rewrite, graph, one.loss),
        )
        for one in found
        if _fits(one)
    ]


# --- from the loss to the layer -------------------------------------------------------------------


def _matched(loss: Node) -> _Loss | None:
    """The layer whose logits a loss is of, if nothing else reads them."""
    if loss.op != "call_function" or loss.target not in (F.cross_entropy, F.nll_loss):
        return None
    given = inspect.signature(loss.target).bind(*loss.args, **loss.kwargs)
    given.apply_defaults()
    found = _Loss(given.arguments, [loss])
    node = given.arguments["input"]
    if not isinstance(node, Node) or len(node.users) != 1:
        return None
    if loss.target is F.nll_loss:
        if not _is_log_softmax(node):
            return None
        node = _onward(found, node)
    elif _rank(node) == 3:  # (rows, classes, rows)
        if not _swaps_last(node):
            return None
        node = _onward(found, node)
    elif _rank(node) != 2:
        return None
    while isinstance(node, Node) and len(node.users) == 1:
        if _takes_layer(found, node):
            return found
        if not _passes_rows(found, node):
            return None
        node = _onward(found, node)
    return None


def _onward(found: _Loss, node: Node) -> Any:
    """What a node of the way is computed from."""
    found.nodes.insert(0, node)
    return node.args[0]


def _takes_layer(found: _Loss, node: Node) -> bool:
    """Whether a node is the layer's product, whose operands are then noted."""
    hidden: Any
    weight: Any
    bias: Any
    if node.op == "call_function" and node.target is F.linear:
        given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
        hidden, weight, bias = (given.get(name) for name in ("input", "weight", "bias"))
    elif calls(node, _MATMUL) and len(node.args) == 2 and not node.kwargs:
        hidden, weight, bias = *node.args, None
        found.by_columns = not _swaps_last(weight)
        weight = weight if found.by_columns else weight.args[0]
    else:
        return False
    if found.bias is not None:
        if bias is not None or dtype_of(found.bias) != dtype_of(node):
            return False  # two of them, or one that is added after a cast
    else:
        found.bias = bias
    found.hidden, found.weight = hidden, weight
    found.nodes.insert(0, node)
    return True


def _passes_rows(found: _Loss, node: Node) -> bool:
    """Whether each row of a node's result is one of what it is computed from, wider at most."""
    value, before = value_of(node), value_of(node.args[0]) if node.args else None
    if value is None or before is None:
        return False
    if calls(node, _SUM):
        return _adds_bias(found, node)
    if calls(node, _CASTS):
        same = value.shape == before.shape and value.device == before.device
        return same and torch.promote_types(value.dtype, before.dtype) == value.dtype
    classes = before.shape[-1] if before.dim() else None
    if type(classes) is not int or value.dim() < 1 or type(value.shape[-1]) is not int:
        return False
    if value.shape[-1] != classes or value.dtype != before.dtype:
        return False
    if not calls(node, _VIEWS) and not _slices_rows(node, before.dim()):
        return False
    found.moves.insert(0, node)
    return True


def _adds_bias(found: _Loss, node: Node) -> bool:
    """Whether a node adds a number for each class, which is then noted."""
    if found.bias is not None or len(node.args) != 2 or node.kwargs:
        return False
    logits, bias = value_of(node.args[0]), value_of(node.args[1])
    if logits is None or bias is None or bias.dim() != 1 or bias.shape[0] != logits.shape[-1]:
        return False
    value = value_of(node)
    assert value is not None
    found.bias = node.args[1]  # type: ignore[assignment]
    return value.dtype == logits.dtype == bias.dtype


def _slices_rows(node: Node, rank: int) -> bool:
    """Whether a node takes some of the rows, by slices and numbers, with all of their classes."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    index: Any = node.args[1]
    index = list(index) if isinstance(index, tuple) else [index]
    if not all(_is_plain(one) for one in index):
        return False
    index = [one for one in index if one is not None]
    of_dims = [one for one in index if one is not Ellipsis]
    takes_classes = len(of_dims) == rank or Ellipsis in index[:-1]
    return not takes_classes or of_dims[-1] == slice(None)


def _is_plain(index: Any) -> bool:
    if isinstance(index, slice):
        parts = (index.start, index.stop, index.step)
        return all(one is None or type(one) is int for one in parts)
    return index is None or index is Ellipsis or type(index) is int


# --- whether the op can compute it ----------------------------------------------------------------


def _fits(found: _Loss) -> bool:
    arguments = found.arguments
    if arguments["size_average"] is not None or arguments["reduce"] is not None:
        return False
    if arguments["reduction"] not in ("mean", "sum", "none"):
        return False
    smoothing = arguments.get("label_smoothing", 0.0)
    known = type(arguments["ignore_index"]) is int and isinstance(smoothing, int | float)
    if not known or not 0 <= smoothing <= 1:
        return False
    return _fits_values(found) and _rows_can_move(found) and not interrupted(found.nodes)


def _fits_values(found: _Loss) -> bool:
    arguments = found.arguments
    hidden, weight, loss = value_of(found.hidden), value_of(found.weight), value_of(found.loss)
    logits, target = value_of(arguments["input"]), value_of(arguments["target"])
    if hidden is None or weight is None or loss is None or logits is None or target is None:
        return False
    if target.dtype != torch.int64 or target.dim() != logits.dim() - 1:
        return False
    if weight.dim() != 2 or hidden.dim() < 2 or not hidden.dtype.is_floating_point:
        return False
    if any(one.device.type != "cpu" for one in (hidden, weight, target)):
        return False
    class_weight = arguments["weight"]
    if class_weight is not None:
        own = value_of(class_weight)
        if own is None or own.dtype != loss.dtype:
            return False
    if found.bias is not None and value_of(found.bias) is None:
        return False
    return math.prod(sizes(logits)) * loss.dtype.itemsize >= LEAST_BYTES


def _rows_can_move(found: _Loss) -> bool:
    """Whether the sizes are known of each view that rows are taken from afterwards."""
    return all(
        type(size) is int for node in _views_to_write(found) for size in node.meta["val"].shape
    )


def _views_to_write(found: _Loss) -> list[Node]:
    """Those before a slice. The others make one matrix of all rows, as is done anyway."""
    slices = [place for place, node in enumerate(found.moves) if not calls(node, _VIEWS)]
    return [n for n in found.moves[: slices[-1] if slices else 0] if calls(n, _VIEWS)]


# --- what stands in its place ---------------------------------------------------------------------


def _rewrite(graph: GraphModule, loss: Node) -> None:
    """Write the op before the loss, and take out what computed that."""
    found = _matched(loss)  # what it reads may be the result of another one by now
    assert found is not None
    write = Writer(graph, loss)
    arguments = found.arguments
    dtype = found.layer.meta["val"].dtype  # autocast's, where that is on
    target = arguments["target"]
    rows = target if target.meta["val"].dim() == 1 else write.method("reshape", target, -1)
    reduction = arguments["reduction"]
    operands = [
        _cast(write, one, dtype)
        for one in (_moved(write, found), _weight(write, found), found.bias)
    ]
    made = write.function(
        ops.linear_cross_entropy,
        *operands,
        rows,
        arguments["weight"],
        reduction,
        arguments["ignore_index"],
        float(arguments.get("label_smoothing", 0.0)),
        loss.meta["val"].dtype,
        _gradients(found, dtype),
    )
    made = write.function(operator.getitem, made, 0)
    if reduction == "none" and rows is not target:
        made = write.method("view_as", made, target)
    loss.replace_all_uses_with(made)
    for node in reversed(found.nodes):
        graph.graph.erase_node(node)


def _moved(write: Writer, found: _Loss) -> Node:
    """The rows of the layer's input that the loss is of, as a matrix."""
    rows = found.hidden
    assert rows is not None
    width = rows.meta["val"].shape[-1]
    views = _views_to_write(found)
    for node in found.moves:
        if node in views:
            rows = write.method("reshape", rows, (*node.meta["val"].shape[:-1], width))
        elif not calls(node, _VIEWS):
            rows = write.function(operator.getitem, rows, node.args[1])
    return rows if _rank(rows) == 2 else write.method("reshape", rows, (-1, width))


def _weight(write: Writer, found: _Loss) -> Node | None:
    return write.method("t", found.weight) if found.by_columns else found.weight


def _cast(write: Writer, node: Node | None, dtype: torch.dtype) -> Node | None:
    if node is None or node.meta["val"].dtype == dtype:
        return node
    return write.method("to", node, dtype)


def _gradients(found: _Loss, dtype: torch.dtype) -> list[bool]:
    """Which gradients the op computes with the loss; its backward computes others."""
    value = value_of(found.loss)
    one_factor = found.arguments["reduction"] != "none" and dtype != torch.float16
    if value is None or not value.requires_grad or not one_factor:
        return [False, False, False]
    operands = map(value_of, (found.hidden, found.weight, found.bias))
    return [one is not None and one.requires_grad for one in operands]


# --- nodes ----------------------------------------------------------------------------------------


def _rank(node: Any) -> int:
    value = value_of(node)
    return -1 if value is None else value.dim()


def _is_log_softmax(node: Any) -> bool:
    """Whether a node is that of a matrix, over its columns."""
    if not calls(node, _LOG_SOFTMAX) or _rank(node) != 2:
        return False
    return argument(node, 1, "dim") in (1, -1) and bool(node.args)


def _swaps_last(node: Any) -> bool:
    """Whether a node is another one with its last two dimensions swapped."""
    rank = _rank(node)
    if not calls(node, _SWAPS) or not node.args or node.kwargs or rank < 2:
        return False
    if node.target is getattr:
        return node.args[1] == "mT" or (node.args[1] == "T" and rank == 2)
    rest = [
        one for arg in node.args[1:] for one in (arg if isinstance(arg, tuple | list) else [arg])
    ]
    if not all(type(one) is int for one in rest):
        return False
    places = [one % rank for one in rest]
    if node.target in ("permute", torch.permute):
        return places == [*range(rank - 2), rank - 1, rank - 2]
    return (not places and rank == 2) or sorted(places) == [rank - 2, rank - 1]
