"""Strides of fake views: the part of :mod:`fuseboard.torch_internals` that makes them the kernel's.

They are so within :func:`eager_view_strides` alone, which is wherever the board traces or compiles.
Outside of it every compiler sees torch's own, so that its cached code is what its keys say.

A dimension of size 1 may have any stride, and in views torch's fake values have others than its
kernels make. Nothing is read by such a stride, but whether a tensor is taken for channels last
depends on it: behind ``x.transpose(1, 2).view(1, c, h, w)`` the fake convolution is channels last
and eager's isn't, and so is all that follows. What is compiled for fake values would have other
strides than eager's. Read against torch 2.13: ``torch/_subclasses/fake_impls.py``, whose ``view``
goes by ``_reshape_view_helper`` of ``torch/_refs``; the kernel's is ``computeStride_impl`` of
``aten/src/ATen/TensorUtils.cpp``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

#: Whether fake views have eager's strides here.
_are_eagers: ContextVar[bool] = ContextVar("fake views have eager's strides", default=False)


@contextlib.contextmanager
def eager_view_strides() -> Iterator[None]:
    """Let fake views have the strides of real ones, for the block, in this thread.

    A compiler that is given a graph looks through its fake values again, and must find the same
    strides as the one that captured it: all that the board does with fake values is to be in such a
    block.
    """
    why_not_installed()
    token = _are_eagers.set(True)
    try:
        yield
    finally:
        _are_eagers.reset(token)


@functools.cache
def why_not_installed() -> str:
    """Install what :func:`eager_view_strides` switches on; why it can't be, "" if it can.

    torch's own function goes on being called. Outside of blocks its result is returned as it is.
    """
    from torch._subclasses import fake_impls, fake_tensor

    known = getattr(fake_impls, "op_implementations_dict", {})
    key_of = getattr(fake_tensor.FakeTensorMode, "_cache_key", None)
    bypass = getattr(fake_tensor, "_BypassDispatchCache", None)
    if key_of is None or bypass is None or any(known.get(op) is None for op in _VIEWS):
        return (
            "this torch computes fake views elsewhere: with a dimension of size 1 they may have "
            "other strides than eager's, for which compilers then trip"
        )
    for op in _VIEWS:
        known[op] = _with_eager_strides(known[op])
    fake_tensor.FakeTensorMode._cache_key = _uncached(key_of, bypass)  # type: ignore[method-assign]
    return ""


def _uncached(key_of: Callable[..., Any], bypass: type[Exception]) -> Callable[..., Any]:
    """Neither look up nor keep results in a block: torch's cache serves the whole process."""

    @wraps(key_of)
    def cache_key(mode: Any, state: Any, op: Any, *arguments: Any) -> Any:
        if op in _VIEWS and _are_eagers.get():
            raise bypass("fuseboard: eager's strides")
        return key_of(mode, state, op, *arguments)

    return cache_key


def _with_eager_strides(fake: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fake)
    def view(mode: Any, op: Any, source: Any, *shape: Any, **keywords: Any) -> Any:
        result = fake(mode, op, source, *shape, **keywords)
        if not _are_eagers.get():
            return result
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
