"""TVM itself: whether it can be used, for which target it compiles, on how many threads."""

from __future__ import annotations

import functools
from typing import Any

import fuseboard

TVM = fuseboard.Engine("apache-tvm", "0.27", "0.28")
FFI = fuseboard.Engine("apache-tvm-ffi", "0.1.14")
#: The version with which TVM's code can be saved as JSON. A search does that before it begins; with
#: 0.1.15 it ends the process (``tvm::ffi::ToJSONGraph``, on all but targets), as do pickling and
#: ``copy.deepcopy``. Compiling, running, libraries and reading JSON work with either.
TUNES_WITH = "0.1.14.post1"
#: Raised whenever the code that this plugin makes may change.
OP_LAYER = "3"


def why_unavailable() -> str:
    """What is missing, with what to do about it; "" if nothing is. TVM isn't imported."""
    return fuseboard.why_unavailable(TVM, FFI, install="pip install 'fuseboard[tvm]'")


def why_no_tuning() -> str:
    """Why nothing can be searched for, with what to do about it; "" if it can."""
    if FFI.version == TUNES_WITH:
        return ""
    return (
        f"with apache-tvm-ffi {FFI.version} a search would end the process: "
        f"pip install 'apache-tvm-ffi=={TUNES_WITH}'"
    )


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
