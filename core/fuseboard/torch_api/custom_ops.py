"""Ops that Python code defines, and where it does: ``torch.library.custom_op`` and ``Library``.

Read against torch 2.13: ``torch/_library/custom_ops.py`` (``OPDEFS``, ``CustomOpDef``) and
``torch/library.py`` (``Library``, which gives the dispatcher the file that makes it). Where another
torch keeps them elsewhere, no module is found.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.torch_api.nodes import graphs_in

#: No other process would find these: each has its own, or they are torch's and there already.
_NOT_IMPORTED = ("__main__", "__mp_main__", "torch")

#: What ``import torch`` leaves out: the ops of PT2E's graphs are defined in there.
_LEFT_OUT = "torch.ao."

#: The module of the program's script, which other processes run under another name.
MAIN = "__main__"

#: Namespaces of ops that are there in every process.
_TORCHS_OWN = frozenset({"aten", "prims", "prim", "higher_order", "fuseboard"})

#: The files that a dump of the dispatcher names for an op and its kernels.
_REGISTERED = re.compile(r"registered at (.+\.py):\d+")


def defining_modules(graph: GraphModule) -> tuple[str, ...]:
    """The modules that another process has to import so that it has a graph's custom ops.

    Modules that are still being imported are left out: what compiles meanwhile may be their own
    code, which would run again there. :data:`MAIN` is among them where :func:`main_file` has one.
    """
    found: set[str] = set()
    for target in _custom_ops(graph):
        found.update(name for name in _modules_of(target) if is_importable(name))
    return tuple(sorted(found))


def custom_op_names(graph: GraphModule) -> tuple[str, ...]:
    """The custom ops in a graph, such as ``"mine::scaled"``."""
    return tuple(sorted({_qualified_name(target) for target in _custom_ops(graph)}))


def main_file() -> str | None:
    """The program's script, if another process may run it to have its definitions; else None.

    It may where the program begins below ``if __name__ == "__main__":``, as scripts do for
    ``multiprocessing``, which runs them under another name in the same way.
    """
    main = sys.modules.get(MAIN)
    file = getattr(main, "__file__", None)
    if not isinstance(file, str) or getattr(main, "__spec__", None) is not None:
        return None
    try:
        statements = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    begins = (ast.unparse(one.test) for one in statements if isinstance(one, ast.If))
    return file if "__name__ == '__main__'" in begins else None


def _custom_ops(graph: GraphModule) -> Iterator[Any]:
    for one in graphs_in(graph):
        for node in one.graph.nodes:
            name = _qualified_name(node.target)
            if name and name.partition("::")[0] not in _TORCHS_OWN:
                yield node.target


def _modules_of(target: Any) -> Iterator[str]:
    """The modules that define an op or one of its kernels."""
    name = _qualified_name(target)
    try:
        from torch._library.custom_ops import OPDEFS
    except ImportError:
        init = None
    else:
        init = getattr(OPDEFS.get(name), "_init_fn", None)
    if init is not None:
        yield init.__module__
        return
    overload = getattr(target, "_overloadname", "default")
    dump = getattr(torch._C, "_dispatch_dump", lambda name: "")
    files = set(_REGISTERED.findall(dump(name if overload == "default" else f"{name}.{overload}")))
    for module, value in list(sys.modules.items()) if files else ():
        if getattr(value, "__file__", None) in files:
            yield module


def _qualified_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    return getattr(target, "_qualified_op_name", "")


def is_importable(name: str | None) -> bool:
    """Whether another process has a module once it imports it, or runs :func:`main_file`.

    :param name: None for that of a function which :func:`exec` made in a plain dictionary.
    """
    if name is None:
        return False
    if name == MAIN:
        return main_file() is not None
    if name.partition(".")[0] in _NOT_IMPORTED and not name.startswith(_LEFT_OUT):
        return False
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    # Only specs of modules that are imported by name have it.
    is_importing = getattr(spec, "_initializing", False)
    return isinstance(module, ModuleType) and spec is not None and not is_importing
