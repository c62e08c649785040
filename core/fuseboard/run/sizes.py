"""What the sizes in a call follow from, and which sizes are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fuseboard.torch_api import symbols as torch_symbols


def size_sources(placeholders: Sequence[Node]) -> list[tuple[str, str]]:
    """What the sizes of a region follow from: (an expression of ``args``, a name for people).

    A number that is an input; else the first size, stride or offset that is just a symbol; at last
    expressions that hold a symbol which appears nowhere alone.
    """
    candidates: list[tuple[str, Any]] = []
    for i, node in enumerate(placeholders):
        value = node.meta.get("val")
        if isinstance(value, torch_symbols.NUMBERS):
            candidates.append((f"args[{i}]", value))
    for i, node in enumerate(placeholders):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        candidates += [(f"args[{i}].size({d})", n) for d, n in enumerate(value.shape)]
        if value.layout == torch.strided:
            candidates += [(f"args[{i}].stride({d})", n) for d, n in enumerate(value.stride())]
            candidates.append((f"args[{i}].storage_offset()", value.storage_offset()))
    candidates = [(t, n) for t, n in candidates if isinstance(n, torch_symbols.NUMBERS)]
    known: set[Any] = set()
    found: list[tuple[str, str]] = []
    for text, number in candidates:
        expr = torch_symbols.expression(number)
        if expr.is_Symbol and expr not in known:
            known.add(expr)
            found.append((text, torch_symbols.source_name(expr, number)))
    for text, number in candidates:
        expr = torch_symbols.expression(number)
        if not expr.free_symbols <= known and expr not in known:
            known.add(expr)
            found.append((text, str(expr)))
    return found


def bucket_source(placeholders: Sequence[Node]) -> str:
    """An expression of ``args`` that is equal for calls of like sizes; "" where none is symbolic.

    Sizes are alike where they lie between the same powers of two; 0 and 1 are by themselves.
    """
    texts = [f"int({text}).bit_length()" for text, _ in size_sources(placeholders)]
    return f"({', '.join(texts)},)" if texts else ""
