"""Writing nodes into a graph of Dynamo's."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves


class Writer:
    """Adds nodes before one, with their fake values and with what is known of that one's place."""

    def __init__(self, graph: GraphModule, before: Node) -> None:
        self._graph = graph.graph
        self._before = before

    def function(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self._add("call_function", target, args, kwargs, target)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        return self._add("call_method", name, args, kwargs, getattr(torch.Tensor, name))

    def _add(self, op: str, target: Any, args: Any, kwargs: Any, function: Any) -> Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.create_node(op, target, args, kwargs)
        node.meta.update(
            {k: v for k, v in self._before.meta.items() if k not in ("val", "example_value")}
        )
        args, kwargs = torch.fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
        node.meta["val"] = _computed(function, args, kwargs)
        return node


def _computed(function: Any, args: Any, kwargs: Any) -> Any:
    """A fake value; nothing is saved, since hooks of the user's would be called with it."""
    with torch.no_grad():
        made = function(*args, **kwargs)
    read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    if torch.is_grad_enabled() and any(one.requires_grad for one in read):
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                one.requires_grad_()
    return made
