"""Symbolic sizes at run time: from the sizes of the inputs to those of the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fuseboard
from fuseboard_onnxruntime._torch_internals import expression

#: Functions of torch's symbolic shapes, by the names under which sympy prints them.
_FUNCTIONS = {
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "Max": max,
    "Min": min,
    "PowByNatural": pow,
    "ToFloat": float,
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "TruncToInt": math.trunc,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
}


def size_function(inputs: Sequence[Any], shapes: Sequence[Sequence[Any]]) -> str:
    """Python code of a function from a call's inputs to the shapes of its outputs.

    :param inputs: fake tensors and SymInts; a symbol has to be a size of one of them.
    :raises LoweringError: a size can't be computed from the sizes of the inputs.
    """
    sources = _sources(inputs)
    texts = [f"({''.join(_text(size, sources) + ', ' for size in shape)})" for shape in shapes]
    return f"lambda x: ({''.join(text + ', ' for text in texts)})"


def compile_sizes(code: str) -> Callable[[Sequence[Any]], tuple[tuple[int, ...], ...]]:
    """The function that :func:`size_function` wrote."""
    return eval(code, {"__builtins__": {}, **_FUNCTIONS})  # type: ignore[no-any-return]


def _sources(inputs: Sequence[Any]) -> dict[Any, str]:
    """Where each symbol's value is found in a call."""
    found: dict[Any, str] = {}
    for i, value in enumerate(inputs):
        if isinstance(value, torch.SymInt):
            found.setdefault(expression(value), f"x[{i}]")
        elif isinstance(value, torch.Tensor):
            for d, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    found.setdefault(expression(size), f"x[{i}].shape[{d}]")
    return found


def _text(size: Any, sources: dict[Any, str]) -> str:
    value = expression(size)
    if value in sources:
        return sources[value]
    text = _written(value)
    names = {str(symbol): sources.get(symbol) for symbol in value.free_symbols}
    unknown = _unknown_parts(value) + sorted(n for n, source in names.items() if source is None)
    if unknown:
        raise fuseboard.LoweringError(
            f"the size {text} of an output can't be computed from the sizes of the inputs: "
            f"{', '.join(unknown)}"
        )
    for name in sorted(names, key=len, reverse=True):
        text = _replaced(text, name, str(names[name]))
    return text


def _written(value: Any) -> str:
    """An expression as Python's code. sympy itself writes 15 digits of a number that has 17."""
    import sympy

    exact = {part: sympy.Symbol(f"({float(part)!r})") for part in value.atoms(sympy.Float)}
    return str(value.xreplace(exact))


def _unknown_parts(value: Any) -> list[str]:
    """What of an expression isn't written here: other functions, fractions."""
    import sympy

    functions = {type(part).__name__ for part in value.atoms(sympy.Function, sympy.Max, sympy.Min)}
    fractions = {str(part) for part in value.atoms(sympy.Rational) if not part.is_integer}
    return sorted(functions - set(_FUNCTIONS)) + sorted(fractions)


def _replaced(text: str, name: str, by: str) -> str:
    import re

    return re.sub(rf"\b{re.escape(name)}\b", by, text)
