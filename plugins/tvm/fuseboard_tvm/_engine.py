"""TVM itself: whether it can be used, for which target it compiles, on how many threads.

Loading it and starting its workers change the process; here that is put back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import fuseboard

TVM = fuseboard.Engine("apache-tvm", "0.27", "0.28")
FFI = fuseboard.Engine("apache-tvm-ffi", "0.1.14")
#: Raised whenever the code that this plugin makes may change.
OP_LAYER = "3"


def why_unavailable() -> str:
    """What is missing, with what to do about it; "" if nothing is. TVM isn't imported."""
    return fuseboard.why_unavailable(TVM, FFI, install="pip install 'fuseboard[tvm]'")


def fingerprint() -> str:
    """What code is made with; the board adds the processor and the threads."""
    return f"{TVM.version} {FFI.version} ops {OP_LAYER}"


def load() -> None:
    """Import TVM without what that does beside: read against TVM 0.27.

    ``tvm/__init__.py`` wraps ``sys.excepthook``, and then ends the children of the user's
    ``multiprocessing`` after each uncaught exception; its library handles SIGSEGV, in place of
    ``faulthandler``.
    """
    if "tvm" in sys.modules:
        return
    hook = sys.excepthook
    with _handler_kept(signal.SIGSEGV):
        import tvm  # noqa: F401
    sys.excepthook = hook


@contextlib.contextmanager
def _handler_kept(number: int) -> Iterator[None]:
    """Python's ``signal`` doesn't see handlers that C code sets; the C library does."""
    sigaction = getattr(ctypes.CDLL(None), "sigaction", None) if os.name == "posix" else None
    if sigaction is None:
        yield
        return
    before = ctypes.create_string_buffer(1024)  # larger than the structure on any system
    known = sigaction(int(number), None, before) == 0
    try:
        yield
    finally:
        if known:
            sigaction(int(number), before, None)


def start_workers(threads: int) -> None:
    """TVM's workers of this thread, which may run wherever this process may.

    Otherwise TVM ties them to a processor each, and the thread that calls them to as many as there
    are workers; whoever sets ``TVM_BIND_THREADS`` decides that. TVM reads it here and nowhere else.
    """
    import tvm

    configure = tvm.get_global_func("runtime.config_threadpool")
    if _BINDING in os.environ:
        configure(0, threads)
        return
    os.environ[_BINDING] = "0"
    try:
        configure(0, threads)
    finally:
        del os.environ[_BINDING]


_BINDING = "TVM_BIND_THREADS"


@functools.cache
def target(threads: int) -> Any:
    """This machine's processor."""
    import tvm
    from tvm.target import codegen

    return tvm.target.Target(
        {"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": threads}
    )
