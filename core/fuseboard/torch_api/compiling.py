"""What is one for the whole process while something is compiled, outside of Dynamo's own compiles.

Read in torch 2.13: ``torch/_dynamo/convert_frame.py`` (``compile_lock``), ``torch/compiler`` and
``torch/fx/_symbolic_trace.py``. A trace of ``torch.fx`` replaces ``torch.nn.Module.__call__`` and
sets a flag, in all threads. By the one, Dynamo writes guards of what is gone a moment later; for
the other, calls of compiled functions raise ("Detected that you are using FX to symbolically
trace"). Dynamo's compiles exclude one another, and tell torch that the trace is theirs. Backwards
are compiled later, and candidates in the middle of a call: these do the same.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from fuseboard.beside import is_beside
from fuseboard.forks import fork_safe_lock, make_fork_safe

#: How long a trace waits for Dynamo in a thread of the board's, for which Dynamo's may wait.
PATIENCE_S = 2.0


def _dynamos_lock() -> Any:
    dynamo = sys.modules.get("torch._dynamo.convert_frame")  # else it compiles nothing
    lock = getattr(dynamo, "compile_lock", None)
    if lock is not None:
        make_fork_safe(lock)
    return lock


class CompileLock:
    """Held while something is compiled: Dynamo's lock, always taken first, and the board's own.

    Beside the user's calls it is the own one alone: what is loaded there would hold up traces.
    """

    def __init__(self) -> None:
        self._own = fork_safe_lock()
        self._taken = threading.local()

    def __enter__(self) -> None:
        dynamos = None if is_beside() else _dynamos_lock()
        if dynamos is not None:
            dynamos.acquire()
        self._own.acquire()
        self._stack().append(dynamos)

    def __exit__(self, *_: object) -> None:
        dynamos = self._stack().pop()
        self._own.release()
        if dynamos is not None:
            dynamos.release()

    def _stack(self) -> list[Any]:
        if not hasattr(self._taken, "locks"):
            self._taken.locks = []
        return self._taken.locks  # type: ignore[no-any-return]


#: Held while something is compiled: backwards are compiled outside of Dynamo, and candidates in the
#: middle of a call.
compile_lock = CompileLock()


@contextlib.contextmanager
def alone_in_tracing() -> Iterator[None]:
    """Trace with ``torch.fx`` while Dynamo doesn't, and let compiled functions be called meanwhile.

    Where Dynamo's lock can't be had in time, the trace is made all the same.
    """
    lock = _dynamos_lock()
    if lock is None or not lock.acquire(timeout=PATIENCE_S):
        yield
        return
    before = getattr(torch.compiler, "_is_compiling_flag", False)
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
        lock.release()
