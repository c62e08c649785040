"""TVM itself: whether it can be used, for which target it compiles, on how many threads."""

from __future__ import annotations

import functools
from typing import Any

import fuseboard

TVM = fuseboard.Engine("apache-tvm", "0.27", "0.28")
FFI = fuseboard.Engine("apache-tvm-ffi", "0.1.14")
#: Raised whenever the code that this plugin makes may change.
OP_LAYER = "2"


def why_unavailable() -> str:
    """What is missing, with what to do about it; "" if nothing is. TVM isn't imported."""
    return fuseboard.why_unavailable(TVM, FFI, install="pip install 'fuseboard[tvm]'")


def fingerprint() -> str:
    """What code is made with; the board adds the processor and the threads."""
    return f"{TVM.version} {FFI.version} ops {OP_LAYER}"


@functools.cache
def target(threads: int) -> Any:
    """This machine's processor."""
    import tvm
    from tvm.target import codegen

    return tvm.target.Target(
        {"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": threads}
    )
