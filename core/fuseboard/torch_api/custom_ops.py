"""Ops that Python code defines with ``torch.library.custom_op``, and where it does.

Read against torch 2.13: ``torch/_library/custom_ops.py`` (``OPDEFS``, ``CustomOpDef``). Where
another torch keeps them elsewhere, no module is found.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch.fx import GraphModule

#: No other process would find these: each has its own, or they are torch's and there already.
_NOT_IMPORTED = ("__main__", "__mp_main__", "torch")


def defining_modules(graph: GraphModule) -> tuple[str, ...]:
    """The modules that another process has to import so that it has a graph's custom ops.

    Modules that are still being imported are left out: what compiles meanwhile may be their own
    code, which would run again there.
    """
    try:
        from torch._library.custom_ops import OPDEFS as definitions
    except ImportError:
        return ()
    found: set[str] = set()
    for one in graph.modules():
        if not isinstance(one, GraphModule):
            continue
        for node in one.graph.nodes:
            definition = definitions.get(_qualified_name(node.target))
            name = getattr(getattr(definition, "_init_fn", None), "__module__", None)
            if isinstance(name, str) and _is_imported(name):
                found.add(name)
    return tuple(sorted(found))


def _qualified_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    return getattr(target, "_qualified_op_name", "")


def _is_imported(name: str) -> bool:
    if name.partition(".")[0] in _NOT_IMPORTED:
        return False
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    # Only specs of modules that are imported by name have it.
    is_importing = getattr(spec, "_initializing", False)
    return isinstance(module, ModuleType) and spec is not None and not is_importing
