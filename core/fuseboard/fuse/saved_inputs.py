"""What a rewrite saves for the backward, and the formula that it stands for doesn't.

Autograd refuses a backward whose saved tensors were written to since. So a program may overwrite
what eager's formula doesn't save, such as a mask that is added to scores, and it raised if what
stands in the formula's place saved that. It is given a copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from fuseboard.fuse.reading import value_of
from fuseboard.fuse.writing import Writer
from fuseboard.torch_api.internals import storage_address

#: Marks a copy; what reads the same later may share it.
_COPY = "fuseboard_copy_for_backward"


def memory(node: Node) -> Iterator[int]:
    """Where the tensor of a node lies; nothing of other values."""
    if (value := value_of(node)) is not None:
        yield storage_address(value)


def is_the_users(node: Node) -> bool:
    """Whether the user may write to a node's memory between the forward and its backward.

    That is what the graph was given, and what it returns.
    """
    mine = set(memory(node))
    ends = _ends(node.graph)
    return any(not mine.isdisjoint(memory(end)) for end in ends)


def copied(write: Writer, node: Node, before: Node) -> Node:
    """A copy of a node's tensor as it is at ``before``, one for all who read it in a graph.

    Nobody writes to it in the graph after that. Dimensions that were expanded stay so.
    """
    for user in node.users:
        if user.meta.get(_COPY) is node and user < before:
            return user
    value = value_of(node)
    assert value is not None
    made, expanded = node, False
    for dim in range(value.dim()):
        if value.stride(dim) == 0 and value.shape[dim] != 1:
            made, expanded = write.method("narrow", made, dim, 0, 1), True
    made = write.method("clone", made)
    if expanded:
        made = write.method("expand_as", made, node)
    made.meta[_COPY] = node
    return made


def _ends(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            yield node
        elif node.op == "output":
            yield from node.all_input_nodes


def requires_grad(node: Node) -> bool:
    """Whether autograd computes a gradient of a node's tensor."""
    value = value_of(node)
    return torch.is_grad_enabled() and value is not None and value.requires_grad
