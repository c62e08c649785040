"""Dynamo's graph as code for a whole graph: what eager is, before anything was taken apart.

AOTAutograd's graph run op by op isn't always as fast. Some ops it can only capture by taking them
apart (resizing an image becomes dozens of index ops), and it has more of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.capture.autograd_functions import with_eager_functions
from fuseboard.capture.checkpoints import with_eager_checkpoints
from fuseboard.contracts import Boxed
from fuseboard.torch_api.nodes import graphs_in
from fuseboard.torch_api.state import AUTOGRAD_PARTS, StateGuard

#: Modules whose functions compute, and neither read nor change anything but tensors.
_COMPUTING = frozenset(
    {
        *("_operator", "operator", "math", "builtins", "torch.functional", "torch.nn.functional"),
        *("torch._C._nn", "torch._C._linalg", "torch._C._fft", "torch._C._special"),
        "torch._C._sparse",
    }
)

#: Namespaces of ops whose kernels don't ask for the grad mode; the user's own may.
_TORCHS_OWN = frozenset(
    {
        *("aten", "prims", "prim", "mkldnn", "onednn", "quantized", "quantized_decomposed"),
        *("torchvision", "fuseboard"),
    }
)

#: Methods of tensors that are about autograd.
_ABOUT_AUTOGRAD = frozenset({"backward", "register_hook", "requires_grad_", "retain_grad"})


def fix_negative_bases(graph: torch.nn.Module) -> None:
    """Let what torch writes for ``(-2) ** x`` mean that, in a graph and in those inside of it.

    ``torch/fx/graph.py`` of 2.13 writes the operator between its operands as they are: ``-2 ** x``,
    which is ``-(2 ** x)``. So it is for each base that prints with a minus: ``-0.0``, ``-inf``,
    ``-2j``. A base that a node of its own makes can't be misread.
    """
    for module in graphs_in(graph):
        powers = module.graph.find_nodes(op="call_function", target=operator.pow)
        misread = [n for n in powers if repr(n.args[0]).startswith("-")]
        for node in misread:
            with module.graph.inserting_before(node):
                base = module.graph.call_function(operator.mul, (node.args[0], 1))
            base.meta.update(
                dict.fromkeys({"val", "example_value"} & node.meta.keys(), node.args[0])
            )
            node.args = (base, node.args[1])
        if misread:
            module.recompile()


def forward_of(graph: GraphModule) -> Callable[..., Any]:
    """The code of Dynamo's graph, to be called as Dynamo calls what a backend returns.

    It is written when it is first looked at. A ``forward`` from before that would go the way around
    by the module's own call, always, which takes longer and prints what it knows of an exception.

    Levels of ``torch.func`` are opened and closed by nodes of their own, where eager has a
    ``with``. So an exception in between would leave them open for the rest of the process.
    """
    graph = with_eager_functions(with_eager_checkpoints(graph))
    _ = graph.code
    forward: Callable[..., Any] = graph.forward
    if only_computes(graph):
        return forward

    def run(*args: Any) -> Any:
        guard = StateGuard(AUTOGRAD_PARTS)
        guard.__enter__()
        try:
            return forward(*args)
        except BaseException as error:
            guard.__exit__(type(error), error, error.__traceback__)
            raise

    return run


def only_computes(graph: GraphModule) -> bool:
    """Whether all that a graph of Dynamo's does is known to be the same in any grad mode.

    Code of ``torch.func`` isn't: without gradients it computes zeros. Neither are the user's ops.
    What isn't known counts as depending on it.
    """
    return all(_computes(node) for one in graphs_in(graph) for node in one.graph.nodes)


def _computes(node: Node) -> bool:
    if node.op == "call_method":
        return node.target not in _ABOUT_AUTOGRAD
    if node.op != "call_function":
        return node.op != "call_module"
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in _TORCHS_OWN
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None)
    if module == "torch":
        return hasattr(torch._C._VariableFunctions, name) or name.startswith(("sym_", "_check"))
    return module is None or module in _COMPUTING


def boxed_original(graph: GraphModule, grads: bool) -> Boxed:
    """Dynamo's graph as the code of an inference graph.

    AOTAutograd calls such code in no-grad mode. Gradients are switched on for it where they are on
    in the calls, unless it makes no difference.
    """
    with_grads = grads and not only_computes(graph)
    forward = forward_of(graph)

    def call(args: list[Any]) -> Sequence[Any]:
        inputs = tuple(args)
        args.clear()
        return forward(*inputs)  # type: ignore[no-any-return]

    def call_with_grads(args: list[Any]) -> Sequence[Any]:
        with torch.enable_grad():
            return call(args)

    return call_with_grads if with_grads else call
