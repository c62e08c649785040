"""Where a call's sizes come from, and which sizes count as alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuseboard.run.codegen import Source
from fuseboard.torch_api import symbols as torch_symbols


def size_sources(values: Sequence[Any]) -> list[tuple[str, str]]:
    """What the sizes of a graph follow from: (an expression of ``args``, a name for people).

    A number that is an input; else the first size, stride or offset that is just a symbol; at last
    expressions that hold a symbol which appears nowhere alone.

    :param values: of the graph's inputs, fake.
    """
    candidates = _symbolic_sizes(values)
    alone = _symbols(candidates)
    found = [
        (text, torch_symbols.source_name(symbol, number))
        for symbol, (text, number) in alone.items()
    ]
    known = set(alone)
    for text, number in candidates:
        expr = torch_symbols.expression(number)
        if not expr.free_symbols <= known and expr not in known:
            known.add(expr)
            found.append((text, str(expr)))
    return found


def symbol_sources(values: Sequence[Any]) -> dict[str, str]:
    """Symbol → an expression of ``args`` that is just that symbol, where there is one.

    :param values: of the graph's inputs, fake.
    """
    alone = _symbols(_symbolic_sizes(values))
    return {str(symbol): text for symbol, (text, _) in alone.items()}


def _symbolic_sizes(values: Sequence[Any]) -> list[tuple[str, Any]]:
    """(an expression of ``args``, the symbolic number that it gives), numbers first."""
    found: list[tuple[str, Any]] = [
        (f"args[{i}]", value)
        for i, value in enumerate(values)
        if isinstance(value, torch_symbols.NUMBERS)
    ]
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            continue
        found += [(f"args[{i}].size({d})", n) for d, n in enumerate(value.shape)]
        if value.layout == torch.strided:
            found += [(f"args[{i}].stride({d})", n) for d, n in enumerate(value.stride())]
            found.append((f"args[{i}].storage_offset()", value.storage_offset()))
    return [(text, n) for text, n in found if isinstance(n, torch_symbols.NUMBERS)]


def _symbols(candidates: Sequence[tuple[str, Any]]) -> dict[Any, tuple[str, Any]]:
    """The first of each that is just a symbol, by the symbol."""
    found: dict[Any, tuple[str, Any]] = {}
    for text, number in candidates:
        if (expr := torch_symbols.expression(number)).is_Symbol:
            found.setdefault(expr, (text, number))
    return found


def bucket_source(values: Sequence[Any]) -> str:
    """An expression of ``args`` that is equal for calls of like sizes; "" where none is symbolic.

    Sizes are alike where they lie between the same powers of two; 0 and 1 are like no others.

    :param values: of the graph's inputs, fake.
    """
    texts = [f"int({text}).bit_length()" for text, _ in size_sources(values)]
    return f"({', '.join(texts)},)" if texts else ""


def bucket_of(values: Sequence[Any]) -> tuple[str, Callable[[list[Any]], Any]]:
    """The expression of :func:`bucket_source`, and a function of ``args`` that computes it."""
    expression = bucket_source(values)
    source = Source()
    source.line(f"return {expression or None}")
    return expression, source.function("bucket", "args")
