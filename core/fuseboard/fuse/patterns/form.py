"""What a pattern looks like as a graph of ATen ops, and that as text.

The text is Python's syntax, so that people can read it and ``ast`` does; nothing of it is run::

    def inference(x, eps):
        pow_1 = aten.pow.Tensor_Scalar(x, 2)
        mean = aten.mean.dim(pow_1, [-1], True)
        add = aten.add.Tensor(mean, eps)
        return [add]
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

#: Calls that give their argument again: traces of a backward hold some, captured graphs others.
TRANSPARENT = frozenset({aten.detach.default, aten.alias.default})


@dataclass(frozen=True)
class Form:
    """A traced pattern.

    :ivar graph: placeholders are holes: tensors, numbers, and gradients that arrive.
    :ivar results: what the function returns.
    :ivar gradients: what its backward returns, of the inputs that were asked for; None for what has
        none. A gradient may be a hole: one that arrives and is passed on.
    """

    graph: Graph
    results: tuple[Node, ...]
    gradients: tuple[Node | None, ...] = ()

    @property
    def outputs(self) -> list[Node]:
        """All results that are computed, gradients included."""
        found = [*self.results, *(one for one in self.gradients if one is not None)]
        return [node for node in dict.fromkeys(found) if node.op == "call_function"]

    @property
    def calls(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def holes(self) -> dict[str, Node]:
        return {str(node.target): node for node in self.graph.nodes if node.op == "placeholder"}


def seen_through(node: Any) -> Any:
    """What a node gives again; itself where it computes something."""
    while isinstance(node, Node) and node.target in TRANSPARENT and node.op == "call_function":
        node = node.args[0]
    return node


def form_of(traced: Graph, names: Sequence[str], results: int) -> Form:
    """A traced graph as a form, without what gives its argument again.

    :param names: of the holes, in order.
    :param results: how many of the outputs come from the forward.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    inputs = iter(names)
    for node in traced.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(next(inputs))
        elif node.op == "output":
            break
        elif node.target in TRANSPARENT:
            copies[node] = copies[node.args[0]]
            continue
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    outputs = tuple(copies.get(one) for one in traced.output_node().args[0])  # type: ignore[union-attr, arg-type]
    graph.output([one for one in outputs if one is not None])
    made = tuple(one for one in outputs[:results] if one is not None)
    return Form(graph, made, outputs[results:])


# --- text -----------------------------------------------------------------------------------------


def form_as_text(form: Form, kind: str) -> str:
    """A form as a function of Python's syntax.

    :raises ValueError: a call holds something that can't be written.
    """
    lines = [f"def {kind}({', '.join(form.holes)}):"]
    lines += [f"    {node_as_text(node)}" for node in form.calls]
    lines.append(f"    return {_as_text(form.results)}, {_as_text(form.gradients)}")
    return "\n".join(lines) + "\n"


def node_as_text(node: Node) -> str:
    """A call as an assignment."""
    given = [_as_text(value) for value in node.args]
    given += [f"{name}={_as_text(value)}" for name, value in node.kwargs.items()]
    return f"{node.name} = {target_as_text(node.target)}({', '.join(given)})"


def target_as_text(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"operator.{target.__name__}" if _is_operator(target) else str(target)


def _is_operator(target: Any) -> bool:
    return getattr(operator, getattr(target, "__name__", ""), None) is target


def _as_text(value: Any) -> str:
    if isinstance(value, Node):
        return str(value.target) if value.op == "placeholder" else value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_text, value))}]"
    if isinstance(value, torch.device):
        return f"device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"number({str(value)!r})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value)
    raise ValueError(f"{value!r} of type {type(value).__name__} can't be written")


def forms_from_text(text: str) -> dict[str, Form]:
    """The forms of a text, by kind.

    :raises ValueError: it isn't such a text, or an op of it isn't there.
    """
    found = {}
    for function in ast.parse(text).body:
        if not isinstance(function, ast.FunctionDef):
            raise ValueError(f"line {function.lineno}: not a form")
        found[function.name] = _Reader().form(function)
    return found


class _Reader:
    """Makes one form's graph of its text."""

    def __init__(self) -> None:
        self._graph = Graph()
        self._nodes: dict[str, Node] = {}

    def form(self, function: ast.FunctionDef) -> Form:
        for one in function.args.args:
            self._nodes[one.arg] = self._graph.placeholder(one.arg)
        *calls, end = function.body
        for statement in calls:
            self._call(statement)
        if not isinstance(end, ast.Return) or not isinstance(end.value, ast.Tuple):
            raise ValueError(f"line {end.lineno}: no results")
        results, grads = (self._value(part) for part in end.value.elts)
        self._graph.output([one for one in (*results, *grads) if one is not None])
        return Form(self._graph, tuple(results), tuple(grads))

    def _call(self, statement: ast.stmt) -> None:
        call = getattr(statement, "value", None)
        if not isinstance(statement, ast.Assign) or not isinstance(call, ast.Call):
            raise ValueError(f"line {statement.lineno}: not an assignment of a call")
        args = tuple(map(self._value, call.args))
        kwargs = {str(one.arg): self._value(one.value) for one in call.keywords}
        name = ast.unparse(statement.targets[0])
        target = _target(ast.unparse(call.func))
        self._nodes[name] = self._graph.create_node("call_function", target, args, kwargs, name)

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.List):
            return list(map(self._value, node.elts))
        if isinstance(node, ast.Name):
            if node.id not in self._nodes:
                raise ValueError(f"line {node.lineno}: nothing is called {node.id!r}")
            return self._nodes[node.id]
        if isinstance(node, ast.Attribute):
            return getattr(torch, node.attr)
        if isinstance(node, ast.Call):
            (text,) = map(ast.literal_eval, node.args)
            return torch.device(text) if ast.unparse(node.func) == "device" else float(text)
        return ast.literal_eval(node)


def _target(text: str) -> Any:
    owner, *path = text.split(".")
    found: Any = operator if owner == "operator" else getattr(torch.ops, owner)
    for name in path:
        found = getattr(found, name, None)
    if not callable(found):
        raise ValueError(f"there is no op {text}")
    return found


def calls_any(form: Form, targets: Collection[Any]) -> bool:
    """Whether a form holds one of some ops."""
    return any(node.target in targets for node in form.calls)
