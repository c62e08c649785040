"""Guards on sizes that a plugin's code adds while a graph is compiled.

Plain compilers add some as well, and with symbolic shapes that is right: code for sizes up to a
bound is only called for these. But a size that is fixed to a number means another compile for each
size, which is the opposite of what symbolic sizes are for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.errors import LoweringError
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.symbols import GuardWatch, is_symbolic


class SizeFixed(LoweringError):
    """A size was fixed where none may be, by a backend that says that it may fix sizes."""


_sizes_are_kept: ContextVar[bool] = ContextVar("no size is fixed", default=False)


@contextmanager
def keeping_sizes() -> Iterator[None]:
    """Let no backend fix a size in the block: Dynamo wouldn't compile again for other ones."""
    token = _sizes_are_kept.set(True)
    try:
        yield
    finally:
        _sizes_are_kept.reset(token)


@contextmanager
def watching_guards(
    session: Session, plugin: str, graph: GraphModule, notes: list[str]
) -> Iterator[None]:
    """Tell of guards that the block adds; what it added is undone where it fails.

    :param graph: whose sizes the block may guard on.
    :param notes: where guards are told of.
    :raises SizeFixed: the backend may fix sizes elsewhere: a reason to do without it here, and no
        failure.
    :raises LoweringError: a size was fixed to a number that the backend or the user wants to be
        dynamic, or a guard came too late to be heard of.
    """
    if not is_symbolic(graph):
        yield
        return
    values = [node.meta.get("val") for node in graph.graph.nodes]
    watch = GuardWatch(torch_internals.fake_mode_of(values))
    try:
        yield
        fixes_sizes = any(i.name == plugin and i.fixes_sizes for i in session.backends)
        problem = _problem(watch, fixes_sizes and not _sizes_are_kept.get())
        if problem:
            excused = fixes_sizes and _sizes_are_kept.get() and watch.fixed()
            raise (SizeFixed if excused else LoweringError)(problem)
    except BaseException:  # whatever it was: what the plugin learned is forgotten
        watch.undo()
        raise
    added = watch.added()
    if added:
        notes.append(f"{plugin} added guards on sizes: {'; '.join(added)}")


def _problem(watch: GuardWatch, may_fix: bool) -> str:
    """What speaks against what was learned; "" if nothing does."""
    for name, (number, marked) in watch.fixed().items():
        if marked:
            return f"it fixes {name} to {number}, which mark_dynamic wants to be dynamic"
        if not may_fix:
            return f"it fixes {name} to {number}: every other size would be compiled again"
    added = watch.added()
    if added and watch.too_late:
        return f"it needs guards on sizes, and Dynamo has made its own already: {'; '.join(added)}"
    return ""
