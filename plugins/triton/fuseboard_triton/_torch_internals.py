"""torch's private APIs: the one module of this plugin that reaches them.

Read against torch 2.11 and 2.13: ``torch/_prims_common/__init__.py`` (``elementwise_dtypes``),
``torch/_decomp/__init__.py``, ``torch/utils/_sympy/printers.py`` and
``torch/fx/experimental/sym_node.py``. All are probed when they are first used; versions are never
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

#: A size: a plain number, or the sympy expression of a symbolic one.
Size = Any


def computation_dtype(operands: Sequence[Any], kind: str) -> torch.dtype:
    """The dtype in which ATen computes a pointwise op, half types being kept as they are.

    :param operands: tensors (fake ones do) and numbers.
    :param kind: a member of torch's ``ELEMENTWISE_TYPE_PROMOTION_KIND``.
    """
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

    kinds: Any = ELEMENTWISE_TYPE_PROMOTION_KIND
    _, result = elementwise_dtypes(*operands, type_promotion_kind=kinds[kind])
    return result


@cache
def decomposition_table(names: tuple[str, ...]) -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of ATen ops, by ``packet.overload``; unknown ones are left out."""
    from torch._decomp import get_decompositions

    found = []
    for name in names:
        packet, overload = name.split(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if op is not None:
            found.append(op)
    return dict(get_decompositions(found))


def size_of(value: Any) -> Size:
    """A fake tensor's size or stride as a number or an expression."""
    return value.node.expr if isinstance(value, torch.SymInt) else int(value)


def hints_of(values: Iterable[Any]) -> dict[Any, int]:
    """Symbol → its number in the example, for the symbols of SymInts; no guard is added."""
    found: dict[Any, int] = {}
    for value in values:
        if isinstance(value, torch.SymInt):
            env = value.node.shape_env
            known = getattr(env, "backed_var_to_val", None) or getattr(env, "var_to_val", {})
            for symbol in value.node.expr.free_symbols:
                if symbol in known:
                    found[symbol] = int(known[symbol])
    return found


def has_unbacked(value: Any) -> bool:
    """Whether only the data decide a size."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return isinstance(value, torch.Tensor | torch.SymInt) and bool(free_unbacked_symbols(value))


def python_source(expr: Size, names: Mapping[Any, str]) -> str:
    """A size as a Python expression.

    :param names: symbol → the variable that holds it.
    :raises KeyError: there is no variable for a symbol.
    """
    if isinstance(expr, int):
        return str(expr)
    from torch.utils._sympy.printers import PythonPrinter

    class Printer(PythonPrinter):
        def _print_Symbol(self, symbol: Any) -> str:
            return names[symbol]

    return str(Printer().doprint(expr))
