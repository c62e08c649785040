"""What reports tell of FX nodes beyond their names: values, modules, a graph's two ends."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.module_names import module_stack, split_source
from fuseboard.report.data import GraphReport, InputReport, NodeReport
from fuseboard.torch_api.nodes import target_name


def value_text(value: Any) -> str:
    """A node's ``meta["val"]`` in words: ``float32[4, s0]``; "" where nothing is known.

    Symbolic sizes are shown as symbols; nothing is guarded on. The device is told unless it is the
    CPU.
    """
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        sizes = ", ".join(map(str, value.shape))
        device = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{kind}[{sizes}]{device}"
    if isinstance(value, list | tuple):
        return f"({', '.join(value_text(item) or 'None' for item in value)})"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(value)
    return "" if value is None else f"{value!r:.80}"


def module_path(node: Node) -> str:
    """The innermost module of the user's that a node comes from, such as ``layers.0.mlp``.

    Backward nodes name the module of the forward node that they are the backward of.
    """
    stack = module_stack(node)
    return split_source(stack[-1])[1] if stack else ""


def modules_text(nodes: Iterable[Node]) -> str:
    """The module that all nodes are in, such as ``layers.0``; else the first and the last one.

    "" where none is known.
    """
    paths = list(dict.fromkeys(filter(None, map(module_path, nodes))))
    if not paths:
        return ""
    steps = zip(*(path.split(".") for path in paths), strict=False)
    shared = [step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps)]
    return ".".join(shared) if shared else f"{paths[0]}..{paths[-1]}"


def describe_ends(graph: GraphModule, static: Collection[int], report: GraphReport) -> None:
    """Note a graph's inputs and outputs.

    :param static: positions of the inputs that are parameters and buffers.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    report.inputs = [
        InputReport(node.name, value_text(node.meta.get("val")), position in static)
        for position, node in enumerate(placeholders)
    ]
    (output,) = graph.graph.find_nodes(op="output")
    report.outputs = tuple(node.name for node in output.all_input_nodes)


def source_line(node: Node) -> str:
    """Where a node comes from: the user's ``file:line``, else the module, else ""."""
    trace = node.meta.get("stack_trace") or ""
    places: Sequence[tuple[str, str]] = re.findall(r'File "([^"]+)", line (\d+)', trace)
    torch_home = torch.__path__[0]
    own = [place for place in places if not place[0].startswith(torch_home)]
    if own or places:
        file, line = (own or places)[-1]
        return f"{file}:{line}"
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    source, kind = list(stack.values())[-1]
    name = getattr(kind, "__name__", kind)
    path = split_source(source)[1]
    return f"module {path} ({name})" if path else f"module {name}"


def describe_node(
    node: Node, backend: str, region: str, reason: str, declined: Mapping[str, str] | None = None
) -> NodeReport:
    """An op's row in a report.

    :param declined: backend name → its reason.
    """
    return NodeReport(
        name=node.name,
        op=target_name(node),
        backend=backend,
        region=region,
        reason=reason,
        source=source_line(node),
        declined=dict(declined or {}),
        inputs=tuple(used.name for used in node.all_input_nodes),
        value=value_text(node.meta.get("val")),
        module=module_path(node),
    )
