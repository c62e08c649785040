"""Ops that Inductor runs as ATen kernels instead of compiling them: which, how often, why.

Read against torch 2.13: ``torch/_inductor/lowering.py`` (``make_fallback``, ``fallbacks``,
``unsupported_input_tensor``), ``torch/_inductor/graph.py`` (``call_function``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

#: A call of an op in the Python that Inductor writes. Matrix products and convolutions, which it
#: leaves to libraries by choice, are written ``extern_kernels.mm``.
_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")

#: Products and convolutions with packed weights, which freezing leaves to oneDNN and MKL.
_BY_CHOICE = ("mkl.", "mkldnn.", "onednn.")


def notes(
    compiled: Any, counted: Mapping[str, int], complex_ops: frozenset[str], random: str
) -> tuple[str, ...]:
    """A line for each op.

    :param counted: what :func:`counting` found; nothing where a cache served the code. Then the
        code itself is looked at, if it is Python.
    :param complex_ops: ops of the region that read or write complex numbers.
    """
    source = getattr(compiled, "source_code", "") or ""
    found = Counter(counted) or Counter(".".join(parts) for parts in _CALL.findall(source))
    return tuple(
        f"{name} runs as an ATen kernel ({count}x): {_why(name, complex_ops, random)}"
        for name, count in sorted(found.items())
        if not name.startswith(_BY_CHOICE)
    )


def ops_on_complex(graph: GraphModule) -> frozenset[str]:
    """The names of the ops that meet complex numbers."""
    found = set()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        values = [node.meta.get("val"), *(used.meta.get("val") for used in node.all_input_nodes)]
        if any(isinstance(v, torch.Tensor) and v.is_complex() for v in tree_leaves(values)):
            found.add(str(node.target))
    return frozenset(found)


def _why(name: str, complex_ops: frozenset[str], random: str) -> str:
    from torch._inductor import lowering

    op = _op(name)
    if name in complex_ops:
        return "Inductor compiles no complex numbers"
    if random == "eager" and _has_other_numbers(op):
        return "so that it draws eager's numbers (the setting random = 'fast' doesn't need it)"
    known: Any = getattr(lowering, "fallbacks", ())
    if op is not None and (op in known or op.overloadpacket in known):
        return "Inductor has no kernel of its own for it"
    if op is not None and op not in lowering.lowerings:
        return "Inductor doesn't know it"
    return "Inductor's own kernel doesn't cover these arguments"


def _has_other_numbers(op: Any) -> bool:
    """Whether Inductor has a kernel for an op that draws other random numbers than eager."""
    from torch._inductor import decomposition

    aten = torch.ops.aten
    if getattr(op, "overloadpacket", None) in (aten.rand, aten.randn, aten.randint):
        return True
    return op in getattr(decomposition, "extra_random_decomps", ())


def _op(name: str) -> Any:
    space, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops, space, None), packet, None)
    return getattr(found, overload, None)


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count the fallback kernels that are made during the block."""
    from torch._inductor import ir

    found: dict[str, int] = {}
    kernel = getattr(ir, "FallbackKernel", None)
    if kernel is None:
        yield found
        return
    original: Callable[..., None] = kernel.__init__

    def count(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        op = getattr(self, "op_overload", None)
        if isinstance(op, torch._ops.OpOverload):
            found[str(op)] = found.get(str(op), 0) + 1

    kernel.__init__ = count
    try:
        with without_warning():
            yield found
    finally:
        kernel.__init__ = original


@contextmanager
def without_warning() -> Iterator[None]:
    """Without Inductor's warning of complex numbers: the notes say it, and its code may lose."""
    from torch._inductor import lowering

    original = getattr(lowering, "_warn_complex_not_supported", None)
    if original is None:
        yield
        return
    lowering._warn_complex_not_supported = lambda: None
    try:
        yield
    finally:
        lowering._warn_complex_not_supported = original
