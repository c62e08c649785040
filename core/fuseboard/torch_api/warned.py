"""What torch's C++ warns of in runs that nobody asked for: nothing is shown.

An op that is called as ``torch.std`` makes Python's warnings of what C++ warns of; called as
``torch.ops.aten.std`` it prints them, each time, in a form that no filter stops. The board's own
runs call ops in that way, on the user's values, so that one warning of the program's became dozens.

Read against torch 2.13: ``torch/csrc/Exceptions.h`` (``PyWarningHandler``, in each function that is
bound with ``HANDLE_TH_ERRORS``) and ``torch/csrc/utils/tensor_apply.cpp``. Python drops a warning
whose module has no name (``warn_explicit`` of ``Python/_warnings.c``, CPython 3.11 to 3.14), and
asks no filter about it, which are the whole process's.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def without_warnings(run: Callable[[], T]) -> T:
    """Call it; C++'s warnings meanwhile are dropped, in this thread.

    With modes on, which would see how that is done, it is called as it is.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return run()
    results: list[T] = []

    def call(_: int) -> int:
        results.append(run())
        return 0

    _apply(torch.zeros((), dtype=torch.int64, device="cpu"), call)
    return results[0]


def _apply_to(tensor: torch.Tensor, call: Callable[[Any], Any]) -> None:
    """``apply_`` is a bound function that calls Python: C++ warns into its handler."""
    tensor.apply_(call)


#: The same in a module without a name, from which the handler's warnings then are.
_apply = FunctionType(_apply_to.__code__, {"__name__": None, "__builtins__": builtins})
