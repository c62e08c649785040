"""Buffers that a recording reads, and fresh copies of what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuseboard_cudagraphs import _torch_internals


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill its memory, each place once, in whatever order."""
    expected: Any = 1
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    sizes = [(stride, size) for stride, size in pairs if not _is_one(size)]
    if any(isinstance(number, torch.SymInt) for pair in sizes for number in pair):
        return True  # its layout is part of the key anyway
    for stride, size in sorted(sizes):
        if stride != expected:
            return False
        expected *= size
    return True


def _is_one(size: Any) -> bool:
    return not isinstance(size, torch.SymInt) and size == 1


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The stretch of memory between a tensor's first and last element, gaps and all.

    A tensor with gaps, or with elements that share a place, can be copied no other way if the copy
    is to have the same strides.
    """
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    span = 1 + sum(stride * (size - 1) for stride, size in pairs) if tensor.numel() else 0
    return tensor.as_strided((span,), (1,))


class Buffers:
    """Memory at fixed addresses, into which a call copies those inputs that move.

    Ordinary memory, outside the pool that recordings share: another recording never writes to it.
    """

    def __init__(self, positions: Sequence[int], inputs: Sequence[Any]) -> None:
        self.positions = tuple(positions)
        self.tensors: dict[int, torch.Tensor] = {}
        self._targets: list[torch.Tensor] = []
        self._flat: set[int] = set()
        # A buffer made in inference mode couldn't be written to outside of it.
        with torch.inference_mode(False):
            for i in self.positions:
                given = inputs[i].detach()
                dense = is_dense(given)
                memory = _like(given if dense else flat(given))
                if not dense:
                    self._flat.add(i)
                self._targets.append(memory)
                self.tensors[i] = (
                    memory if dense else memory.as_strided(given.shape, given.stride())
                )

    def fill(self, inputs: Sequence[Any]) -> None:
        """Copy a call's inputs in."""
        sources = [flat(inputs[i]) if i in self._flat else inputs[i] for i in self.positions]
        _torch_internals.copy_all(self._targets, sources)

    def instead_of(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs with the buffers in the places of those that are copied."""
        return [self.tensors.get(i, value) for i, value in enumerate(inputs)]


@dataclass(frozen=True)
class _View:
    """An output that is a view of an input."""

    position: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Results:
    """What a recording returned when it was made, and how a call's own results are made of it.

    The next replay, of this recording or of another one in the same pool, overwrites the memory
    of its outputs. So a call gets copies: there is no telling how long it keeps them.

    :param inputs: what the recording read: buffers, and inputs at their own addresses.
    """

    def __init__(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        self._outputs: list[Any] = []
        self._kept: list[torch.Tensor] = []
        for output in outputs:
            self._outputs.append(self._plan(output, inputs))

    def _plan(self, output: Any, inputs: Sequence[Any]) -> Any:
        if not isinstance(output, torch.Tensor):
            return lambda call_inputs, fresh: output
        view = _view_of(output, inputs)
        if view is not None:
            return lambda call_inputs, fresh: _view(call_inputs[view.position], view)
        output = output.detach()
        if output.is_conj() or output.is_neg():
            return lambda call_inputs, fresh: output.clone()
        number = len(self._kept)
        if is_dense(output):
            self._kept.append(output)
            return lambda call_inputs, fresh: fresh[number]
        self._kept.append(flat(output))
        size, stride = output.shape, output.stride()
        return lambda call_inputs, fresh: fresh[number].as_strided(size, stride)

    def copies(self, inputs: Sequence[Any]) -> list[Any]:
        """A call's results. Views of inputs are views of the inputs that this call gave."""
        fresh = [_like(tensor) for tensor in self._kept]
        _torch_internals.copy_all(fresh, self._kept)
        return [make(inputs, fresh) for make in self._outputs]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _view(tensor: torch.Tensor, view: _View) -> torch.Tensor:
    offset = tensor.storage_offset() + view.offset
    return tensor.detach().as_strided(view.size, view.stride, offset)


def _view_of(output: torch.Tensor, inputs: Sequence[Any]) -> _View | None:
    """Which input an output shares memory with; None if it has memory of its own."""
    if output.numel() == 0 or output.is_conj() or output.is_neg():
        return None
    address = output.untyped_storage().data_ptr()
    for i, value in enumerate(inputs):
        if (
            isinstance(value, torch.Tensor)
            and value.dtype == output.dtype
            and value.device == output.device
            and value.untyped_storage().data_ptr() == address
        ):
            offset = output.storage_offset() - value.storage_offset()
            return _View(i, tuple(output.shape), output.stride(), offset)
    return None
