"""The user's function that Dynamo is compiling, and what its code and its callers' can name.

Read against torch 2.13 (``torch/_guards.py``); what moved between 2.11 and 2.14 is probed by
attribute.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch


def compile_id() -> str:
    """Dynamo's id of the compile that is under way, such as ``0/1``; empty outside of one."""
    context = torch._guards.CompileContext.try_get()
    return str(context.compile_id) if context is not None and context.compile_id else ""


def frame_name() -> str:
    """The user's function that Dynamo is compiling, with its file and line; "" if unknown."""
    context = torch._guards.TracingContext.try_get()
    traced = getattr(context, "traced_code", None)
    if not traced:
        return ""
    own = [code for code in traced if not code.co_filename.startswith(torch.__path__[0])]
    code = _decorated((own or traced)[0])
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _decorated(code: CodeType) -> CodeType:
    """The code of a module's forward, where Dynamo compiles what a decorator made of it.

    All models of transformers have such a one, whose code would give them all one name.
    """
    root = _root_translator()
    if root is None:
        return code
    names = inspect.getargs(root.f_code)
    first = [root.f_locals.get(name) for name in names.args[:1]]
    first += root.f_locals.get(names.varargs, ())[:1]  # a decorator's (*args, **kwargs)
    forward: Any = getattr(type(first[0]), "forward", None) if first else None
    made = inspect.unwrap(forward, stop=lambda one: getattr(one, "__code__", None) is code)
    if getattr(made, "__code__", None) is not code:
        return code
    own = getattr(inspect.unwrap(made), "__code__", None)
    return own if isinstance(own, CodeType) else code


def frame_title() -> str:
    """Dynamo's id of the compile that is under way, and the user's function."""
    return f"{compile_id()} {frame_name()}".strip()


@dataclass(frozen=True)
class FrameScope:
    """What the function that Dynamo compiles can see.

    :ivar names: Dynamo's name of a local or global, such as ``L['self']``, and the object.
    :ivar callers: the same objects of the functions that called it, inside of the compiled call.
    """

    names: dict[str, Any]
    callers: list[Any]


def frame_scope() -> FrameScope:
    """The scope of the frame that is being compiled; empty outside of Dynamo.

    Read in ``torch/_dynamo/symbolic_convert.py`` (``tls.current_tx``, its ``output.root_tx``). A
    function that Dynamo compiles apart, after a graph break, has the compiled model among its
    callers.
    """
    root = _root_translator()
    if root is None:
        return FrameScope({}, [])
    names = {f"L[{name!r}]": value for name, value in root.f_locals.items()}
    used = _globals_of(root.f_code, root.f_globals)
    names.update((f"G[{name!r}]", value) for name, value in used.items())
    return FrameScope(names, _callers_objects())


def _root_translator() -> Any:
    """Dynamo's translator of the frame that is being compiled; None outside of Dynamo."""
    from torch._dynamo import symbolic_convert

    current = getattr(getattr(symbolic_convert, "tls", None), "current_tx", None)
    return getattr(getattr(current, "output", None), "root_tx", None)


def needs_one_graph() -> bool:
    """Whether the frame that is being compiled is to be one graph: ``fullgraph=True``."""
    return bool(getattr(_root_translator(), "one_graph", False))


def leave_to_eager(why: str) -> None:
    """From a backend's call, let eager run the frame that is being compiled, now and later.

    Read in ``call_user_compiler`` of ``torch/_dynamo/output_graph.py``.

    :raises SkipFrame: which Dynamo takes for that wish.
    """
    from torch._dynamo.exc import SkipFrame

    raise SkipFrame(why)


def _callers_objects() -> list[Any]:
    """Locals and globals in the Python frames from the entry to compiled code to the compiler.

    The entry is ``compile_wrapper`` of ``torch/_dynamo/eval_frame.py``; where a version calls it
    otherwise, the frames around it are looked at, too.
    """
    dynamo = os.path.join(torch.__path__[0], "_dynamo", "")
    found: list[Any] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(dynamo):
            if found and code.co_name == "compile_wrapper":
                break
            found.clear()  # these were the compiler's own
        else:
            found.extend(frame.f_locals.values())
            found.extend(_globals_of(code, frame.f_globals).values())
        frame = frame.f_back
    return found


def _globals_of(code: CodeType, values: Mapping[str, Any]) -> dict[str, Any]:
    """The globals that a function's code names."""
    return {name: values[name] for name in code.co_names if name in values}
