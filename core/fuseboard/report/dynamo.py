"""What Dynamo did: the one module of the report that reaches Dynamo's private APIs.

Read against torch 2.13 (``torch/_dynamo/utils.py``, ``convert_frame.py``, ``eval_frame.py``,
``guards.py``, ``pgo.py``); what moved between 2.11 and 2.14 is probed by signature or attribute.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch

from fuseboard.module_names import readable
from fuseboard.report.data import Break

# --- what happened ------------------------------------------------------------------------------


@dataclass
class Watch:
    """What Dynamo did while :func:`watch` was open; complete once it is closed."""

    breaks: list[Break] = field(default_factory=list)


@contextmanager
def watch() -> Iterator[Watch]:
    """Note where and why Dynamo ends graphs, or leaves functions to Python."""
    from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons

    seen = Watch()
    reasons_before = len(graph_break_reasons)
    newest = get_compilation_metrics()[-1:]
    try:
        yield seen
    finally:
        found = [_ended_graph(reason) for reason in graph_break_reasons[reasons_before:]]
        for metrics in _after(get_compilation_metrics(), newest):
            if getattr(metrics, "fail_reason", None):
                found.append(_left_to_python(metrics))
        seen.breaks = _counted(found)


def _after(metrics: Sequence[Any], newest: Sequence[Any]) -> list[Any]:
    """The compilations since ``newest``. Dynamo remembers a bounded number of them."""
    for position, item in enumerate(metrics):
        if newest and item is newest[0]:
            return list(metrics[position + 1 :])
    return list(metrics)


def _ended_graph(reason: Any) -> Break:
    """From Dynamo's ``GraphCompileReason``."""
    own = [f for f in reason.user_stack if not f.filename.startswith(torch.__path__[0])]
    frames = own or list(reason.user_stack)
    last = frames[-1] if frames else None
    title, explanation, hints = _parts(reason.reason)
    return Break(
        reason=title,
        explanation=explanation,
        hints=hints,
        function=readable(last.name) if last else "",
        source=f"{last.filename}:{last.lineno}" if last else "",
        stack=tuple(f"{f.filename}:{f.lineno} in {readable(f.name)}" for f in frames),
    )


def _left_to_python(metrics: Any) -> Break:
    """From the ``CompilationMetrics`` of a compilation that failed."""
    title, explanation, hints = _parts(metrics.fail_reason)
    file = metrics.fail_user_frame_filename or metrics.co_filename
    line = metrics.fail_user_frame_lineno or metrics.co_firstlineno
    return Break(
        reason=title,
        explanation=explanation,
        hints=hints,
        function=readable(metrics.co_name or ""),
        source=f"{file}:{line}",
        uncompiled=True,
    )


def _counted(breaks: Sequence[Break]) -> list[Break]:
    """Each place once.

    A break inside a function that Dynamo had inlined is met again when that function is compiled
    by itself: the first of the two, which knows the way there, stands for both.
    """
    first: dict[tuple[str, str, bool], Break] = {}
    times: Counter[tuple[str, str, bool]] = Counter()
    inner = {(b.reason, b.source) for b in breaks if len(b.stack) > 1}
    for found in breaks:
        key = (found.reason, found.source, found.uncompiled)
        first.setdefault(key, found)
        if len(found.stack) != 1 or (found.reason, found.source) not in inner:
            times[key] += 1
    return [replace(found, count=max(times[key], 1)) for key, found in first.items()]


