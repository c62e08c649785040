"""Marks that users put around code of a model, and that arrive on the nodes made there.

A mark is a generator over ``torch.fx.traceback.annotate``: that form Dynamo traces, where a class
with ``__enter__`` would break the graph. It arrives as ``node.meta["custom"][key]``, in the joint
graph and on most nodes of its backward part, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node
from torch.fx.traceback import annotate

from fuseboard.errors import SettingsError

MEMORY_BUDGET = "fuseboard.memory_budget"
PREFER = "fuseboard.prefer"


@contextmanager
def _marked(key: str, value: Any) -> Iterator[None]:
    """Mark the nodes that are traced inside. In eager it does nothing: ``annotate`` would write
    to a global that threads share.
    """
    if torch.compiler.is_compiling():
        with annotate({key: value}):
            yield
    else:
        yield


def mark_of(node: Node, key: str) -> Any:
    """The value that a node was marked with; None where it wasn't."""
    custom = node.meta.get("custom")
    return custom.get(key) if isinstance(custom, dict) else None


@contextmanager
def memory_budget(value: float) -> Iterator[None]:
    """A memory budget of its own for the code inside, in the forward of a model that is compiled.

    ``with fuseboard.memory_budget(0.3): x = self.block(x)``. What is computed inside is saved for
    the backward or computed again as a ``memory_budget`` of ``value`` for the whole graph would
    choose; everything else as the setting chooses. The innermost of nested contexts counts. It
    breaks no graph, and does nothing in code that isn't compiled with fuseboard.

    :param value: from 0 (compute all again) to 1 (save all that min-cut would).
    :raises SettingsError: ``value`` is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise SettingsError(
            f"fuseboard.memory_budget({value!r}): allowed: a number from 0 to 1, such as "
            "fuseboard.memory_budget(0.5)."
        )
    # A float that changes between calls becomes symbolic, and no mark can hold that. The range
    # makes Dynamo compile for each value.
    millionths = range(int(value * 1_000_000 + 0.5))
    with _marked(MEMORY_BUDGET, len(millionths) / 1_000_000):
        yield


@contextmanager
def prefer(backend: str) -> Iterator[None]:
    """Prefer a backend for the code inside, in the forward of a model that is compiled.

    ``with fuseboard.prefer("inductor"): x = self.block(x)``. Its ops, and those of its backward, go
    to that backend as far as it claims them; where it doesn't, or isn't in use, the report says so.
    The settings ``pin`` and ``exclude`` have the last word. The innermost of nested contexts
    counts. It breaks no graph, and does nothing in code that isn't compiled with fuseboard.

    :param backend: a backend's name, such as ``"inductor"``.
    :raises SettingsError: it is no name.
    """
    if not isinstance(backend, str) or not backend:
        raise SettingsError(
            f"fuseboard.prefer({backend!r}): allowed: a backend's name, such as "
            "fuseboard.prefer('inductor')."
        )
    with _marked(PREFER, backend):
        yield
