"""Strides of fake views: the part of :mod:`fuseboard.torch_internals` that makes them the kernel's.

A dimension of size 1 may have any stride, and in views torch's fake values have others than its
kernels make. Nothing is read by such a stride, but whether a tensor is taken for channels last
depends on it: behind ``x.transpose(1, 2).view(1, c, h, w)`` the fake convolution is channels last
and eager's isn't, and so is all that follows. What is compiled for fake values would have other
strides than eager's. Read against torch 2.13: ``torch/_subclasses/fake_impls.py``, whose ``view``
goes by ``_reshape_view_helper`` of ``torch/_refs``; the kernel's is ``computeStride_impl`` of
``aten/src/ATen/TensorUtils.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def mend_views() -> None:
    """From now on, let fake views have the strides of real ones, in all of this process.

    To be called before Dynamo traces, and not for a while: a compiler that is given a graph looks
    through its fake values again, and so must find the same strides.
    """
    from torch._subclasses import fake_impls, fake_tensor

    known = getattr(fake_impls, "op_implementations_dict", {})
    for op in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        fake = known.get(op)
        if fake is not None and not hasattr(fake, "__wrapped__"):
            known[op] = _mended(fake)
            fake_tensor.FakeTensorMode.cache_clear()  # of what was found before


def _mended(fake: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fake)
    def view(mode: Any, op: Any, source: Any, *shape: Any, **keywords: Any) -> Any:
        result = fake(mode, op, source, *shape, **keywords)
        if source.dim() == 0 or any(_is(size, 0) for size in source.shape):
            return result
        strides = _real_strides(result, source.stride(-1))
        return result if strides is None else result.as_strided(result.shape, strides)

    return view


def _real_strides(view: torch.Tensor, last: Any) -> list[Any] | None:
    """A view's strides as the kernel makes them; None where it has them.

    Dimensions of size 1 go on where the next one ends. No guard is added: sizes of 1 are plain
    numbers, for which Dynamo has no symbols.

    :param last: the stride of the last dimension of what is viewed.
    """
    strides = list(view.stride())
    differs = False
    step = last
    for dim in reversed(range(len(strides))):
        if _is(view.shape[dim], 1) and str(strides[dim]) != str(step):
            strides[dim], differs = step, True
        step = view.shape[dim] * strides[dim]
    return strides if differs else None


def _is(size: Any, number: int) -> bool:
    """Whether a size is known to be this number."""
    return isinstance(size, int) and size == number