def _parts(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Title, explanation and hints of a message of Dynamo's."""
    title = text.strip().partition("\n")[0].strip()
    if title.startswith("generic_jump"):  # what 2.13 calls it in the structured reason
        return (
            "Data-dependent branching",
            "The condition of an if, a while or an assert is a tensor's value, which is known only "
            "when the call runs.",
            ("Use torch.where, or torch.cond, to keep both branches in one graph.",),
        )
    explanation = re.search(r"^ *Explanation: (.*?)(?=^ *Hint:|^ *$)", text, re.M | re.S)
    hints = re.findall(r"^ *Hint: (.*?)(?=^ *Hint:|^ *$)", text, re.M | re.S)
    told = [" ".join(hint.split()) for hint in hints]
    return (
        title,
        " ".join(explanation[1].split()) if explanation else "",
        tuple(hint for hint in told if "report an issue to PyTorch" not in hint),
    )


# --- compiling apart from the user's own compiled code ------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """How a callable that ``torch.compile`` returned was made.

    :ivar original: what was compiled.
    :ivar backend: the backend's function, or None where it can't be told.
    :ivar options: ``mode`` and ``options`` as the backend gets them.
    :ivar how: ``dynamic`` and ``fullgraph``, as ``torch.compile`` takes them.
    """

    original: Callable[..., Any]
    backend: Callable[..., Any] | None
    options: Mapping[str, Any]
    how: Mapping[str, Any]


def compiled_from(fn: Callable[..., Any]) -> Compiled | None:
    """How ``fn`` was compiled; None if it wasn't."""
    from torch._dynamo.eval_frame import OptimizedModule, innermost_backend, innermost_fn

    original: Callable[..., Any]
    context: Any
    if isinstance(fn, OptimizedModule):
        original, context = fn._orig_mod, fn.dynamo_ctx
    elif getattr(fn, "_compiled_call_impl", None) is not None:  # module.compile()
        # Its __call__ would answer from Dynamo's cache; what it compiled, hooks included, doesn't.
        in_place = fn._compiled_call_impl  # type: ignore[attr-defined]
        original, context = innermost_fn(in_place), _context_of(in_place)
    else:
        original = innermost_fn(fn)
        if original is fn:
            return None
        context = _context_of(fn)
    if context is None or not callable(context.callback):
        return Compiled(original, None, {}, {})
    wrapper = innermost_backend(context.callback)
    return Compiled(
        original=original,
        backend=getattr(wrapper, "compiler_fn", wrapper),
        options=dict(getattr(wrapper, "kwargs", {})),
        how={
            "dynamic": getattr(context, "_dynamic", None),
            "fullgraph": getattr(context, "fullgraph", False),
        },
    )


def _context_of(wrapper: Any) -> Any | None:
    """The Dynamo context that a compiled function closes over."""
    from torch._dynamo.eval_frame import OptimizeContext

    cells = [cell.cell_contents for cell in getattr(wrapper, "__closure__", None) or ()]
    return next((value for value in cells if isinstance(value, OptimizeContext)), None)


@contextmanager
def compiled_apart(
    fn: Callable[..., Any], backend: Callable[..., Any], how: Mapping[str, Any]
) -> Iterator[Callable[..., Any]]:
    """``fn`` compiled with ``backend``, so that nothing of it is left in Dynamo afterwards.

    Dynamo keeps compiled code, and what it learnt of sizes, with the user's code objects. Without
    this the code made here would count against the user's recompile limit, and sizes seen here
    would make the user's next compile dynamic.
    """
    from torch._dynamo.convert_frame import register_bytecode_hook
    from torch._dynamo.pgo import get_code_state

    codes: set[CodeType] = set()
    sizes = get_code_state()
    sizes_before = copy.deepcopy(sizes)
    handle = register_bytecode_hook(lambda code, compiled: codes.add(code))
    isolated = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    keywords = {**how, "isolate_recompiles": True} if isolated else dict(how)
    try:
        yield torch.compile(fn, backend=backend, **keywords)
    finally:
        handle.remove()
        for code in codes:
            _forget(code, backend)
        sizes.clear()
        sizes.update(sizes_before)


def _forget(code: CodeType, backend: Callable[..., Any]) -> None:
    """Drop what ``backend`` compiled for a code object, and nothing else."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo.eval_frame import innermost_backend
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    entries = _debug_get_cache_entry_list(code)
    own = [
        entry
        for entry in entries
        if getattr(innermost_backend(entry.backend), "compiler_fn", None) is backend
    ]
    if own and len(own) == len(entries):
        reset_code(code)
        return
    for entry in own:
        state = getattr(entry.guard_manager, "extra_state", None)
        if state is not None:  # None: something that it guarded on is gone, and so is its code
            state.invalidate(entry, DeletedGuardManagerWrapper("it was compiled to be explained"))
