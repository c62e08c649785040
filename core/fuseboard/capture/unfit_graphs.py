"""Graphs that AOTAutograd of torch 2.13 doesn't capture as they are, known before it tries.

An inference mode that is entered inside is dropped: results made in it are no inference tensors,
and autograd takes them for its own. Where all of a graph is inside of one, it is captured without
it, and called in one (:func:`take_out_inference_mode`). Dynamo's own graph runs otherwise.

Inputs of a subclass of ``torch.Tensor`` that has no ``__torch_dispatch__`` of its own make each
call raise (``_AnalyzeCustomOpInputOutputMode`` in
``torch/_functorch/_aot_autograd/runtime_wrappers.py`` knows none), though they differ from tensors
in name alone; and what is compiled would return plain tensors.

Inputs that were made in inference mode can't be saved for a backward, which it finds in the call.

Tensors of other kinds than fuseboard judges and lowers are no fault of AOTAutograd's: graphs of
them run as they are as well (:func:`why_not_supported`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fuseboard.torch_api.nodes import graphs_in
from fuseboard.torch_api.tensor_classes import is_plain

_ENTER, _EXIT = "_enter_inference_mode", "_exit_inference_mode"

_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def why_not_supported(graph: GraphModule, inputs: Sequence[Any]) -> str:
    """Why a graph of Dynamo's is left as it is: the kind of a tensor; "" if it needn't be.

    :param inputs: real ones, and symbolic numbers.
    """
    for value in inputs:
        if why := _why_of_another_kind(value):
            return why
    # Fake tensors aren't quantised (torch 2.13), so that no node's value tells: its arguments do.
    for one in graphs_in(graph):
        for node in one.graph.nodes:
            if any(arg in _QUANTIZED for arg in _dtypes((node.args, node.kwargs))):
                return "it quantises tensors"
    return ""


def _why_of_another_kind(value: Any) -> str:
    if isinstance(value, torch.SymInt) and value.node.is_nested_int():
        return "an input is a size of nested tensors"
    if not isinstance(value, torch.Tensor):
        return ""
    if value.is_nested:
        return "an input is a nested tensor"
    if value.is_quantized:
        return "an input is quantised"
    return "an input has oneDNN's layout" if value.layout is torch._mkldnn else ""  # type: ignore[attr-defined]


def _dtypes(args: Any) -> list[torch.dtype]:
    return [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.dtype)]


def why_unfit(graph: GraphModule, inputs: Sequence[Any]) -> str:
    """Why a graph of Dynamo's runs as it is; "" if AOTAutograd may have it.

    :param inputs: real ones.
    """
    for value in inputs:
        if isinstance(value, torch.Tensor) and _is_named_alone(value):
            return f"an input is of {type(value).__name__}, a subclass of Tensor in name alone"
    if may_save_inference_tensors(inputs):
        return "an input was made in inference mode, and can't be saved for a backward"
    inside = torch.is_inference_mode_enabled()
    for node in (node for one in graphs_in(graph) for node in one.graph.nodes):
        if _name(node) == _ENTER and node.args != (inside,):
            return "a part of it is in another inference mode than the rest"
        if node.op == "call_method" and node.target == "as_subclass":
            return "it makes tensors of a subclass"
    return ""


def may_save_inference_tensors(inputs: Sequence[Any]) -> bool:
    """Whether a backward may read an input that autograd refuses to save.

    Eager saves what the formulas of single ops read, such as what was computed from that input.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    training = torch.is_grad_enabled() and any(value.requires_grad for value in tensors)
    return training and any(value.is_inference() for value in tensors)


def _is_named_alone(value: torch.Tensor) -> bool:
    kind = type(value)
    if is_plain(value) or hasattr(kind, "__tensor_flatten__"):
        return False
    return getattr(kind, "__torch_dispatch__", None) == torch.Tensor.__torch_dispatch__


def take_out_inference_mode(graph: GraphModule) -> bool:
    """Let a graph mean the same if it is called in inference mode; False where it can't.

    It can where all that computes is between the nodes that enter one and leave it.
    """
    switches: list[Node] = []
    entered: Node | None = None
    for node in graph.graph.nodes:
        if entered is None and _name(node) == _ENTER and node.args == (True,):
            entered = node
            switches.append(node)
        elif entered is not None and _name(node) == _EXIT and node.args == (entered,):
            entered = None
            switches.append(node)
        elif _name(node) in (_ENTER, _EXIT):
            return False
        elif entered is None and node.op not in ("placeholder", "get_attr", "output"):
            return False
    for node in reversed(switches):
        graph.graph.erase_node(node)
    if switches:
        graph.recompile()
    return bool(switches)


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""
