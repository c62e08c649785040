"""Compile a callable of the user's, and leave it and what Dynamo keeps of it as they were.

Read against torch 2.13 (``torch/_dynamo/eval_frame.py``, ``guards.py``, ``pgo.py``); what moved
between 2.11 and 2.14 is probed by signature or attribute.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch


@dataclass(frozen=True)
class CompileCall:
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


def compiled_from(fn: Callable[..., Any]) -> CompileCall | None:
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
        return CompileCall(original, None, {}, {})
    wrapper = innermost_backend(context.callback)
    return CompileCall(
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


def with_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function around callables that Dynamo can't start from: builtins, objects, partials."""
    if isinstance(fn, torch.nn.Module) or hasattr(fn, "__code__"):
        return fn

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return call


@contextmanager
def state_kept(fn: Callable[..., Any]) -> Iterator[None]:
    """Put the random generators and a module's buffers back."""
    module = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    owners = list(module.modules()) if isinstance(module, torch.nn.Module) else []
    buffers = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in owners
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for owner, name, buffer, before in buffers:
                owner._buffers[name] = buffer
                if not _equal(buffer, before):
                    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                        buffer.copy_(before)


def _equal(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether values are equal; NaNs aren't, which costs a copy and changes nothing."""
    return now.shape == before.shape and torch.equal(now, before)
