"""Small questions to ask of FX graphs, and small edits."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fuseboard_mkldnn import _ops

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default)
#: Ops whose results share memory although their schemas don't say so.
UNANNOTATED_VIEWS = (
    aten._unsafe_view.default,
    aten.contiguous.default,
    aten.reshape.default,
    aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
TRANSPOSES = (aten.t.default, aten.permute.default, aten.transpose.int)


def calls(node: Any, *targets: Any) -> bool:
    """Whether ``node`` calls one of ``targets``."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def value(node: Any) -> Any:
    """The fake value of a node."""
    return node.meta.get("val")


def tensor(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node, or None if it hasn't exactly one."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def sole_user(node: Node) -> Node | None:
    """The one node that uses ``node`` (the output node counts), or None."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def outputs(graph: Graph) -> list[Node]:
    """The nodes that the graph returns."""
    return list(graph.output_node().all_input_nodes)


def static_nodes(
    graph: GraphModule, positions: Iterable[int], but: Callable[[Node], bool] = lambda node: False
) -> set[Node]:
    """Static inputs and what depends on nothing else, nor on a node that ``but`` is true of."""
    wanted = set(positions)
    found: set[Node] = set()
    placeholders = 0
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            if placeholders in wanted:
                found.add(node)
            placeholders += 1
        elif node.op == "call_function" and node.all_input_nodes:
            if found.issuperset(node.all_input_nodes) and not _is_random(node.target):
                if not but(node):
                    found.add(node)
    return found


def _is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def same_sizes(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(left) == len(right) and all(map(_ops.known_equal, left, right))


def has_strides_of(found: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether strides agree wherever a dimension has more than one element."""
    return len(found.shape) == len(other.shape) and all(
        _ops.known_equal(size, 1) or _ops.known_equal(mine, theirs)
        for size, mine, theirs in zip(found.shape, found.stride(), other.stride(), strict=True)
    )


def is_contiguous(found: torch.Tensor) -> bool:
    """Whether a fake tensor is known to be contiguous in memory, row-major."""
    expected: Any = 1
    for size, stride in zip(reversed(found.shape), reversed(found.stride()), strict=True):
        if not _ops.known_equal(size, 1):
            if not _ops.known_equal(stride, expected):
                return False
            expected = expected * size
    return True


def is_channels_last(found: torch.Tensor) -> bool:
    """Whether a fake tensor (N, C, H, W) is known to lie in memory as (N, H, W, C).

    The same for (N, C, D, H, W).
    """
    dims = found.dim()
    return dims in (4, 5) and is_contiguous(found.permute(0, *range(2, dims), 1))


def channels_last(found: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same sizes that lies in memory as (N, H, W, C), or (N, D, H, W, C)."""
    n, c, *spatial = found.shape
    dense = found.new_empty((n, *spatial, c))
    return dense.permute(0, -1, *range(1, found.dim() - 1))


def is_empty(found: torch.Tensor) -> bool:
    """Whether a dimension is known to be 0."""
    return any(_ops.known_equal(size, 0) for size in found.shape)


def has_good_dtypes(*operands: torch.Tensor | None) -> bool:
    """Whether all are of one dtype: float32, or a half type that oneDNN has kernels for."""
    dtypes = {one.dtype for one in operands if one is not None}
    return len(dtypes) == 1 and all(map(_ops.has_kernels, dtypes))


def for_each(numbers: list[int], weight: torch.Tensor) -> list[int]:
    """One number for each spatial dimension of a weight."""
    return list(numbers) * (weight.dim() - 2) if len(numbers) == 1 else list(numbers)


def is_plain_clone(node: Node) -> bool:
    """Whether a node copies its input into the same strides (dropout leaves such nodes)."""
    if not calls(node, aten.clone.default):
        return False
    source, copy = tensor(node.args[0]), tensor(node)
    return source is not None and copy is not None and has_strides_of(copy, source)


def view_source(node: Any) -> Node | None:
    """The input of a view that keeps the last dimension, or None."""
    if not calls(node, *VIEWS):
        return None
    source, shaped = tensor(node.args[0]), tensor(node)
    if source is None or shaped is None or not source.dim() or not shaped.dim():
        return None
    if not _ops.known_equal(source.shape[-1], shaped.shape[-1]):
        return None
    return node.args[0]


def is_view(target: Any) -> bool:
    """Whether results of a call may share memory with its inputs."""
    if target is operator.getitem or target in UNANNOTATED_VIEWS:
        return True
    if isinstance(target, torch._ops.OpOverload):
        return any(result.alias_info is not None for result in target._schema.returns)
    return True


class Editor:
    """Adds nodes before one place of a graph, with the origin of the node that was there."""

    def __init__(self, before: Node) -> None:
        self.graph = before.graph
        self._before = before
        self._origin = {
            key: found
            for key, found in before.meta.items()
            if key in ("stack_trace", "nn_module_stack", "source_fn_stack")
        }

    def call(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        val: Any,
        kwargs: dict[str, Any] | None = None,
    ) -> Node:
        """One call whose fake value is ``val``."""
        with self.graph.inserting_before(self._before):
            node = self.graph.call_function(target, tuple(args), kwargs or {})
        node.meta.update(self._origin)
        node.meta["val"] = val
        return node

    def replace(self, new: Node, old: Sequence[Node]) -> None:
        """Let ``new`` stand for the last of ``old``, and drop all that is then unused."""
        old[-1].replace_all_uses_with(new)
        for node in reversed(old):
            erase_unused(node)


def erase_unused(node: Node) -> None:
    """Erase a call that nothing uses, and then its inputs where they are left unused."""
    if node.op != "call_function" or node.users or node._erased:
        return
    inputs = list(node.all_input_nodes)
    node.graph.erase_node(node)
    for used in inputs:
        erase_unused(used)
