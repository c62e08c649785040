"""Activation checkpoints in Dynamo's graph, as eager has them.

The op that Dynamo puts in their place (``torch/_higher_order_ops/wrap.py`` of 2.13) is made to be
traced by AOTAutograd. Called as it is it recomputes with other random numbers than it drew, and
takes buffers that the checkpoint writes to, such as a batch norm's, for changed inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from fuseboard.capture.autograd_functions import with_eager_functions
from fuseboard.torch_api.nodes import graphs_in

#: What Dynamo puts in the place of a call of ``checkpoint``; its first argument is the body.
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def with_eager_checkpoints(graph: GraphModule) -> GraphModule:
    """The graph, or a copy that calls torch's checkpoints in the place of the op."""
    if not any(n.target is CHECKPOINT for one in graphs_in(graph) for n in one.graph.nodes):
        return graph
    own = GraphModule(graph, copy.deepcopy(graph.graph))
    for name, inner in list(own.named_children()):
        if isinstance(inner, GraphModule):
            setattr(own, name, with_eager_checkpoints(inner))
    for node in own.graph.find_nodes(op="call_function", target=CHECKPOINT):
        node.target = _checkpoint
    own.recompile()
    return own


def _checkpoint(body: GraphModule, *args: Any, **keywords: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint`` as the user called it, but for what torch's op needs.

    Not reentrant, as Dynamo traces no other; and recomputed to its end, since the code of
    ``torch.func`` in it has to close the levels that it opens.
    """
    if "_checkpoint_context_fn" in body.meta:
        keywords["context_fn"] = body.meta["_checkpoint_context_fn"]
    keywords |= {"use_reentrant": False, "early_stop": False}
    body = with_eager_functions(body)
    _ = body.code  # else its forward goes the way around by the module's own call
    run = _Body(body.forward, args)
    return checkpoint(run, *run.differentiable, **keywords)


class _Body:
    """A checkpoint's code. Inputs without gradients are what eager's code has in closures.

    torch keeps those that are handed to it and raises where they are written to before it
    recomputes. Dynamo hands over all that eager's code reads: a batch norm's statistics, too, which
    that code itself writes to. So those are left out, and looked after here.

    :ivar differentiable: the inputs to hand over.
    """

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._forward = forward
        self._places = [
            i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad
        ]
        self.differentiable = [args[i] for i in self._places]
        self._others = [None if i in self._places else a for i, a in enumerate(args)]
        #: Of those others that the code doesn't write to; None before the first run.
        self._versions: dict[int, int] | None = None

    def __call__(self, *differentiable: Any) -> Any:
        before = self._read()
        if self._versions is not None and self._versions != {i: before[i] for i in self._versions}:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: an input of a checkpoint, which is computed again in backward"
            )
        args = list(self._others)
        for place, value in zip(self._places, differentiable, strict=True):
            args[place] = value
        results = self._forward(*args)
        if self._versions is None:
            after = self._read()
            self._versions = {i: now for i, now in after.items() if now == before[i]}
        return results

    def _read(self) -> dict[int, int]:
        return {
            i: value._version
            for i, value in enumerate(self._others)
            if isinstance(value, torch.Tensor) and not value.is_inference()
        }
