"""Whether gradients are off where a node was traced, as the user's source has it.

Dynamo 2.13 traces the backward of an ``autograd.Function`` with gradients off, so that a
``torch.no_grad()`` in it changes nothing and leaves no node. Where the backward is differentiated,
gradients are on around it and off inside of that block. Only the source still tells: the decorators
and the ``with`` statements around the lines of a node's stack trace.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from functools import lru_cache

from torch.fx import Node

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (\S+)$', re.M)
#: Where torch calls a function that is decorated with a context manager.
_DECORATED = "decorate_context"


def gradients_are_on(node: Node, around: bool) -> bool | None:
    """Whether a node computes with gradients on.

    :param around: whether they are on around all of the code.
    :returns: None where the source doesn't say: it isn't there, or a variable decides.
    """
    mode: bool | None = around
    decorated = False
    for file, line, function in _FRAME.findall(node.stack_trace or ""):
        if function == _DECORATED:
            decorated = True
            continue
        switches = _switches(file, int(line), function)
        if switches is None:
            switches = [None] if decorated else []
        for mode in switches:  # noqa: B007  # the innermost one counts
            pass
        decorated = False
    return mode


@lru_cache(maxsize=1024)
def _switches(file: str, line: int, function: str) -> list[bool | None] | None:
    """What the contexts around a line in a function switch to, outermost first.

    :returns: None where there is no source.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
    around = list(_around(tree, line))
    starts = [
        i
        for i, one in enumerate(around)
        if isinstance(one, ast.FunctionDef | ast.Lambda)
        and getattr(one, "name", "<lambda>") == function
    ]
    if not starts:
        return None
    contexts: list[ast.expr] = []
    for one in around[starts[-1] :]:
        if isinstance(one, ast.FunctionDef):
            contexts += one.decorator_list
        elif isinstance(one, ast.With):
            contexts += [item.context_expr for item in one.items]
    return [found for context in contexts for found in _switch(context)]


def _around(tree: ast.AST, line: int) -> Iterator[ast.AST]:
    """The statements and functions that a line is in, outermost first."""
    for child in ast.iter_child_nodes(tree):
        first, last = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
        if first is None or last is None:
            yield from _around(child, line)
        elif first <= line <= last:
            yield child
            yield from _around(child, line)


def _switch(context: ast.expr) -> list[bool | None]:
    """What a context manager's expression switches gradients to: one answer, or none."""
    call = context if isinstance(context, ast.Call) else None
    named = call.func if call is not None else context
    name = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
    if name in ("no_grad", "enable_grad"):
        return [name == "enable_grad"]
    if name in ("set_grad_enabled", "inference_mode"):
        given = [*call.args, *(word.value for word in call.keywords)] if call is not None else []
        value = given[0].value if given and isinstance(given[0], ast.Constant) else None
        if name == "inference_mode":
            return [] if value is False else [False if not given or value is True else None]
        return [value if isinstance(value, bool) else None]
    return []
