"""Flat Python source from graph nodes: the only code that runs in a call."""

from __future__ import annotations

import keyword
import linecache
import math
import operator
import re
import weakref
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from torch.fx import Node

from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.nodes import target_name
from fuseboard.torch_api.profiler import show_in_traces

_function_numbers = count()

#: Values of these types are written as their ``repr``.
_PLAIN = (type(None), bool, int, str)

#: Operators that are written infix instead of called.
_INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.truediv: "/",
    operator.mod: "%",
    operator.pow: "**",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}


class Source:
    """A function being written: lines, and the objects that they name as globals.

    :ivar spans: globals that are shown in traces, and what makes the names of their spans.
    :ivar ops: globals that hold what an op overload calls, and the overload.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.globals: dict[str, Any] = {}
        self.spans: dict[str, Callable[[], str]] = {}
        self.ops: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._taken = {
            "args",
            "cell",
            "error",
            "given",
        }  # what the generated functions call their own

    def bind(self, value: Any, hint: str) -> str:
        """The name of a global that holds ``value``; one object has one name."""
        if id(value) in self._names:
            return self._names[id(value)]
        name = self._names[id(value)] = self.bind_apart(value, hint)
        return name

    def bind_apart(self, value: Any, hint: str) -> str:
        """The name of a new global that holds ``value``, whichever others do."""
        name = self.unique(f"_{hint}")
        self.globals[name] = value
        return name

    def unique(self, hint: str) -> str:
        """An identifier that isn't used yet."""
        base = re.sub(r"\W", "_", hint) or "_"
        if base[0].isdigit() or keyword.iskeyword(base):
            base = f"_{base}"
        name, number = base, 0
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name

    def line(self, text: str, indent: int = 1) -> None:
        self.lines.append("    " * indent + text)

    def function(self, name: str, signature: str) -> Callable[..., Any]:
        """Compile what was written."""
        code = f"def {name}({signature}):\n" + "\n".join(self.lines) + "\n"
        function = compile_source(name, code, self.globals, self.ops)
        if self.spans:
            show_in_traces(function, self.spans)
        return function

    def literal(self, value: Any, names: Mapping[Node, str]) -> str:
        """An expression for an argument of a node."""
        if isinstance(value, Node):
            return names[value]
        if type(value) in _PLAIN:  # what is derived from them, an enum say, has a repr of its own
            return repr(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
        if isinstance(value, tuple) and type(value) is tuple:
            items = ", ".join(self.literal(item, names) for item in value)
            return f"({items},)" if len(value) == 1 else f"({items})"
        if isinstance(value, list):
            return f"[{', '.join(self.literal(item, names) for item in value)}]"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(self.literal(item, names) for item in parts)})"
        if isinstance(value, dict):
            pairs = (f"{key!r}: {self.literal(item, names)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        return self.bind(value, type(value).__name__)

    def call(self, node: Node, names: Mapping[Node, str]) -> str:
        """An expression that computes a ``call_function`` node."""
        if node.target is operator.getitem:
            return f"{self._operand(node.args[0], names)}[{self.literal(node.args[1], names)}]"
        target: Any = node.target
        if target in _INFIX and len(node.args) == 2 and not node.kwargs:
            left, right = (self._operand(arg, names) for arg in node.args)
            return f"({left} {_INFIX[target]} {right})"
        arguments = [self.literal(arg, names) for arg in node.args]
        arguments += [f"{key}={self.literal(arg, names)}" for key, arg in node.kwargs.items()]
        called = torch_internals.direct_call(target)
        callee = self.bind(called, target_name(node))
        if called is not target:
            self.ops[callee] = target
        return f"{callee}({', '.join(arguments)})"

    def _operand(self, value: Any, names: Mapping[Node, str]) -> str:
        """An operand, in parentheses where needed: ``-2 ** x`` is ``-(2 ** x)``."""
        text = self.literal(value, names)
        return text if text.isidentifier() or text.isdigit() else f"({text})"


def compile_source(
    name: str, code: str, held: dict[str, Any], ops: Mapping[str, Any]
) -> Callable[..., Any]:
    """A generated function. Tracebacks show its lines.

    :param held: its globals.
    :param ops: see :class:`Source`.
    """
    filename = f"<fuseboard:{name}:{next(_function_numbers)}>"
    linecache.cache[filename] = (len(code), None, code.splitlines(True), filename)
    exec(compile(code, filename, "exec"), held)
    function: Callable[..., Any] = held[name]
    # A freed function can't raise any more; linecache itself would keep such lines for good.
    weakref.finalize(function, linecache.cache.pop, filename, None).atexit = False
    function.__fuseboard_source__ = code  # type: ignore[attr-defined]
    function.__fuseboard_ops__ = ops  # type: ignore[attr-defined]
    return function
