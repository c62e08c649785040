"""The inputs of a graph's first call, to compare candidates without another call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fuseboard.spare_memory import free_bytes
from fuseboard.torch_api.state import ANSWER_PARTS, read_state

#: So many bytes are copied without a look at how many are free; and of those, what may be taken.
FEW_BYTES, _SHARE = 64 * 2**20, 0.25


def why_too_large(size: int, device: torch.device) -> str:
    """Why copies of a call's inputs shouldn't be kept; "" if they may be.

    :param size: of all of them, in bytes.
    """
    free = free_bytes(device) if size > FEW_BYTES else None
    if free is None or size <= _SHARE * free:
        return ""
    return f"copies of its inputs take {size / 2**20:.0f} MiB of {free / 2**20:.0f} MiB free"


class KeptInputs:
    """The first inputs of a graph: weights by weak reference, all else as copies."""

    def __init__(self) -> None:
        self._values: list[Callable[[], Any]] | None = None
        #: The state of torch that results depended on in that call.
        self.state: list[Any] = []

    def keep(self, inputs: Sequence[Any], static: Collection[int]) -> None:
        """Keep inputs unless there are some, or they are too large."""
        copied = [
            value
            for i, value in enumerate(inputs)
            if i not in static and isinstance(value, torch.Tensor)
        ]
        size = sum(value.numel() * value.element_size() for value in copied)
        if self._values is not None or (copied and why_too_large(size, copied[0].device)):
            return
        self.state = read_state(ANSWER_PARTS)
        with torch.no_grad():
            self._values = [
                weakref.ref(value)
                if i in static and isinstance(value, torch.Tensor)
                else held(strided_copy(value))
                for i, value in enumerate(inputs)
            ]

    def inputs(self) -> list[Any] | None:
        if self._values is None:
            return None
        values = [value() for value in self._values]
        return None if any(value is None for value in values) else values

    def clear(self) -> None:
        self._values = None


def held(value: Any) -> Callable[[], Any]:
    """A function that returns the value, with the interface of a weak reference."""
    return lambda: value


def strided_copy(value: Any) -> Any:
    """A copy with the same strides: gaps and repeated elements, which ``clone`` leaves out.

    Lazily conjugated and negated ones stay so: a compiler may not look at these bits.
    """
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.layout != torch.strided:
        return value.clone()
    if value.is_neg():
        return torch._neg_view(strided_copy(torch._neg_view(value)))
    if value.is_conj():
        return strided_copy(value.conj()).conj()
    strides = value.stride()
    # An expanded tensor has one element in several places and takes no copy.
    shape = [1 if stride == 0 else n for n, stride in zip(value.shape, strides, strict=True)]
    once = value.as_strided(shape, strides)
    copy = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).copy_(once)
    return copy.as_strided(value.shape, strides)
