"""CUDA graphs' partition: which ops a CUDA graph can hold, decided on fake tensors.

A recording repeats kernels with the arguments that they had: whatever the host decided, read or
passed by value while it was recorded stays as it was. So an op can be recorded if its tensors are
all on the GPU and the host needs none of their values. What the host does know before a call
(symbolic sizes, scalars on the CPU) is part of the key by which recordings are kept.

The rules are those of torch 2.13 (``torch/fx/passes/backends/cudagraphs.py``,
``torch/_dynamo/backends/cudagraphs.py``, ``is_cudagraph_unsafe_fx_node`` in
``torch/_inductor/utils.py``), stricter where that errs on the side of recording: custom ops need
the user's word, and so does nothing that runs collectives or higher-order ops.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

import fuseboard
from fuseboard_cudagraphs import _torch_internals

#: Namespaces of torch's own ops. Ops of others may do anything on the host.
OWN_NAMESPACES = frozenset({"aten", "prims", "inductor", "inductor_prims"})
COLLECTIVE_NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem"}
)

#: Ops that can't be recorded and don't say so by a tag.
UNSAFE = {
    "aten::embedding_dense_backward": "its kernel waits for the GPU to count indices",
    "aten::_fused_moving_avg_obs_fq_helper": "it reads its observers' state on the host",
    "aten::_fused_moving_avg_obs_fq_helper_functional": "it reads its observers' state on the host",
    "aten::_assert_scalar": "it checks a value on the host",
}
#: Ops that copy a CPU scalar to the GPU instead of passing it to the kernel by value.
MOVES_SCALARS = frozenset({"aten::where", "aten::copy", "aten::_to_copy", "aten::to"})
#: Ops that select by masks if an index is boolean.
INDEXED = frozenset(
    {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::_unsafe_index_put"}
)


def claim(
    graph: GraphModule, device_type: str = "cuda", namespaces: Collection[str] = ()
) -> list[fuseboard.Claim | fuseboard.Decline]:
    """The ops of a graph that can be recorded, and the others with reasons."""
    return fuseboard.claim_nodes(graph, lambda node: why_not(node, device_type, namespaces))


def why_not(node: Node, device_type: str = "cuda", namespaces: Collection[str] = ()) -> str | None:
    """Why an op can't be part of a recording; None if it can.

    :param device_type: what is recorded; tests use another than CUDA.
    :param namespaces: of custom ops that the user vouches for.
    """
    if node.target is operator.getitem:
        producer = node.args[0]
        if isinstance(producer, Node) and producer.op == "call_function":
            return why_not(producer, device_type, namespaces)
        return None
    values = tensors_of(node)
    if any(map(_torch_internals.has_unbacked_symbols, _symbolic(node))):
        return "its size or value depends on data"
    if any(value.layout != torch.strided for value in values):
        return "its result isn't a strided tensor"
    return _why_not_op(node, namespaces) or _why_not_devices(node, values, device_type)


def _why_not_op(node: Node, namespaces: Collection[str]) -> str | None:
    """What speaks against the op itself, wherever its tensors are."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "a higher-order op: the host may decide what it runs"
    if not isinstance(target, torch._ops.OpOverload):
        return None  # arithmetic on sizes
    name = target._schema.name
    if target.namespace in COLLECTIVE_NAMESPACES:
        return "a collective: other processes would have to record it at the same time"
    if target.namespace not in OWN_NAMESPACES and target.namespace not in namespaces:
        return (
            f"a custom op; if it neither waits for the GPU nor decides anything on the host, name "
            f"{target.namespace!r} in plugins.cudagraphs.namespaces"
        )
    if name in UNSAFE:
        return UNSAFE[name]
    if name in INDEXED:
        return _why_not_indices(node)
    return _why_not_tags(node, target)


def _why_not_tags(node: Node, target: torch._ops.OpOverload) -> str | None:
    tags = target.tags
    if torch.Tag.data_dependent_output in tags:
        return "the host reads what it computes"
    if torch.Tag.dynamic_output_shape in tags:
        return "the size of its result depends on data"
    if getattr(torch.Tag, "cudagraph_unsafe", None) in tags:
        return "it is tagged as unsafe for CUDA graphs"
    if target._schema.is_mutable:
        return "it writes to an argument"
    arguments = (*node.args, *node.kwargs.values())
    if any(isinstance(argument, torch.Generator) for argument in arguments):
        return "it draws random numbers from a generator of its own"
    return None


def _why_not_indices(node: Node) -> str | None:
    """Boolean indices select as many elements as the data say.

    One mask into which one number is put is the exception: that is a fill, in every backend.
    """
    indices = [index for index in node.args[1] if isinstance(index, Node)]  # type: ignore[union-attr]
    masks = [i for i in indices if _dtype(i) in (torch.bool, torch.uint8)]
    if not masks:
        return None
    accumulate = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    put = "index_put" in str(node.target) and len(indices) == 1 and not accumulate
    if put and tensors_of(node.args[2]) and tensors_of(node.args[2])[0].numel() == 1:
        return None
    return "a boolean index selects as many elements as the data say"


def _why_not_devices(node: Node, results: list[torch.Tensor], device_type: str) -> str | None:
    """What speaks against where its tensors are."""
    operands = [value for used in node.all_input_nodes for value in tensors_of(used)]
    everything = [*operands, *results]
    for value in everything:
        if value.device.type != device_type and not is_cpu_scalar(value):
            return f"a tensor on {value.device}"
    on_device = [value for value in everything if value.device.type == device_type]
    scalars = len(on_device) < len(everything)
    tags = getattr(node.target, "tags", ())
    if not scalars:
        return None
    if not on_device:
        seeded = torch.Tag.nondeterministic_seeded in tags
        return "it draws random numbers on the CPU" if seeded else None
    if any(value.device.type != device_type for value in results):
        return "it copies to the CPU"
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    if torch.Tag.pointwise not in tags or name in MOVES_SCALARS:
        return "it copies a CPU scalar to the GPU"
    return None


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The fake tensors that a node stands for; none where it stands for a number or nothing."""
    held = value.meta.get("val") if isinstance(value, Node) else value
    return [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, torch.Tensor)]


def is_cpu_scalar(value: torch.Tensor) -> bool:
    """A number in a tensor on the CPU: kernels are passed it by value."""
    return value.device.type == "cpu" and value.dim() == 0


def _symbolic(node: Node) -> list[Any]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | torch.SymInt)]


def _dtype(node: Node) -> torch.dtype | None:
    held = tensors_of(node)
    return held[0].dtype if held else None
