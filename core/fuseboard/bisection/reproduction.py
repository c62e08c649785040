"""A script with nothing but the ops that are to blame."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

#: What the code of a graph may name, and how a script gets it.
_IMPORTS = {
    "torch": "",
    "device": "from torch import device",
    "inf": "from math import inf",
    "nan": "from math import nan",
}
_SCRIPT = '''"""{title}

Written by `fuseboard bisect`. Versions: {versions}.
"""

{imports}


def f({parameters}):
{body}


torch.manual_seed(0)
inputs = [
{inputs}
]
compiled = torch.compile(f, backend="fuseboard", options={options})
with torch.no_grad():
    torch.testing.assert_close(compiled(*inputs), f(*inputs), equal_nan=True)
'''


def function_of(graph: GraphModule, names: Collection[str]) -> dict[str, Any] | None:
    """The nodes of a graph as the source of a function, with what makes inputs for it.

    Inputs are drawn: where the values of the user's count, the function doesn't fail.

    :returns: ``imports``, ``parameters``, ``body`` and ``inputs`` of the script; None where a node
        reads what can't be written down: a size that isn't known, or a constant.
    """
    taken = [user for node in graph.graph.nodes if node.name in names for user in node.users]
    items = {user.name for user in taken if user.target is operator.getitem}
    names = {*names, *items}
    alone, copied, inputs = Graph(), {}, {}

    def argument(node: Node) -> Node:
        if node not in copied:
            copied[node] = alone.placeholder(node.name)
            inputs[node.name] = _drawn(node.meta.get("val"))
        return copied[node]

    nodes = [node for node in graph.graph.nodes if node.name in names]
    for node in nodes:
        for used in node.all_input_nodes:  # placeholders come first
            if used.name not in names:
                argument(used)
    for node in nodes:
        copied[node] = alone.node_copy(node, argument)
    if None in inputs.values() or any(node.op != "call_function" for node in nodes):
        return None
    results = [n for n in nodes if not n.users or any(u.name not in names for u in n.users)]
    tensors = [n for n in results if isinstance(n.meta.get("val"), torch.Tensor)]
    alone.output(tuple(copied[node] for node in tensors))
    code = alone.python_code("self")
    lines = [line.split(";  ")[0] for line in code.src.splitlines() if line.strip()][1:]
    words = set(re.findall(r"(?<![.\w])\w+", "\n".join(lines)))
    named = code.globals.keys() & words
    if not named <= _IMPORTS.keys():
        return None
    return {
        "imports": ["import torch", *sorted(filter(None, (_IMPORTS[name] for name in named)))],
        "parameters": list(inputs),
        "body": lines,
        "inputs": list(inputs.values()),
    }


def _drawn(value: Any) -> str | None:
    """An expression for a value like this one."""
    if isinstance(value, bool | int | float):
        return repr(value)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    size, stride = tuple(value.shape), value.stride()
    if not all(isinstance(number, int) for number in (*size, *stride)):
        return None
    if value.dtype is torch.bool:
        made = f"torch.rand({size}) > 0.5"
    elif value.dtype.is_floating_point or value.dtype.is_complex:
        made = f"torch.randn({size}, dtype={value.dtype})"
    else:
        made = f"torch.randint(2, {size}, dtype={value.dtype})"
    if torch.empty(size, device="meta").stride() == stride and value.device.type == "cpu":
        return made
    empty = (
        f"torch.empty_strided({size}, {stride}, dtype={value.dtype}, device={str(value.device)!r})"
    )
    return f"{empty}.copy_({made})"


def script_of(function: dict[str, Any], title: str, options: dict[str, Any]) -> str:
    """The script's text."""
    parts: dict[str, Sequence[str]] = {
        "imports": function["imports"],
        "body": function["body"],
        "inputs": [f"    {expression}," for expression in function["inputs"]],
    }
    return _SCRIPT.format(
        title=title,
        versions=", ".join(f"{name} {version(name)}" for name in ("torch", "fuseboard")),
        parameters=", ".join(function["parameters"]),
        options=options,
        **{name: "\n".join(lines) for name, lines in parts.items()},
    )
