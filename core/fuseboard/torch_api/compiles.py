"""What ``torch.compile`` compiles: the hook around each compilation, and code that is left alone.

Read against torch 2.13: ``torch/_dynamo/callback.py``, and its callers in ``convert_frame.py`` and
``torch/_functorch/_aot_autograd/runtime_wrappers.py``. Older handlers call without arguments, so
none is relied on.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch

from fuseboard.torch_api.frames import compile_id as current_compile_id
from fuseboard.torch_api.frames import frame_name

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Compilation:
    """A compilation that begins.

    :ivar compile_id: Dynamo's, such as ``0/1``; "" where it has none.
    :ivar frame: the user's function with its file and line; "" where it isn't known.
    :ivar kind: ``dynamo`` for a function, ``lazy_backward`` for a backward that is compiled when it
        is first run, or another of ``torch._dynamo.callback.CallbackTrigger`` in lower case.
    """

    compile_id: str
    frame: str
    kind: str


@contextlib.contextmanager
def watched_compilations(
    begin: Callable[[Compilation], None], end: Callable[[bool], None]
) -> Iterator[Callable[[], bool]]:
    """Call ``begin`` and ``end`` around each compilation in this process, inside of the block.

    One within another is a part of it. What they raise would end the user's compilation. ``end``
    is told whether the compilation was left by an exception. Yields a function that says whether
    they are still called: ``torch._dynamo.reset()`` forgets all callbacks.
    """
    from torch._dynamo.callback import callback_handler

    handled: list[BaseException | None] = []

    def started(*arguments: Any) -> None:
        handled.append(sys.exc_info()[1])
        if len(handled) == 1:
            begin(_compilation(arguments[0] if arguments else None))

    def ended(*arguments: Any) -> None:
        if handled:
            before = handled.pop()
            if not handled:
                end(sys.exc_info()[1] is not before)

    callback_handler.register_start_callback(started)
    callback_handler.register_end_callback(ended)
    try:
        yield lambda: ended in callback_handler.end_callbacks
    finally:
        for callbacks, own in (
            (callback_handler.start_callbacks, started),
            (callback_handler.end_callbacks, ended),
        ):
            if own in callbacks:
                callbacks.remove(own)


def _compilation(arguments: Any) -> Compilation:
    trigger = getattr(getattr(arguments, "callback_trigger", None), "name", "dynamo")
    compile_id = str(getattr(arguments, "compile_id", "")) or current_compile_id()
    frame = frame_name() or _frame_of_dynamo()
    return Compilation(compile_id, frame, trigger.lower())


def _frame_of_dynamo() -> str:
    """The code that Dynamo is about to trace: a local ``code`` of the compiler's own functions."""
    dynamo = os.path.join(torch.__path__[0], "_dynamo", "")
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(dynamo):
            code = frame.f_locals.get("code")
            if isinstance(code, CodeType):
                return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
        frame = frame.f_back
    return ""


def untraced(function: F) -> F:
    """Let a function run as it is, with all that it calls, where its caller is being compiled.

    As ``torch.compiler.disable``, which would import Dynamo right away; that takes seconds. Dynamo
    looks at the attributes when it meets a call, and breaks the graph; its hook of Python's frames
    looks at the code's strategy.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    frames = getattr(torch._C._dynamo, "eval_frame", None)
    action = getattr(frames, "_FrameAction", None)
    strategy = getattr(frames, "_FrameExecStrategy", None)
    mark = getattr(frames, "set_code_exec_strategy", None)
    if action is not None and strategy is not None and mark is not None:
        mark(function.__code__, strategy(action.SKIP, action.SKIP))
    return function


@dataclass
class CompileRecords:
    """What Dynamo noted of compilations.

    :ivar ended: a ``GraphCompileReason`` for each graph that it ended.
    :ivar failed: the ``CompilationMetrics`` of each compilation that failed.
    """

    ended: list[Any] = field(default_factory=list)
    failed: list[Any] = field(default_factory=list)


@contextlib.contextmanager
def compile_records(records: CompileRecords) -> Iterator[None]:
    """Fill in, at the end of the block, what Dynamo noted in it (``torch/_dynamo/utils.py``)."""
    from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons

    reasons = len(graph_break_reasons)
    before = list(get_compilation_metrics())  # a bounded number, held here so that ids stay theirs
    try:
        yield
    finally:
        records.ended += graph_break_reasons[reasons:]
        known = set(map(id, before))
        new = [one for one in get_compilation_metrics() if id(one) not in known]
        records.failed += [one for one in new if getattr(one, "fail_reason", None)]
